"""SQLite: one thread that writes, in groups of units that share a commit, and threads that only read (O34).

The writer takes the units that wait, begins once, runs them, commits once and hands every event loop its answers in
one call. No rule of the protocol is known here, and no statement about runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dialect import SQLITE, Dialect
from deerflow_runs.store.lanes import Job, Lane, Outcome, hand_over
from deerflow_runs.store.migrate import check, check_connection, upgrade_connection
from deerflow_runs.store.retry import ErrorKind, RetryPolicy, classify, retrying, retrying_in_thread
from deerflow_runs.store.sqlite_connection import (
    Clock,
    Driver,
    driver_of,
    is_locked,
    opened_elsewhere,
    require_version,
    sqlite_engine,
    wal_reset_risk,
    wall_clock,
)
from deerflow_runs.store.sqlite_file import require_usable
from deerflow_runs.store.units import Unit

T = TypeVar("T")

LARGEST_GROUP: Final = 256
READERS: Final = 2
LOCK_TIMEOUT: Final = 5.0
"""Seconds to try for the file while other processes write; then the caller hears that there was no answer."""

SHORTEST_PAUSE: Final = 0.0002
LONGEST_PAUSE: Final = 0.004
"""Seconds between two tries. SQLite's own busy handler lets some processes starve."""

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class WriterStats:
    """What the writer has done since the store was opened: so many ``units`` in so many ``commits``."""

    units: int = 0
    commits: int = 0


