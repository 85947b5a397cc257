"""The session line of a SQLite file: a connection that only beats, one that only looks, and a locked file (O10, O34).

All of it belongs to the thread of the event loop in which it was connected. No rule of the protocol is known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.protocol.judge import Sign, proof
from deerflow_runs.store import hints, sessions
from deerflow_runs.store.base import CancelRequest, Renewal
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dialect import SQLITE
from deerflow_runs.store.failures import driver_error, error_code
from deerflow_runs.store.retry import retrying
from deerflow_runs.store.signals import Hub, Inbox, Signal, SignalMode
from deerflow_runs.store.sqlite_connection import Clock, driver_of, is_locked, sqlite_engine, wall_clock
from deerflow_runs.store.units import Unit
from deerflow_runs.store.writer import LOCK_TIMEOUT, lock_or_not, lock_policy

T = TypeVar("T")

POLL: Final = 0.05
"""Seconds between two looks at ``data_version``: a quarter of a percent of a core."""

ANYTHING: Final = frozenset({Signal.CANCEL, Signal.WORK})
"""What a commit may mean."""


@final
class SqliteLines:
    """``Lines`` on a file. What other processes do is seen in the file; within this one signals need no look."""

    def __init__(self, database: Sqlite, *, clock: Clock | None = None, lock_timeout: float = LOCK_TIMEOUT) -> None:
        self._database = database
        self._clock = clock or wall_clock
        self._lock_timeout = lock_timeout
        self._hub = Hub()

    @property
    def proves(self) -> bool:
        """See ``Lines.proves``."""
        return True

    def line(self) -> SqliteLine:
        """See ``Lines.line``."""
        return SqliteLine(self._database, self._clock, self._lock_timeout, self._hub)

    async def send(self, signal: Signal, to: WorkerId | None) -> None:
        """See ``Lines.send``. The commit itself is what other processes notice."""
        self._hub.send(signal, to)

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:
        """See ``Lines.signs``. Files of the dead are removed on the way."""
        return await asyncio.to_thread(_signs, _folder(self._database), tuple(sessions))

    async def close(self) -> None:
        """See ``Lines.close``."""


def _signs(folder: Path, sessions: Sequence[Session]) -> dict[WorkerId, Sign]:
    try:
        files = {path.name: path for path in folder.iterdir()}
    except OSError:
        files = {}
    signs = {}
    for session in sessions:
        path = files.get(hints.file_name(session.worker_id))
        if session.state is not SessionState.DEAD:
            free = hints.is_free(path) if path else None
            if free is not False:  # who holds its lock lives, also where a container calls its boot by another name
                signs[session.worker_id] = proof(session, free=free, boot_id=hints.boot_id())
        elif path is not None:
            hints.remove_if_free(path)
    return {worker_id: sign for worker_id, sign in signs.items() if sign is not Sign.NONE}


def _folder(database: Sqlite) -> Path:
    assert database.path is not None, "a database in memory has no sessions of other processes"
    return hints.folder_beside(database.path)


@final
@dataclass(slots=True)
class _Link:
    """What a connected line consists of; ``seen`` is the ``data_version`` that was last looked at."""

    inbox: Inbox
    beating: Connection
    looking: Connection
    seen: int

    def version(self) -> int:
        """A number that changes with every commit of anybody else than this connection, which never writes."""
        driver = driver_of(self.looking)
        (version,) = driver.execute("PRAGMA data_version").fetchone()
        driver.close_cursors()
        return int(version)


@final
class SqliteLine:
    """``SessionLine`` on a file."""

    def __init__(self, database: Sqlite, clock: Clock, lock_timeout: float, hub: Hub) -> None:
        self._database = database
        self._clock = clock
        self._policy = lock_policy(lock_timeout)
        self._hub = hub
        self._link: _Link | None = None
        self._lock: hints.FileLock | None = None

    @property
    def mode(self) -> SignalMode:
        """See ``SessionLine.mode``."""
        return SignalMode.DATA_VERSION

    @property
    def hinted(self) -> bool:
        """See ``SessionLine.hinted``. Without a connection too: the lock is of the process (O27)."""
        return self._lock is not None and self._lock.held

    async def connect(self, worker_id: WorkerId) -> None:
        """See ``SessionLine.connect``."""
        self._disconnect()
        await self._take_lock(worker_id)
        async with _answering():
            with contextlib.ExitStack() as half_made:
                beating = await self._patiently(partial(self._open, query_only=False))
                half_made.callback(_shut, beating)
                looking = await self._patiently(partial(self._open, query_only=True))
                half_made.callback(_shut, looking)
                link = _Link(Inbox(worker_id), beating, looking, 0)
                link.seen = await self._patiently(link.version)
                half_made.pop_all()
        self._link = link
        self._hub.join(link.inbox)

    async def open_session(self, session: Session) -> Session:
        """See ``SessionLine.open_session``."""
        told = replace(session, hinted=self.hinted, boot_id=session.boot_id or hints.boot_id())
        return await self._write(lambda connection: sessions.open_session(connection, SQLITE, told))

    async def renew(self, worker_id: WorkerId, *, state: SessionState) -> Renewal:
        """See ``SessionLine.renew``."""
        beat = partial(sessions.renew, dialect=SQLITE, worker_id=worker_id, hinted=self.hinted, state=state)
        return await self._write(beat)

    async def requests(self, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
        """See ``SessionLine.requests``."""
        link = self._connected()
        async with _answering():
            try:
                return await self._patiently(lambda: sessions.requests(link.looking, worker_id))
            finally:
                driver_of(link.looking).close_cursors()

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``SessionLine.close_session``."""
        return await self._write(lambda connection: sessions.close_session(connection, SQLITE, worker_id))

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """See ``SessionLine.wait``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            if self._changed():
                return ANYTHING
            heard = await self._connected().inbox.wait(min(POLL, max(0.0, until - loop.time())))
            if heard or loop.time() >= until:
                return heard

    async def probe(self) -> bool:
        """See ``SessionLine.probe``."""
        link = self._connected()
        await self._take_lock(link.inbox.worker_id)
        async with _answering():
            await self._patiently(link.version)
        return True

    async def close(self) -> None:
        """See ``SessionLine.close``."""
        self._disconnect()
        self._release_lock()

    # --- The hint ---------------------------------------------------------------------------------------------------

    async def _take_lock(self, worker_id: WorkerId) -> None:
        """A lock that is held is kept, also over a new connection: while it is free, anybody may prove us dead."""
        if self._lock is not None and self._lock.worker_id == worker_id and self._lock.held:
            return
        self._release_lock()
        self._lock = await hints.FileLock.take(_folder(self._database), worker_id)

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    # --- The connections --------------------------------------------------------------------------------------------

    def _open(self, *, query_only: bool) -> Connection:
        path = self._database.path
        if path is None or not path.exists():  # connecting would make an empty one
            raise StoreUnavailable(
                f"{self._database}: there is no such file; the store was not opened, or the file is gone"
            )
        return sqlite_engine(self._database, clock=self._clock, query_only=query_only).connect()

    def _connected(self) -> _Link:
        if self._link is None:
            raise StoreUnavailable("the session line is not connected")
        return self._link

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._hub.leave(link.inbox)
            link.inbox.wake()
            _shut(link.beating)
            _shut(link.looking)

    def _changed(self) -> bool:
        """Whether anybody has committed something since the last look."""
        link = self._connected()
        try:
            version = link.version()
        except sqlite3.Error as error:
            if is_locked(error):
                return False
            raise _unavailable(error) from driver_error(error)
        changed, link.seen = version != link.seen, version
        return changed

    async def _patiently(self, attempt: Callable[[], T]) -> T:
        """Try while the file is locked, and let the loop's timers go on in between (O34)."""

        async def once() -> T:
            return attempt()

        return await retrying(self._policy, once, lock_or_not)

    async def _write(self, unit: Unit[T]) -> T:
        connection = self._connected().beating
        driver = driver_of(connection)
        async with _answering():
            await self._patiently(lambda: driver.execute("BEGIN IMMEDIATE"))
            try:
                answer = unit(connection)
                driver.close_cursors()
                await self._patiently(lambda: driver.execute("COMMIT"))
            except BaseException:
                _roll_back(connection)
                raise
            finally:
                driver.close_cursors()
            return answer


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """An error of the database is no answer; one of the unit's own passes."""
    try:
        yield
    except (OSError, sqlite3.Error, DBAPIError) as error:
        raise _unavailable(error) from driver_error(error)


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"no answer on the session's connection: {error_code(error)}; connect again and repeat it")


def _roll_back(connection: Connection) -> None:
    driver = driver_of(connection)
    with contextlib.suppress(sqlite3.Error):
        driver.close_cursors()
        if driver.in_transaction:
            driver.execute("ROLLBACK")


def _shut(connection: Connection) -> None:
    with contextlib.suppress(DBAPIError, sqlite3.Error):
        _roll_back(connection)
        connection.close()
