"""The one table of a run's life (ownership.md §3) and ``decide()``, its reading on values.

Everything that affects a run's status, owner or epoch lives in this file, and the file does not know which database,
worker or task asks. A guard or an effect is a name here; it is read twice, as Python below and as SQL in
``store.clauses``, and both readings end in ``assert_never``. No clock, no I/O: instants come in as facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, assert_never, final

from deerflow_runs.model import (
    ACTIVE,
    NO_USAGE,
    TERMINAL,
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunStatus,
    SessionState,
    StopReason,
    ThreadOutcome,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.recovery import being_restored, forgiven_attempt, next_attempt, seizers_attempt, used_up


class RunEvent(StrEnum):
    """What can happen to an operation that exists. Arrivals (admit, admit behind) are in ``admission``."""

    PROMOTE = "promote"
    CLAIM = "claim"
    START = "start"
    PROGRESS = "progress"
    SETTLE_SUCCESS = "settle success"
    SETTLE_ERROR = "settle error"
    SETTLE_TIMEOUT = "settle timeout"
    SETTLE_CANCELLED = "settle cancelled"
    SETTLE_ROLLBACK_FAILED = "settle rollback failed"
    REQUEST_CANCEL = "request cancel"
    CANCEL_QUEUED = "cancel queued"
    FORCE = "force"
    SEIZE = "seize"
    TAKE_OVER_FAIL = "take over: fail"
    TAKE_OVER_FAIL_WAITING = "take over: fail, waiting"
    TAKE_OVER_RESUME = "take over: resume"
    TAKE_OVER_RESUME_WAITING = "take over: resume, waiting"
    TAKE_OVER_RELEASE = "take over: release"
    TAKE_BACK = "take back"
    HAND_OVER = "hand over"
    DEFER = "defer"
    GIVE_BACK_FAIL = "give back: fail"
    GIVE_BACK_RESUME = "give back: resume"
    RE_HOME = "re-home"
    END_WAITING = "end waiting"
    RELEASE = "release"
    REMOVE = "remove"


class Guard(StrEnum):
    """A named condition of the table, in the words the documentation shows."""

    IS_RUN = "it is a run"
    IS_RESERVATION = "it is a reservation"
    OWNER_IS_ME = "owner = me"
    EPOCH_IS_MINE = "epoch = mine"
    NO_CANCEL = "no cancel recorded"
    CANCEL_RECORDED = "a cancel is recorded"
    NOTHING_OWED = "no rollback owed"
    ROLLBACK_OWED = "a rollback is owed"
    OWED_ONLY_ONCE_RESTORED = "if a rollback is owed, pending and restored by me"
    ATTEMPTS_EXCEEDED = "attempt > max_attempts"
    UNOWNED = "owner null"
    DUE = "due"
    READY = "not_before passed"
    CAPABLE = "capabilities mine"
    HOME_ALLOWS_ME = "home null or mine"
    HOME_IS_MINE = "home = me"
    HOME_WAS_MINE = "home = my dead session"
    HOME_IS_DEAD = "home's session is dead"
    ACTOR_LIVE = "my session is live"
    ACTOR_DRAINING = "my session is draining"
    OWNER_IS_DEAD = "owner's session is dead"
    OWNER_WAS_ME = "owner = my dead session"
    UNHELD_OR_OVERDUE = "vacant, or owner dead, or cancel grace over"
    MINE_UNHELD_OR_OVERDUE = "owner = me, or vacant, or owner dead, or cancel grace over"
    FAILS_WHEN_ORPHANED = "on_orphan = fail, or attempts used up"
    FAILS_WHEN_HOMELESS = "on_orphan = fail"
    RESUMES_WHEN_ORPHANED = "on_orphan = resume, attempts left"
    RESUMES_WHEN_HOMELESS = "on_orphan = resume"
    OWNER_VERDICT_RIPE = "owner's death proven, or one lease old"
    HOME_VERDICT_RIPE = "home's death proven, or one lease old"
    NO_PROGRESS_THIS_EPOCH = "nothing recorded by this epoch"
    THREAD_FREE = "no active operation on the thread"
    FIRST_DUE = "first of the due queue"


class Effect(StrEnum):
    """A named change of the table beside the status."""

    TAKE_OWNERSHIP = "owner = me, epoch + 1, granted now"
    VACATE = "owner null, epoch + 1"
    RAISE_EPOCH = "epoch + 1"
    MOVE_TO_ME = "owner (and home, if set) = me, epoch + 1"
    NO_OWNER = "owner null"
    FLAG_BEHIND = "queue_behind set"
    FIRST_ATTEMPT = "attempt at least 1"
    COUNT_ATTEMPT = "attempt counted"
    FORGIVE_ATTEMPTS = "attempt 1 if this epoch made progress"
    COUNT_RESTORE = "attempt = number of this restore"
    BACK_OFF = "not_before = now + backoff"
    READY_NOW = "not_before = now"
    CLEAR_WAITS = "waits_for cleared"
    DRAW_TURN = "first time: turn drawn, base recorded"
    STAMP_START = "started now"
    RECORD_CANCEL = "first action and time recorded"
    RECORD_PROGRESS = "progress recorded"
    CANCEL_DECIDES = "interrupted if a cancel is recorded"
    STAMP_END = "settled by me now"
    RECORD_OUTCOME = "error and usage recorded"
    REASON_CANCEL_OR_GIVEN = "stop_reason = the action, else as given"
    REASON_SHUTDOWN = "stop_reason = the action, else shutdown"
    REASON_ORPHAN = "stop_reason = orphan_recovered, or poison"
    REASON_GIVEN_BACK = "stop_reason as given, or poison"
    REASON_ROLLBACK_FAILED = "stop_reason = rollback_failed"
    FREE_OF_HOME = "home cleared"
    HOME_TO_ME = "home = me"
    REQUIRE_MORE = "requirement added"


class Refusal(StrEnum):
    """Why an event did not happen. Values are stable: they travel in answers and logs."""

    UNKNOWN = "unknown"
    TERMINAL = "terminal"
    WRONG_STATUS = "wrong_status"
    NOT_A_RUN = "not_a_run"
    NOT_A_RESERVATION = "not_a_reservation"
    LOST = "lost"
    CANCEL_RECORDED = "cancel_recorded"
    NO_CANCEL = "no_cancel"
    ROLLBACK_OWED = "rollback_owed"
    NOTHING_OWED = "nothing_owed"
    HELD = "held"
    TOO_EARLY = "too_early"
    NOT_CAPABLE = "not_capable"
    AT_HOME_ELSEWHERE = "at_home_elsewhere"
    SESSION_NOT_LIVE = "session_not_live"
    SESSION_NOT_DRAINING = "session_not_draining"
    OTHER_POLICY = "other_policy"
    RECORDED = "recorded"
    THREAD_BUSY = "thread_busy"
    NOT_FIRST = "not_first"


@final
@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks. ``epoch`` is the epoch it believes to hold; ``previous`` the dead session it used to be (O13)."""

    worker_id: WorkerId
    epoch: int | None = None
    capabilities: frozenset[str] = frozenset()
    previous: WorkerId | None = None


