"""How a unit of work reaches a database: one synchronous function over a SQLAlchemy connection, for both of them.

The store's operations are written against ``Units`` and know neither threads nor pools. ``writer`` runs units on
SQLite, ``connections`` on PostgreSQL; ``open_units`` picks. Retrying is done here and nowhere else, so a unit must be
safe to repeat (O8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, assert_never

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine

from deerflow_runs.store.database import Database, Postgres, Sqlite
from deerflow_runs.store.dialect import Dialect

T = TypeVar("T")
Unit = Callable[[Connection], T]
"""Synchronous, takes the connection, returns plain values; never commits and never keeps the connection."""


class Units(Protocol):
    """Runs units of work. All three verbs are safe to cancel: the unit then runs as a whole or not at all, the
    caller's cancellation is raised once it is known which, and no connection is lost.

    Raises ``StoreUnavailable`` when no answer came within the retries; the unit may then have been committed or not.
    Errors of the unit itself pass unchanged.
    """

    @property
    def dialect(self) -> Dialect:
        """What the database can say."""

    async def once(self, unit: Unit[T]) -> T:
        """Run a unit of one statement that changes something. PostgreSQL: autocommit, one round trip. SQLite: joins
        the group that is being committed."""

    async def transaction(self, unit: Unit[T]) -> T:
        """Run a unit of several statements that happen together or not at all."""

    async def read(self, unit: Unit[T]) -> T:
        """Run a unit that changes nothing; on SQLite beside the writer, on a connection of its own."""

    async def open(self) -> None:
        """Connect and check the tables (``SchemaMismatch``). Repeating it is harmless."""

    async def close(self) -> None:
        """Finish what was accepted, then close every connection. Repeating it is harmless."""


def open_units(
    database: Database,
    *,
    engine: AsyncEngine | None = None,
    connections: int = 5,
    clock: Callable[[], int] | None = None,
) -> Units:
    """The units for ``database``; nothing is connected before ``open()``.

    PostgreSQL only: the host's ``engine``, and how many ``connections`` are kept. SQLite only: the ``clock``, in
    microseconds since 1970; PostgreSQL's own is used there.
    """
    match database:
        case Sqlite():
            from deerflow_runs.store.writer import SqliteUnits

            return SqliteUnits(database, clock=clock)
        case Postgres():
            from deerflow_runs.store.connections import PostgresUnits

            return PostgresUnits(database, engine=engine, connections=connections)
        case _:
            assert_never(database)
