"""Lets a test database write down its own history, by triggers, and reads it back.

The product does not know of it. A test installs the recording before its processes start, lets executors write their
steps with ``write_step``, reads the history when all is over, and has it judged by ``invariants``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, assert_never, final
from uuid import uuid4

from sqlalchemy import BigInteger, Column, Connection, MetaData, Row, String, Table, bindparam, select, text

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Session,
    SessionState,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.store.clauses import key_parameters
from deerflow_runs.store.database import Postgres, Sqlite
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.fence import held, holds
from deerflow_runs.store.migrate_connect import arrange_session, in_own_loop, postgres_connection, sqlite_connection
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.recorded import Change, History, OutboxChanged, RunChanged, SessionChanged, StepWritten
from deerflow_runs.testing.triggers import HISTORY, STEPS, postgres_statements, sqlite_statements

Address = str | os.PathLike[str]
"""As ``parse_dsn`` takes it. A file or a server: what is in memory belongs to one process and needs no recording."""


# --- Installing and reading -----------------------------------------------------------------------------------------


def install_recording(dsn: Address) -> None:
    """Add the tables ``dr_history`` and ``dr_test_writes`` and the triggers to a migrated database. Once for each
    database, before anything happens in it; blocks, from any thread."""
    match database := parse_dsn(dsn):
        case Sqlite():
            with sqlite_connection(database, begin="BEGIN IMMEDIATE") as connection, connection.begin():
                for statement in sqlite_statements():
                    connection.exec_driver_sql(statement)
        case Postgres():
            in_own_loop(partial(_install_on_postgres, database))
        case _:
            assert_never(database)


async def _install_on_postgres(database: Postgres) -> None:
    async with postgres_connection(database) as connection:
        await arrange_session(connection, database.schema)
        for statement in postgres_statements():
            await connection.exec_driver_sql(statement)
        await connection.commit()


def read_history(dsn: Address) -> History:
    """All that was recorded and committed so far; blocks, from any thread. Read it when nothing is under way: what a
    transaction holds back is missing."""
    match database := parse_dsn(dsn):
        case Sqlite():
            with sqlite_connection(database, begin="BEGIN") as connection:
                return History.of([_change(row) for row in connection.execute(_ALL)])
        case Postgres():
            return in_own_loop(partial(_read_from_postgres, database))
        case _:
            assert_never(database)


async def _read_from_postgres(database: Postgres) -> History:
    async with postgres_connection(database) as connection:
        await arrange_session(connection, database.schema)
        return History.of([_change(row) for row in await connection.execute(_ALL)])


_ALL: Final = text(f"SELECT id, at, xact, source, old, new FROM {HISTORY} ORDER BY id")  # noqa: S608 - a constant


# --- Steps ----------------------------------------------------------------------------------------------------------


class Token(Protocol):
    """What orders writes on a thread (O15)."""

    @property
    def turn(self) -> int | None:
        """Drawn at the first start."""

    @property
    def epoch(self) -> int:
        """Raised at every grant."""


class Grant(Protocol):
    """Which run, under which token: a ``RunLease`` is one, ``grant_of(run)`` makes one for a test without a manager."""

    @property
    def key(self) -> RunKey:
        """The run."""

    @property
    def token(self) -> Token:
        """As its holder believes."""


@final
@dataclass(frozen=True, slots=True)
class TokenOf:
    """A token as a plain value."""

    turn: int | None
    epoch: int


@final
@dataclass(frozen=True, slots=True)
class GrantOf:
    """A grant as a plain value."""

    key: RunKey
    token: TokenOf


def grant_of(run: Run) -> GrantOf:
    """What the row says now."""
    return GrantOf(run.key, TokenOf(run.turn, run.epoch))


async def write_step(store: SqlRunStore, grant: Grant, step: str, value: str | None = None) -> bool:
    """Record a step of a run under the fence, as a saver records a checkpoint (O14). False: refused, and whoever wants
    to write has lost the run. Raises ``StoreUnavailable`` when no answer came: the step may be recorded or not, and
    ``steps_of`` says which."""
    token = grant.token
    given = {"epoch": token.epoch, "turn": token.turn, "step": step, "value": value, "write": uuid4().hex}
    bag = key_parameters(grant.key) | {f"p_{name}": known for name, known in given.items()}
    how = store.units.once if store.units.dialect.writes_in_ctes else store.units.transaction
    return await how(partial(_write, store.units.dialect, grant.key, token.epoch, bag))


async def steps_of(store: SqlRunStore, key: RunKey) -> tuple[str, ...]:
    """The steps that are recorded for a run, in their order: what a resumed executor uses instead of doing it again."""
    wanted = select(_STEPS.c.step).where(_STEPS.c.run_id == key.run_id).order_by(_STEPS.c.id)
    return await store.units.read(lambda connection: tuple(connection.execute(wanted).scalars()))


_STEPS: Final = Table(
    STEPS,
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("write_id", String),
    Column("thread_id", String),
    Column("run_id", String),
    Column("epoch", BigInteger),
    Column("turn", BigInteger),
    Column("step", String),
    Column("value", String),
)
_PARAMETERS: Final = {
    "write_id": "p_write",
    "thread_id": "p_thread",
    "run_id": "p_run",
    "epoch": "p_epoch",
    "turn": "p_turn",
    "step": "p_step",
    "value": "p_value",
}


def _write(dialect: Dialect, key: RunKey, epoch: int, bag: Mapping[str, Any], connection: Connection) -> bool:
    """On PostgreSQL guard and write are one statement; on SQLite both stand in one transaction. Safe to repeat: the
    same write finds its own row and leaves it as it is (O8)."""
    given = {name: bindparam(parameter, type_=_STEPS.c[name].type) for name, parameter in _PARAMETERS.items()}
    if dialect.writes_in_ctes:
        guarded = dialect.insert(_STEPS).from_select(list(given), select(*given.values()).select_from(held(dialect)))
    elif holds(connection, dialect, key, epoch):
        guarded = dialect.insert(_STEPS).values(given)
    else:
        return False
    kept = guarded.on_conflict_do_update(index_elements=[_STEPS.c.write_id], set_={"value": guarded.excluded.value})
    return connection.execute(kept.returning(_STEPS.c.id), dict(bag)).first() is not None


# --- Rows to values -------------------------------------------------------------------------------------------------


def _change(row: Row[Any]) -> Change:
    where: dict[str, Any] = {"number": row.id, "at": Micros(row.at), "transaction": row.xact}
    old = None if row.old is None else json.loads(row.old)
    new = None if row.new is None else json.loads(row.new)
    some: dict[str, Any] = new or old or {}
    match row.source:
        case "dr_runs":
            return RunChanged(before=_run(old), after=_run(new), scope=some["idempotency_scope"], **where)
        case "dr_workers":
            return SessionChanged(before=_session(old), after=_session(new), **where)
        case "dr_outbox":
            delivered = some["delivered_at"] is not None
            known = {"kind": some["kind"], "attempts": some["attempts"], "delivered": delivered, "new": old is None}
            return OutboxChanged(run_id=RunId(some["run_id"]), **known, **where)
        case _:
            key = RunKey(ThreadId(some["thread_id"]), RunId(some["run_id"]))
            told = {name: some[name] for name in ("epoch", "turn", "step", "value")}
            return StepWritten(key=key, **told, **where)


_AS_THEY_ARE: Final = (
    "seq",
    "due_at",
    "turn",
    "user_id",
    "home_worker_id",
    "idempotency_key",
    "payload_digest",
    "owner_worker_id",
    "epoch",
    "attempt",
    "max_attempts",
    "progress_epoch",
    "granted_at",
    "not_before",
    "cancel_requested_at",
    "error",
    "stop_reason",
    "settled_by",
    "superseded_by",
    "last_checkpoint",
    "created_at",
    "started_at",
    "settled_at",
    "updated_at",
)


def _run(row: Mapping[str, Any] | None) -> Run | None:
    if row is None:
        return None
    return Run(
        run_id=RunId(row["run_id"]),
        thread_id=ThreadId(row["thread_id"]),
        kind=OperationKind(row["operation_kind"]),
        status=RunStatus(row["status"]),
        strategy=Strategy(row["multitask_strategy"]),
        on_orphan=OnOrphan(row["on_orphan"]),
        required_capabilities=frozenset(json.loads(row["required_capabilities"])),
        queue_behind=bool(row["queue_behind"]),
        cancel_action=CancelAction(row["cancel_action"]) if row["cancel_action"] else None,
        usage=Usage(total_tokens=row["total_tokens"]),
        **{name: row[name] for name in _AS_THEY_ARE},
    )


def _session(row: Mapping[str, Any] | None) -> Session | None:
    if row is None:
        return None
    return Session(
        worker_id=WorkerId(row["worker_id"]),
        state=SessionState(row["state"]),
        hinted=bool(row["hinted"]),
        proven=bool(row["proven"]),
        **{
            name: row[name] for name in ("beat", "lease", "beat_interval", "expires_at", "started_at", "dead_at", "pid")
        },
    )
