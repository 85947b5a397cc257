"""The SQL reading of the table's guards and effects; the Python reading stands in ``protocol.decision``.

A guard becomes one condition, an effect the columns it sets, both over ``dr_runs`` and bound parameters whose names
begin with ``p_``. What a guard means is decided in the table; the contract suite holds the two readings together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, assert_never, final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Integer,
    ScalarSelect,
    Text,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
)
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from deerflow_runs.model import NO_USAGE, Json, RunKey, RunStatus, SessionState, StopReason, Usage
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import Effect, Guard, Into, Rule
from deerflow_runs.protocol.recovery import DOUBLINGS, SPREAD, STRIDE
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.schema import JsonText, runs, workers
from deerflow_runs.store.values import encode

Columns = dict[str, ColumnElement[Any]]
R: Final = runs.c


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """Which optional things an event carries: they decide the statement's text; what is absent costs nothing."""

    usage: bool = False
    checkpoint: bool = False
    model_name: bool = False

    @classmethod
    def of(cls, given: Given) -> Shape:
        """The shape of what was given."""
        return cls(given.usage != NO_USAGE, given.checkpoint is not None, given.model_name is not None)


def word(value: str) -> ColumnElement[str]:
    """One of our own enum words as a literal; never a caller's text."""
    return literal_column(f"'{value}'")


def at_key() -> ColumnElement[bool]:
    """The run of the bound key."""
    return and_(R.run_id == bindparam("p_run"), R.thread_id == bindparam("p_thread"))


def in_sources(rule: Rule) -> ColumnElement[bool]:
    """Status is where the rule may start."""
    return status_in(*rule.sources)


def status_in(*statuses: RunStatus) -> ColumnElement[bool]:
    """Speaks of ``status``, never of ``active``, so that the primary key serves the guard."""
    if set(statuses) == {RunStatus.QUEUED}:
        # As an equality it would imply the predicate of the queue's index, which PostgreSQL then prefers.
        return R.status.between(word(RunStatus.QUEUED), word(RunStatus.QUEUED))
    return R.status.in_([word(status) for status in sorted(statuses)])


def guards(rule: Rule, dialect: Dialect) -> ColumnElement[bool]:
    """All that must hold in the statement, but for the key."""
    return and_(in_sources(rule), *(condition(guard, dialect) for guard in rule.guards))


def condition(guard: Guard, dialect: Dialect) -> ColumnElement[bool]:  # noqa: PLR0912 - one line per guard
    """The SQL reading of one guard."""
    match guard:
        case Guard.IS_RUN:
            return R.operation_kind == word("run")
        case Guard.IS_RESERVATION:
            return R.operation_kind != word("run")
        case Guard.OWNER_IS_ME:
            return R.owner_worker_id == bindparam("p_worker")
        case Guard.EPOCH_IS_MINE:
            return R.epoch == bindparam("p_epoch")
        case Guard.NO_CANCEL:
            return R.cancel_action.is_(null())
        case Guard.CANCEL_RECORDED:
            return R.cancel_action.is_not(null())
        case Guard.NOTHING_OWED:
            return _nothing_owed()
        case Guard.ROLLBACK_OWED:
            return and_(R.cancel_action == word("rollback"), R.turn.is_not(null()))
        case Guard.OWED_ONLY_ONCE_RESTORED:
            restored = bindparam("p_restored", type_=Integer) == literal_column("1")
            return or_(_nothing_owed(), and_(R.status == word("pending"), restored))
        case Guard.ATTEMPTS_EXCEEDED:
            return R.attempt > R.max_attempts
        case Guard.UNOWNED:
            return R.owner_worker_id.is_(null())
        case Guard.DUE:
            return due(R, dialect)
        case Guard.READY:
            return R.not_before <= dialect.now
        case Guard.CAPABLE:
            return dialect.contained(R.required_capabilities, "p_capabilities")
        case Guard.HOME_ALLOWS_ME:
            return or_(R.home_worker_id.is_(null()), R.home_worker_id == bindparam("p_worker"))
        case Guard.HOME_IS_MINE:
            return R.home_worker_id == bindparam("p_worker")
        case Guard.HOME_WAS_MINE:
            return R.home_worker_id == bindparam("p_previous")
        case Guard.HOME_IS_DEAD:
            return _session_is(R.home_worker_id, SessionState.DEAD)
        case Guard.ACTOR_LIVE:
            return _session_is(bindparam("p_worker"), SessionState.LIVE)
        case Guard.ACTOR_DRAINING:
            return _session_is(bindparam("p_worker"), SessionState.DRAINING)
        case Guard.OWNER_IS_DEAD:
            return _session_is(R.owner_worker_id, SessionState.DEAD)
        case Guard.OWNER_WAS_ME:
            return R.owner_worker_id == bindparam("p_previous")
        case Guard.UNHELD_OR_OVERDUE:
            return _unheld_or_overdue(dialect)
        case Guard.MINE_UNHELD_OR_OVERDUE:
            return or_(R.owner_worker_id == bindparam("p_worker"), _unheld_or_overdue(dialect))
        case Guard.FAILS_WHEN_ORPHANED:
            return or_(R.on_orphan == word("fail"), next_attempt() > R.max_attempts)
        case Guard.FAILS_WHEN_HOMELESS:
            return R.on_orphan == word("fail")
        case Guard.RESUMES_WHEN_ORPHANED:
            return and_(R.on_orphan == word("resume"), next_attempt() <= R.max_attempts)
        case Guard.RESUMES_WHEN_HOMELESS:
            return R.on_orphan == word("resume")
        case Guard.OWNER_VERDICT_RIPE:
            return _ripe(R.owner_worker_id, dialect)
        case Guard.HOME_VERDICT_RIPE:
            return _ripe(R.home_worker_id, dialect)
        case Guard.NO_PROGRESS_THIS_EPOCH:
            return or_(R.progress_epoch.is_(null()), R.progress_epoch != R.epoch)
        case Guard.ASKS_FOR_MORE:
            return ~dialect.matches(R.required_capabilities, "p_requirements")
        case Guard.THREAD_FREE:
            return ~thread_active()
        case Guard.FIRST_DUE:
            return and_(R.run_id == first_due(R.thread_id, dialect))
        case _:
            assert_never(guard)


