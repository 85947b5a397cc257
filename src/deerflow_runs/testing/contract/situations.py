"""Rows and sessions for every status and event: owner × session × epoch × cancel, and one more thing gone wrong.

Each situation starts from one in which everything but those four dimensions permits the event, and then spoils at most
one other thing, so that a store that forgets a guard meets a row that only this guard refuses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, final

from deerflow_runs.model import (
    ACTIVE,
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    ThreadId,
    ThreadOutcome,
    Usage,
    WorkerId,
    micros,
)
from deerflow_runs.protocol.decision import Actor, Applied, Facts, Given, SessionFacts, decide, is_due
from deerflow_runs.protocol.lifecycle import RunEvent

HOUR: Final = micros(3600)
LEASE: Final = micros(15)
GRACE: Final = micros(10)

ME: Final = WorkerId("me:live")
DRAINING: Final = WorkerId("me:draining")
BURIED: Final = WorkerId("me:dead")
PREVIOUS: Final = WorkerId("me:previous")
OTHER: Final = WorkerId("other:live")
FRESHLY_DEAD: Final = WorkerId("other:freshly-dead")
LONG_DEAD: Final = WorkerId("other:long-dead")
PROVEN_DEAD: Final = WorkerId("other:proven-dead")
STRANGER: Final = WorkerId("other:never-seen")


def sessions(now: Micros) -> tuple[Session, ...]:
    """The worker sessions of every situation; ``STRANGER`` has no row."""

    def session(
        worker_id: WorkerId, state: SessionState, dead_for: int | None = None, *, proven: bool = False
    ) -> Session:
        dead_at = None if dead_for is None else Micros(now - dead_for)
        expires = Micros(now + LEASE)
        return Session(worker_id, state, lease=LEASE, expires_at=expires, dead_at=dead_at, proven=proven)

    return (
        session(ME, SessionState.LIVE),
        session(DRAINING, SessionState.DRAINING),
        session(BURIED, SessionState.DEAD, HOUR),
        session(PREVIOUS, SessionState.DEAD, HOUR),
        session(OTHER, SessionState.LIVE),
        # Dead since "an hour from now", so that no slow test ever sees its verdict ripen.
        session(FRESHLY_DEAD, SessionState.DEAD, -HOUR),
        session(LONG_DEAD, SessionState.DEAD, HOUR),
        session(PROVEN_DEAD, SessionState.DEAD, -HOUR, proven=True),
    )


@final
@dataclass(frozen=True, slots=True)
class Situation:
    """One question: the row, who asks, what it carries, and what else lies on the thread."""

    run: Run
    by: Actor
    facts: Facts
    given: Given
    beside: tuple[Run, ...] = field(default=())


OWNERS: Final = ("me", OTHER, FRESHLY_DEAD, LONG_DEAD, PROVEN_DEAD, STRANGER, PREVIOUS, None)
CANCELS: Final = (None, CancelAction.INTERRUPT, CancelAction.ROLLBACK)

HOMES: Final[dict[str, WorkerId | None]] = {
    "home": OTHER,
    "home, freshly dead": FRESHLY_DEAD,
    "home, unknown": STRANGER,
    "no home": None,
}
"""The homes that spoil an event which asks for another one."""

SPOILED: Final = 3
"""In how many of the situations that allow the event each thing is spoiled."""

SPOILS: Final = (
    "actor",
    "home",
    "home, freshly dead",
    "home, unknown",
    "no home",
    "kind",
    "policy",
    "attempt",
    "progress",
    "not_before",
    "due",
    "capabilities",
    "thread",
    "first",
    "grace",
    "seized",
    "requirements",
    "clock set back",
)

RELEASES: Final = frozenset({RunEvent.RELEASE, RunEvent.TAKE_OVER_RELEASE})
WAITING: Final = frozenset({RunEvent.TAKE_OVER_FAIL_WAITING, RunEvent.TAKE_OVER_RESUME_WAITING})
FAILS: Final = frozenset({RunEvent.TAKE_OVER_FAIL, RunEvent.TAKE_OVER_FAIL_WAITING, RunEvent.GIVE_BACK_FAIL})


ATTEMPTS: Final = {RunEvent.SETTLE_ROLLBACK_FAILED: (4, 1), RunEvent.CLAIM: (1, 0)}
"""Of three: the attempt at which an event may happen, or counts as any other, and the one that says something else."""

OWING: Final = frozenset({RunEvent.SETTLE_ROLLBACK_FAILED, RunEvent.SEIZE})
"""Happen only where a rollback is owed, hence to a run that has started once."""


def situations(status: RunStatus, event: RunEvent, now: Micros) -> Iterator[Situation]:
    """All situations of one status and event; the same ones every time."""
    chance = random.Random(f"{status}/{event}")
    allowed: list[tuple[str | None, int, CancelAction | None]] = []
    for number, (owner, epoch, cancel) in enumerate(product(OWNERS, (0, -1), CANCELS)):
        name = f"{status}-{event.name}-{number}"
        plain = _situation(status, event, now, name, owner, epoch, cancel, "nothing", chance)
        yield plain
        if isinstance(decide(plain.run, event, plain.by, plain.facts, plain.given), Applied):
            allowed.append((owner, epoch, cancel))
    for spoil in SPOILS:
        for number, (owner, epoch, cancel) in enumerate(chance.sample(allowed, min(SPOILED, len(allowed)))):
            name = f"{status}-{event.name}-{spoil}-{number}"
            yield _situation(status, event, now, name, owner, epoch, cancel, spoil, chance)


def _situation(  # noqa: PLR0917 - one argument a dimension
    status: RunStatus,
    event: RunEvent,
    now: Micros,
    name: str,
    owner: str | None,
    epoch: int,
    cancel: CancelAction | None,
    spoil: str,
    chance: random.Random,
) -> Situation:
    me = _actor(event, spoil, chance)
    holder = me if owner == "me" else None if owner is None else WorkerId(owner)
    if status is RunStatus.QUEUED:
        holder = None
    home = _home(event, spoil, me, chance)
    run = _row(status, event, now, name, holder, home, cancel, spoil, chance)
    beside = _beside(run, event, now, spoil)
    facts = Facts(
        now=now,
        owner=_facts(holder, now),
        home=_facts(home, now),
        actor={ME: SessionState.LIVE, DRAINING: SessionState.DRAINING}.get(me, SessionState.DEAD),
        thread_active=any(run.active for run in beside),
        first_due=status is RunStatus.QUEUED
        and is_due(run, now)
        and not any(other.status is RunStatus.QUEUED for other in beside),
        turn=1,
    )
    capabilities = frozenset({"executor:agent", "gpu"} if spoil != "capabilities" else {"gpu"})
    by = Actor(me, run.epoch + epoch, capabilities, PREVIOUS)
    return Situation(run, by, facts, _given(event, spoil, chance), beside)


def _actor(event: RunEvent, spoil: str, chance: random.Random) -> WorkerId:
    fitting = DRAINING if event is RunEvent.END_WAITING else ME
    return chance.choice([one for one in (ME, DRAINING, BURIED) if one != fitting]) if spoil == "actor" else fitting


def _home(event: RunEvent, spoil: str, me: WorkerId, chance: random.Random) -> WorkerId | None:
    fitting = {
        RunEvent.RE_HOME: PREVIOUS,
        RunEvent.END_WAITING: me,
        RunEvent.TAKE_OVER_FAIL_WAITING: chance.choice((PROVEN_DEAD, LONG_DEAD)),
        RunEvent.TAKE_OVER_RESUME_WAITING: chance.choice((PROVEN_DEAD, FRESHLY_DEAD)),
        RunEvent.TAKE_BACK: chance.choice((PREVIOUS, None)),
    }.get(event, chance.choice((None, me)))
    return {"home": OTHER, "home, freshly dead": FRESHLY_DEAD, "home, unknown": STRANGER, "no home": None}.get(
        spoil, fitting
    )


def _row(  # noqa: PLR0917 - one argument a dimension
    status: RunStatus,
    event: RunEvent,
    now: Micros,
    name: str,
    owner: WorkerId | None,
    home: WorkerId | None,
    cancel: CancelAction | None,
    spoil: str,
    chance: random.Random,
) -> Run:
    past, future = Micros(now - HOUR), Micros(now + HOUR)
    reservation = (event in RELEASES) != (spoil == "kind")
    fails = (event in FAILS) != (spoil == "policy")
    fitting, spoilt = ATTEMPTS.get(event, (2 if spoil == "progress" else 1, 3))
    attempt = spoilt if spoil == "attempt" else fitting
    owing = event in OWING and status is RunStatus.PENDING
    started = status is RunStatus.RUNNING or owing or (status is not RunStatus.QUEUED and chance.random() < 0.7)
    epoch = chance.randrange(2, 9)
    # A pending run that owes a rollback may have been seized for it, or not yet: its grant then is the later one.
    seized = spoil == "seized"
    return Run(
        run_id=RunId(f"run-{name}"),
        thread_id=ThreadId(f"thread-{name}"),
        kind=OperationKind.CHECKPOINT_WRITE if reservation else OperationKind.RUN,
        status=status,
        seq=1000,
        due_at=future if spoil in ("due", "clock set back") else past,
        turn=chance.randrange(1, 50) if started else None,
        owner_worker_id=owner,
        home_worker_id=home,
        epoch=epoch,
        attempt=attempt,
        progress_epoch=epoch if spoil == "progress" else chance.choice((None, epoch - 1)),
        granted_at=future if seized or spoil == "clock set back" else Micros(now - 2 * HOUR),
        not_before=future if spoil == "not_before" else past,
        cancel_action=cancel,
        cancel_requested_at=None if cancel is None else future if spoil == "grace" else Micros(now - HOUR),
        on_orphan=OnOrphan.FAIL if fails else OnOrphan.RESUME,
        required_capabilities=frozenset({"executor:agent"}),
        base_known=started,
        base_heads={"": "checkpoint-1"} if started else {},
        waits_for={"missing": ["gpu"]} if chance.random() < 0.2 else None,
        settled_by=chance.choice((ME, OTHER))
        if status.value in ("success", "error", "timeout", "interrupted")
        else None,
        created_at=future if spoil == "clock set back" else past,
        started_at=past if started else None,
        updated_at=past,
    )


def _beside(run: Run, event: RunEvent, now: Micros, spoil: str) -> tuple[Run, ...]:
    """Another operation on the same thread; only what the run itself leaves room for."""
    if spoil == "thread" and run.status not in ACTIVE:
        holder = Run(
            RunId(f"{run.run_id}-holder"), run.thread_id, status=RunStatus.RUNNING, owner_worker_id=OTHER, epoch=1
        )
        return (replace(holder, granted_at=now, created_at=now, updated_at=now),)
    if spoil == "first" and event is RunEvent.PROMOTE:
        early = Run(RunId(f"{run.run_id}-first"), run.thread_id, status=RunStatus.QUEUED, due_at=Micros(now - 2 * HOUR))
        return (replace(early, created_at=now, updated_at=now),)
    return ()


def _given(event: RunEvent, spoil: str, chance: random.Random) -> Given:
    usage = Usage(1, 2, 3, 4, 5, {"m": 3}, {"lead": 3}, "hello", "bye")
    full: dict[str, Any] = {
        "usage": usage if chance.random() < 0.5 else Usage(),
        "checkpoint": "checkpoint-2" if chance.random() < 0.5 else None,
        "model_name": "small" if chance.random() < 0.5 else None,
    }
    return Given(
        action=chance.choice(tuple(CancelAction)),
        cancel_grace=GRACE,
        stop_reason=chance.choice((None, "caller_gone")),
        error="it broke" if "error" in event.value or "fail" in event.value else None,
        outcome=chance.choice((None, ThreadOutcome.INTERRUPTED)),
        base_heads={"": "checkpoint-9", "sub": "checkpoint-8"},
        backoff=Micros(5 * HOUR),
        backoff_limit=chance.choice((Micros(0), Micros(6 * HOUR), Micros(80 * HOUR))),
        requirements=frozenset({"executor:agent" if spoil == "requirements" else "gpu"}),
        restored=chance.random() < 0.5,
        **full,
    )


def _facts(worker_id: WorkerId | None, now: Micros) -> SessionFacts | None:
    known = {session.worker_id: session for session in sessions(now)}
    session = None if worker_id is None else known.get(worker_id)
    if session is None:
        return None
    return SessionFacts(session.state, session.proven, session.dead_at or Micros(0), session.lease)
