"""Short-lived connections for upgrades and checks, which happen before a store has any of its own.

They wait where a store's connections would not, and belong to one thread each. No statement about runs lives here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import asyncpg
from sqlalchemy import Connection, NullPool, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.schema import CreateSchema

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.store.database import Postgres, Sqlite

BUSY_SECONDS: Final = 30.0
"""How long SQLite waits for a worker's transaction; workers themselves do not wait inside SQLite (O34)."""

_T = TypeVar("_T")


@contextlib.contextmanager
def sqlite_connection(database: Sqlite, *, begin: str) -> Iterator[Connection]:
    """A connection whose transactions start with the statement ``begin``: Python's own way leaves tables outside."""
    engine = create_engine(database.sqlalchemy_url(), connect_args={"timeout": BUSY_SECONDS}, poolclass=NullPool)
    event.listen(engine, "connect", begin_nothing_unasked)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    with engine.connect() as connection:
        yield connection


def begin_nothing_unasked(connection: Any, _record: object) -> None:
    """A listener for ``connect`` of a SQLite engine."""
    connection.isolation_level = None


def keep_a_log(connection: Connection) -> None:
    """Write-ahead logging is a property of the file; it cannot be switched on inside a transaction (O34)."""
    with contextlib.closing(connection.connection.cursor()) as cursor:
        cursor.execute("PRAGMA journal_mode = WAL")


@contextlib.asynccontextmanager
async def postgres_connection(database: Postgres) -> AsyncIterator[AsyncConnection]:
    """A connection of its own; ``StoreUnavailable`` if there is none to be had."""
    engine = create_async_engine(database.sqlalchemy_url(), connect_args=database.connect_args(), poolclass=NullPool)
    try:
        connection = await engine.connect()
    except (OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreUnavailable(f"cannot connect to {database}: {error}") from error
    try:
        yield connection
    finally:
        await connection.close()


async def arrange_session(connection: AsyncConnection, schema: str | None) -> None:
    """Let nothing cut off the building of an index or the session that holds the lock; lead all names to ``schema``."""
    for setting in ("statement_timeout", "lock_timeout", "idle_session_timeout"):
        await connection.execute(text(f"SET {setting} = 0"))
    if schema is not None:
        name = {"schema": schema}
        # Not IF NOT EXISTS: that asks for the right to create schemas even where the schema is there.
        if not await connection.scalar(text("SELECT 1 FROM pg_namespace WHERE nspname = :schema"), name):
            await connection.execute(CreateSchema(schema))
        await connection.execute(text("SELECT set_config('search_path', quote_ident(:schema), false)"), name)
    await connection.commit()


def in_own_loop(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run ``work`` in a thread of its own: the caller's thread may be running an event loop."""

    async def run() -> _T:
        return await work()

    with ThreadPoolExecutor(1, thread_name_prefix="deerflow-runs-migrate") as pool:
        return pool.submit(lambda: asyncio.run(run())).result()