@final
@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What the store knows of another session when it judges an event."""

    state: SessionState = SessionState.LIVE
    proven: bool = False
    dead_at: Micros = Micros(0)
    lease: Micros = Micros(0)


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What a statement sees beside the run's own row. ``now`` is the store's clock.

    ``owner`` and ``home`` are None when the run names no such session. ``turn`` is the number that a first start
    would draw; ``thread_active`` speaks of operations other than this one.
    """

    now: Micros
    owner: SessionFacts | None = None
    home: SessionFacts | None = None
    actor: SessionState = SessionState.LIVE
    thread_active: bool = False
    first_due: bool = True
    turn: int = 1


@final
@dataclass(frozen=True, slots=True)
class Given:
    """What an event carries. Only the fields that its guards and effects name are read; durations are microseconds.

    ``restored``: the holder has carried out the rollback at the epoch it names. Without it a run that is stopped for
    another reason would end over a rollback that was recorded a moment ago (I16).
    """

    action: CancelAction = CancelAction.INTERRUPT
    cancel_grace: Micros = Micros(10_000_000)
    restored: bool = False
    stop_reason: str | None = None
    error: str | None = field(default=None, repr=False)
    usage: Usage = field(default=NO_USAGE, repr=False)
    outcome: ThreadOutcome | None = None
    values: Any = field(default=None, repr=False)
    interrupts: Any = field(default=None, repr=False)
    base_heads: Mapping[str, str] = field(default_factory=dict)
    backoff: Micros = Micros(0)
    requirements: frozenset[str] = frozenset()
    checkpoint: str | None = None
    model_name: str | None = None


