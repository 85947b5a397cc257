"""What the contract needs of a store under test: the store itself, and a way to put rows there that no honest history
would leave, so that every guard can be asked alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, final

from sqlalchemy import Connection, insert, select

from deerflow_runs.model import Run, RunId, Session
from deerflow_runs.store.base import OwnershipStore
from deerflow_runs.store.clauses import usage_columns
from deerflow_runs.store.rows import to_run, whole
from deerflow_runs.store.schema import runs, workers
from deerflow_runs.store.units import Units
from deerflow_runs.testing.model_store import ModelStore


class Subject(Protocol):
    """A store under test."""

    @property
    def store(self) -> OwnershipStore:
        """The store."""

    async def place_sessions(self, sessions: Sequence[Session]) -> None:
        """Put sessions there exactly as given."""

    async def place(self, placed: Sequence[Run]) -> None:
        """Put operations there exactly as given, stored input apart."""

    async def rows(self, run_ids: Collection[RunId]) -> dict[RunId, Run]:
        """Those of the operations that are there, as they are kept, whatever their kind."""

    async def row(self, run_id: RunId) -> Run | None:
        """One of them."""


@final
class ModelSubject:
    """The model store under test."""

    def __init__(self) -> None:
        self._store = ModelStore()

    @property
    def store(self) -> OwnershipStore:
        """The store."""
        return self._store

    async def place_sessions(self, sessions: Iterable[Session]) -> None:
        """Put sessions there."""
        self._store.world.sessions |= {session.worker_id: session for session in sessions}

    async def place(self, placed: Iterable[Run]) -> None:
        """Put operations there."""
        for run in placed:
            self._store.world.runs[run.run_id] = run
            self._store.world.seq = max(self._store.world.seq, run.seq)
            self._store.world.turn = max(self._store.world.turn, run.turn or 0)

    async def rows(self, run_ids: Collection[RunId]) -> dict[RunId, Run]:
        """The operations as they are kept."""
        return {run_id: self._store.world.runs[run_id] for run_id in run_ids if run_id in self._store.world.runs}

    async def row(self, run_id: RunId) -> Run | None:
        """One of them."""
        return self._store.world.runs.get(run_id)


@final
class SqlSubject:
    """A SQL store under test; ``units`` reach the same database."""

    def __init__(self, store: OwnershipStore, units: Units) -> None:
        self._store = store
        self._units = units

    @property
    def store(self) -> OwnershipStore:
        """The store."""
        return self._store

    async def place_sessions(self, sessions: Sequence[Session]) -> None:
        """Put sessions there."""
        rows = [session_row(session) for session in sessions]
        await self._units.transaction(lambda connection: _insert(connection, workers, rows))

    async def place(self, placed: Sequence[Run]) -> None:
        """Put operations there."""
        rows = [run_row(run) for run in placed]
        await self._units.transaction(lambda connection: _insert(connection, runs, rows))

    async def rows(self, run_ids: Collection[RunId]) -> dict[RunId, Run]:
        """The operations as they are kept."""
        wanted = select(*whole()).where(runs.c.run_id.in_(run_ids))
        found = await self._units.read(lambda connection: [to_run(row) for row in connection.execute(wanted)])
        return {run.run_id: run for run in found}

    async def row(self, run_id: RunId) -> Run | None:
        """One of them."""
        return (await self.rows([run_id])).get(run_id)


def _insert(connection: Connection, table: Any, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)


def session_row(session: Session) -> dict[str, Any]:
    """The columns of a session."""
    names = [column.name for column in workers.c]
    values = {name: getattr(session, name) for name in names}
    return values | {"capabilities": sorted(session.capabilities), "labels": dict(session.labels)}


def run_row(run: Run) -> dict[str, Any]:
    """The columns of an operation."""
    plain = {column.name for column in runs.c} & set(Run.__dataclass_fields__)
    values = {name: getattr(run, name) for name in plain - {"metadata", "kwargs", "deliveries", "base_heads"}}
    return (
        values
        | usage_columns(run.usage)
        | {
            "operation_kind": run.kind.value,
            "multitask_strategy": run.strategy.value,
            "metadata": dict(run.metadata),
            "kwargs": dict(run.kwargs or {}),
            "deliveries": dict(run.deliveries),
            "base_heads": dict(run.base_heads),
            "required_capabilities": sorted(run.required_capabilities),
            "idempotency_scope": "",
        }
    )
