"""How a newcomer's row comes in: the statements behind ``protocol.admission`` (O1–O5).

The common cases are one guarded insert; what it refuses is looked at and planned by ``plan_admission``. Whoever
displaces, or waits without an incumbent, does it under the thread's lock.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    and_,
    bindparam,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    union_all,
    update,
)

from deerflow_runs.model import Micros, OperationKind, Run, RunStatus, Strategy
from deerflow_runs.protocol.admission import (
    CLEARINGS,
    Displace,
    Enter,
    Newcomer,
    Plan,
    ThreadView,
    Wait,
    plan_admission,
)
from deerflow_runs.protocol.decision import Actor, Facts, Given
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store.base import Admitted
from deerflow_runs.store.clauses import (
    R,
    Shape,
    assignments,
    at_key,
    delayed,
    due,
    guards,
    key_parameters,
    parameters,
    status_in,
    word,
)
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.endings import end_queue
from deerflow_runs.store.events import look_columns, looking_from, to_look
from deerflow_runs.store.rows import narrow, to_run
from deerflow_runs.store.schema import runs
from deerflow_runs.store.statement import Statement


class StartAgain(Exception):
    """The thread changed between the look and the change: nothing was written, look again."""


# --- The common case: one guarded insert ----------------------------------------------------------------------------


def enter(connection: Connection, dialect: Dialect, newcomer: Newcomer) -> Run | None:
    """O1: in one statement, unless a run waits on the thread, something is active, or the id or key is known.

    ``enqueue`` passes runs that are not due yet; ``reject`` respects those too. A user's limit makes it a transaction:
    whoever else enters for the same user is locked out until this one can be counted (I19).
    """
    limited = _lock_user(connection, dialect, newcomer)
    only_due = newcomer.strategy is Strategy.ENQUEUE
    return _insert(connection, dialect, newcomer, _entering(dialect, newcomer.take, only_due, limited))


def _lock_user(connection: Connection, dialect: Dialect, newcomer: Newcomer) -> bool:
    """Take the user's lock where a limit is to be kept. In a statement of its own, so that what is counted after it
    holds whoever had the lock before; and before the thread's lock, in which order alone the two are ever taken."""
    if newcomer.user_limit is None or newcomer.user_id is None:
        return False
    dialect.lock_user(connection, newcomer.user_id)
    return True


def wait_behind(connection: Connection, dialect: Dialect, newcomer: Newcomer, given: Given) -> Admitted | None:
    """O2: flag the active run and queue behind it. The flag waits for a settle in flight, and if that ended the run
    nothing is inserted; it also holds the incumbent's row, so that the limit is counted exactly (I19).

    None: nobody is there to wait behind, or anybody may clear the holder away, and the plan says how. ``StartAgain``:
    the newcomer was not let in, so the flag must not stay either."""
    bag = parameters(Actor(newcomer.worker_id), given) | {"p_thread": newcomer.thread_id}
    behind = _flag(dialect, unless_cleared=True).run(connection, bag).one_or_none()
    if behind is None:
        return None
    queueing = _queueing(dialect, newcomer.delayed, newcomer.max_queued is not None)
    return Admitted(_insert_or_again(connection, dialect, newcomer, queueing), to_run(behind))


def _insert(connection: Connection, dialect: Dialect, newcomer: Newcomer, statement: Statement) -> Run | None:
    row = statement.run(connection, _newcomer_parameters(newcomer)).one_or_none()
    if row is None:
        return None
    dialect.drawn(connection, "seq")
    return to_run(row)


@cache
def _entering(dialect: Dialect, take: bool, only_due: bool | None, limited: bool = False) -> Statement:  # noqa: FBT001, FBT002 - cached
    waiting = runs.alias("waiting")
    queued = and_(waiting.c.thread_id == bindparam("p_thread"), waiting.c.status == word(RunStatus.QUEUED))
    their_time = [due(waiting.c, dialect)] if only_due else []
    nobody_waits = ~select(literal_column("1")).select_from(waiting).where(queued, *their_time).exists()
    if limited:
        room = _active_of_user().scalar_subquery() < bindparam("p_max_active", type_=BigInteger)
        return _insertion(dialect, RunStatus.PENDING, take, and_(nobody_waits, room))
    return _insertion(dialect, RunStatus.PENDING, take, true() if only_due is None else nobody_waits)


