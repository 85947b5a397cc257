"""The fence as a clause for somebody else's statement (O14): nothing is written for a run that its writer lost.

PostgreSQL: ``held`` is a common table expression that another statement selects from, so that guard and write are one
statement and no lock outlives it. SQLite: ``holds`` is asked inside the unit of work that writes. A foreign database
keeps the monotone table ``dr_fence`` instead (O16).
"""

from __future__ import annotations

from functools import cache
from typing import Final

from sqlalchemy import CTE, BigInteger, Connection, and_, bindparam, literal_column, or_, select

from deerflow_runs.model import RunKey, RunStatus
from deerflow_runs.store.clauses import R, at_key, key_parameters, status_in
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.schema import fence
from deerflow_runs.store.statement import Statement


def held_sql(schema: str | None = None) -> str:
    """The guard as text for a driver with ``%(name)s`` parameters: ``WITH held AS (…) INSERT … SELECT … FROM held``.

    Takes ``fence_run`` and ``fence_epoch``; ``schema`` is that of the store's address. ``FOR SHARE`` is the weakest
    lock that makes a take-over wait for the write, and the write for a take-over. Statements that also update the
    run's row take ``FOR NO KEY UPDATE`` instead: share first and update later would deadlock.
    """
    table = "dr_runs" if schema is None else f"{schema}.dr_runs"
    return (
        f"SELECT 1 FROM {table} WHERE run_id = %(fence_run)s AND epoch = %(fence_epoch)s"  # noqa: S608 - checked by dsn
        " AND status IN ('pending', 'running') FOR SHARE"
    )


def held(dialect: Dialect) -> CTE:
    """The guard for a statement built here: one row while (run, epoch) stands, bound as ``p_run``, ``p_thread`` and
    ``p_epoch``."""
    mine = and_(at_key(), R.epoch == bindparam("p_epoch", type_=BigInteger), status_in(*HOLDING))
    return dialect.share_lock(select(literal_column("1").label("held")).where(mine)).cte("held")


HOLDING: Final = (RunStatus.PENDING, RunStatus.RUNNING)


@cache
def _held(dialect: Dialect) -> Statement:
    return Statement.of(select(held(dialect)))


def holds(connection: Connection, dialect: Dialect, key: RunKey, epoch: int) -> bool:
    """Whether (run, epoch) stands, locked until the transaction ends where the database can lock rows.

    False: write nothing. Only inside a transaction that also makes the write.
    """
    return _held(dialect).run(connection, key_parameters(key) | {"p_epoch": epoch}).first() is not None


def raise_fence(connection: Connection, dialect: Dialect, thread_id: str, turn: int, epoch: int) -> bool:
    """In a foreign database: let (turn, epoch) be the least that may write on the thread. False: a newer one stands.

    Repeating it with the same token is yes (O8); a new owner raises it before its first read (O16).
    """
    bag = {"p_thread": thread_id, "p_turn": turn, "p_epoch": epoch}
    return _raising(dialect).run(connection, bag).first() is not None


@cache
def _raising(dialect: Dialect) -> Statement:
    turn, epoch = bindparam("p_turn", type_=BigInteger), bindparam("p_epoch", type_=BigInteger)
    values = {"thread_id": bindparam("p_thread", type_=fence.c.thread_id.type), "turn": turn, "epoch": epoch}
    insertion = dialect.insert(fence).values(values)
    older = or_(fence.c.turn < turn, and_(fence.c.turn == turn, fence.c.epoch <= epoch))
    raised = insertion.on_conflict_do_update(
        index_elements=[fence.c.thread_id], set_={"turn": turn, "epoch": epoch}, where=older
    )
    return Statement.of(raised.returning(fence.c.thread_id))


def passes(connection: Connection, dialect: Dialect, thread_id: str, turn: int, epoch: int) -> bool:
    """In a foreign database: whether (turn, epoch) may write now, locked until the transaction ends where the database
    can lock rows. Only inside a transaction that also makes the write: a new owner could raise the fence in between."""
    bag = {"p_thread": thread_id, "p_turn": turn, "p_epoch": epoch}
    return _passes(dialect).run(connection, bag).first() is not None


@cache
def _passes(dialect: Dialect) -> Statement:
    found = select(fence.c.thread_id).where(
        fence.c.thread_id == bindparam("p_thread"),
        fence.c.turn == bindparam("p_turn", type_=BigInteger),
        fence.c.epoch == bindparam("p_epoch", type_=BigInteger),
    )
    return Statement.of(dialect.share_lock(found))