NOTHING_GIVEN: Final = Given()


class Into(StrEnum):
    """Targets that are not a status."""

    STAYS = "stays"
    GONE = "row deleted"


class Repeat(StrEnum):
    """When the same event has visibly happened already: a lost reply, repeated (O8)."""

    RUNNING_AT_MY_EPOCH = "already running at my epoch"
    ENDED_BY_ME = "terminal at my epoch, settled by me"
    MOVED_TO_ME = "mine at the next epoch, and not by a seizure"
    HOME_IS_ME = "home is me already"


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    sources: frozenset[RunStatus]
    target: RunStatus | Into
    guards: tuple[Guard, ...]
    effects: tuple[Effect, ...] = ()
    repeat: Repeat | None = None

    @property
    def ends(self) -> bool:
        """Whether it brings an operation to its end; every such event goes through the ending's routine (O28)."""
        return (self.target in TERMINAL or self.target is Into.GONE) and not self.sources <= TERMINAL

    @property
    def frees(self) -> bool:
        """Whether it can free a thread, so that a waiting run is promoted in the same transaction (O7)."""
        return self.ends and not self.sources.isdisjoint(ACTIVE)


G, E, S = Guard, Effect, RunStatus
_HOLDER: Final = (G.IS_RUN, G.OWNER_IS_ME, G.EPOCH_IS_MINE)
_ENDS: Final = (E.STAMP_END, E.RECORD_OUTCOME)
_PENDING: Final = frozenset({S.PENDING})
_RUNNING: Final = frozenset({S.RUNNING})
_QUEUED: Final = frozenset({S.QUEUED})
_WAITING: Final = frozenset({S.QUEUED, S.PENDING})
_SETTLED: Final = (E.CANCEL_DECIDES, E.REASON_CANCEL_OR_GIVEN, *_ENDS)


def _settle(target: RunStatus, sources: frozenset[RunStatus]) -> Rule:
    return Rule(sources, target, (*_HOLDER, G.NOTHING_OWED), _SETTLED, Repeat.ENDED_BY_ME)


