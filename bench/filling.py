"""Databases with a past: many rows like one that the store itself has written, put there by a single statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deerflow_runs import RunId, SqlRunStore
from deerflow_runs.model import Run, ThreadId, WorkerId
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Applied
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted
from deerflow_runs.store.schema import runs, threads
from tests.migrations.databases import do, is_sqlite

SERIES: Final = "WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < {})"


async def run_of(store: SqlRunStore, worker_id: WorkerId, name: str, *, key: str | None = None) -> Run:
    """A running run of a session, by the store's own verbs."""
    newcomer = Newcomer(
        run_id=RunId(name),
        thread_id=ThreadId(name),
        worker_id=worker_id,
        idempotency_key=key,
        payload_digest=key and "digest",
    )
    answer = await store.admit(newcomer)
    assert isinstance(answer, Admitted), answer
    return await happened(store, answer.run, RunEvent.START)


async def happened(store: SqlRunStore, run: Run, event: RunEvent) -> Run:
    """The run after one more step of its life."""
    assert run.owner_worker_id is not None
    decision = await store.apply(run.key, event, Actor(run.owner_worker_id, run.epoch))
    assert isinstance(decision, Applied), decision
    return decision.run


def multiply(dsn: str, run_id: str, times: int) -> None:
    """So many more rows like this one and like its thread's, with names of their own."""
    for table, changed in ((threads, {}), (runs, {"run_id": "", "idempotency_key": "", "idempotency_scope": ""})):
        columns = [column.name for column in table.columns if column.computed is None]
        values = [_value(column, {"thread_id": "", **changed}) for column in columns]
        do(
            dsn,
            f"{SERIES.format(times)} INSERT INTO {table.name} ({_quoted(columns)})"  # noqa: S608 - our own names
            f" SELECT {', '.join(values)} FROM series, {table.name} AS one WHERE one.thread_id = '{run_id}'",
        )
    if not is_sqlite(dsn):
        do(dsn, "ANALYZE")  # what autovacuum does a minute later


def _value(column: str, changed: Mapping[str, str]) -> str:
    return f"""one."{column}" || '-' || n""" if column in changed else f'one."{column}"'


def _quoted(columns: list[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)
