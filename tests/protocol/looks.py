"""Random rows with everything a statement sees beside them, for properties of ``decide``.

Each is spelled by a string of bytes, one byte a choice: fifty times faster than drawing every field, and a failing
example still shrinks towards the first of every list of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from deerflow_runs.model import (
    ACTIVE,
    TERMINAL,
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    SessionState,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Applied, Facts, Given, SessionFacts
from deerflow_runs.protocol.lifecycle import RunEvent
from tests.protocol.situations import BACKOFF, GRACE, LEASE, ME, NOW, OLD, OTHER, Situation

T = TypeVar("T")

WORKERS = (ME, OTHER, OLD)
INSTANTS = tuple(Micros(NOW - ago) for ago in (1, LEASE, GRACE, 0, -1))
ABILITIES = tuple(map(frozenset, ((), ("gpu",), ("disk",), ("gpu", "disk"))))
NEEDS = (frozenset(), *ABILITIES)
CANCELS = (None, *CancelAction)
LIVELY = (*[RunStatus.PENDING] * 4, *[RunStatus.RUNNING] * 2, *[RunStatus.QUEUED] * 2, *sorted(TERMINAL))
CHOICES = 40


def happened(look: Situation) -> Iterator[tuple[RunEvent, Run, bool]]:
    """Each event that happens in this situation, with the row afterwards and whether it was a repetition."""
    for event in RunEvent:
        decision = look.decide(event)
        if isinstance(decision, Applied):
            yield event, decision.run, decision.repeated


def looks(
    *, statuses: Collection[RunStatus] = LIVELY, cancels: Sequence[CancelAction | None] = (None, *CANCELS)
) -> st.SearchStrategy[Situation]:
    """A row that a history can lead to, and somebody who asks."""
    return _spelled(lambda choose: _look(choose, _row(choose, tuple(statuses), cancels)))


def any_looks(*, statuses: Collection[RunStatus] = tuple(RunStatus)) -> st.SearchStrategy[Situation]:
    """The same with rows that no history leads to."""
    return _spelled(lambda choose: _look(choose, _nonsense(choose, tuple(statuses))))


class Chooser:
    """Reads one choice after the other from a string of bytes."""

    def __init__(self, letters: bytes) -> None:
        self._letters = iter(letters)

    def __call__(self, options: Sequence[T]) -> T:
        return options[next(self._letters) % len(options)]


def _spelled(build: Callable[[Chooser], Situation]) -> st.SearchStrategy[Situation]:
    return st.binary(min_size=CHOICES, max_size=CHOICES).map(lambda letters: build(Chooser(letters)))


def _look(choose: Chooser, run: Run) -> Situation:
    sessions = {worker: _session(choose) for worker in WORKERS}
    asker = choose(WORKERS)
    mine = choose((True, False))
    epoch = choose((run.epoch, run.epoch - 1, run.epoch + 1, None))
    me = (run.owner_worker_id or run.home_worker_id or asker) if mine else asker
    previous = choose((None, *(worker for worker in WORKERS if worker != me)))
    by = Actor(me, run.epoch if mine else epoch, choose(ABILITIES), previous)
    acting = sessions[by.worker_id]
    facts = Facts(
        now=NOW,
        owner=sessions[run.owner_worker_id] if run.owner_worker_id else None,
        home=sessions[run.home_worker_id] if run.home_worker_id else None,
        actor=acting.state if acting else SessionState.DEAD,
        thread_active=choose((False, True)),
        first_due=choose((True, False)),
        turn=9,
    )
    return Situation(run, by, facts, _given(choose))


def _session(choose: Chooser) -> SessionFacts | None:
    died = choose((NOW - LEASE, NOW - LEASE - 1, NOW - LEASE + 1, NOW))
    dead = (
        SessionFacts(SessionState.DEAD, proven=proven, dead_at=Micros(died), lease=LEASE) for proven in (True, False)
    )
    living = (SessionFacts(state, lease=LEASE) for state in (SessionState.LIVE, SessionState.DRAINING))
    live, draining = living
    return choose((live, live, live, draining, *dead, None))


def _given(choose: Chooser) -> Given:
    return Given(
        action=choose(tuple(CancelAction)),
        cancel_grace=GRACE,
        restored=choose((True, False)),
        stop_reason=choose((None, "shutdown")),
        usage=choose((Usage(), Usage(total_tokens=3))),
        backoff=choose((Micros(0), BACKOFF)),
        requirements=choose(ABILITIES),
        checkpoint=choose((None, "c1")),
    )


def _row(choose: Chooser, statuses: Sequence[RunStatus], cancels: Sequence[CancelAction | None]) -> Run:
    if choose((False, False, False, False, False, False, RunStatus.PENDING in statuses and None in cancels)):
        kind = choose([kind for kind in OperationKind if kind is not OperationKind.RUN])
        return _built(RunStatus.PENDING, kind=kind, owner_worker_id=choose(WORKERS), epoch=1, attempt=1, granted_at=NOW)
    status = choose(statuses)
    fields: dict[str, Any] = {
        "due_at": choose(INSTANTS),
        "not_before": choose(INSTANTS),
        "home_worker_id": choose((None, None, None, *WORKERS)),
        "required_capabilities": choose(NEEDS),
        "on_orphan": choose(tuple(OnOrphan)),
        "settled_by": choose(WORKERS) if status not in (*ACTIVE, RunStatus.QUEUED) else None,
    }
    past = {} if status is RunStatus.QUEUED else _past(choose, status, cancels)
    return _built(status, **fields, **past)


def _past(choose: Chooser, status: RunStatus, cancels: Sequence[CancelAction | None]) -> dict[str, Any]:
    """What a run that has been active carries."""
    epoch = choose((3, 0, 1, 2))
    owned = choose((True, False)) or status is RunStatus.RUNNING
    started = choose((True, False)) or status is RunStatus.RUNNING
    cancel = choose(cancels) if status is not RunStatus.SUCCESS else None
    requested, granted = choose(INSTANTS), choose(INSTANTS)
    return {
        "owner_worker_id": choose(WORKERS) if owned else None,
        "epoch": epoch,
        "attempt": choose((1, 2, 3, 4)),
        "progress_epoch": choose((None, epoch, max(0, epoch - 1))),
        "granted_at": granted if epoch else None,
        "turn": 7 if started else None,
        "base_known": started,
        "started_at": Micros(NOW - LEASE) if started else None,
        "cancel_action": cancel,
        "cancel_requested_at": requested if cancel else None,
        "queue_behind": choose((False, True)),
    }


def _nonsense(choose: Chooser, statuses: Sequence[RunStatus]) -> Run:
    return _built(
        choose(statuses),
        kind=choose(tuple(OperationKind)),
        owner_worker_id=choose((None, *WORKERS)),
        home_worker_id=choose((None, *WORKERS)),
        epoch=choose(range(5)),
        attempt=choose(range(9)),
        max_attempts=choose(range(4)),
        progress_epoch=choose((None, *range(5))),
        granted_at=choose((None, *INSTANTS)),
        turn=choose((None, 1, 2)),
        cancel_action=choose(CANCELS),
        cancel_requested_at=choose((None, *INSTANTS)),
        on_orphan=choose(tuple(OnOrphan)),
        required_capabilities=choose(ABILITIES),
        settled_by=choose((None, *WORKERS)),
    )


def _built(status: RunStatus, **fields: Any) -> Run:
    return Run(RunId("run"), ThreadId("thread"), status=status, **fields)


def worker(number: int) -> WorkerId:
    """The id of one of many sessions."""
    return WorkerId(f"worker:{number}")
