"""Short statements on either database: what these tests are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Connection, insert, text

from deerflow_runs.store import schema
from deerflow_runs.store.database import Postgres, Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate_connect import in_own_loop, postgres_connection, sqlite_connection

T = TypeVar("T")


def on(dsn: str, work: Callable[[Connection], T]) -> T:
    """Run ``work`` in one transaction on the database, and commit."""
    database = parse_dsn(dsn)
    if isinstance(database, Sqlite):
        with sqlite_connection(database, begin="BEGIN IMMEDIATE") as connection, connection.begin():
            return work(connection)
    return in_own_loop(lambda: _on_postgres(database, work))


async def _on_postgres(database: Postgres, work: Callable[[Connection], T]) -> T:
    async with postgres_connection(database) as connection, connection.begin():
        return await connection.run_sync(work)


def ask(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows that a query answers."""
    return on(dsn, lambda connection: [tuple(row) for row in connection.execute(text(statement))])


def do(dsn: str, statement: str) -> None:
    """Carry out a statement that answers nothing."""
    on(dsn, lambda connection: connection.execute(text(statement)).close())


def is_sqlite(dsn: str) -> bool:
    return dsn.startswith("sqlite")


def indexes(dsn: str) -> dict[str, str]:
    """Every index of ours by name, as the database itself words it."""
    if is_sqlite(dsn):
        found = ask(dsn, "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    else:
        found = ask(dsn, "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'")
    return {name: words for name, words in found if name != "dr_alembic_version_pkc"}


def invalid_indexes(dsn: str) -> list[str]:
    """Indexes of PostgreSQL whose building was broken off."""
    return [name for (name,) in ask(dsn, "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid")]


# --- Rows -----------------------------------------------------------------------------------------------------------

_RUN: Final[Mapping[str, Any]] = {
    "thread_id": "t",
    "operation_kind": "run",
    "status": "running",
    "seq": 1,
    "due_at": 0,
    "payload_version": 1,
    "kwargs": {},
    "metadata": {},
    "multitask_strategy": "reject",
    "on_disconnect": "continue",
    "on_orphan": "fail",
    "required_capabilities": [],
    "idempotency_scope": "",
    "epoch": 1,
    "attempt": 1,
    "max_attempts": 3,
    "not_before": 0,
    "queue_behind": False,
    "base_known": False,
    "base_heads": {},
    "temporary": False,
    "deliveries": {},
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "llm_calls": 0,
    "message_count": 0,
    "tokens_by_model": {},
    "tokens_by_caller": {},
    "created_at": 1,
    "updated_at": 1,
}

_SESSION: Final[Mapping[str, Any]] = {
    "beat": 1,
    "lease": 1,
    "beat_interval": 1,
    "expires_at": 2**62,
    "hinted": False,
    "started_at": 1,
    "host": "h",
    "boot_id": "b",
    "pid": 1,
    "version": "1",
    "labels": {},
    "capabilities": [],
}


def add_run(dsn: str, run_id: str, **given: Any) -> None:
    """Put the row of a run (active unless said otherwise) straight into the table."""
    on(dsn, lambda c: c.execute(insert(schema.runs), {**_RUN, "run_id": run_id, **given}).close())


def add_session(dsn: str, worker_id: str, state: str, **given: Any) -> None:
    """Put the row of a worker session straight into the table; it expires in the far future unless said otherwise."""
    row = {**_SESSION, "worker_id": worker_id, "state": state, **given}
    on(dsn, lambda c: c.execute(insert(schema.workers), row).close())


def run(dsn: str, run_id: str) -> Mapping[str, Any]:
    """The row of a run."""
    return on(
        dsn, lambda c: dict(c.execute(schema.runs.select().where(schema.runs.c.run_id == run_id)).mappings().one())
    )


def statuses(dsn: str) -> dict[str, str]:
    """Every run's status."""
    return dict(cast("list[tuple[str, str]]", ask(dsn, "SELECT run_id, status FROM dr_runs")))