def _nothing_owed() -> ColumnElement[bool]:
    return or_(R.cancel_action.is_(null()), R.cancel_action != word("rollback"), R.turn.is_(null()))


def _session_is(worker_id: ColumnElement[Any], state: SessionState) -> ColumnElement[bool]:
    """A session in this state exists: a positive join, never the absence of another (O26)."""
    return select(literal_column("1")).where(workers.c.worker_id == worker_id, workers.c.state == word(state)).exists()


def _ripe(worker_id: ColumnElement[Any], dialect: Dialect) -> ColumnElement[bool]:
    old = workers.c.dead_at + workers.c.lease <= dialect.now
    return select(literal_column("1")).where(workers.c.worker_id == worker_id, or_(workers.c.proven, old)).exists()


def _unheld_or_overdue(dialect: Dialect) -> ColumnElement[bool]:
    granted = func.coalesce(R.granted_at, literal_column("0"))
    since = case((R.cancel_requested_at > granted, R.cancel_requested_at), else_=granted)
    overdue = and_(R.cancel_requested_at.is_not(null()), since + bindparam("p_grace", type_=BigInteger) <= dialect.now)
    vacant = and_(R.status == word("pending"), R.owner_worker_id.is_(null()))
    return or_(vacant, overdue, _session_is(R.owner_worker_id, SessionState.DEAD))


def next_attempt() -> ColumnElement[int]:
    """O30: an epoch that wrote a checkpoint starts the count anew."""
    return case((R.progress_epoch == R.epoch, literal_column("1")), else_=R.attempt + literal_column("1"))


def _spread_backoff() -> ColumnElement[int]:
    """See ``recovery.spread_backoff``: the ceiling doubles with every attempt, and no two neighbours wait alike."""
    shortest, limit = (bindparam(name, type_=BigInteger) for name in ("p_backoff", "p_backoff_limit"))
    attempt = next_attempt()
    doubled = case((attempt < DOUBLINGS, attempt), else_=literal_column(str(DOUBLINGS)))
    grown = shortest.bitwise_lshift(cast(doubled, Integer))
    capped = case((grown < limit, grown), else_=limit)
    ceiling = case((capped > shortest, capped), else_=shortest)
    part = (R.seq * literal_column(str(STRIDE))) % literal_column(str(SPREAD))
    return shortest + (ceiling - shortest) * part // literal_column(str(SPREAD))


def _seizers_attempt(me: ColumnElement[Any]) -> ColumnElement[int]:
    """Restores are counted apart from attempts; see ``recovery.seizers_attempt``."""
    granted = func.coalesce(R.granted_at, literal_column("0"))
    restoring = and_(R.status == word("pending"), R.owner_worker_id.is_not(null()), granted >= R.cancel_requested_at)
    lost_reply = and_(R.owner_worker_id == me, R.epoch.is_distinct_from(bindparam("p_epoch")))
    again = case((lost_reply, R.attempt), else_=R.attempt + literal_column("1"))
    return case((restoring, again), else_=literal_column("1"))