@cache
def _queueing(dialect: Dialect, later: bool, limited: bool) -> Statement:  # noqa: FBT001 - cached
    waiting = runs.alias("waiting")
    queued = and_(waiting.c.thread_id == bindparam("p_thread"), waiting.c.status == word(RunStatus.QUEUED))
    length = select(func.count()).select_from(waiting).where(queued).scalar_subquery()
    room = length < bindparam("p_max_queued", type_=BigInteger) if limited else true()
    reading = _reading(dialect) if later else _reading_behind_others(dialect)
    return _insertion(dialect, RunStatus.QUEUED, False, room, reading)


def _active_of_user() -> Select[Any]:
    """How many runs of the newcomer's user are active, on whatever threads. Names the predicate of its index."""
    theirs = runs.alias("theirs")
    counted = and_(
        theirs.c.user_id == bindparam("p_user_id", type_=R.user_id.type),
        theirs.c.created_at >= literal_column("0"),
        theirs.c.active == true(),  # a bare column is no use of an index to SQLite
        theirs.c.operation_kind == word(OperationKind.RUN),
    )
    return select(func.count()).select_from(theirs).where(counted)


def _reading(dialect: Dialect) -> FromClause:
    """One reading of the clock for all instants of a row, so that they tell exactly whether it was delayed. Neither
    database takes a subquery apart that has no table: PostgreSQL because the clock is volatile."""
    return select(dialect.now.label("at")).subquery("reading")


def _reading_behind_others(dialect: Dialect) -> FromClause:
    """See ``admission.admitted_at``. Whoever queues up not delayed holds the incumbent's row, in a statement before
    this one: those before it are seen, those after it see it."""
    waiting = runs.alias("waiting")
    queued = and_(waiting.c.thread_id == bindparam("p_thread"), waiting.c.status == word(RunStatus.QUEUED))
    earlier = select(waiting.c.created_at).where(queued, ~delayed(waiting.c))
    instants = union_all(select(dialect.now.label("at")), earlier).subquery("instants")
    return select(func.max(instants.c.at).label("at")).subquery("reading")


def _insertion(
    dialect: Dialect,
    status: RunStatus,
    take: bool,  # noqa: FBT001 - cached by its callers
    where: ColumnElement[bool],
    reading: FromClause | None = None,
) -> Statement:
    reading = _reading(dialect) if reading is None else reading
    values = _row(dialect, status, reading.c.at, take=take)
    rows = select(*(value.label(name) for name, value in values.items())).select_from(reading).where(where)
    insertion = dialect.insert(runs).from_select(list(values), rows)
    # Without a target: the run id, the key and the thread's one slot all mean "look who is there".
    return Statement.of(insertion.on_conflict_do_nothing().returning(*narrow()))


CALLERS: Final = (
    "executor",
    "payload_version",
    "kwargs",
    "assistant_id",
    "user_id",
    "model_name",
    "metadata",
    "multitask_strategy",
    "on_disconnect",
    "on_orphan",
    "home_worker_id",
    "required_capabilities",
    "idempotency_scope",
    "idempotency_key",
    "payload_digest",
    "max_attempts",
    "run_timeout",
    "temporary",
    "deliveries",
)
"""Columns that are stored as the newcomer gave them."""