TRANSITIONS: Final[Mapping[RunEvent, Rule]] = MappingProxyType(
    {
        RunEvent.PROMOTE: Rule(
            _QUEUED,
            S.PENDING,
            (G.IS_RUN, G.DUE, G.FIRST_DUE, G.THREAD_FREE),
            (E.NO_OWNER, E.FLAG_BEHIND, E.READY_NOW),
        ),
        RunEvent.CLAIM: Rule(
            _PENDING,
            S.PENDING,
            (G.IS_RUN, G.UNOWNED, G.NO_CANCEL, G.READY, G.CAPABLE, G.HOME_ALLOWS_ME, G.ACTOR_LIVE),
            (E.TAKE_OWNERSHIP, E.FIRST_ATTEMPT, E.CLEAR_WAITS),
        ),
        RunEvent.START: Rule(
            _PENDING,
            S.RUNNING,
            (*_HOLDER, G.NO_CANCEL),
            (E.DRAW_TURN, E.STAMP_START),
            Repeat.RUNNING_AT_MY_EPOCH,
        ),
        RunEvent.PROGRESS: Rule(ACTIVE, Into.STAYS, _HOLDER, (E.RECORD_PROGRESS,)),
        RunEvent.SETTLE_SUCCESS: _settle(S.SUCCESS, _RUNNING),
        RunEvent.SETTLE_ERROR: _settle(S.ERROR, ACTIVE),
        RunEvent.SETTLE_TIMEOUT: _settle(S.TIMEOUT, _RUNNING),
        RunEvent.SETTLE_CANCELLED: Rule(
            ACTIVE,
            S.INTERRUPTED,
            (*_HOLDER, G.OWED_ONLY_ONCE_RESTORED),
            (E.REASON_CANCEL_OR_GIVEN, *_ENDS),
            Repeat.ENDED_BY_ME,
        ),
        RunEvent.SETTLE_ROLLBACK_FAILED: Rule(
            _PENDING,
            S.ERROR,
            (*_HOLDER, G.ROLLBACK_OWED, G.ATTEMPTS_EXCEEDED),
            (E.REASON_ROLLBACK_FAILED, *_ENDS),
            Repeat.ENDED_BY_ME,
        ),
        RunEvent.REQUEST_CANCEL: Rule(ACTIVE, Into.STAYS, (G.IS_RUN,), (E.RECORD_CANCEL,)),
        RunEvent.CANCEL_QUEUED: Rule(
            _QUEUED,
            S.INTERRUPTED,
            (G.IS_RUN,),
            (E.RECORD_CANCEL, E.REASON_CANCEL_OR_GIVEN, *_ENDS),
        ),
        RunEvent.FORCE: Rule(
            ACTIVE,
            S.INTERRUPTED,
            (G.IS_RUN, G.CANCEL_RECORDED, G.NOTHING_OWED, G.UNHELD_OR_OVERDUE),
            (E.RAISE_EPOCH, E.REASON_CANCEL_OR_GIVEN, *_ENDS),
        ),
        RunEvent.SEIZE: Rule(
            ACTIVE,
            S.PENDING,
            (G.IS_RUN, G.ROLLBACK_OWED, G.MINE_UNHELD_OR_OVERDUE, G.CAPABLE),
            (E.COUNT_RESTORE, E.TAKE_OWNERSHIP, E.CLEAR_WAITS),
        ),
        RunEvent.TAKE_OVER_FAIL: Rule(
            ACTIVE,
            S.ERROR,
            (G.IS_RUN, G.OWNER_IS_DEAD, G.NO_CANCEL, G.FAILS_WHEN_ORPHANED, G.OWNER_VERDICT_RIPE),
            (E.RAISE_EPOCH, E.REASON_ORPHAN, *_ENDS),
        ),
        RunEvent.TAKE_OVER_FAIL_WAITING: Rule(
            _WAITING,
            S.ERROR,
            (G.IS_RUN, G.UNOWNED, G.NO_CANCEL, G.FAILS_WHEN_HOMELESS, G.HOME_IS_DEAD, G.HOME_VERDICT_RIPE),
            (E.RAISE_EPOCH, E.REASON_ORPHAN, *_ENDS),
        ),
        RunEvent.TAKE_OVER_RESUME: Rule(
            ACTIVE,
            S.PENDING,
            (G.IS_RUN, G.OWNER_IS_DEAD, G.NO_CANCEL, G.RESUMES_WHEN_ORPHANED),
            (E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF, E.FREE_OF_HOME),
        ),
        RunEvent.TAKE_OVER_RESUME_WAITING: Rule(
            _WAITING,
            Into.STAYS,
            (G.IS_RUN, G.UNOWNED, G.NO_CANCEL, G.RESUMES_WHEN_HOMELESS, G.HOME_IS_DEAD),
            (E.FREE_OF_HOME,),
        ),
        RunEvent.TAKE_OVER_RELEASE: Rule(ACTIVE, Into.GONE, (G.IS_RESERVATION, G.OWNER_IS_DEAD)),
        RunEvent.TAKE_BACK: Rule(
            ACTIVE,
            Into.STAYS,
            (G.OWNER_WAS_ME, G.EPOCH_IS_MINE),
            (E.FORGIVE_ATTEMPTS, E.MOVE_TO_ME),
            Repeat.MOVED_TO_ME,
        ),
        RunEvent.HAND_OVER: Rule(
            ACTIVE,
            S.PENDING,
            (*_HOLDER, G.NO_CANCEL),
            (E.FORGIVE_ATTEMPTS, E.VACATE, E.READY_NOW),
        ),
        RunEvent.DEFER: Rule(
            ACTIVE,
            S.PENDING,
            (*_HOLDER, G.NO_CANCEL, G.NO_PROGRESS_THIS_EPOCH),
            (E.VACATE, E.READY_NOW, E.REQUIRE_MORE),
        ),
        RunEvent.GIVE_BACK_FAIL: Rule(
            ACTIVE,
            S.ERROR,
            (*_HOLDER, G.NO_CANCEL, G.FAILS_WHEN_ORPHANED),
            (E.RAISE_EPOCH, E.REASON_GIVEN_BACK, *_ENDS),
        ),
        RunEvent.GIVE_BACK_RESUME: Rule(
            ACTIVE,
            S.PENDING,
            (*_HOLDER, G.NO_CANCEL, G.RESUMES_WHEN_ORPHANED),
            (E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF),
        ),
        RunEvent.RE_HOME: Rule(
            _WAITING,
            Into.STAYS,
            (G.IS_RUN, G.UNOWNED, G.HOME_WAS_MINE),
            (E.HOME_TO_ME,),
            Repeat.HOME_IS_ME,
        ),
        RunEvent.END_WAITING: Rule(
            _WAITING,
            S.INTERRUPTED,
            (G.IS_RUN, G.UNOWNED, G.HOME_IS_MINE, G.ACTOR_DRAINING, G.NOTHING_OWED),
            (E.RAISE_EPOCH, E.REASON_SHUTDOWN, *_ENDS),
        ),
        RunEvent.RELEASE: Rule(ACTIVE, Into.GONE, (G.IS_RESERVATION, G.OWNER_IS_ME, G.EPOCH_IS_MINE)),
        RunEvent.REMOVE: Rule(TERMINAL, Into.GONE, ()),
    }
)
"""Every event, with where it may start, what must hold in the same statement, and what it changes."""


