"""``decide()``: the table of ``lifecycle``, read on values.

A guard and an effect are names in the table; here each becomes Python, in ``store.clauses`` each becomes SQL, and both
readings end in ``assert_never``. No clock, no I/O: instants come in as facts. No rule lives here: what may happen is
the table's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never, final

from deerflow_runs.model import (
    NO_USAGE,
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
from deerflow_runs.protocol.lifecycle import REASONS, TRANSITIONS, Effect, Guard, Into, Refusal, Repeat, Rule, RunEvent
from deerflow_runs.protocol.recovery import (
    being_restored,
    forgiven_attempt,
    next_attempt,
    seizers_attempt,
    spread_backoff,
    used_up,
)


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
    backoff_limit: Micros = Micros(0)
    requirements: frozenset[str] = frozenset()
    checkpoint: str | None = None
    model_name: str | None = None


NOTHING_GIVEN: Final = Given()


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
            return is_due(run, facts.now)
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
        case Guard.ASKS_FOR_MORE:
            return not given.requirements <= run.required_capabilities
        case Guard.THREAD_FREE:
            return not facts.thread_active
        case Guard.FIRST_DUE:
            return facts.first_due
        case _:
            assert_never(guard)


def is_due(run: Run, now: Micros) -> bool:
    """Whether a waiting run's time has come. That of one that was never delayed came with it: a clock that was set
    back since has no say, or the run would wait on an idle thread until it has caught up (I7)."""
    return run.due_at <= max(now, run.created_at)


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
            granted = Micros(max(facts.now, run.cancel_requested_at or 0))
            return {"owner_worker_id": by.worker_id, "epoch": run.epoch + 1, "granted_at": granted}
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
            pause = spread_backoff(run, minimum=given.backoff, maximum=given.backoff_limit)
            return {"not_before": Micros(facts.now + pause)}
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
            requested = facts.now if run.granted_at is None else Micros(max(facts.now, run.granted_at + 1))
            first = {"cancel_action": given.action, "cancel_requested_at": requested}
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
            return {"stop_reason": StopReason.POISON.value if poison else given.stop_reason or _ORPHAN}
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


_ORPHAN: Final = StopReason.ORPHAN_RECOVERED.value


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
        case Repeat.CANCELLED_BY_ME:
            cancelled = run.status is RunStatus.INTERRUPTED and run.cancel_action is not None
            return cancelled and run.settled_by == by.worker_id
        case Repeat.GIVEN_BACK_BY_ME:
            next_epoch = by.epoch is not None and run.epoch == by.epoch + 1
            return run.terminal and next_epoch and run.settled_by == by.worker_id
        case Repeat.HOME_IS_ME:
            return run.home_worker_id == by.worker_id and run.status in rule.sources
        case _:
            assert_never(rule.repeat)
