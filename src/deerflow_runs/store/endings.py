"""The one routine that ends operations and frees threads (O28), for one run and for many.

An ending changes the run, the thread's outcome, the receipt and the outbox together, and promotes the next waiting
run in the same transaction. PostgreSQL does all but the promotion in one statement (a promotion needs a fresh
snapshot, O7); SQLite does one after the other inside its transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
    Connection,
    FromClause,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Micros, OperationKind, Run, RunKey, RunStatus, WorkerId
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Decision, Given, Refused
from deerflow_runs.protocol.lifecycle import TRANSITIONS, Effect, Guard, Into, Rule, RunEvent
from deerflow_runs.store.clauses import (
    R,
    Shape,
    assignments,
    at_key,
    condition,
    due,
    first_due,
    guards,
    key_parameters,
    parameters,
    thread_active,
    word,
)
from deerflow_runs.store.consequences import followers
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.events import TRIES, explain
from deerflow_runs.store.lenient import as_text, decoded, read_or_skip
from deerflow_runs.store.rows import narrow, run_from, whole
from deerflow_runs.store.schema import outbox, runs
from deerflow_runs.store.statement import Statement


def optimistic(event: RunEvent) -> bool:
    """Whether its holder may end it in one autocommit statement while nobody waits and no cancel is recorded (O7)."""
    rule = TRANSITIONS[event]
    return rule.frees and (Effect.CANCEL_DECIDES in rule.effects or event is RunEvent.RELEASE)


# --- One run --------------------------------------------------------------------------------------------------------


def end_optimistically(
    connection: Connection, dialect: Dialect, key: RunKey, event: RunEvent, by: Actor, given: Given
) -> Run | None:
    """O7's fast path: one statement. None: somebody waits, a cancel is recorded, or the run is not ours."""
    bag = parameters(by, given) | key_parameters(key)
    return _first(_ending_of_one(event, dialect, Shape.of(given), True).run(connection, bag))


def end_locked(
    connection: Connection, dialect: Dialect, key: RunKey, event: RunEvent, by: Actor, given: Given
) -> Decision:
    """The whole way, inside a transaction: lock the thread, end, then promote in a later statement.

    A refusal leaves everything as it was; ``Applied`` means that it has happened, now or (``repeated``) before.
    """
    bag = parameters(by, given) | key_parameters(key)
    dialect.lock_threads(connection, [key.thread_id])
    for _ in range(TRIES):
        ended = _first(_ending_of_one(event, dialect, Shape.of(given), False).run(connection, bag))
        if ended is not None:
            break
        decision = explain(connection, dialect, key, event, by, given)
        if isinstance(decision, Refused) or decision.repeated:
            return decision
    else:
        raise StoreUnavailable(f"run {key.run_id} kept changing under {event.value!r}; repeat it")
    if TRANSITIONS[event].frees:
        let_in_the_next(connection, dialect, by, (ended,))
    return Applied(ended)


def _first(ended: tuple[Run, ...]) -> Run | None:
    return ended[0] if ended else None


# --- Many runs ------------------------------------------------------------------------------------------------------


def end_batch(
    connection: Connection, dialect: Dialect, event: RunEvent, by: Actor, given: Given, limit: int
) -> tuple[Run, ...]:
    """Let the event happen to up to ``limit`` runs that the table allows it for, oldest first, skipping rows that are
    busy; then promote on exactly the threads that were freed. Takes no thread lock where it holds each thread's active
    row before it touches the queue; what ends waiting runs too does not (O7)."""
    bag = parameters(by, given) | {"p_limit": limit}
    if _ends_waiting(event):
        found = _threads_concerned(event, dialect).run(connection, bag).scalars().all()
        dialect.lock_threads(connection, found)
        bag |= {"p_threads": list(found)}
    ended = _ending_of_many(event, dialect, Shape.of(given)).run(connection, bag)
    if TRANSITIONS[event].frees:
        let_in_the_next(connection, dialect, by, ended)
    return ended


