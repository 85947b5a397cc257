"""PostgreSQL: connections that stay open, in autocommit, handed out in the order of asking.

A unit of one statement costs one round trip, because nothing is sent around it. No rule of the protocol is known
here, and no statement about runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import asyncpg
from sqlalchemy import NullPool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dialect import POSTGRES, Dialect
from deerflow_runs.store.failures import driver_error
from deerflow_runs.store.migrate import check_connection
from deerflow_runs.store.retry import RetryPolicy, retrying
from deerflow_runs.store.shield import see_through
from deerflow_runs.store.units import Unit

T = TypeVar("T")

CONNECTIONS: Final = 5
APPLICATION: Final = "deerflow_runs"
STATEMENTS: Final = 500
"""How many prepared statements a connection keeps: more than the store has."""


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which something is given up. The first three are kept by the server, the others by us.

    ``command`` is for a network that swallows everything, so it is longer than ``statement``; on an engine of the
    host's it is for the whole unit.
    """

    statement: float = 10.0
    lock: float = 5.0
    idle_in_transaction: float = 10.0
    command: float = 15.0
    connect: float = 10.0

    def settings(self) -> dict[str, str]:
        """As PostgreSQL's settings, in its milliseconds."""
        seconds = {
            "statement_timeout": self.statement,
            "lock_timeout": self.lock,
            "idle_in_transaction_session_timeout": self.idle_in_transaction,
        }
        return {name: str(round(value * 1000)) for name, value in seconds.items()}