@final
@dataclass(frozen=True, slots=True)
class Applied:
    """It happened. ``run`` is the row afterwards (before its deletion where the row is gone); ``repeated`` says that
    this very event had happened before and its reply was lost (O8)."""

    run: Run
    repeated: bool = False


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """It did not happen and nothing changed; ``run`` is the row that said no, if there is one."""

    reason: Refusal
    run: Run | None = None


Decision = Applied | Refused


def decide(run: Run | None, event: RunEvent, by: Actor, facts: Facts, given: Given = NOTHING_GIVEN) -> Decision:
    """Let ``event`` happen to ``run`` if the table allows it.

    The stores' statements are another reading of the same table; the contract suite holds them against this one.
    """
    if run is None:
        return Refused(Refusal.UNKNOWN)
    rule = TRANSITIONS[event]
    if run.status not in rule.sources:
        return Applied(run, repeated=True) if _repeats(rule, run, by) else Refused(_misplaced(rule, run, by), run)
    for guard in rule.guards:
        if not holds(guard, run, by, facts, given):
            return Applied(run, repeated=True) if _repeats(rule, run, by) else Refused(REASONS[guard], run)
    return Applied(after(rule, run, by, facts, given))


def _misplaced(rule: Rule, run: Run, by: Actor) -> Refusal:
    """Why a rule may not start here. Whoever lost the run is told that first: it must stop, whatever became of it."""
    if Guard.EPOCH_IS_MINE in rule.guards and run.epoch != by.epoch:
        return Refusal.LOST
    return Refusal.TERMINAL if run.terminal else Refusal.WRONG_STATUS


def after(rule: Rule, run: Run, by: Actor, facts: Facts, given: Given) -> Run:
    """The row once ``rule`` has been carried out on ``run``. Effects read the row as it was before the event."""
    changes: dict[str, Any] = {} if isinstance(rule.target, Into) else {"status": rule.target}
    for effect in rule.effects:
        changes |= change(effect, run, by, facts, given)
    return replace(run, **changes, updated_at=facts.now)


