"""Reading runs: one, some, a thread's list page by page, what is open, and how much of everything.

Nothing here changes a run but the note why it waits. Whoever reads for a user sees that user's runs only, and a
foreign run looks like one that does not exist. What sweeps and health checks ask reads partial indexes, so that its
cost does not grow with the runs that have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    false,
    func,
    literal_column,
    not_,
    null,
    or_,
    select,
    true,
    type_coerce,
    union,
    union_all,
    update,
)

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import (
    ACTIVE,
    TERMINAL,
    Micros,
    OperationKind,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Scope,
    SessionState,
    StopReason,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store.base import Counts, Page, RunFilter, TokenTotals, Visibility
from deerflow_runs.store.clauses import (
    R,
    at_key,
    due,
    guards,
    key_parameters,
    parameters,
    status_in,
    thread_active,
    word,
)
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.history import SOURCE, Attempt, Spending, add_up, hidden_runs
from deerflow_runs.store.lenient import as_text, object_or_empty, read_or_skip
from deerflow_runs.store.pages import (
    BEGINNING,
    HERE,
    IS_RUN,
    Position,
    Wanted,
    in_order,
    newest_first,
    wanted_of,
)
from deerflow_runs.store.rows import narrow, run_from, to_run, whole
from deerflow_runs.store.schema import runs, threads, workers
from deerflow_runs.store.scopes import in_scope, restricted, scope_parameters
from deerflow_runs.store.statement import Statement
from deerflow_runs.store.texts import decode
from deerflow_runs.store.values import repaired

OPEN: Final = ACTIVE | {RunStatus.QUEUED}
"""Not ended yet."""

WAITING: Final = R.status == word(RunStatus.QUEUED)


# --- By id ----------------------------------------------------------------------------------------------------------


def get(connection: Connection, dialect: Dialect, key: RunKey, *, scope: Scope) -> Run | None:
    """One run with its stored input; None for a foreign one, and for a reservation. Raises on an unreadable row."""
    bag = key_parameters(key) | scope_parameters(scope)
    row = _one(dialect, mine=restricted(scope)).run(connection, bag).one_or_none()
    return None if row is None else to_run(row)


@cache
def _one(_: Dialect, *, mine: bool) -> Statement:
    return Statement.of(select(*whole()).where(at_key(), IS_RUN, *in_scope(R.user_id, mine=mine)))


MANY: Final = 1000
"""Rows or ids in one statement."""


def get_many(
    connection: Connection, dialect: Dialect, thread_id: ThreadId, run_ids: Collection[RunId], *, scope: Scope
) -> dict[RunId, Run]:
    """Those of the runs that exist on this thread, in the order asked for; unreadable ones are left out."""
    wanted = list(dict.fromkeys(run_ids))
    bag = {"p_thread": thread_id} | scope_parameters(scope)
    found: dict[str, Run] = {}
    for start in range(0, len(wanted), MANY):
        part = bag | {"p_ids": wanted[start : start + MANY]}
        rows = _some(dialect, mine=restricted(scope)).run(connection, part)
        found |= {run.run_id: run for run in _readable(rows)}
    return {run_id: found[run_id] for run_id in wanted if run_id in found}


@cache
def _some(_: Dialect, *, mine: bool) -> Statement:
    these = R.run_id.in_(bindparam("p_ids", expanding=True))
    return Statement.of(select(*as_text(narrow())).where(these, HERE, IS_RUN, *in_scope(R.user_id, mine=mine)))


def _readable(rows: Any) -> tuple[Run, ...]:
    read = (read_or_skip(run_from, row, "run_id") for row in rows)
    return tuple(run for run in read if run is not None)


# --- A thread's list ------------------------------------------------------------------------------------------------


def list_runs(
    connection: Connection,
    dialect: Dialect,
    thread_id: ThreadId,
    *,
    scope: Scope,
    only: RunFilter | None = None,
    limit: int = 100,
    after: str | None = None,
) -> Page:
    """A page of a thread's runs, newest first, by (created_at, run_id): a place that other runs do not move.

    Raises ``InvalidValue`` for a limit outside 1–1000, a cursor that is none, and a filter no row could hold. A row
    that cannot be read is logged and named in the answer; it neither counts nor stops the list.
    """
    if not 1 <= limit <= MANY:
        raise InvalidValue("limit", f"must be between 1 and {MANY}")
    only = only or RunFilter()
    wanted = wanted_of(only.metadata)
    statuses = None if only.statuses is None else frozenset(only.statuses)
    shape = ListShape(restricted(scope), statuses, len(wanted.needles), only.rolled_back)
    bag = {"p_thread": thread_id} | scope_parameters(scope) | wanted.parameters()
    start = BEGINNING if after is None else Position.of(after)
    batch = limit + 1 if wanted.json is None else MANY
    rows = newest_first(connection, _listed(dialect, shape), bag, start, batch)
    return _page(rows, wanted, limit)


def _page(rows: Iterator[Row[Any]], wanted: Wanted, limit: int) -> Page:
    found: list[Run] = []
    unreadable: list[str] = []
    last = ""
    for row in rows:
        if len(found) == limit:
            return Page(tuple(found), last, tuple(unreadable))
        last = Position(row.created_at, row.run_id).cursor()
        run = read_or_skip(run_from, row, "run_id")
        if run is None:
            unreadable.append(row.run_id)
        elif wanted.matches(row.metadata):
            found.append(run)
    return Page(tuple(found), None, tuple(unreadable))


@final
@dataclass(frozen=True, slots=True)
class ListShape:
    """What decides a list's statement: whether it is one user's, its statuses, how many texts it looks for, and whether
    runs that were rolled back are wanted, unwanted or neither."""

    mine: bool
    statuses: frozenset[RunStatus] | None
    needles: int
    rolled_back: bool | None


@cache
def _listed(_: Dialect, shape: ListShape) -> Statement:
    statuses = [] if shape.statuses is None else [_among(shape.statuses)]
    # A text search first, and the exact answer in Python: casting a broken row to JSON would end the whole statement.
    metadata = type_coerce(R.metadata, Text)
    needles = [metadata.like(bindparam(f"p_needle_{n}", type_=Text), escape="/") for n in range(shape.needles)]
    undone = [] if shape.rolled_back is None else [ROLLED_BACK if shape.rolled_back else not_(ROLLED_BACK)]
    return in_order(as_text(narrow()), *in_scope(R.user_id, mine=shape.mine), *statuses, *undone, *needles)


ROLLED_BACK: Final = and_(
    R.status == word(RunStatus.INTERRUPTED), func.coalesce(R.stop_reason, word("")) == word(StopReason.ROLLBACK)
)
"""As ``Run.rolled_back`` says it. Never null, so that its opposite is found too."""


def _among(statuses: frozenset[RunStatus]) -> ColumnElement[bool]:
    """Open runs are found by the partial indexes, however many ended ones the thread has."""
    if not statuses <= OPEN or not statuses:
        return status_in(*statuses)
    active = [and_(HERE, R.active, status_in(*statuses & ACTIVE))] if statuses & ACTIVE else []
    return or_(*active, *([and_(HERE, WAITING)] if RunStatus.QUEUED in statuses else []))


# --- After another, and of a user -----------------------------------------------------------------------------------


def is_newest(connection: Connection, dialect: Dialect, key: RunKey) -> bool:
    """Whether no run was admitted to the thread after this one, by the number drawn at admission and no clock.

    False for a run that is not there. What is admitted a moment later is of course not seen.
    """
    return bool(_is_newest(dialect).run(connection, key_parameters(key)).scalar())


@cache
def _is_newest(_: Dialect) -> Statement:
    later = runs.alias("later")
    came_later: Select[Any] = select(literal_column("1")).where(
        later.c.thread_id == R.thread_id,
        later.c.seq > R.seq,
        later.c.created_at >= literal_column("0"),  # names the predicate of its index
        later.c.operation_kind == word(OperationKind.RUN),
    )
    return Statement.of(select(~came_later.correlate(runs).exists()).where(at_key(), IS_RUN))


def threads_of(
    connection: Connection, dialect: Dialect, user_id: str, *, limit: int = 100, after: ThreadId | None = None
) -> tuple[ThreadId, ...]:
    """The threads that belong to a user or on which the user has a run, in the database's order of their ids.

    Reads what is the user's and nothing else. Raises ``InvalidValue`` for a limit outside 1–1000.
    """
    if not 1 <= limit <= MANY:
        raise InvalidValue("limit", f"must be between 1 and {MANY}")
    bag = {"p_user": user_id, "p_after": after or "", "p_limit": limit}
    return tuple(map(ThreadId, _threads_of(dialect).run(connection, bag).scalars()))


@cache
def _threads_of(_: Dialect) -> Statement:
    user = bindparam("p_user", type_=R.user_id.type)
    theirs = [R.user_id == user, R.created_at >= literal_column("0"), IS_RUN]  # names the predicate of its index
    # One arm for each half of that index, in whose order the threads come; SQLite wants to see a comparison.
    arms = (
        _first_threads(R.thread_id, *theirs, R.active == true()),
        _first_threads(R.thread_id, *theirs, R.active == false()),
        _first_threads(threads.c.thread_id, threads.c.user_id == user),
    )
    found = union(*(select(arm.c.thread_id) for arm in arms)).subquery("found")
    return Statement.of(select(found.c.thread_id).order_by(found.c.thread_id).limit(_limit()))


def _first_threads(thread_id: ColumnElement[Any], *where: ColumnElement[bool]) -> Any:
    after = bindparam("p_after", type_=R.thread_id.type)
    found = select(thread_id.label("thread_id")).where(*where, thread_id > after)
    return found.group_by(thread_id).order_by(thread_id).limit(_limit()).subquery()


def _limit() -> ColumnElement[int]:
    return bindparam("p_limit", type_=BigInteger)


# --- What is open ---------------------------------------------------------------------------------------------------


def owned(connection: Connection, dialect: Dialect, worker_id: WorkerId) -> tuple[Run, ...]:
    """The active operations that name this session as owner, reservations included (O12)."""
    return _readable(_owned(dialect).run(connection, {"p_worker": worker_id}))


@cache
def _owned(_: Dialect) -> Statement:
    mine = and_(R.active, R.owner_worker_id == bindparam("p_worker"))
    return Statement.of(select(*as_text(narrow())).where(mine).order_by(R.seq))


def active(connection: Connection, dialect: Dialect, thread_id: ThreadId) -> Run | None:
    """The operation that holds the thread, whatever its kind."""
    row = _active(dialect).run(connection, {"p_thread": thread_id}).one_or_none()
    return None if row is None else to_run(row)


@cache
def _active(_: Dialect) -> Statement:
    return Statement.of(select(*narrow()).where(HERE, R.active))


def queue(connection: Connection, dialect: Dialect, thread_id: ThreadId) -> tuple[Run, ...]:
    """The runs that wait on the thread, delayed ones too, in the order in which they would start (I17)."""
    return _readable(_queue(dialect).run(connection, {"p_thread": thread_id}))


@cache
def _queue(_: Dialect) -> Statement:
    return Statement.of(select(*as_text(narrow())).where(HERE, WAITING).order_by(R.due_at, R.seq))


def in_flight(connection: Connection, dialect: Dialect, thread_id: ThreadId) -> bool:
    """Whether a run is active or waits on the thread; a reservation is none (B015)."""
    return bool(_in_flight(dialect).run(connection, {"p_thread": thread_id}).scalar())


@cache
def _in_flight(_: Dialect) -> Statement:
    held = select(literal_column("1")).where(HERE, R.active, IS_RUN).exists()
    awaited = select(literal_column("1")).where(HERE, WAITING).exists()
    return Statement.of(select(or_(held, awaited)))


# --- What a sweep looks for -----------------------------------------------------------------------------------------


def seizable(connection: Connection, dialect: Dialect, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
    """Runs that owe a rollback and that ``by`` may seize, the longest cancelled first (O4).

    Those that ``by`` owns are among them: whether it is restoring them already, only its registry knows.
    """
    bag = parameters(by, given) | {"p_limit": limit}
    return _readable(_seizable(dialect).run(connection, bag))


@cache
def _seizable(dialect: Dialect) -> Statement:
    cancelled = and_(R.active, R.cancel_requested_at.is_not(null()))
    found = select(*as_text(narrow())).where(cancelled, guards(TRANSITIONS[RunEvent.SEIZE], dialect))
    ordered = found.order_by(R.cancel_requested_at, R.run_id)
    return Statement.of(ordered.limit(bindparam("p_limit", type_=BigInteger)))


def idle_threads_with_due_runs(connection: Connection, dialect: Dialect, limit: int) -> tuple[ThreadId, ...]:
    """Threads on which nothing is active and a waiting run is due, the longest due first (O7)."""
    return tuple(_idle(dialect).run(connection, {"p_limit": limit}).scalars())


@cache
def _idle(dialect: Dialect) -> Statement:
    idle = and_(WAITING, due(R, dialect), ~thread_active())
    threads = select(R.thread_id).where(idle).group_by(R.thread_id).order_by(func.min(R.due_at), R.thread_id)
    return Statement.of(threads.limit(bindparam("p_limit", type_=BigInteger)))


def next_due(connection: Connection, dialect: Dialect) -> Micros | None:
    """How long until the next delayed run is due, by the store's clock; None: no run is delayed.

    A duration, because a worker must not compare the store's instants with its own clock.
    """
    wait = _next_due(dialect).run(connection, {}).scalar()
    return None if wait is None else Micros(wait)


@cache
def _next_due(dialect: Dialect) -> Statement:
    return Statement.of(select(func.min(R.due_at) - dialect.now).where(WAITING, ~due(R, dialect)))


WAITS_BYTES: Final = 16 * 1024


def note_waiting(connection: Connection, dialect: Dialect, key: RunKey, waits_for: Mapping[str, Any]) -> bool:
    """Write down why a vacant run is not claimed (O31); False: it is not vacant any more, and nothing changed.

    ``missing`` is a list of what no worker has; the other keys are for people. The last note stands, so whoever
    writes one keeps ``since`` of the one before. It does not count as a change of the run.
    """
    note = repaired(dict(waits_for), "waits_for", limit_bytes=WAITS_BYTES)[0]
    bag = key_parameters(key) | {"p_waits_for": note}
    return _note(dialect).run(connection, bag).one_or_none() is not None


@cache
def _note(_: Dialect) -> Statement:
    vacant = and_(status_in(RunStatus.PENDING), R.owner_worker_id.is_(null()))
    noted = update(runs).where(at_key(), vacant).values(waits_for=bindparam("p_waits_for", type_=R.waits_for.type))
    return Statement.of(noted.returning(R.run_id))


# --- How many -------------------------------------------------------------------------------------------------------


def counts(connection: Connection, dialect: Dialect) -> Counts:
    """What is open, by status, why vacant runs wait, and sessions by state: one statement, no ended run is read."""
    found: dict[str, dict[str, int]] = {"run": {}, "vacant": {}, "waits": {}, "session": {}}
    for row in _counts(dialect).run(connection, {}).mappings():
        found[row["what"]][row["name"]] = row["number"]
    waiting_for: dict[str, int] = {}
    for missing, number in found["waits"].items():
        for name in _names(missing):
            waiting_for[name] = waiting_for.get(name, 0) + number
    return Counts(
        by_status={status: found["run"].get(status, 0) for status in RunStatus if status in OPEN},
        vacant=sum(found["vacant"].values()),
        waiting_for=waiting_for,
        sessions={state: found["session"].get(state, 0) for state in SessionState},
    )


def _names(missing: str) -> list[str]:
    """The elements of a JSON list of texts; whatever else stands there is one name."""
    try:
        names = decode(missing)
    except ValueError:
        names = missing
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


@cache
def _counts(dialect: Dialect) -> Statement:
    vacant = and_(R.active, R.owner_worker_id.is_(null()), IS_RUN)
    note = dialect.pairs(R.waits_for)
    missing = cast(note.c.value, Text)
    arms = (
        _counted("run", R.status).where(R.active, IS_RUN).group_by(R.status),
        _counted("run", _constant(RunStatus.QUEUED)).select_from(runs).where(WAITING),
        _counted("vacant", _constant("vacant")).select_from(runs).where(vacant),
        _counted("waits", missing)
        .select_from(runs, note)
        .where(vacant, note.c.key == word("missing"))
        .group_by(missing),
        _counted("session", workers.c.state).group_by(workers.c.state),
    )
    return Statement.of(union_all(*arms))


def _counted(what: str, name: ColumnElement[Any]) -> Select[Any]:
    return select(_constant(what).label("what"), name.label("name"), func.count().label("number"))


def _constant(name: str) -> ColumnElement[str]:
    return cast(word(name), Text)


# --- A thread's past ------------------------------------------------------------------------------------------------


def tokens_by_thread(
    connection: Connection, dialect: Dialect, thread_id: ThreadId, *, scope: Scope, include_active: bool = False
) -> TokenTotals:
    """What a thread's runs used up, however they ended (B196 as amended); active ones on request."""
    statement = _spendings(dialect, mine=restricted(scope), active=include_active)
    bag = {"p_thread": thread_id} | scope_parameters(scope)
    return add_up(map(_spending, newest_first(connection, statement, bag, BEGINNING, MANY)))