def _row(dialect: Dialect, status: RunStatus, now: ColumnElement[int], *, take: bool) -> dict[str, ColumnElement[Any]]:
    """The columns of a row admitted ``now``. What arrives owned has its first epoch and attempt; what waits has none
    yet."""
    zero, one, empty = literal_column("0", BigInteger), literal_column("1", BigInteger), word("{}")
    given = {name: bindparam(f"p_{name}", type_=R[name].type) for name in CALLERS}
    counted = ("input_tokens", "output_tokens", "total_tokens", "llm_calls", "message_count")
    fixed = {
        "run_id": bindparam("p_run", type_=R.run_id.type),
        "thread_id": bindparam("p_thread", type_=R.thread_id.type),
        "operation_kind": bindparam("p_kind", type_=R.operation_kind.type),
        "status": word(status),
        "seq": dialect.counter("seq"),
        "due_at": now + bindparam("p_delay", type_=BigInteger),
        "owner_worker_id": bindparam("p_worker", type_=R.owner_worker_id.type) if take else null(),
        "epoch": one if take else zero,
        "attempt": one if take else zero,
        "granted_at": now if take else null(),
        "not_before": now + bindparam("p_delay", type_=BigInteger),
        "queue_behind": literal_column("false"),
        "base_known": literal_column("false"),
        "base_heads": empty,
        "tokens_by_model": empty,
        "tokens_by_caller": empty,
        "created_at": now,
        "updated_at": now,
    }
    return fixed | dict.fromkeys(counted, zero) | given


def _newcomer_parameters(newcomer: Newcomer) -> dict[str, Any]:
    given = {name: getattr(newcomer, name) for name in CALLERS if hasattr(newcomer, name)}
    changed = {
        "kwargs": dict(newcomer.kwargs),
        "metadata": dict(newcomer.metadata),
        "deliveries": dict(newcomer.deliveries),
        "required_capabilities": sorted(newcomer.required_capabilities),
        "multitask_strategy": newcomer.strategy.value,
        "home_worker_id": newcomer.worker_id if newcomer.pinned else None,
        "kind": newcomer.kind.value,
        "run": newcomer.run_id,
        "thread": newcomer.thread_id,
        "delay": newcomer.delay,
        "worker": newcomer.worker_id,
        "max_queued": newcomer.max_queued,
        "max_active": newcomer.max_active_per_user,
    }
    return {f"p_{name}": value for name, value in (given | changed).items()}


# --- The look at a thread -------------------------------------------------------------------------------------------


@cache
def _thread_rows(dialect: Dialect) -> Statement:
    """The runs that matter to a newcomer: its own, its key's, the active one and those that wait."""
    mine = R.run_id == bindparam("p_run")
    keyed = and_(
        R.idempotency_scope == bindparam("p_idempotency_scope"), R.idempotency_key == bindparam("p_idempotency_key")
    )
    here = R.thread_id == bindparam("p_thread")
    # One arm for each partial index: the thread's ended runs are never read.
    arms = or_(mine, keyed, and_(here, R.active), and_(here, R.status == word(RunStatus.QUEUED)))
    matching: Select[Any] = select(*narrow(), *look_columns(dialect), keyed.label("keyed"))
    return Statement.of(looking_from(matching).where(arms).order_by(R.due_at, R.seq))


@cache
def _now_and_me(dialect: Dialect) -> Select[Any]:
    return select(dialect.now)


def look_at_thread(connection: Connection, dialect: Dialect, newcomer: Newcomer) -> ThreadView:
    """One consistent look; ``protocol.admission`` decides on it."""
    bag = _newcomer_parameters(newcomer)
    rows = _thread_rows(dialect).run(connection, bag).all()
    looks = [(to_look(row), bool(row._mapping["keyed"])) for row in rows]
    mine = next((look.run for look, _ in looks if look.run and look.run.run_id == newcomer.run_id), None)
    keyed = next((look.run for look, has_key in looks if has_key), None)
    here = [look for look, _ in looks if look.run and look.run.thread_id == newcomer.thread_id]
    active = next((look for look in here if look.run and look.run.active), None)
    waiting = tuple(look.run for look in here if look.run and look.run.status is RunStatus.QUEUED)
    facts = active.facts if active else here[0].facts if here else _bare_facts(connection, dialect)
    return ThreadView(
        facts=facts,
        known=mine or keyed,
        active=active.run if active else None,
        queued=waiting,
        owner_expires_at=active.owner_expires_at if active else None,
        user_active=0 if newcomer.user_limit is None else _counted(dialect).run(connection, bag).scalar_one(),
    )


@cache
def _counted(_: Dialect) -> Statement:
    return Statement.of(_active_of_user())


def _bare_facts(connection: Connection, dialect: Dialect) -> Facts:
    return Facts(now=Micros(connection.scalar(_now_and_me(dialect)) or 0))


