"""Who may enter a thread (ownership.md §4): strategy × what stands on the thread → one plan, as a value.

``plan_admission`` sees a thread as one consistent look and says what to do; whoever has the database carries it out
under the thread's lock, or has already done the common case in one guarded statement and looks only when that
statement found no room. No I/O and no clock here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, assert_never, final

from deerflow_runs.errors import UsageError
from deerflow_runs.model import (
    MICROS_PER_SECOND,
    CancelAction,
    Micros,
    OnDisconnect,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Applied, Facts, Given, decide, is_due
from deerflow_runs.protocol.lifecycle import RunEvent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """An operation that asks for a thread.

    ``take`` says that the asking session has a free slot and can run it: it enters owned, otherwise vacant. ``pinned``
    makes the asking session its home: no other may claim it. ``delay`` is microseconds from the store's now.
    ``stateless`` runs have their idempotency key to themselves per user, others per user and thread (O5).
    ``max_active_per_user`` is how many active runs the user may have for this one to enter at once (I19). What waits is
    not counted, and is not held up by the limit when its turn comes: it gates arrivals.
    """

    run_id: RunId
    thread_id: ThreadId
    worker_id: WorkerId
    kind: OperationKind = OperationKind.RUN
    strategy: Strategy = Strategy.REJECT
    take: bool = True
    pinned: bool = False
    delay: Micros = Micros(0)
    executor: str | None = None
    payload_version: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    assistant_id: str | None = None
    user_id: str | None = None
    model_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    on_orphan: OnOrphan = OnOrphan.FAIL
    required_capabilities: frozenset[str] = frozenset()
    idempotency_key: str | None = None
    payload_digest: str | None = None
    stateless: bool = False
    max_attempts: int = 3
    run_timeout: Micros | None = None
    temporary: bool = False
    deliveries: Mapping[str, Any] = field(default_factory=dict, repr=False)
    max_queued: int | None = 100
    max_active_per_user: int | None = None

    def __post_init__(self) -> None:
        """A reservation that waits, is nobody's, or is found again by a key would hold a thread for no one."""
        plain = self.strategy is Strategy.REJECT and self.take and not self.delayed
        if self.reservation and not (plain and not self.pinned and self.idempotency_key is None):
            raise UsageError("a reservation is taken at once or refused: no strategy, delay, home or idempotency key")

    @property
    def reservation(self) -> bool:
        """Asks for the thread without being a run."""
        return self.kind is not OperationKind.RUN

    @property
    def idempotency_scope(self) -> str:
        """Never null, and two different pairs of user and thread never read alike."""
        user = self.user_id or ""
        return f"{len(user)}:{user}{'' if self.stateless else self.thread_id}"

    @property
    def user_limit(self) -> int | None:
        """``max_active_per_user`` where it applies: to a run of some user. Reservations and runs of nobody are free."""
        return None if self.reservation or self.user_id is None else self.max_active_per_user

    @property
    def delayed(self) -> bool:
        """Not due yet: it waits in the queue whether or not the thread is free."""
        return self.delay > 0


@final
@dataclass(frozen=True, slots=True)
class ThreadView:
    """One consistent look at a thread. ``known`` is the run with the newcomer's id, else the one with its key;
    ``queued`` is in order of (due_at, seq); ``facts`` and ``owner_expires_at`` speak of the active operation.
    ``user_active`` counts the active runs of the newcomer's user on all threads, where a limit asks for it."""

    facts: Facts
    known: Run | None = None
    active: Run | None = None
    queued: tuple[Run, ...] = ()
    owner_expires_at: Micros | None = None
    user_active: int = 0


@final
@dataclass(frozen=True, slots=True)
class Reuse:
    """This very request was admitted before: answer ``run`` and change nothing. ``by_key`` is False when it is the
    newcomer's own lost reply, so that its caller still runs it (O5, O8)."""

    run: Run
    by_key: bool


@final
@dataclass(frozen=True, slots=True)
class Clash:
    """The run id or the key belongs to another request."""

    run: Run
    by_key: bool


@final
@dataclass(frozen=True, slots=True)
class Enter:
    """Insert as pending."""


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """Insert as queued; flag ``behind`` so that its end promotes (O2). None: a delayed run on an idle thread."""

    behind: Run | None


@final
@dataclass(frozen=True, slots=True)
class Displace:
    """Record ``action`` on ``incumbent``, end the waiting ``ended``, then insert: queued behind the incumbent, or
    pending where there is none (O3)."""

    action: CancelAction
    incumbent: Run | None
    ended: tuple[Run, ...]


@final
@dataclass(frozen=True, slots=True)
class ClearFirst:
    """The holder is nobody's any more: let ``event`` happen to it, then look again (O1, O3)."""

    run: Run
    event: RunEvent


@final
@dataclass(frozen=True, slots=True)
class PromoteFirst:
    """Nobody is active but a due run waits: promote it, then look again (O2)."""


@final
@dataclass(frozen=True, slots=True)
class Deny:
    """The thread is held by ``holder``; ``retry_after`` in whole seconds, at least one."""

    holder: Run
    retry_after: int


@final
@dataclass(frozen=True, slots=True)
class DenyFull:
    """The thread's queue holds ``limit`` runs already."""

    limit: int
    retry_after: int