@cache
def _spendings(_: Dialect, *, mine: bool, active: bool) -> Statement:
    tokens = [R.input_tokens, R.output_tokens, R.total_tokens, *as_text([R.tokens_by_model, R.tokens_by_caller])]
    statuses = TERMINAL | ACTIVE if active else TERMINAL
    columns = [R.run_id, R.created_at, R.model_name, *tokens]
    return in_order(columns, status_in(*statuses), *in_scope(R.user_id, mine=mine))


def _spending(row: Row[Any]) -> Spending:
    by_model, by_caller = object_or_empty(row.tokens_by_model), object_or_empty(row.tokens_by_caller)
    return Spending(row.model_name, row.input_tokens, row.output_tokens, row.total_tokens, by_model, by_caller)


def visibility(connection: Connection, dialect: Dialect, thread_id: ThreadId, *, scope: Scope) -> Visibility:
    """Which runs of a thread regenerations and edits hide, over its whole past (B188–B190)."""
    bag = {"p_thread": thread_id} | scope_parameters(scope)
    rows = newest_first(connection, _attempts(dialect, mine=restricted(scope)), bag, BEGINNING, MANY)
    attempts = (read_or_skip(_attempt, row, "run_id") for row in rows)
    return Visibility(hidden_runs(attempt for attempt in attempts if attempt is not None))


@cache
def _attempts(_: Dialect, *, mine: bool) -> Statement:
    does_over = type_coerce(R.metadata, Text).contains(f'"{SOURCE}"', autoescape=True)
    columns = [R.run_id, R.created_at, R.status, *as_text([R.metadata])]
    return in_order(columns, does_over, *in_scope(R.user_id, mine=mine))


def _attempt(data: Mapping[str, Any]) -> Attempt | None:
    return Attempt.of(data["run_id"], RunStatus(data["status"]), data["metadata"])