@final
class SqliteUnits:
    """``Units`` on SQLite. One object may serve several event loops; a forked child must make its own."""

    def __init__(
        self,
        database: Sqlite,
        *,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> None:
        self._database = database
        self._clock = clock or wall_clock
        self._policy = policy or RetryPolicy()
        self._lock_timeout = lock_timeout
        self._opening = threading.Lock()
        self._lanes: _Lanes | None = None

    @property
    def dialect(self) -> Dialect:
        """See ``Units.dialect``."""
        return SQLITE

    def stats(self) -> WriterStats:
        """Exact for what has been answered; taken without a lock."""
        return self._opened().writer.stats

    async def once(self, unit: Unit[T]) -> T:
        """See ``Units.once``."""
        lane = self._opened().writing
        return await self._ask(lane, unit)

    async def transaction(self, unit: Unit[T]) -> T:
        """See ``Units.transaction``."""
        lane = self._opened().writing
        return await self._ask(lane, unit, together=True)

    async def read(self, unit: Unit[T]) -> T:
        """See ``Units.read``; the unit sees one state of the database, whatever is committed meanwhile."""
        lane = self._opened().reading
        return await self._ask(lane, unit)

    async def open(self) -> None:
        """See ``Units.open``. A database in memory is made here, as nobody else could."""
        require_version()
        path = self._database.path
        if path is not None:
            require_usable(path)
        if path is not None and not path.exists():
            check(self._database.display())  # refuses; connecting would leave an empty file behind
        with self._opening:
            first = self._lanes is None
            self._lanes = self._lanes or self._start()
        try:
            await self.read(lambda connection: check_connection(connection, self._database))
        except BaseException:
            if first:
                await self.close()  # nobody closes what could not be opened
            raise
        if path is not None and wal_reset_risk() and opened_elsewhere(path):
            _warn_of_reset_risk(path)

    async def close(self) -> None:
        """See ``Units.close``."""
        with self._opening:
            lanes, self._lanes = self._lanes, None
        if lanes is not None:
            await lanes.reading.close()
            await lanes.writing.close()

    async def _ask(self, lane: Lane, unit: Unit[T], *, together: bool = False) -> T:
        return await retrying(self._policy, lambda: lane.ask(unit, together=together), _kind_of)

    def _opened(self) -> _Lanes:
        if self._lanes is None:
            raise UsageError("the store is not open; await open() first, or use it in an async with block")
        return self._lanes

    def _start(self) -> _Lanes:
        patience = partial(retrying_in_thread, lock_policy(self._lock_timeout), kind_of=lock_or_not)
        writer = _Writer(partial(_connect, self._database, self._clock, query_only=False), patience)
        writing = Lane("deerflow-runs-sqlite-writer", [writer])
        reading = writing  # a database in memory has one connection
        if self._database.path is not None:
            connect = partial(_connect, self._database, self._clock, query_only=True)
            reading = Lane("deerflow-runs-sqlite-reader", [_Reader(connect, patience) for _ in range(READERS)])
        for lane in {writing, reading}:
            weakref.finalize(self, lane.stop).atexit = False
        return _Lanes(writer, writing, reading)


@cache
def _warn_of_reset_risk(path: Path) -> None:
    """Once for each file."""
    _log.warning(
        "another process has %s open, and SQLite %s may damage a file that several write; use 3.51.3 or Postgres",
        path,
        sqlite3.sqlite_version,
    )


# --- What runs in the threads ---------------------------------------------------------------------------------------

Patience = Callable[[Callable[[], Any]], Any]
"""Carries out something that may find the file locked, trying again for a while."""


def lock_policy(lock_timeout: float) -> RetryPolicy:
    """So many tries that they last about as long; a pause is on average half of what it may be at most."""
    attempts = math.ceil(lock_timeout / (LONGEST_PAUSE / 2))
    return RetryPolicy(max_attempts=max(attempts, 1), initial=SHORTEST_PAUSE, maximum=LONGEST_PAUSE)


def lock_or_not(error: BaseException) -> ErrorKind:
    """O34: "locked" says nothing about anybody. It is a reason to try again, and in the end no answer."""
    return ErrorKind.TRANSIENT if is_locked(error) else ErrorKind.PERMANENT


def _kind_of(error: BaseException) -> ErrorKind:
    """The thread has been patient already: its caller need not be."""
    return ErrorKind.PERMANENT if isinstance(error, StoreUnavailable) else classify(error)


@final
class _Writer:
    """Runs a group of units in one transaction; what it has committed stands in ``stats``."""

    most: Final = LARGEST_GROUP

    def __init__(self, connect: Callable[[], Connection], patience: Patience) -> None:
        self.stats = WriterStats()
        self._connection = _Held(connect)
        self._patience = patience

    def serve(self, jobs: Sequence[Job[Any]]) -> None:
        """See ``Worker.serve``. An error of BEGIN or COMMIT belongs to everybody in the group."""
        wanted = [job for job in jobs if not job.withdrawn]
        if not wanted:
            return
        try:
            outcomes = self._commit(wanted)
        except BaseException as error:  # noqa: BLE001 - nothing may end the thread while callers wait for it
            self._connection.abandon_transaction()
            outcomes = [Outcome(job, error=error) for job in wanted]
        hand_over(outcomes)

    def close(self) -> None:
        """See ``Worker.close``."""
        self._connection.close()

    def _commit(self, jobs: Sequence[Job[Any]]) -> list[Outcome]:
        connection = self._patience(self._connection.get)
        driver = driver_of(connection)
        # IMMEDIATE: a transaction that reads first and then finds another writer could only fail.
        self._patience(lambda: driver.execute("BEGIN IMMEDIATE"))
        outcomes = [_run_one(job, connection, driver) for job in jobs if job.claim()]
        self._patience(lambda: driver.execute("COMMIT"))
        self.stats = WriterStats(self.stats.units + len(outcomes), self.stats.commits + 1)
        return outcomes


def _run_one(job: Job[Any], connection: Connection, driver: Driver) -> Outcome:
    """Run a unit inside the group's transaction. An error ends here, unless the transaction ended with it."""
    if job.together:
        driver.execute("SAVEPOINT unit")
    try:
        outcome = Outcome(job, value=job.unit(connection))
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller, whatever it is
        outcome = Outcome(job, error=error)
    driver.close_cursors()
    if not driver.in_transaction:
        raise outcome.error or UsageError("a unit of work must not commit or roll back")
    if job.together:
        if outcome.error is not None:
            driver.execute("ROLLBACK TO unit")
        driver.execute("RELEASE unit")
    return outcome


@final
class _Reader:
    """Runs one unit at a time on a connection that cannot write."""

    most: Final = 1

    def __init__(self, connect: Callable[[], Connection], patience: Patience) -> None:
        self._connection = _Held(connect)
        self._patience = patience

    def serve(self, jobs: Sequence[Job[Any]]) -> None:
        """See ``Worker.serve``. A reader is rarely in anybody's way; if it is, the unit is repeated."""
        for job in jobs:
            if not job.claim():
                continue
            try:
                outcome = Outcome(job, value=self._patience(partial(self._read, job.unit)))
            except BaseException as error:  # noqa: BLE001 - nothing may end the thread while callers wait for it
                outcome = Outcome(job, error=error)
            hand_over([outcome])

    def close(self) -> None:
        """See ``Worker.close``."""
        self._connection.close()

    def _read(self, unit: Unit[T]) -> T:
        connection = self._connection.get()
        driver_of(connection).execute("BEGIN")
        try:
            return unit(connection)
        finally:
            self._connection.abandon_transaction()


@final
class _Held:
    """The one connection of a thread, made when it is first wanted."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._connection: Connection | None = None

    def get(self) -> Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def abandon_transaction(self) -> None:
        """Roll back what is open and end every result. Never raises: a connection that cannot is given up."""
        if self._connection is None:
            return
        driver = driver_of(self._connection)
        try:
            driver.close_cursors()
            if driver.in_transaction:
                driver.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop()

    def close(self) -> None:
        self.abandon_transaction()
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError, sqlite3.Error):
                connection.close()


def _connect(database: Sqlite, clock: Clock, *, query_only: bool) -> Connection:
    engine = sqlite_engine(database, clock=clock, query_only=query_only)
    connection = engine.connect()
    if database.path is None:
        upgrade_connection(connection)
    return connection


@final
@dataclass(frozen=True, slots=True)
class _Lanes:
    """What an open store consists of."""

    writer: _Writer
    writing: Lane
    reading: Lane
