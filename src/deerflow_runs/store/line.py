"""Where session lines come from: for each kind of database one way to make them, to signal, and to look at hints.

The lines themselves stand in ``line_postgres``, ``line_sqlite`` and ``line_memory``. No rule of the protocol is known
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, assert_never

from deerflow_runs.model import Session, WorkerId
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store.base import SessionLine
from deerflow_runs.store.database import Database, Postgres, Sqlite
from deerflow_runs.store.signals import Signal
from deerflow_runs.store.units import Units


class Lines(Protocol):
    """What one store offers beside its units of work. Nothing is connected by making one."""

    @property
    def proves(self) -> bool:
        """Whether ``signs`` proves deaths, and asks no database for it."""

    def line(self) -> SessionLine:
        """A new line, not connected."""

    async def send(self, signal: Signal, to: WorkerId | None) -> None:
        """See ``RunStore.send``."""

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:
        """See ``RunStore.signs``."""

    async def close(self) -> None:
        """Finish the signals that are still under way; lines are closed by those who opened them."""


def open_lines(database: Database, units: Units, *, clock: Callable[[], int] | None = None) -> Lines:
    """The lines for ``database``. SQLite only: the ``clock``, in microseconds since 1970."""
    match database:
        case Sqlite(path=None):
            from deerflow_runs.store.line_memory import MemoryLines

            return MemoryLines(units)
        case Sqlite():
            from deerflow_runs.store.line_sqlite import SqliteLines

            return SqliteLines(database, clock=clock)
        case Postgres():
            from deerflow_runs.store.line_postgres import PostgresLines

            return PostgresLines(database, units)
        case _:
            assert_never(database)
