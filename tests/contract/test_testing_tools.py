"""The tools for tests, tested: the witness sees every broken invariant, the contract sees a store that lies, and all of
it can be had from one place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deerflow_runs import testing
from deerflow_runs.model import (
    CancelAction,
    Micros,
    OperationKind,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import Newcomer, Reuse
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Decision, Given, Refused
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store.base import Admitted
from deerflow_runs.testing import CHECKS, HistoryBroken, HistoryChecker, ModelStore
from tests.rules import rule

ME = WorkerId("host:me")
THREAD = ThreadId("thread")


# --- The witness ----------------------------------------------------------------------------------------------------


def row(name: str = "run", **given: Any) -> Run:
    """A run as it may well be: running, owned, started."""
    usual: dict[str, Any] = {
        "status": RunStatus.RUNNING,
        "owner_worker_id": ME,
        "epoch": 2,
        "seq": 1,
        "turn": 1,
        "due_at": Micros(10),
        "created_at": Micros(10),
        "granted_at": Micros(20),
    }
    return Run(RunId(name), THREAD, **usual | given)


def over(run: Run, status: RunStatus = RunStatus.SUCCESS, **given: Any) -> Run:
    """How it may well end."""
    return replace(run, status=status, settled_by=run.owner_worker_id, settled_at=Micros(90), **given)


def queued(name: str, **given: Any) -> Run:
    """A run that waits."""
    return row(
        name, **{"status": RunStatus.QUEUED, "owner_worker_id": None, "epoch": 0, "turn": None, "seq": 2} | given
    )


def cancelled(run: Run, action: CancelAction = CancelAction.INTERRUPT, at: int = 50) -> Run:
    """The same with a cancel."""
    return replace(run, cancel_action=action, cancel_requested_at=Micros(at))


RUN = row()
OWED = cancelled(RUN, CancelAction.ROLLBACK)
SEIZED = replace(OWED, status=RunStatus.PENDING, epoch=3, granted_at=Micros(60))
VACANT = replace(OWED, status=RunStatus.PENDING, owner_worker_id=None, epoch=3)
ROLLED_BACK: dict[str, Any] = {"status": RunStatus.INTERRUPTED, "stop_reason": "rollback"}

HONEST: dict[str, list[list[Run]]] = {
    "a run ends": [[RUN], [over(RUN)], [over(RUN)]],
    "a run is removed and its id used again": [[over(RUN)], [], [row(seq=9, turn=9, epoch=1)]],
    "the next one comes to its turn": [
        [RUN, queued("next")],
        [over(RUN), queued("next", status=RunStatus.PENDING)],
        [over(RUN), row("next", seq=2, turn=2, epoch=1)],
    ],
    "a run changes hands": [[RUN], [replace(RUN, owner_worker_id=WorkerId("host:other"), epoch=3)]],
    "a run is rolled back": [[OWED], [SEIZED], [over(SEIZED, **ROLLED_BACK)]],
    "a run is rolled back between two looks": [[OWED], [over(SEIZED, **ROLLED_BACK)]],
    "a rollback fails": [[SEIZED], [over(SEIZED, RunStatus.ERROR, stop_reason="rollback_failed")]],
    "a run is interrupted": [[RUN], [cancelled(RUN)], [over(cancelled(RUN), RunStatus.INTERRUPTED)]],
    "a reservation goes": [[row(kind=OperationKind.DELETE, turn=None)], []],
}


@pytest.mark.parametrize("name", HONEST)
def test_a_history_that_can_have_happened_is_believed(name: str) -> None:
    checker = HistoryChecker()
    for rows in HONEST[name]:
        checker.saw(rows)


BROKEN: dict[str, tuple[str, list[list[Run]]]] = {
    "two are active": ("I1", [[RUN, row("other", seq=2, turn=2)]]),
    "one waits on an idle thread": ("I7", [[queued("next")]]),
    "a later one started first": ("I17", [[over(row(turn=2)), row("other", seq=2, turn=1, due_at=Micros(11))]]),
    "two share a turn": ("O15", [[over(RUN), row("other", seq=2)]]),
    "an epoch falls": ("I4", [[RUN], [replace(RUN, epoch=1)]]),
    "an epoch has two holders": ("I4", [[RUN], [replace(RUN, owner_worker_id=WorkerId("host:other"))]]),
    "an epoch has two holders, one after the other": (
        "I4",
        [[RUN], [replace(RUN, owner_worker_id=None)], [replace(RUN, owner_worker_id=WorkerId("host:other"))]],
    ),
    "an ended run changes": ("I5", [[over(RUN)], [over(RUN, error="late")]]),
    "an ended run comes back": ("I5", [[over(RUN)], [RUN]]),
    "an end has no time": ("I5", [[replace(over(RUN), settled_at=None)]]),
    "a cancelled run succeeds": ("I6", [[cancelled(RUN)], [over(cancelled(RUN))]]),
    "a cancel is replaced": ("I6", [[cancelled(RUN)], [cancelled(RUN, CancelAction.ROLLBACK)]]),
    "a cancel is forgotten": ("I6", [[cancelled(RUN)], [RUN]]),
    "a cancel is put off": ("I6", [[cancelled(RUN)], [cancelled(RUN, at=60)]]),
    "a turn is drawn again": ("O15", [[RUN], [replace(RUN, turn=5)]]),
    "an owed run fails": ("I16", [[over(SEIZED, RunStatus.ERROR)]]),
    "an owed run ends in the hands of its owner": ("I16", [[OWED], [over(OWED, **ROLLED_BACK)]]),
    "an owed run is forced": ("I16", [[VACANT], [over(VACANT, **ROLLED_BACK, epoch=4)]]),
}


@rule("I1", "I4", "I5", "I6", "I7", "I16", "I17")
@pytest.mark.parametrize("name", BROKEN)
def test_a_history_that_cannot_have_happened_is_told_by_the_invariant_it_breaks(name: str) -> None:
    invariant, looks = BROKEN[name]
    assert broken_by(looks) == invariant


def broken_by(looks: Sequence[list[Run]]) -> str | None:
    """The invariant that the witness names."""
    checker = HistoryChecker()
    try:
        for rows in looks:
            checker.saw(rows)
    except HistoryBroken as broken:
        return str(broken).split(":")[0]
    return None


def _admitted(run: Run, **asked: Any) -> tuple[Newcomer, Admitted]:
    return Newcomer(run_id=run.run_id, thread_id=THREAD, worker_id=ME, **asked), Admitted(run)


@rule("I7")
def test_a_run_for_later_may_wait_on_an_idle_thread_but_not_after_a_sweep_in_its_time() -> None:
    checker, later = HistoryChecker(), queued("later", due_at=Micros(100))
    checker.admitted(*_admitted(later, strategy=Strategy.ENQUEUE, delay=Micros(90)))
    checker.saw([later])
    checker.swept([later], Micros(99))
    checker.swept([later, RUN], Micros(100))
    with pytest.raises(HistoryBroken, match=r"^I7:"):
        checker.swept([later], Micros(100))


@rule("I14")
def test_two_runs_under_one_key_are_noticed_and_one_after_the_other_is_not() -> None:
    checker, first = HistoryChecker(), over(row("first", idempotency_key="key"))
    second = row("second", seq=2, turn=2, idempotency_key="key", due_at=Micros(11))
    checker.admitted(*_admitted(first, idempotency_key="key"))
    checker.saw([first])
    checker.admitted(*_admitted(second, idempotency_key="key"))
    checker.saw([second])
    with pytest.raises(HistoryBroken, match=r"^I14:"):
        checker.saw([first, second])
    third = Newcomer(run_id=RunId("third"), thread_id=THREAD, worker_id=ME, idempotency_key="key")
    checker.admitted(third, Reuse(second, by_key=True))
    with pytest.raises(HistoryBroken, match=r"^I14:"):
        checker.admitted(replace(third, idempotency_key="another"), Reuse(second, by_key=True))


@rule("I5")
def test_a_run_that_was_answered_twice_to_have_ended_is_noticed() -> None:
    checker = HistoryChecker()
    checker.decided(RunEvent.PROGRESS, Applied(RUN))
    checker.decided(RunEvent.SETTLE_SUCCESS, Applied(over(RUN)))
    checker.decided(RunEvent.SETTLE_SUCCESS, Applied(over(RUN), repeated=True))
    checker.decided(RunEvent.SETTLE_SUCCESS, Refused(Refusal.LOST))
    checker.decided(RunEvent.SETTLE_SUCCESS, Applied(over(replace(RUN, seq=7))))
    with pytest.raises(HistoryBroken, match=r"^I5:"):
        checker.decided(RunEvent.FORCE, Applied(over(RUN)))


# --- The contract ---------------------------------------------------------------------------------------------------


def test_every_check_is_a_sentence_of_its_own_and_cites_what_it_proves() -> None:
    assert len({check.sentence for check in CHECKS}) == len(CHECKS) > 300
    assert [check.sentence for check in CHECKS if not check.rules] == []


class Trusting:
    """The model store, but that it believes every asker to hold the run it asks about."""

    def __init__(self) -> None:
        self._model = ModelStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def apply(self, key: RunKey, event: RunEvent, by: Actor, given: Given = NOTHING_GIVEN) -> Decision:
        """The lie."""
        run = self._model.world.runs.get(key.run_id)
        by = by if run is None or run.owner_worker_id is None else Actor(run.owner_worker_id, run.epoch)
        return await self._model.apply(key, event, by, given)


class TrustingSubject:
    """It, under test."""

    def __init__(self) -> None:
        self.store = Trusting()


@rule("I2", "O14")
async def test_the_contract_notices_a_store_that_fences_nobody() -> None:
    noticed = []
    for check in CHECKS:
        if check.sentence in {"a run is settled by its holder at its epoch and by nobody else", *_ABOUT_FENCES}:
            subject: Any = TrustingSubject()
            with pytest.raises(AssertionError):
                await check(subject)
            noticed.append(check.sentence)
    assert len(noticed) == 1 + len(_ABOUT_FENCES)


_ABOUT_FENCES = {
    "its owner seizes an owed run at once and is fenced at its old epoch",
    "only its holder releases a reservation and only once",
}


# --- One place ------------------------------------------------------------------------------------------------------


def test_every_tool_can_be_had_from_one_place() -> None:
    assert all(getattr(testing, name) is not None for name in testing.__all__)
    assert set(dir(testing)) == set(testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'FlakyClock'"):
        _ = testing.FlakyClock


def test_who_wants_a_clock_waits_for_no_database_driver() -> None:
    heavy = ("asyncpg", "alembic", "langgraph", "fastapi", "pytest")
    program = (
        "import sys; from deerflow_runs.testing import ManualClock, Sequencer; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