def holds(guard: Guard, run: Run, by: Actor, facts: Facts, given: Given) -> bool:  # noqa: PLR0912 - one line per guard
    """The Python reading of one guard."""
    match guard:
        case Guard.IS_RUN:
            return run.kind is OperationKind.RUN
        case Guard.IS_RESERVATION:
            return run.kind is not OperationKind.RUN
        case Guard.OWNER_IS_ME:
            return run.owner_worker_id == by.worker_id
        case Guard.EPOCH_IS_MINE:
            return run.epoch == by.epoch
        case Guard.NO_CANCEL:
            return run.cancel_action is None
        case Guard.CANCEL_RECORDED:
            return run.cancel_action is not None
        case Guard.NOTHING_OWED:
            return not run.rollback_owed
        case Guard.ROLLBACK_OWED:
            return run.rollback_owed
        case Guard.OWED_ONLY_ONCE_RESTORED:
            return not run.rollback_owed or (given.restored and run.status is RunStatus.PENDING)
        case Guard.ATTEMPTS_EXCEEDED:
            return run.attempt > run.max_attempts
        case Guard.UNOWNED:
            return run.owner_worker_id is None
        case Guard.DUE:
            return run.due_at <= facts.now
        case Guard.READY:
            return run.not_before <= facts.now
        case Guard.CAPABLE:
            return run.required_capabilities <= by.capabilities
        case Guard.HOME_ALLOWS_ME:
            return run.home_worker_id in (None, by.worker_id)
        case Guard.HOME_IS_MINE:
            return run.home_worker_id == by.worker_id
        case Guard.HOME_WAS_MINE:
            return run.home_worker_id is not None and run.home_worker_id == by.previous
        case Guard.HOME_IS_DEAD:
            return _dead(facts.home)
        case Guard.ACTOR_LIVE:
            return facts.actor is SessionState.LIVE
        case Guard.ACTOR_DRAINING:
            return facts.actor is SessionState.DRAINING
        case Guard.OWNER_IS_DEAD:
            return _dead(facts.owner)
        case Guard.OWNER_WAS_ME:
            return run.owner_worker_id is not None and run.owner_worker_id == by.previous
        case Guard.UNHELD_OR_OVERDUE:
            return run.vacant or _dead(facts.owner) or _grace_over(run, facts, given)
        case Guard.MINE_UNHELD_OR_OVERDUE:
            mine = run.owner_worker_id == by.worker_id
            return mine or run.vacant or _dead(facts.owner) or _grace_over(run, facts, given)
        case Guard.FAILS_WHEN_ORPHANED:
            return run.on_orphan is OnOrphan.FAIL or used_up(run)
        case Guard.FAILS_WHEN_HOMELESS:
            return run.on_orphan is OnOrphan.FAIL
        case Guard.RESUMES_WHEN_ORPHANED:
            return run.on_orphan is OnOrphan.RESUME and not used_up(run)
        case Guard.RESUMES_WHEN_HOMELESS:
            return run.on_orphan is OnOrphan.RESUME
        case Guard.OWNER_VERDICT_RIPE:
            return _ripe(facts.owner, facts.now)
        case Guard.HOME_VERDICT_RIPE:
            return _ripe(facts.home, facts.now)
        case Guard.NO_PROGRESS_THIS_EPOCH:
            return run.progress_epoch != run.epoch
        case Guard.THREAD_FREE:
            return not facts.thread_active
        case Guard.FIRST_DUE:
            return facts.first_due
        case _:
            assert_never(guard)


def _dead(session: SessionFacts | None) -> bool:
    return session is not None and session.state is SessionState.DEAD


def _ripe(session: SessionFacts | None, now: Micros) -> bool:
    """O26: what ends a run for good waits one lease after an unproven death, so that a live copy may take it back."""
    return session is not None and (session.proven or session.dead_at + session.lease <= now)


def _grace_over(run: Run, facts: Facts, given: Given) -> bool:
    """O4: the grace of a cancel counts from the later of the request and the grant."""
    if run.cancel_requested_at is None:
        return False
    return max(run.cancel_requested_at, run.granted_at or 0) + given.cancel_grace <= facts.now


