"""From an address to a store: one function, because a host should need no other.

The database's kind, its driver and its migrations are decided by the address; nothing is connected before ``open()``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from deerflow_runs.model import Micros
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.line import open_lines
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import open_units

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

CONNECTIONS: Final = 5


def store_at(
    dsn: str | os.PathLike[str],
    *,
    migrate: bool = False,
    workers: int = 1,
    engine: AsyncEngine | None = None,
    connections: int = CONNECTIONS,
    clock: Callable[[], Micros] | None = None,
) -> SqlRunStore:
    """A store on the database at ``dsn``; use it in ``async with``, or await ``open()`` and ``close()``.

    ``dsn`` is a path, ``:memory:``, or an address (``sqlite:///runs.db``, ``postgresql://user@host/database``); raises
    ``InvalidDsn`` for one that cannot be used, also for ``:memory:`` with more than one of ``workers``. With
    ``migrate`` the tables are made or brought up to date by ``open()``; without, it raises ``SchemaMismatch`` with the
    command that does it. PostgreSQL only: the host's own ``engine``, which is left open, and how many ``connections``
    are kept. SQLite only: the ``clock``, in microseconds since 1970.
    """
    database = parse_dsn(dsn)
    database.require_shareable(workers)
    units = open_units(database, engine=engine, connections=connections, clock=clock)
    shared = isinstance(database, Postgres) or database.path is not None
    lines = open_lines(database, units, clock=clock)
    return SqlRunStore(units, upgrade=_upgrade_of(dsn) if migrate and shared else None, lines=lines)


def _upgrade_of(dsn: str | os.PathLike[str]) -> Callable[[], Awaitable[None]]:
    async def upgrade() -> None:
        from deerflow_runs.store.migrate import upgrade_async  # alembic takes a second to import

        await upgrade_async(dsn)

    return upgrade