def _ends_waiting(event: RunEvent) -> bool:
    """Whether it ends runs that may wait: several of one thread, and without its active row."""
    return TRANSITIONS[event].ends and RunStatus.QUEUED in TRANSITIONS[event].sources


@cache
def _threads_concerned(event: RunEvent, dialect: Dialect) -> Statement:
    found = select(R.thread_id).where(guards(TRANSITIONS[event], dialect), *_narrowing(event)).order_by(R.seq)
    return Statement.of(found.limit(bindparam("p_limit", type_=BigInteger)))


def change_batch(
    connection: Connection, dialect: Dialect, event: RunEvent, by: Actor, given: Given, limit: int
) -> tuple[Run, ...]:
    """The same for events that end nothing: one statement on PostgreSQL. Answers whole rows, stored input included,
    for a claim, which is about to run them."""
    bag = parameters(by, given) | {"p_limit": limit}
    return _change_of_many(event, dialect, Shape.of(given)).run(connection, bag)


def end_these(
    connection: Connection, dialect: Dialect, event: RunEvent, by: Actor, given: Given, ids: Sequence[str]
) -> tuple[Run, ...]:
    """Let an event that frees no thread happen to exactly these runs, as far as the table allows it."""
    if not ids:
        return ()
    bag = parameters(by, given) | {"p_ids": list(ids)}
    return _ending_of_these(event, dialect, Shape.of(given)).run(connection, bag)


TAKE_OVERS: Final = (
    RunEvent.TAKE_OVER_FAIL,
    RunEvent.TAKE_OVER_FAIL_WAITING,
    RunEvent.TAKE_OVER_RESUME,
    RunEvent.TAKE_OVER_RESUME_WAITING,
    RunEvent.TAKE_OVER_RELEASE,
)
"""What a sweep does to operations whose owner or home is dead."""


def possible(
    connection: Connection, dialect: Dialect, wanted: tuple[RunEvent, ...], by: Actor, given: Given
) -> frozenset[RunEvent]:
    """Which of the events could happen to any run now: one read, so that a sweep with nothing to do costs no more."""
    row = _possible(wanted, dialect).run(connection, parameters(by, given)).one()
    return frozenset(event for event, found in zip(wanted, row, strict=True) if found)


@cache
def _possible(wanted: tuple[RunEvent, ...], dialect: Dialect) -> Statement:
    def found(event: RunEvent) -> ColumnElement[bool]:
        allowed = guards(_rule_of_many(event), dialect)
        return select(literal_column("1")).select_from(runs).where(allowed, *_narrowing(event)).exists()

    return Statement.of(select(*(found(event).label(event.name.lower()) for event in wanted)))


def purge(connection: Connection, dialect: Dialect, before: Micros, limit: int) -> tuple[Run, ...]:
    """Remove up to ``limit`` runs that ended before an instant, oldest end first, with all that hangs on them.

    A run whose deliveries are not all made stays: its rows are all that remembers what is owed. Whoever removes it by
    name means it.
    """
    ids = connection.scalars(_ENDED_BEFORE, {"p_before": before, "p_limit": limit}).all()
    return end_these(connection, dialect, RunEvent.REMOVE, Actor(WorkerId("")), NOTHING_GIVEN, ids)


_OWES: Final = (
    select(literal_column("1"))
    .where(outbox.c.run_id == R.run_id, outbox.c.delivered_at.is_(null()))
    .correlate(runs)
    .exists()
)
_ENDED_BEFORE: Final = (
    select(R.run_id)
    .where(R.settled_at < bindparam("p_before", type_=BigInteger), ~_OWES)
    .order_by(R.settled_at)
    .limit(bindparam("p_limit", type_=BigInteger))
    .with_for_update(skip_locked=True)
)


