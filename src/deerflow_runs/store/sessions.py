"""Worker sessions in the database: open, beat, drain, close, declare dead (O9, O10, O24).

A session's row is touched by its own beat and by whoever judges it, and by nobody else, so a beat never waits for a
run. When a session may be judged is decided in ``protocol.judge``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, assert_never

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Subquery,
    and_,
    bindparam,
    case,
    delete,
    false,
    func,
    literal_column,
    null,
    select,
    true,
    union,
    update,
)

from deerflow_runs.errors import UsageError
from deerflow_runs.model import CancelAction, Micros, RunId, RunKey, Session, SessionState, ThreadId, WorkerId
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.store.base import CancelRequest, NotLive, Renewal, Renewed
from deerflow_runs.store.clauses import R, word
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.rows import to_session
from deerflow_runs.store.schema import runs, workers
from deerflow_runs.store.statement import Statement

W: Final = workers.c
OTHERS: Final = workers.alias("others")
NOT_DEAD: Final = W.state != word(SessionState.DEAD)


# --- Opening --------------------------------------------------------------------------------------------------------


def open_session(connection: Connection, dialect: Dialect, session: Session) -> Session:
    """Insert the session's row; a repeat whose first reply was lost answers the row that is there (O8).

    Raises ``UsageError`` for an id that has died: ids are never reused (I12).
    """
    row = _opening(dialect).run(connection, _opening_parameters(session)).one_or_none()
    if row is None:
        row = connection.execute(_ONE, {"p_worker": session.worker_id}).one()
    opened = to_session(row)
    if opened.state is SessionState.DEAD:
        raise UsageError(f"worker id {session.worker_id} belongs to a dead session; open one under a new id")
    return opened


_ONE: Final = select(workers).where(W.worker_id == bindparam("p_worker"))


@cache
def _opening(dialect: Dialect) -> Statement:
    given = ("worker_id", "lease", "beat_interval", "host", "boot_id", "pid", "version", "labels", "capabilities")
    values: dict[str, Any] = {name: bindparam(f"p_{name}", type_=W[name].type) for name in given}
    values |= {
        "state": word(SessionState.LIVE),
        "beat": literal_column("0", BigInteger),
        "expires_at": dialect.now + bindparam("p_lease", type_=BigInteger),
        "hinted": bindparam("p_hinted", type_=W.hinted.type),
        "started_at": dialect.now,
    }
    return Statement.of(dialect.insert(workers).values(values).on_conflict_do_nothing().returning(*workers.c))


def _opening_parameters(session: Session) -> dict[str, Any]:
    return {
        "p_worker_id": session.worker_id,
        "p_lease": session.lease,
        "p_beat_interval": session.beat_interval,
        "p_hinted": session.hinted,
        "p_host": session.host,
        "p_boot_id": session.boot_id,
        "p_pid": session.pid,
        "p_version": session.version,
        "p_labels": dict(session.labels),
        "p_capabilities": sorted(session.capabilities),
    }


# --- Beating --------------------------------------------------------------------------------------------------------


def renew(
    connection: Connection, dialect: Dialect, worker_id: WorkerId, *, hinted: bool, state: SessionState
) -> Renewal:
    """One beat. PostgreSQL: one statement renews and reads; SQLite: two in one transaction. Never touches a run."""
    bag = {"p_worker": worker_id, "p_hinted": hinted, "p_state": state.value}
    if dialect.writes_in_ctes:
        beats = found = _beat_and_requests(dialect).run(connection, bag).all()
    else:
        beats = _beat(dialect).run(connection, bag).all()
        found = _requests().run(connection, bag).all() if beats else []
    if not beats:
        return NotLive()
    beat = beats[0]
    asked = tuple(_request(row) for row in found if row.run_id is not None)
    return Renewed(beat.beat, Micros(beat.expires_at), SessionState(beat.state), asked)


def requests(connection: Connection, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
    """The cancel requests alone: what a beat would answer, without beating."""
    return tuple(_request(row) for row in _requests().run(connection, {"p_worker": worker_id}))


def _request(row: Row[Any]) -> CancelRequest:
    key = RunKey(ThreadId(row.thread_id), RunId(row.run_id))
    return CancelRequest(key, row.epoch, CancelAction(row.cancel_action))


def _beating(dialect: Dialect) -> Any:
    draining = word(SessionState.DRAINING)
    # A late beat of a worker that began to drain must not make it live again.
    state = case((W.state == draining, draining), else_=bindparam("p_state", type_=W.state.type))
    return (
        update(workers)
        .where(W.worker_id == bindparam("p_worker"), NOT_DEAD)
        .values(
            beat=W.beat + 1,
            expires_at=dialect.now + W.lease,
            hinted=bindparam("p_hinted", type_=W.hinted.type),
            state=state,
        )
        .returning(W.beat, W.expires_at, W.state)
    )


_REQUEST_COLUMNS: Final = (R.thread_id, R.run_id, R.epoch, R.cancel_action)
_REQUESTED: Final = and_(R.owner_worker_id == bindparam("p_worker"), R.active, R.cancel_requested_at.is_not(null()))


@cache
def _beat(dialect: Dialect) -> Statement:
    return Statement.of(_beating(dialect))


@cache
def _requests() -> Statement:
    return Statement.of(select(*_REQUEST_COLUMNS).where(_REQUESTED))


@cache
def _beat_and_requests(dialect: Dialect) -> Statement:
    beat = _beating(dialect).cte("beat")
    together = beat.outerjoin(runs, _REQUESTED)
    return Statement.of(select(beat.c.beat, beat.c.expires_at, beat.c.state, *_REQUEST_COLUMNS).select_from(together))


# --- Dying ----------------------------------------------------------------------------------------------------------


def close_session(connection: Connection, dialect: Dialect, worker_id: WorkerId) -> bool:
    """Dead by its own word, hence proven. A repeat is answered yes (O8)."""
    closed = _death(dialect, true(), NOT_DEAD).run(connection, {"p_worker": worker_id}).one_or_none()
    if closed is not None:
        return True
    row = connection.execute(_ONE, {"p_worker": worker_id}).one_or_none()
    return row is not None and to_session(row).proven


def declare_dead(connection: Connection, dialect: Dialect, verdict: Verdict) -> bool:
    """O24: one compare-and-set on the beat that the judge saw; what else must hold depends on how it knows."""
    bag = {"p_worker": verdict.worker_id, "p_beat": verdict.beat, "p_grace": verdict.grace}
    return _verdict(dialect, verdict.how).run(connection, bag).one_or_none() is not None


@cache
def _verdict(dialect: Dialect, how: How) -> Statement:
    unchanged = and_(NOT_DEAD, W.beat == bindparam("p_beat"))
    match how:
        case How.EXPIRY:
            grace = bindparam("p_grace", type_=BigInteger)
            return _death(dialect, false(), and_(unchanged, W.expires_at < dialect.now - grace))
        case How.HINT:
            return _death(dialect, false(), and_(unchanged, W.hinted))
        case How.PROOF:
            return _death(dialect, true(), unchanged)
        case _:
            assert_never(how)


def _death(dialect: Dialect, proven: ColumnElement[bool], where: ColumnElement[bool]) -> Statement:
    changes = update(workers).where(W.worker_id == bindparam("p_worker"), where)
    values = {"state": word(SessionState.DEAD), "dead_at": dialect.now, "proven": proven}
    return Statement.of(changes.values(values).returning(W.worker_id))


def bury_strangers(connection: Connection, dialect: Dialect) -> int:
    """O26: an owner or home without a row was removed or never written; a tombstone lets the join find its runs."""
    return len(_burial(dialect).run(connection, {}).all())


def _named() -> Subquery:
    """The sessions that open runs name. One arm for each partial index: all in one would read every ended run too."""
    owners = select(R.owner_worker_id.label("worker_id")).where(R.active, R.owner_worker_id.is_not(null()))
    homes = select(R.home_worker_id.label("worker_id")).where(R.home_worker_id.is_not(null()))
    return union(owners, homes.where(R.active), homes.where(R.status == word("queued"))).subquery("named")


@cache
def _burial(dialect: Dialect) -> Statement:
    named = _named()
    known = select(literal_column("1")).where(W.worker_id == named.c.worker_id).exists()
    # As long a lease as anybody has: who has no row may still live, and take its runs back meanwhile (O26).
    longest = select(func.coalesce(func.max(OTHERS.c.lease), literal_column("0", BigInteger))).scalar_subquery()
    zero, nothing = literal_column("0", BigInteger), word("")
    tombstone: dict[str, Any] = {
        "worker_id": named.c.worker_id,
        "state": word(SessionState.DEAD),
        "beat": zero,
        "lease": longest,
        "beat_interval": zero,
        "expires_at": zero,
        "hinted": false(),
        "started_at": zero,
        "dead_at": dialect.now,
        "proven": false(),
        "host": nothing,
        "boot_id": nothing,
        "pid": literal_column("0"),
        "version": nothing,
        "labels": literal_column("'{}'"),
        "capabilities": literal_column("'[]'"),
    }
    rows = select(*(value.label(name) for name, value in tombstone.items())).select_from(named).where(~known)
    insertion = dialect.insert(workers).from_select(list(tombstone), rows)
    return Statement.of(insertion.on_conflict_do_nothing().returning(W.worker_id))


# --- Reading --------------------------------------------------------------------------------------------------------


def list_sessions(connection: Connection) -> tuple[Session, ...]:
    """All rows: the table holds the living and, for some days, the dead."""
    return tuple(to_session(row) for row in connection.execute(_ALL))


_ALL: Final = select(workers).order_by(W.started_at, W.worker_id)


def forget_dead(connection: Connection, dialect: Dialect, kept_for: Micros) -> int:
    """Remove dead sessions older than ``kept_for`` that no open run names any more."""
    return len(_forgetting(dialect).run(connection, {"p_kept": kept_for}).all())


@cache
def _forgetting(dialect: Dialect) -> Statement:
    old = W.dead_at + bindparam("p_kept", type_=BigInteger) < dialect.now
    gone = delete(workers).where(
        W.state == word(SessionState.DEAD), old, W.worker_id.not_in(select(_named().c.worker_id))
    )
    return Statement.of(gone.returning(W.worker_id))