def change(effect: Effect, run: Run, by: Actor, facts: Facts, given: Given) -> dict[str, Any]:  # noqa: PLR0912 - one line per effect
    """The Python reading of one effect: the fields it sets, computed from the row as it was."""
    match effect:
        case Effect.TAKE_OWNERSHIP:
            return {"owner_worker_id": by.worker_id, "epoch": run.epoch + 1, "granted_at": facts.now}
        case Effect.VACATE:
            return {"owner_worker_id": None, "epoch": run.epoch + 1}
        case Effect.RAISE_EPOCH:
            return {"epoch": run.epoch + 1}
        case Effect.MOVE_TO_ME:
            home = by.worker_id if run.home_worker_id is not None else None
            return {"owner_worker_id": by.worker_id, "home_worker_id": home, "epoch": run.epoch + 1}
        case Effect.NO_OWNER:
            return {"owner_worker_id": None}
        case Effect.FLAG_BEHIND:
            return {"queue_behind": True}
        case Effect.FIRST_ATTEMPT:
            return {"attempt": max(run.attempt, 1)}
        case Effect.COUNT_ATTEMPT:
            return {"attempt": next_attempt(run)}
        case Effect.FORGIVE_ATTEMPTS:
            return {"attempt": forgiven_attempt(run)}
        case Effect.COUNT_RESTORE:
            return {"attempt": seizers_attempt(run, by=by.worker_id, epoch=by.epoch)}
        case Effect.BACK_OFF:
            return {"not_before": Micros(facts.now + given.backoff)}
        case Effect.READY_NOW:
            return {"not_before": facts.now}
        case Effect.CLEAR_WAITS:
            return {"waits_for": None}
        case Effect.DRAW_TURN:
            first = {"turn": facts.turn, "base_known": True, "base_heads": given.base_heads}
            return first if run.turn is None else {}
        case Effect.STAMP_START:
            return {"started_at": run.started_at if run.started_at is not None else facts.now}
        case Effect.RECORD_CANCEL:
            first = {"cancel_action": given.action, "cancel_requested_at": facts.now}
            return first if run.cancel_action is None else {}
        case Effect.RECORD_PROGRESS:
            return _progress(run, facts, given)
        case Effect.CANCEL_DECIDES:
            return {} if run.cancel_action is None else {"status": RunStatus.INTERRUPTED}
        case Effect.STAMP_END:
            return {"settled_by": by.worker_id, "settled_at": facts.now, "waits_for": None}
        case Effect.RECORD_OUTCOME:
            usage = run.usage if given.usage == NO_USAGE else given.usage
            return {"error": given.error, "usage": usage} | _checkpoint(given)
        case Effect.REASON_CANCEL_OR_GIVEN:
            cancelled = run.cancel_action or (given.action if run.status is RunStatus.QUEUED else None)
            return {"stop_reason": cancelled.value if cancelled else given.stop_reason}
        case Effect.REASON_SHUTDOWN:
            return {"stop_reason": (run.cancel_action or StopReason.SHUTDOWN).value}
        case Effect.REASON_ORPHAN:
            poison = run.on_orphan is OnOrphan.RESUME
            return {"stop_reason": (StopReason.POISON if poison else StopReason.ORPHAN_RECOVERED).value}
        case Effect.REASON_GIVEN_BACK:
            poison = run.on_orphan is OnOrphan.RESUME
            return {"stop_reason": StopReason.POISON.value if poison else given.stop_reason}
        case Effect.REASON_ROLLBACK_FAILED:
            return {"stop_reason": StopReason.ROLLBACK_FAILED.value}
        case Effect.FREE_OF_HOME:
            return {"home_worker_id": None}
        case Effect.HOME_TO_ME:
            return {"home_worker_id": by.worker_id}
        case Effect.REQUIRE_MORE:
            return {"required_capabilities": run.required_capabilities | given.requirements}
        case _:
            assert_never(effect)


def _progress(run: Run, facts: Facts, given: Given) -> dict[str, Any]:
    """O30: a checkpoint marks its epoch as one that made progress. What is not given stays as it was."""
    changes: dict[str, Any] = {"progress_at": facts.now} | _checkpoint(given)
    if given.checkpoint is not None:
        changes["progress_epoch"] = run.epoch
    if given.usage != NO_USAGE:
        changes["usage"] = given.usage
    if given.model_name is not None:
        changes["model_name"] = given.model_name
    return changes