# --- Under the thread's lock ----------------------------------------------------------------------------------------


def admit_locked(connection: Connection, dialect: Dialect, newcomer: Newcomer, given: Given) -> Admitted | Plan:
    """O3, and all that waits without an incumbent: lock, look, then do what the plan says, in one transaction.

    Answers ``Admitted``, or the plan where it says no, or where something must be cleared away first. Raises
    ``StartAgain`` when the incumbent ended between the look and the change.
    """
    _lock_user(connection, dialect, newcomer)
    dialect.lock_threads(connection, [newcomer.thread_id])
    plan = plan_admission(newcomer, look_at_thread(connection, dialect, newcomer), given)
    match plan:
        case Enter():
            return Admitted(_insert_or_again(connection, dialect, newcomer, _entering(dialect, newcomer.take, None)))
        case Wait(behind):
            return _queue_up(connection, dialect, newcomer, behind)
        case Displace():
            return _displace(connection, dialect, newcomer, plan)
        case _:
            return plan


def _queue_up(connection: Connection, dialect: Dialect, newcomer: Newcomer, behind: Run | None) -> Admitted:
    incumbent = None
    if behind is not None:
        bag = {"p_thread": newcomer.thread_id}
        row = _flag(dialect, unless_cleared=False).run(connection, bag).one_or_none()
        if row is None:
            raise StartAgain
        incumbent = to_run(row)
    # Counted again: who queues behind an incumbent holds its row and not the lock (O2).
    queueing = _queueing(dialect, newcomer.delayed, newcomer.max_queued is not None)
    return Admitted(_insert_or_again(connection, dialect, newcomer, queueing), incumbent)


def _displace(connection: Connection, dialect: Dialect, newcomer: Newcomer, plan: Displace) -> Admitted:
    """Cancel who holds the thread, take the place behind it, then end who waited: slot before queue, always."""
    by = Actor(newcomer.worker_id)
    given = Given(action=plan.action, error=f"displaced by run {newcomer.run_id}")
    incumbent = None
    if plan.incumbent is not None:
        bag = parameters(by, given) | key_parameters(plan.incumbent.key) | {"p_newcomer": newcomer.run_id}
        row = _cancel_and_flag(dialect).run(connection, bag).one_or_none()
        if row is None:
            raise StartAgain
        incumbent = to_run(row)
        run = _insert_or_again(connection, dialect, newcomer, _queueing(dialect, newcomer.delayed, False))
    else:
        run = _insert_or_again(connection, dialect, newcomer, _entering(dialect, newcomer.take, None))
    # Not those of the plan: until the slot was taken, enqueued runs could still arrive (O2).
    ended = end_queue(connection, dialect, newcomer.thread_id, by, given, spare=newcomer.run_id)
    return Admitted(run, incumbent, ended)


def _insert_or_again(connection: Connection, dialect: Dialect, newcomer: Newcomer, statement: Statement) -> Run:
    run = _insert(connection, dialect, newcomer, statement)
    if run is None:
        raise StartAgain
    return run


@cache
def _flag(dialect: Dialect, *, unless_cleared: bool) -> Statement:
    here = and_(R.thread_id == bindparam("p_thread"), R.active)
    cleared = or_(*(guards(TRANSITIONS[event], dialect) for event in CLEARINGS))
    wanted = [here, cleared.is_not(true())] if unless_cleared else [here]
    return Statement.of(
        update(runs).where(*wanted).values(queue_behind=true(), updated_at=dialect.now).returning(*narrow())
    )


@cache
def _cancel_and_flag(dialect: Dialect) -> Statement:
    rule = TRANSITIONS[RunEvent.REQUEST_CANCEL]
    superseded = func.coalesce(R.superseded_by, bindparam("p_newcomer", type_=R.superseded_by.type))
    values = assignments(rule, dialect, Shape()) | {"queue_behind": true(), "superseded_by": superseded}
    active_run = and_(at_key(), status_in(*rule.sources), R.operation_kind == word(OperationKind.RUN))
    return Statement.of(update(runs).where(active_run).values(values).returning(*narrow()))