def thread_active() -> ColumnElement[bool]:
    """Another operation is active on the run's thread."""
    other = runs.alias("other")
    same = and_(other.c.thread_id == R.thread_id, other.c.active, other.c.run_id != R.run_id)
    return select(literal_column("1")).select_from(other).where(same).exists()


RunColumns = ReadOnlyColumnCollection[str, Column[Any]]
"""Of ``dr_runs`` or one of its aliases."""


def due(run: RunColumns, dialect: Dialect) -> ColumnElement[bool]:
    """The SQL reading of ``decision.is_due``. One comparison: an OR would let SQLite look into its index twice."""
    return run.due_at <= dialect.later(dialect.now, run.created_at)


def delayed(run: RunColumns) -> ColumnElement[bool]:
    """The SQL reading of ``Run.delayed``."""
    return run.due_at > run.created_at


def first_due(thread_id: ColumnElement[Any], dialect: Dialect) -> ScalarSelect[str]:
    """The waiting run whose turn it is on a thread, by (due_at, seq) of those due."""
    waiting = runs.alias("waiting")
    mine = and_(waiting.c.thread_id == thread_id, waiting.c.status == word("queued"), due(waiting.c, dialect))
    return select(waiting.c.run_id).where(mine).order_by(waiting.c.due_at, waiting.c.seq).limit(1).scalar_subquery()


# --- Effects --------------------------------------------------------------------------------------------------------


def assignments(rule: Rule, dialect: Dialect, shape: Shape) -> Columns:
    """All columns the rule sets, computed from the row as it was."""
    columns: Columns = {} if isinstance(rule.target, Into) else {"status": word(rule.target)}
    for effect in rule.effects:
        columns |= _columns(effect, rule, dialect, shape)
    return columns | {"updated_at": dialect.now}


def _columns(effect: Effect, rule: Rule, dialect: Dialect, shape: Shape) -> Columns:  # noqa: PLR0912 - one line per effect
    me = bindparam("p_worker", type_=R.owner_worker_id.type)
    match effect:
        case Effect.TAKE_OWNERSHIP:
            return {"owner_worker_id": me, "epoch": R.epoch + 1, "granted_at": _granted(dialect)}
        case Effect.VACATE:
            return {"owner_worker_id": null(), "epoch": R.epoch + 1}
        case Effect.RAISE_EPOCH:
            return {"epoch": R.epoch + 1}
        case Effect.MOVE_TO_ME:
            home = case((R.home_worker_id.is_(null()), null()), else_=me)
            return {"owner_worker_id": me, "home_worker_id": home, "epoch": R.epoch + 1}
        case Effect.NO_OWNER:
            return {"owner_worker_id": null()}
        case Effect.FLAG_BEHIND:
            return {"queue_behind": true()}
        case Effect.FIRST_ATTEMPT:
            return {"attempt": case((R.attempt < 1, literal_column("1")), else_=R.attempt)}
        case Effect.COUNT_ATTEMPT:
            return {"attempt": next_attempt()}
        case Effect.FORGIVE_ATTEMPTS:
            return {"attempt": case((R.progress_epoch == R.epoch, literal_column("1")), else_=R.attempt)}
        case Effect.COUNT_RESTORE:
            return {"attempt": _seizers_attempt(me)}
        case Effect.BACK_OFF:
            return {"not_before": dialect.now + _spread_backoff()}
        case Effect.READY_NOW:
            return {"not_before": dialect.now}
        case Effect.CLEAR_WAITS:
            return {"waits_for": null()}
        case Effect.DRAW_TURN:
            return _first_start(dialect)
        case Effect.STAMP_START:
            return {"started_at": func.coalesce(R.started_at, dialect.now)}
        case Effect.RECORD_CANCEL:
            return {
                "cancel_action": func.coalesce(R.cancel_action, bindparam("p_action")),
                "cancel_requested_at": func.coalesce(R.cancel_requested_at, _requested(dialect)),
            }
        case Effect.RECORD_PROGRESS:
            return {"progress_at": dialect.now} | _progress(shape)
        case Effect.CANCEL_DECIDES:
            target = rule.target.value
            return {"status": case((R.cancel_action.is_not(null()), word("interrupted")), else_=word(target))}
        case Effect.STAMP_END:
            return {"settled_by": me, "settled_at": dialect.now, "waits_for": null()}
        case Effect.RECORD_OUTCOME:
            return {"error": bindparam("p_error", type_=Text)} | _usage(shape) | _checkpoint(shape)
        case Effect.REASON_CANCEL_OR_GIVEN:
            waiting = case((R.status == word("queued"), bindparam("p_action")), else_=null())
            return {"stop_reason": func.coalesce(R.cancel_action, waiting, bindparam("p_reason", type_=Text))}
        case Effect.REASON_SHUTDOWN:
            return {"stop_reason": func.coalesce(R.cancel_action, word(StopReason.SHUTDOWN))}
        case Effect.REASON_ORPHAN:
            return {"stop_reason": _poison_or(word(StopReason.ORPHAN_RECOVERED))}
        case Effect.REASON_GIVEN_BACK:
            given = func.coalesce(bindparam("p_reason", type_=Text), word(StopReason.ORPHAN_RECOVERED))
            return {"stop_reason": _poison_or(given)}
        case Effect.REASON_ROLLBACK_FAILED:
            return {"stop_reason": word(StopReason.ROLLBACK_FAILED)}
        case Effect.FREE_OF_HOME:
            return {"home_worker_id": null()}
        case Effect.HOME_TO_ME:
            return {"home_worker_id": me}
        case Effect.REQUIRE_MORE:
            return {"required_capabilities": dialect.united(R.required_capabilities, "p_requirements")}
        case _:
            assert_never(effect)