# --- The statement of an ending -------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Ending:
    """A change of runs with all that follows from it.

    ``chosen`` finds the rows first where the database cannot choose and change in one statement; ``followers`` are the
    further changes where it cannot make them in the same statement either. ``alone``: it is asked for one run, and an
    unreadable row is an error; of many it is changed like the others and left out of the answer, or no run could be
    claimed or recovered beside it.
    """

    change: Statement
    followers: tuple[Statement, ...] = ()
    chosen: Statement | None = None
    alone: bool = False

    def run(self, connection: Connection, bag: Mapping[str, Any]) -> tuple[Run, ...]:
        """Carry it out; the runs as they are afterwards (as they were, where their rows are gone)."""
        bag = dict(bag)
        if self.chosen is not None:
            bag["p_ids"] = self.chosen.run(connection, bag).scalars().all()
            if not bag["p_ids"]:
                return ()
        rows = self.change.run(connection, bag).all()
        bag["p_ids"] = [row.run_id for row in rows]
        for follower in self.followers if rows else ():
            follower.run(connection, bag)
        return tuple(run_from(decoded(row)) for row in rows) if self.alone else _readable(rows)


def _readable(rows: Iterable[Row[Any]]) -> tuple[Run, ...]:
    read = (read_or_skip(run_from, row, "run_id") for row in rows)
    return tuple(run for run in read if run is not None)


@cache
def _ending_of_one(event: RunEvent, dialect: Dialect, shape: Shape, nobody_waits: bool) -> Ending:  # noqa: FBT001 - cached
    rule = TRANSITIONS[event]
    alone = [~R.queue_behind, R.cancel_action.is_(null())] if nobody_waits else []
    return replace(_with_followers(event, dialect, shape, at_key(), guards(rule, dialect), *alone), alone=True)


@cache
def _ending_of_these(event: RunEvent, dialect: Dialect, shape: Shape) -> Ending:
    return _with_followers(event, dialect, shape, _id_in_list(), guards(TRANSITIONS[event], dialect))


@cache
def _ending_of_many(event: RunEvent, dialect: Dialect, shape: Shape) -> Ending:
    if dialect.writes_in_ctes:
        return _with_followers(event, dialect, shape, _id_in_chosen(event, dialect))
    return replace(_with_followers(event, dialect, shape, _id_in_list()), chosen=_chosen(event, dialect))


@cache
def _change_of_many(event: RunEvent, dialect: Dialect, shape: Shape) -> Ending:
    columns = whole() if event is RunEvent.CLAIM else narrow()
    changes = update(runs).values(assignments(TRANSITIONS[event], dialect, shape)).returning(*as_text(columns))
    if dialect.writes_in_ctes:
        return Ending(Statement.of(changes.where(_id_in_chosen(event, dialect))))
    return Ending(Statement.of(changes.where(_id_in_list())), chosen=_chosen(event, dialect))


def _with_followers(event: RunEvent, dialect: Dialect, shape: Shape, *where: ColumnElement[bool]) -> Ending:
    rule = TRANSITIONS[event]
    change: Any = delete(runs) if rule.target is Into.GONE else update(runs).values(assignments(rule, dialect, shape))
    change = change.where(*where).returning(*as_text(narrow()))
    if not dialect.writes_in_ctes:
        ended: FromClause = select(runs).where(_id_in_list()).subquery("ended")
        return Ending(Statement.of(change), tuple(map(Statement.of, followers(event, ended, _id_list(), dialect))))
    ended = change.cte("ended")
    answer = select(ended)
    for number, follower in enumerate(followers(event, ended, select(ended.c.run_id), dialect)):
        answer = answer.add_cte(follower.cte(f"follower_{number}"))
    return Ending(Statement.of(answer))


def _id_list() -> Any:
    return bindparam("p_ids", expanding=True)


def _id_in_list() -> ColumnElement[bool]:
    return R.run_id.in_(_id_list())


