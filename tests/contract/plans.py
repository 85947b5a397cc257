"""What PostgreSQL does for a unit of work: every statement is explained after it ran, and rows are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from sqlalchemy import Connection, NullPool, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.schema import runs
from deerflow_runs.store.units import Unit


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """One statement's plan, as it was carried out."""

    root: Mapping[str, Any]

    def nodes(self) -> Iterator[Mapping[str, Any]]:
        """All nodes, from the top."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.get("Plans", [])

    def rows_read(self, table: str) -> int:
        """How many rows of the table were looked at, kept or not."""
        counted = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        scans = [node for node in self.nodes() if node.get("Relation Name") == table and "Scan" in node["Node Type"]]
        return sum(int(node["Actual Loops"] * node.get(name, 0)) for node in scans for name in counted)

    def sequential(self) -> list[str]:
        """Tables that were read from end to end."""
        return [node["Relation Name"] for node in self.nodes() if node["Node Type"] == "Seq Scan"]

    def indexes(self) -> set[str]:
        """The indexes that were used."""
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}


async def plans(dsn: str, unit: Unit[Any]) -> list[Plan]:
    """The plans of a unit's statements. What it changes is changed twice: once by itself, once to be explained."""
    database = parse_dsn(dsn)
    assert isinstance(database, Postgres)
    engine = create_async_engine(
        database.sqlalchemy_url(),
        connect_args=database.connect_args(),
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
    )
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(lambda connection: _explained(connection, unit))
    finally:
        await engine.dispose()


def _explained(connection: Connection, unit: Unit[Any]) -> list[Plan]:
    seen: list[tuple[str, Any]] = []

    def see(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        seen.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", see)
    unit(connection)
    event.remove(connection, "before_cursor_execute", see)
    return [Plan(_plan(connection, statement, parameters)) for statement, parameters in seen]


def _plan(connection: Connection, statement: str, parameters: Any) -> Mapping[str, Any]:
    explained: Any = connection.exec_driver_sql("EXPLAIN (ANALYZE, FORMAT JSON) " + statement, parameters).scalar_one()
    plan: Mapping[str, Any] = explained[0]["Plan"]
    return plan


ENDED: Final = 20_000


def add_history(connection: Connection, run_id: str) -> None:
    """Copies of an ended run: ``ENDED`` on its own thread and as many on others, with receipts and thread rows; then
    statistics."""
    copied = [column.name for column in runs.c if column.name not in {"run_id", "thread_id", "active", "created_at"}]
    names = ", ".join(copied)
    for thread in ("r.thread_id", "'past-' || n"):
        sql = (
            f"INSERT INTO dr_runs (run_id, thread_id, created_at, {names})"
            f" SELECT {thread} || '/' || n, {thread}, r.created_at - n, {', '.join('r.' + name for name in copied)}"
            f" FROM dr_runs AS r, generate_series(1, {ENDED}) AS n WHERE r.run_id = :run"
        )
        connection.execute(text(sql), {"run": run_id})
    connection.execute(
        text(
            "INSERT INTO dr_outbox (run_id, kind, payload, attempts, not_before, delivered_at)"
            f" SELECT 'thread/' || n, 'receipt', '{{}}', 0, n, n FROM generate_series(1, {ENDED}) AS n"
        )
    )
    connection.execute(
        text(
            "INSERT INTO dr_threads (thread_id, user_id, metadata, config, outcome, interrupts, temporary, created_at,"
            " updated_at) SELECT 'past-' || n, 'ann', '{}', '{}', 'idle', '{}', false, n, n"
            f" FROM generate_series(1, {ENDED}) AS n"
        )
    )
    for table in ("dr_runs", "dr_outbox", "dr_threads"):
        connection.exec_driver_sql(f"ANALYZE {table}")