def _checkpoint(given: Given) -> dict[str, Any]:
    return {} if given.checkpoint is None else {"last_checkpoint": given.checkpoint}


def _repeats(rule: Rule, run: Run, by: Actor) -> bool:
    """O8: whether the row already shows that this event happened for this asker."""
    mine = run.owner_worker_id == by.worker_id
    match rule.repeat:
        case None:
            return False
        case Repeat.RUNNING_AT_MY_EPOCH:
            return mine and run.status is RunStatus.RUNNING and run.epoch == by.epoch
        case Repeat.ENDED_BY_ME:
            return run.terminal and run.epoch == by.epoch and run.settled_by == by.worker_id
        case Repeat.MOVED_TO_ME:
            # My own seizure moves a run to my next epoch too; the copy that ran before it must not go on (I4, I16).
            next_epoch = by.epoch is not None and run.epoch == by.epoch + 1
            return mine and run.active and next_epoch and not being_restored(run)
        case Repeat.HOME_IS_ME:
            return run.home_worker_id == by.worker_id and run.status in rule.sources
        case _:
            assert_never(rule.repeat)


REASONS: Final[Mapping[Guard, Refusal]] = MappingProxyType(
    {
        Guard.IS_RUN: Refusal.NOT_A_RUN,
        Guard.IS_RESERVATION: Refusal.NOT_A_RESERVATION,
        Guard.OWNER_IS_ME: Refusal.LOST,
        Guard.EPOCH_IS_MINE: Refusal.LOST,
        Guard.NO_CANCEL: Refusal.CANCEL_RECORDED,
        Guard.CANCEL_RECORDED: Refusal.NO_CANCEL,
        Guard.NOTHING_OWED: Refusal.ROLLBACK_OWED,
        Guard.ROLLBACK_OWED: Refusal.NOTHING_OWED,
        Guard.OWED_ONLY_ONCE_RESTORED: Refusal.ROLLBACK_OWED,
        Guard.ATTEMPTS_EXCEEDED: Refusal.TOO_EARLY,
        Guard.UNOWNED: Refusal.HELD,
        Guard.DUE: Refusal.TOO_EARLY,
        Guard.READY: Refusal.TOO_EARLY,
        Guard.CAPABLE: Refusal.NOT_CAPABLE,
        Guard.HOME_ALLOWS_ME: Refusal.AT_HOME_ELSEWHERE,
        Guard.HOME_IS_MINE: Refusal.AT_HOME_ELSEWHERE,
        Guard.HOME_WAS_MINE: Refusal.AT_HOME_ELSEWHERE,
        Guard.HOME_IS_DEAD: Refusal.HELD,
        Guard.ACTOR_LIVE: Refusal.SESSION_NOT_LIVE,
        Guard.ACTOR_DRAINING: Refusal.SESSION_NOT_DRAINING,
        Guard.OWNER_IS_DEAD: Refusal.HELD,
        Guard.OWNER_WAS_ME: Refusal.LOST,
        Guard.UNHELD_OR_OVERDUE: Refusal.HELD,
        Guard.MINE_UNHELD_OR_OVERDUE: Refusal.HELD,
        Guard.FAILS_WHEN_ORPHANED: Refusal.OTHER_POLICY,
        Guard.FAILS_WHEN_HOMELESS: Refusal.OTHER_POLICY,
        Guard.RESUMES_WHEN_ORPHANED: Refusal.OTHER_POLICY,
        Guard.RESUMES_WHEN_HOMELESS: Refusal.OTHER_POLICY,
        Guard.OWNER_VERDICT_RIPE: Refusal.TOO_EARLY,
        Guard.HOME_VERDICT_RIPE: Refusal.TOO_EARLY,
        Guard.NO_PROGRESS_THIS_EPOCH: Refusal.RECORDED,
        Guard.THREAD_FREE: Refusal.THREAD_BUSY,
        Guard.FIRST_DUE: Refusal.NOT_FIRST,
    }
)
"""What a failed guard is called in the answer."""