@final
@dataclass(frozen=True, slots=True)
class DenyUser:
    """The thread is free, but the user has ``limit`` active runs already, wherever they are."""

    limit: int
    retry_after: int


Plan = Reuse | Clash | Enter | Wait | Displace | ClearFirst | PromoteFirst | Deny | DenyFull | DenyUser

RETRY_USER: Final = 1
"""Seconds after which a user at the limit may ask again: nobody knows when one of several runs will end."""

CLEARINGS: Final = (
    RunEvent.TAKE_OVER_FAIL,
    RunEvent.TAKE_OVER_FAIL_WAITING,
    RunEvent.TAKE_OVER_RELEASE,
    RunEvent.FORCE,
)
"""The ends that anybody may bring to a holder nobody runs."""


def plan_admission(newcomer: Newcomer, view: ThreadView, given: Given) -> Plan:
    """What to do with ``newcomer`` on the thread of ``view``; ``given`` carries the cancel grace."""
    plan = _plan_for_thread(newcomer, view, given)
    limit = newcomer.user_limit
    if limit is not None and view.user_active >= limit and _becomes_active(plan):
        return DenyUser(limit, RETRY_USER)
    return plan


def _becomes_active(plan: Plan) -> bool:
    """Whether the newcomer would hold its thread at once: only then does it count among its user's (I19)."""
    return isinstance(plan, Enter) or (isinstance(plan, Displace) and plan.incumbent is None)


def _plan_for_thread(newcomer: Newcomer, view: ThreadView, given: Given) -> Plan:
    if view.known is not None:
        return _known(newcomer, view.known)
    if clearing := _clearing(newcomer, view, given):
        return clearing
    if newcomer.delayed and newcomer.strategy is not Strategy.REJECT:
        return _wait(newcomer, view)
    match newcomer.strategy:
        case Strategy.REJECT:
            return _reject(newcomer, view)
        case Strategy.ENQUEUE:
            return _enqueue(newcomer, view)
        case Strategy.INTERRUPT:
            return _displace(CancelAction.INTERRUPT, view)
        case Strategy.ROLLBACK:
            return _displace(CancelAction.ROLLBACK, view)
        case _:
            assert_never(newcomer.strategy)


def _known(newcomer: Newcomer, known: Run) -> Reuse | Clash:
    """O5: same request, same run; another payload, kind or place under the same name is a clash."""
    by_key = known.run_id != newcomer.run_id
    same_place = known.thread_id == newcomer.thread_id or (by_key and newcomer.stateless)
    theirs = (known.kind, known.user_id, known.payload_digest)
    same = same_place and theirs == (newcomer.kind, newcomer.user_id, newcomer.payload_digest)
    return Reuse(known, by_key) if same else Clash(known, by_key)


def _clearing(newcomer: Newcomer, view: ThreadView, given: Given) -> ClearFirst | None:
    """O1: a dead holder whose run can only fail, or a dead reservation, never refuses or delays anybody."""
    if view.active is None:
        return None
    actor = Actor(newcomer.worker_id)
    for event in CLEARINGS:
        if isinstance(decide(view.active, event, actor, view.facts, given), Applied):
            return ClearFirst(view.active, event)
    return None


def _reject(newcomer: Newcomer, view: ThreadView) -> Plan:
    if newcomer.kind is OperationKind.DELETE and view.active is None and view.queued:
        return Displace(CancelAction.INTERRUPT, None, view.queued)  # O28: what waits goes with the thread
    holder = view.active or (view.queued[0] if view.queued else None)
    if holder is not None:
        return Deny(holder, _retry_after(view))
    return Wait(None) if newcomer.delayed else Enter()


def _enqueue(newcomer: Newcomer, view: ThreadView) -> Plan:
    if view.active is not None:
        return _wait(newcomer, view)
    due = any(is_due(run, view.facts.now) for run in view.queued)
    return PromoteFirst() if due else Enter()


def _wait(newcomer: Newcomer, view: ThreadView) -> Wait | DenyFull:
    limit = newcomer.max_queued
    if limit is not None and len(view.queued) >= limit:
        return DenyFull(limit, _retry_after(view))
    return Wait(view.active)


def _displace(action: CancelAction, view: ThreadView) -> Displace | Deny:
    """O3: slot before queue; a live reservation is never displaced."""
    if view.active is not None and view.active.reservation:
        return Deny(view.active, _retry_after(view))
    return Displace(action, view.active, view.queued)


def admitted_at(newcomer: Newcomer, waiting: Iterable[Run], now: Micros) -> Micros:
    """The instant that a newcomer's row bears as its admission; ``waiting`` are those queued on its thread.

    The store's now, but for one that is not delayed never before another such one that waits: the clock may have been
    set back between the two, and whoever was never delayed starts in order of admission (I17).
    """
    earlier = () if newcomer.delayed else (run.created_at for run in waiting if not run.delayed)
    return Micros(max((now, *earlier)))


def _retry_after(view: ThreadView) -> int:
    """Seconds until the holder's lease ends or, where nobody holds, the first in the queue is due; at least one."""
    waiting = view.queued[0].due_at if view.queued and view.active is None else None
    until = waiting or view.owner_expires_at or view.facts.now
    return max(1, -(-(until - view.facts.now) // MICROS_PER_SECOND))