@final
class PostgresUnits:
    """``Units`` on PostgreSQL, for the event loop in which it was opened.

    With ``engine`` the connections come from the host's pool, which is left open; each is kept until ``close()``.
    """

    def __init__(
        self,
        database: Postgres,
        *,
        engine: AsyncEngine | None = None,
        connections: int = CONNECTIONS,
        limits: Limits | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        limits = limits or Limits()
        self._database = database
        self._policy = policy or RetryPolicy()
        self._ours = own_engine(database, limits) if engine is None else None
        self._engine = arrange(self._ours or _fitting(engine), database)
        self._begin = _begin(limits if engine is not None or database.pooler else None)
        self._patience = None if engine is None else limits.command
        self._connections = connections
        self._desk: _Desk | None = None

    @property
    def dialect(self) -> Dialect:
        """See ``Units.dialect``."""
        return POSTGRES

    async def once(self, unit: Unit[T]) -> T:
        """See ``Units.once``."""
        return await self._run(lambda held: held.once(unit))

    async def transaction(self, unit: Unit[T]) -> T:
        """See ``Units.transaction``. Each statement sees what was committed before it began."""
        return await self._run(lambda held: held.transaction(unit, self._begin))

    async def read(self, unit: Unit[T]) -> T:
        """See ``Units.read``. Each statement sees what was committed before it began."""
        return await self.once(unit)

    async def open(self) -> None:
        """See ``Units.open``. The other connections are made when they are first wanted."""
        first = self._desk is None
        if first:
            self._desk = _Desk([_Held(self._engine, self._patience) for _ in range(self._connections)])
            weakref.finalize(self, _keep_if_left_behind, self._desk).atexit = False
        try:
            await self._check()
        except BaseException:
            if first:
                await self.close()  # nobody closes what could not be opened
            raise

    async def _check(self) -> None:
        """A wrong address shows here first; the answer names it, and nothing was asked that could have been stored."""
        try:
            await self.read(lambda connection: check_connection(connection, self._database))
        except (StoreUnavailable, DBAPIError) as error:
            driver = driver_error(error)
            raise StoreUnavailable(f"cannot open {self._database}: {driver}") from driver

    async def close(self) -> None:
        """See ``Units.close``."""
        desk = self._desk
        if desk is None or desk.left_behind():
            return
        desk.require_here()
        self._desk = None
        await see_through(lambda: self._close(desk), name="deerflow-runs-close")

    async def _close(self, desk: _Desk) -> None:
        await desk.close()
        if self._ours is not None:
            await self._ours.dispose()

    async def _run(self, attempt: Callable[[_Held], Awaitable[T]]) -> T:
        """Wait for a connection, during which a caller may leave at once; then see the unit through."""
        if self._desk is None:
            raise UsageError("the store is not open; await open() first, or use it in an async with block")
        desk = self._desk
        held = await desk.take()
        try:
            return await see_through(lambda: retrying(self._policy, lambda: attempt(held)), name="deerflow-runs-unit")
        finally:
            desk.give_back(held)


# --- Handing out ----------------------------------------------------------------------------------------------------


@final
class _Desk:
    """Who waits for a connection gets one in the order of asking: a newcomer never overtakes (a semaphore is fair)."""

    def __init__(self, connections: list[_Held]) -> None:
        self._all = connections
        self._free = list(connections)
        self._places = asyncio.Semaphore(len(connections))
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()

    async def take(self) -> _Held:
        """Wait for a connection; it is the one used last, so that few are open where few are enough."""
        self.require_here()
        await self._places.acquire()
        return self._free.pop()

    def give_back(self, held: _Held) -> None:
        """Let the next one have it."""
        self._free.append(held)
        self._places.release()

    def left_behind(self) -> bool:
        """Whether this is a forked child, whose sockets belong to the parent."""
        return self._pid != os.getpid()

    def require_here(self) -> None:
        """Refuse a use that would wait for ever, or speak on somebody else's sockets."""
        if self.left_behind():
            raise UsageError("this store was opened before a fork; open another one in the child")
        if self._loop is not asyncio.get_running_loop():
            raise UsageError("this store was opened in another event loop; on PostgreSQL each loop needs its own")

    async def close(self) -> None:
        """Close every connection, after those who already wait have been served."""
        for _ in self._all:
            await self._places.acquire()
        for held in self._all:
            await held.close()


_LEFT_BEHIND: Final[list[_Desk]] = []


def _keep_if_left_behind(desk: _Desk) -> None:
    """In a forked child nothing may be cleaned up: the driver would say farewell on the parent's sockets."""
    if desk.left_behind():
        _LEFT_BEHIND.append(desk)


@final
class _Held:
    """One connection that stays open: made when it is first wanted, made anew when nobody knows its state.

    ``patience`` is for a host's engine, whose driver may wait for a reply for ever; ours was told not to.
    """

    def __init__(self, engine: AsyncEngine, patience: float | None) -> None:
        self._engine = engine
        self._patience = patience
        self._connection: AsyncConnection | None = None

    async def once(self, unit: Unit[T]) -> T:
        return await self._with_connection(lambda connection: connection.run_sync(unit))

    async def transaction(self, unit: Unit[T], begin: str) -> T:
        async def whole(connection: AsyncConnection) -> T:
            driver = await _driver_of(connection)
            await driver.execute(begin)  # not SQLAlchemy's begin(), which sends nothing in autocommit
            answer = await connection.run_sync(unit)
            if await driver.execute("COMMIT") != "COMMIT":
                raise UsageError("a unit of work caught an error of the database, after which nothing can be committed")
            return answer

        return await self._with_connection(whole)

    async def close(self) -> None:
        """Ours is cut off, a host's goes back to its pool: neither waits for the network."""
        if self._patience is None:
            self._discard()
        elif self._connection is not None:
            with contextlib.suppress(OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._connection.close()
            self._connection = None

    async def _with_connection(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        if self._patience is None:
            return await self._attempt(work)
        async with asyncio.timeout(self._patience):
            return await self._attempt(work)

    async def _attempt(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        if self._connection is None:
            self._connection = await self._engine.connect()
        try:
            return await work(self._connection)
        except BaseException as error:
            if not (answered(error) and await self._rolled_back(self._connection)):
                self._discard()
            raise

    async def _rolled_back(self, connection: AsyncConnection) -> bool:
        """Whether the connection is as good as new."""
        try:
            driver = await _driver_of(connection)
            if driver.is_in_transaction():
                await driver.execute("ROLLBACK")
            await connection.rollback()  # only SQLAlchemy's notion of it, no round trip
        except (OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        return True

    def _discard(self) -> None:
        """Cut it off without a word to the server, which would have to be awaited."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.sync_connection is not None:
            connection.sync_connection.invalidate()
            connection.sync_connection.close()


async def _driver_of(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection


def answered(error: BaseException) -> bool:
    """Whether the connection is sound: the server has answered with an error, or the unit raised one of its own."""
    if isinstance(error, DBAPIError):
        return not error.connection_invalidated and getattr(error.orig, "sqlstate", None) is not None
    return isinstance(error, Exception) and not isinstance(
        error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError
    )


# --- What connections are told --------------------------------------------------------------------------------------


def own_engine(database: Postgres, limits: Limits) -> AsyncEngine:
    """An engine without a pool; each of its connections is told the limits, unless a pooler stands in between."""
    arguments = database.connect_args()
    told = {"application_name": APPLICATION} if database.pooler else _session(limits)
    arguments["server_settings"] = told | arguments.get("server_settings", {})
    arguments.setdefault("timeout", limits.connect)
    arguments["command_timeout"] = limits.command
    arguments.setdefault("prepared_statement_cache_size", STATEMENTS)
    return create_async_engine(
        database.sqlalchemy_url(),
        connect_args=arguments,
        poolclass=NullPool,
        pool_reset_on_return=None,
    )


def _session(limits: Limits) -> dict[str, str]:
    # Read committed: the rules count on a fresh snapshot for the statement after a lock (O7).
    return {
        "application_name": APPLICATION,
        "default_transaction_isolation": "read committed",
        **limits.settings(),
    }


def _begin(limits: Limits | None) -> str:
    """How a transaction begins: with the limits (O14) where the session could not be told. One round trip."""
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
    settings = limits.settings() if limits else {}
    return "; ".join([begin, *(f"SET LOCAL {name} = {value}" for name, value in settings.items())])


def _fitting(engine: AsyncEngine | None) -> AsyncEngine:
    if engine is None or engine.dialect.driver != "asyncpg":
        raise UsageError("the host's engine must use asyncpg: create_async_engine('postgresql+asyncpg://...')")
    return engine


def arrange(engine: AsyncEngine, database: Postgres) -> AsyncEngine:
    """Autocommit, and our tables' schema: by name in every statement, as no pooler keeps a search path.

    What comes back shares the host's pool and is ours otherwise: its errors and logs show no parameters, the host's own
    remain as the host wants them.
    """
    schemas = {"schema_translate_map": {None: database.schema}} if database.schema else {}
    arranged = engine.execution_options(isolation_level="AUTOCOMMIT", **schemas)
    arranged.sync_engine.hide_parameters = True  # an error's text ends in logs, and a run's input is none of theirs
    return arranged