def _id_in_chosen(event: RunEvent, dialect: Dialect) -> ColumnElement[bool]:
    """``= ANY(ARRAY(…))``, never ``IN``: under a nested loop a locking subquery runs again for every row."""
    return R.run_id == func.any(func.array(_candidates(event, dialect).scalar_subquery()))


@cache
def _chosen(event: RunEvent, dialect: Dialect) -> Statement:
    return Statement.of(_candidates(event, dialect))


def _candidates(event: RunEvent, dialect: Dialect) -> Select[Any]:
    """Up to ``p_limit`` runs that the event may happen to, locked, never waiting for a busy row."""
    found = select(R.run_id).where(guards(_rule_of_many(event), dialect), *_narrowing(event), *_policy(event, dialect))
    if _ends_waiting(event) and dialect.writes_in_ctes:
        found = found.where(R.thread_id == func.any(bindparam("p_threads", type_=ARRAY(Text))))
    # Not by run id: whoever asks chooses those, and SQLite would go through all runs in their order.
    order = (R.not_before, R.run_id) if event is RunEvent.CLAIM else (R.seq,)
    limited = found.order_by(*order).limit(bindparam("p_limit", type_=BigInteger))
    return limited.with_for_update(skip_locked=True, of=runs, key_share=True).correlate(None)


LEAVING: Final = (RunEvent.HAND_OVER, RunEvent.SETTLE_CANCELLED, RunEvent.RELEASE)
"""What a session does to all that it holds when it leaves (O35)."""


def _rule_of_many(event: RunEvent) -> Rule:
    """The event's rule; a whole session leaves its runs whatever their epochs are (O35)."""
    rule = TRANSITIONS[event]
    if event not in LEAVING:
        return rule
    return replace(rule, guards=tuple(guard for guard in rule.guards if guard is not Guard.EPOCH_IS_MINE))


def _policy(event: RunEvent, dialect: Dialect) -> list[ColumnElement[bool]]:
    """O35: what may resume elsewhere and is not cancelled is handed over; what that leaves ends."""
    travels = condition(Guard.RESUMES_WHEN_HOMELESS, dialect)
    if event is RunEvent.HAND_OVER:
        return [travels]
    return [~and_(travels, condition(Guard.NO_CANCEL, dialect))] if event is RunEvent.SETTLE_CANCELLED else []


def _narrowing(event: RunEvent) -> list[ColumnElement[bool]]:
    """What lets a partial index find the candidates; true of every row that the guards accept."""
    rule = TRANSITIONS[event]
    if RunStatus.QUEUED in rule.sources:
        return [R.run_id.in_(_unowned())]
    if Guard.UNOWNED in rule.guards:
        return [R.active, R.owner_worker_id.is_(null())]
    return [R.active, R.owner_worker_id.is_not(null())] if Guard.OWNER_IS_DEAD in rule.guards else [R.active]


def _unowned() -> CompoundSelect[Any]:
    """Every run that waits, queued or vacant: one arm for each partial index. An OR of the two is, for SQLite, a scan
    of all runs that ever were."""
    vacant = select(R.run_id).where(R.active, R.owner_worker_id.is_(null()))
    return select(R.run_id).where(R.status == word(RunStatus.QUEUED)).union_all(vacant)


# --- The next one ---------------------------------------------------------------------------------------------------


def let_in_the_next(connection: Connection, dialect: Dialect, by: Actor, ended: Sequence[Run]) -> tuple[Run, ...]:
    """Promote the first due run of every thread that was freed; of a deleted thread, end the waiting ones (O28)."""
    deleted = sorted({run.thread_id for run in ended if run.kind is OperationKind.DELETE})
    for thread_id in deleted:
        end_queue(connection, dialect, thread_id, by, Given(error="the thread was deleted"))
    return promote(connection, dialect, sorted({run.thread_id for run in ended}.difference(deleted)))


