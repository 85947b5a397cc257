"""The contract's part about arrivals: newcomers of every strategy meet everything that can stand on a thread (O1–O4).

One table, a row for each incumbent and a column for each strategy; what a cell means is checked once, below it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, assert_never, final

from deerflow_runs.model import EVERYONE, CancelAction, OnOrphan, Run, RunStatus, Strategy
from deerflow_runs.protocol.admission import Deny
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admission, Admitted
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import AT_ONCE, HOUR, INSTANT, ME, OTHER, Stage, key

ADMISSION: Final = Checks()

Standing = Mapping[str, Run]
"""What stands on the thread, by its id."""


# --- What becomes of a newcomer -------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Enters:
    """It holds the thread, owned at epoch 1. ``left``: what became of the others, by their ids; all else is as it
    was."""

    left: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Waits:
    """It waits behind the holder, which is told that somebody does; ``queue`` is the whole queue afterwards."""

    queue: tuple[str, ...]
    left: Mapping[str, str]


@final
@dataclass(frozen=True, slots=True)
class Denied:
    """It is not let in, and is told of the ``holder``."""

    holder: str
    left: Mapping[str, str]


Fate = Enters | Waits | Denied


def enters(**left: str) -> Fate:
    return Enters(left)


def waits(*queue: str, **left: str) -> Fate:
    return Waits(queue or ("newcomer",), left)


def denied(holder: str = "incumbent", **left: str) -> Fate:
    return Denied(holder, left)


def as_left(run: Run) -> str:
    """What became of a run in a few words: its status and the word that a cancel or an end has left on it."""
    note = run.stop_reason if run.terminal else run.cancel_action
    return run.status.value if note is None else f"{run.status.value}, {note}"


# --- What can stand there -------------------------------------------------------------------------------------------


async def _nothing(_: Stage) -> None:
    """The thread is free."""


async def _ended(stage: Stage) -> None:
    await stage.ends(await stage.starts("incumbent"))


async def _owned(stage: Stage) -> Run:
    return await stage.arrives("incumbent", worker_id=OTHER)


async def _running(stage: Stage) -> Run:
    return await stage.starts("incumbent", worker_id=OTHER)


async def _mine(stage: Stage) -> Run:
    return await stage.starts("incumbent")


async def _vacant(stage: Stage) -> Run:
    return await stage.arrives("incumbent", take=False)


async def _handed_over(stage: Stage) -> Run:
    return await stage.happens(RunEvent.HAND_OVER, await _running(stage))


async def _with_queue(stage: Stage) -> None:
    await _running(stage)
    await stage.waits("first")
    await stage.waits("later", delay=HOUR)


async def _delayed(stage: Stage) -> None:
    await stage.waits("incumbent", delay=HOUR)


async def _due(stage: Stage) -> None:
    await stage.waits("incumbent", delay=INSTANT)
    await stage.passes(INSTANT)


async def _cancelled(stage: Stage, action: CancelAction = CancelAction.INTERRUPT) -> None:
    await stage.is_cancelled(await _running(stage), action)


async def _vacant_and_cancelled(stage: Stage) -> None:
    await stage.is_cancelled(await _vacant(stage))


async def _vacant_and_owed(stage: Stage) -> None:
    await stage.is_cancelled(await _handed_over(stage), CancelAction.ROLLBACK)


async def _reserved(stage: Stage) -> None:
    await stage.reserves("incumbent", worker_id=OTHER)


async def _reserved_with_queue(stage: Stage) -> None:
    await _reserved(stage)
    await stage.waits("first")


async def _reserved_by_the_dead(stage: Stage) -> None:
    await stage.opens(OTHER)
    await _reserved(stage)
    await stage.dies(OTHER)


async def _orphaned(stage: Stage, on_orphan: OnOrphan) -> None:
    await stage.is_orphaned("incumbent", on_orphan=on_orphan)


async def _orphaned_with_queue(stage: Stage) -> None:
    await stage.opens(OTHER)
    await _running(stage)
    await stage.waits("first")
    await stage.dies(OTHER)


async def _believed_dead(stage: Stage) -> None:
    await stage.opens(OTHER)
    await _running(stage)
    await stage.is_believed_dead(OTHER)


@final
@dataclass(frozen=True, slots=True)
class Incumbent:
    """How something comes to stand on a thread, and what then becomes of a newcomer of each strategy."""

    sentence: str
    prepare: Callable[[Stage], Awaitable[object]]
    reject: Fate
    enqueue: Fate
    interrupt: Fate
    rollback: Fate
    given: Given = NOTHING_GIVEN

    def fate(self, strategy: Strategy) -> Fate:
        """Of a newcomer of this strategy."""
        match strategy:
            case Strategy.REJECT:
                return self.reject
            case Strategy.ENQUEUE:
                return self.enqueue
            case Strategy.INTERRUPT:
                return self.interrupt
            case Strategy.ROLLBACK:
                return self.rollback
            case _:
                assert_never(strategy)


INTERRUPTED: Final = enters(incumbent="interrupted, interrupt")
ROLLED_BACK: Final = enters(incumbent="interrupted, rollback")
FAILED: Final = enters(incumbent="error, orphan_recovered")

INCUMBENTS: Final = (
    Incumbent("a free thread", _nothing, enters(), enters(), enters(), enters()),
    Incumbent("a thread whose run has ended", _ended, enters(), enters(), enters(), enters()),
    Incumbent(
        "a run that has not started",
        _owned,
        denied(),
        waits(),
        waits(incumbent="pending, interrupt"),
        waits(incumbent="pending, rollback"),
    ),
    Incumbent(
        "a running run",
        _running,
        denied(),
        waits(),
        waits(incumbent="running, interrupt"),
        waits(incumbent="running, rollback"),
    ),
    Incumbent(
        "a run of its own session",
        _mine,
        denied(),
        waits(),
        waits(incumbent="running, interrupt"),
        waits(incumbent="running, rollback"),
    ),
    Incumbent(
        "a run with a queue behind it",
        _with_queue,
        denied(),
        waits("first", "newcomer", "later"),
        waits(incumbent="running, interrupt", first="interrupted, interrupt", later="interrupted, interrupt"),
        waits(incumbent="running, rollback", first="interrupted, rollback", later="interrupted, rollback"),
    ),
    Incumbent("a vacant run", _vacant, denied(), waits(), INTERRUPTED, ROLLED_BACK),
    Incumbent(
        "a vacant run that has started once",
        _handed_over,
        denied(),
        waits(),
        INTERRUPTED,
        waits(incumbent="pending, rollback"),
    ),
    Incumbent("a delayed run", _delayed, denied(), enters(), INTERRUPTED, ROLLED_BACK),
    Incumbent("a due run on an idle thread", _due, denied(), waits(incumbent="pending"), INTERRUPTED, ROLLED_BACK),
    Incumbent("an interrupted run", _cancelled, denied(), waits(), waits(), waits()),
    Incumbent(
        "a run to be rolled back",
        partial(_cancelled, action=CancelAction.ROLLBACK),
        denied(),
        waits(),
        waits(),
        waits(),
    ),
    Incumbent(
        "a run that was interrupted too long ago",
        _cancelled,
        INTERRUPTED,
        INTERRUPTED,
        INTERRUPTED,
        INTERRUPTED,
        AT_ONCE,
    ),
    Incumbent("a vacant interrupted run", _vacant_and_cancelled, INTERRUPTED, INTERRUPTED, INTERRUPTED, INTERRUPTED),
    Incumbent("a vacant run to be rolled back", _vacant_and_owed, denied(), waits(), waits(), waits()),
    Incumbent("a reservation", _reserved, denied(), waits(), denied(), denied()),
    Incumbent(
        "a reservation with a queue", _reserved_with_queue, denied(), waits("first", "newcomer"), denied(), denied()
    ),
    Incumbent("a dead session's reservation", _reserved_by_the_dead, *4 * (enters(incumbent="gone"),)),
    Incumbent("a dead session's run that can only fail", partial(_orphaned, on_orphan=OnOrphan.FAIL), *4 * (FAILED,)),
    Incumbent(
        "a dead session's run that may resume",
        partial(_orphaned, on_orphan=OnOrphan.RESUME),
        denied(),
        waits(),
        INTERRUPTED,
        waits(incumbent="running, rollback"),
    ),
    Incumbent(
        "the run of a session that may be dead",
        _believed_dead,
        denied(),
        waits(),
        INTERRUPTED,
        waits(incumbent="running, rollback"),
    ),
    Incumbent(
        "a dead session's run with a queue behind it",
        _orphaned_with_queue,
        denied("first", incumbent="error, orphan_recovered", first="pending"),
        waits(incumbent="error, orphan_recovered", first="pending"),
        enters(incumbent="error, orphan_recovered", first="interrupted, interrupt"),
        enters(incumbent="error, orphan_recovered", first="interrupted, rollback"),
    ),
)
"""Everything a newcomer can meet but its own request, which is in ``requests``."""


# --- What is checked ------------------------------------------------------------------------------------------------


async def _meets(stage: Stage, *, strategy: Strategy, incumbent: Incumbent) -> None:
    await stage.opens(ME)
    await incumbent.prepare(stage)
    before = await _standing(stage)
    answer = await stage.admit("newcomer", strategy=strategy, given=incumbent.given)
    after, queue = await _standing(stage), await stage.queue()
    match fate := incumbent.fate(strategy):
        case Enters():
            _entered(answer, after["newcomer"])
            assert "newcomer" not in queue
        case Waits():
            _waits(answer, after, strategy)
            assert tuple(queue) == fate.queue
        case Denied():
            assert isinstance(answer, Deny), answer
            assert (answer.holder.run_id, answer.retry_after >= 1) == (fate.holder, True)
            assert "newcomer" not in after
        case _:
            assert_never(fate)
    _left_as_told(before, after, fate)
    _tells_whom_it_displaced(answer, before, after)


async def _standing(stage: Stage) -> Standing:
    found = [await stage.store.get(key(name), scope=EVERYONE) for name in ("incumbent", "first", "later", "newcomer")]
    rows = [replace(run, kwargs=None) for run in [*found, await stage.holder()] if run is not None]
    return {run.run_id: run for run in rows}


def _entered(answer: Admission, row: Run) -> None:
    assert isinstance(answer, Admitted), answer
    assert answer.incumbent is None
    for run in (answer.run, row):
        facts = (run.run_id, run.status, run.owner_worker_id, run.epoch, run.attempt, run.turn)
        assert facts == ("newcomer", RunStatus.PENDING, ME, 1, 1, None), facts
        assert run.granted_at is not None


def _waits(answer: Admission, after: Standing, strategy: Strategy) -> None:
    assert isinstance(answer, Admitted), answer
    for run in (answer.run, after["newcomer"]):
        facts = (run.run_id, run.status, run.owner_worker_id, run.epoch, run.attempt, run.granted_at)
        assert facts == ("newcomer", RunStatus.QUEUED, None, 0, 0, None), facts
    assert answer.incumbent is not None
    (holder,) = [run for run in after.values() if run.active]
    assert holder.queue_behind, "its end would not look at the queue"
    assert (answer.incumbent.run_id, answer.incumbent.cancel_action) == (holder.run_id, holder.cancel_action)
    displacing = strategy in (Strategy.INTERRUPT, Strategy.ROLLBACK)
    assert holder.superseded_by == ("newcomer" if displacing else None)


def _left_as_told(before: Standing, after: Standing, fate: Fate) -> None:
    for name, was in before.items():
        now = after.get(name)
        told = fate.left.get(name)
        if told is not None:
            assert (as_left(now) if now is not None else "gone") == told, f"{name}: {now}"
        elif now is not None and now.active and isinstance(fate, Waits):
            flagged = replace(was, queue_behind=True, superseded_by=now.superseded_by, updated_at=now.updated_at)
            assert now == flagged
        else:
            assert now == was, f"{name} was to stay as it is"


def _tells_whom_it_displaced(answer: Admission, before: Standing, after: Standing) -> None:
    """Those that waited and never got their turn; each says who came instead."""
    waiting = [name for name, run in before.items() if run.status is RunStatus.QUEUED]
    displaced = {name for name in waiting if after[name].terminal and not after[name].queue_behind}
    if displaced:
        assert isinstance(answer, Admitted)
        assert {run.run_id for run in answer.ended} == displaced
    assert all("newcomer" in (after[name].error or "") for name in displaced)


for _incumbent in INCUMBENTS:
    for _strategy in Strategy:
        ADMISSION.tell(
            f"a newcomer that asks to {_strategy.value} meets {_incumbent.sentence}",
            partial(_meets, strategy=_strategy, incumbent=_incumbent),
            *("O1", "I1", "B022") if _strategy is Strategy.REJECT else (),
            *("O2", "I1", "B025") if _strategy is Strategy.ENQUEUE else (),
            *("O3", "O4", "I1", "B026") if _strategy in (Strategy.INTERRUPT, Strategy.ROLLBACK) else (),
        )