def _granted(dialect: Dialect) -> ColumnElement[int]:
    """Not before a recorded cancel; see ``recovery.being_restored``."""
    return dialect.later(dialect.now, func.coalesce(R.cancel_requested_at, literal_column("0")))


def _requested(dialect: Dialect) -> ColumnElement[int]:
    """After the grant; see ``recovery.being_restored``."""
    return dialect.later(dialect.now, func.coalesce(R.granted_at + literal_column("1"), literal_column("0")))


def _first_start(dialect: Dialect) -> Columns:
    """O15: the turn is drawn once, by the statement that starts the run while it holds its thread."""
    first = R.turn.is_(null())
    heads = bindparam("p_base_heads", type_=JsonText)
    return {
        "turn": case((first, dialect.counter("turn")), else_=R.turn),
        "base_known": true(),
        "base_heads": case((first, heads), else_=R.base_heads),
    }


def _poison_or(otherwise: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((R.on_orphan == word("resume"), word(StopReason.POISON)), else_=otherwise)


def _progress(shape: Shape) -> Columns:
    columns = _usage(shape) | _checkpoint(shape)
    if shape.checkpoint:
        columns["progress_epoch"] = R.epoch
    if shape.model_name:
        columns["model_name"] = bindparam("p_model_name")
    return columns


def _checkpoint(shape: Shape) -> Columns:
    return {"last_checkpoint": bindparam("p_checkpoint")} if shape.checkpoint else {}


def _usage(shape: Shape) -> Columns:
    names = usage_columns(NO_USAGE)
    return {name: bindparam(f"p_{name}", type_=R[name].type) for name in names} if shape.usage else {}


# --- Parameters -----------------------------------------------------------------------------------------------------


def usage_columns(usage: Usage) -> dict[str, Any]:
    """The columns that hold a run's accounting."""
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "llm_calls": usage.llm_calls,
        "message_count": usage.message_count,
        "tokens_by_model": dict(usage.by_model),
        "tokens_by_caller": dict(usage.by_caller),
        "first_human_message": usage.first_human_message,
        "last_ai_message": usage.last_ai_message,
    }


def key_parameters(key: RunKey) -> dict[str, Any]:
    """Where the run is."""
    return {"p_run": key.run_id, "p_thread": key.thread_id}


def parameters(by: Actor, given: Given) -> dict[str, Any]:
    """Every parameter that a guard or an effect may name; a statement takes those it uses."""
    usage = {f"p_{name}": value for name, value in usage_columns(given.usage).items()}
    return usage | {
        "p_worker": by.worker_id,
        "p_epoch": by.epoch,
        "p_capabilities": _names(by.capabilities),
        "p_previous": by.previous,
        "p_grace": given.cancel_grace,
        "p_restored": int(given.restored),
        "p_action": given.action.value,
        "p_reason": given.stop_reason,
        "p_error": given.error,
        "p_base_heads": dict(given.base_heads),
        "p_backoff": given.backoff,
        "p_backoff_limit": given.backoff_limit,
        "p_requirements": _names(given.requirements),
        "p_checkpoint": given.checkpoint,
        "p_model_name": given.model_name,
        "p_outcome": given.outcome.value if given.outcome else None,
        "p_values": given.values,
        "p_interrupts": given.interrupts,
    }


def _names(names: frozenset[str]) -> str:
    ordered: list[Json] = [*sorted(names)]
    return encode(ordered)