def end_queue(
    connection: Connection, dialect: Dialect, thread_id: str, by: Actor, given: Given, *, spare: str = ""
) -> tuple[Run, ...]:
    """End all that waits on a thread by now, but for ``spare``: whoever found out who waits may have missed somebody,
    as O2 needs no lock. Under the thread's lock, and after its slot was taken."""
    bag = parameters(by, given) | {"p_thread": thread_id, "p_spare": spare}
    ended = _ending_of_queue(dialect, Shape.of(given)).run(connection, bag)
    return tuple(sorted(ended, key=lambda run: (run.due_at, run.seq)))


@cache
def _ending_of_queue(dialect: Dialect, shape: Shape) -> Ending:
    rule = TRANSITIONS[RunEvent.CANCEL_QUEUED]
    here = and_(R.thread_id == bindparam("p_thread"), R.status == word(RunStatus.QUEUED))
    waiting = [here, R.run_id != bindparam("p_spare"), guards(rule, dialect)]
    if dialect.writes_in_ctes:
        return _with_followers(RunEvent.CANCEL_QUEUED, dialect, shape, *waiting)
    chosen = Statement.of(select(R.run_id).where(*waiting))
    return replace(_with_followers(RunEvent.CANCEL_QUEUED, dialect, shape, _id_in_list()), chosen=chosen)


def promote(connection: Connection, dialect: Dialect, thread_ids: Sequence[str]) -> tuple[Run, ...]:
    """Make the first due waiting run of each thread active and vacant, where nothing is active (O7).

    Runs in the transaction that freed the threads, or under their locks, always in a statement of its own.
    """
    if not thread_ids:
        return ()
    if dialect.writes_in_ctes:
        rows = _promote_many(dialect).run(connection, {"p_threads": list(thread_ids)}).all()
    else:
        found = (_promote_one(dialect).run(connection, {"p_thread": thread_id}) for thread_id in thread_ids)
        rows = [row for result in found for row in result]
    return _readable(rows)


def _promotion(dialect: Dialect) -> Any:
    rule = TRANSITIONS[RunEvent.PROMOTE]
    changes = update(runs).values(assignments(rule, dialect, Shape())).returning(*as_text(narrow()))
    return changes.where(R.status == word(RunStatus.QUEUED), ~thread_active())


@cache
def _promote_one(dialect: Dialect) -> Statement:
    return Statement.of(_promotion(dialect).where(R.run_id == first_due(bindparam("p_thread"), dialect)))


@cache
def _promote_many(dialect: Dialect) -> Statement:
    wanted = func.unnest(bindparam("p_threads", type_=ARRAY(Text))).table_valued("thread_id").render_derived("wanted")
    waiting, held = runs.alias("waiting"), runs.alias("held")
    here = and_(held.c.thread_id == wanted.c.thread_id, held.c.active)
    busy: Select[Any] = select(literal_column("1")).select_from(held).where(here)
    mine = select(waiting.c.run_id).where(
        waiting.c.thread_id == wanted.c.thread_id,
        waiting.c.status == word(RunStatus.QUEUED),
        due(waiting.c, dialect),
        # Who holds a thread locks its waiting runs; a head locked on another's thread would be waited for in a ring.
        ~busy.correlate(wanted).exists(),
    )
    first = mine.order_by(waiting.c.due_at, waiting.c.seq).limit(1).with_for_update(key_share=True).lateral("first")
    heads = select(first.c.run_id).select_from(wanted.join(first, true())).correlate(None).scalar_subquery()
    return Statement.of(_promotion(dialect).where(R.run_id == func.any(func.array(heads))))


def promote_under_lock(connection: Connection, dialect: Dialect, thread_ids: Sequence[str]) -> tuple[Run, ...]:
    """Promote on threads that nobody has just freed: lock them first, then look afresh (O7)."""
    dialect.lock_threads(connection, thread_ids)
    return promote(connection, dialect, thread_ids)
