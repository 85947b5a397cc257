"""A connection to SQLite as the store wants it: write-ahead log, full sync, our own functions, no waiting inside.

Whoever opens a database file on behalf of a store does it here. Which thread uses the connection, and when a
transaction begins, is the business of the caller.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Engine, NullPool, create_engine, event

from deerflow_runs.errors import InvalidDsn, UsageError
from deerflow_runs.store.database import Sqlite

Clock: TypeAlias = Callable[[], int]
"""Microseconds since 1970; called in the thread that runs the statement."""

OLDEST: Final = (3, 35, 0)
"""RETURNING appeared here."""

RESET_MENDED: Final = (3, 51, 3)
"""Before it, two connections that write at the same instant may damage the log when it starts anew (O34)."""

STATEMENTS: Final = 500
"""How many prepared statements a connection keeps: more than the store has."""


def wall_clock() -> int:
    """The host's clock is the server's clock: SQLite runs in this process."""
    return time.time_ns() // 1000


def require_version(found: tuple[int, int, int] = sqlite3.sqlite_version_info) -> None:
    """Refuse an SQLite library that does not know our statements."""
    if found < OLDEST:
        raise UsageError(
            f"SQLite {_dotted(found)} is too old, {_dotted(OLDEST)} is needed; use a Python built with a newer one"
        )


def wal_reset_risk(found: tuple[int, int, int] = sqlite3.sqlite_version_info) -> bool:
    """Whether several processes that write one file risk it with this SQLite library (O34)."""
    return found < RESET_MENDED


def opened_elsewhere(path: Path) -> bool:
    """Whether another process has the file open as we do. Only Linux can say without harm; elsewhere False.

    Asking the file itself would need a handle of our own, and closing that drops the locks SQLite holds here.
    """
    try:
        log = path.with_name(path.name + "-shm").stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    file = f"{os.major(log.st_dev):02x}:{os.minor(log.st_dev):02x}:{log.st_ino}"
    holders = {fields[-4] for line in locks.splitlines() if (fields := line.split())[-3] == file}
    return bool(holders - {str(os.getpid())})


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


# --- The engine -----------------------------------------------------------------------------------------------------


class Driver(sqlite3.Connection):
    """Remembers its cursors: a result that was not read to its end keeps everybody's COMMIT from succeeding."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open: list[sqlite3.Cursor] = []

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        cursor = super().cursor(*arguments, **options)
        self._open.append(cursor)
        return cursor

    def close_cursors(self) -> None:
        """End every result of the unit that has just run."""
        for cursor in self._open:
            cursor.close()
        self._open.clear()


def sqlite_engine(database: Sqlite, *, clock: Clock, query_only: bool = False) -> Engine:
    """An engine without a pool, whose connections begin and commit nothing by themselves."""
    arguments = database.connect_args() | {"factory": Driver, "isolation_level": None, "cached_statements": STATEMENTS}
    engine = create_engine(
        database.sqlalchemy_url(),
        connect_args=arguments,
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,  # an error's text ends in logs, and a run's input is none of theirs
    )

    # A flag is then rendered bare: SQLite does not see that "active = 1" implies an index's "WHERE active".
    engine.dialect.supports_native_boolean = True

    @event.listens_for(engine, "connect")
    def prepare(connection: Driver, _record: object) -> None:
        try:
            _prepare(connection, database, clock)
            if query_only:
                connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()  # nobody else would
            raise

    return engine


def _prepare(connection: Driver, database: Sqlite, clock: Clock) -> None:
    connection.create_function("dr_now", 0, clock)
    connection.create_function("dr_contains", 2, contains, deterministic=True)
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal" and database.path is not None:
        raise InvalidDsn(f"{database}: no write-ahead log can be kept there ({mode}); use a disk of this machine")
    connection.execute("PRAGMA synchronous = FULL")


def driver_of(connection: Connection) -> Driver:
    """The driver's connection below, for BEGIN, COMMIT and savepoints, which need nothing of SQLAlchemy."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, Driver)
    return driver


def is_locked(error: BaseException) -> bool:
    """Whether somebody else is in the way for a moment. The extended codes keep the kind in the low byte."""
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    return code is not None and code & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


# --- Containment ----------------------------------------------------------------------------------------------------


def contains(whole: str | None, part: str | None) -> bool | None:
    """PostgreSQL's ``@>`` on JSON text: objects by key, lists in any order, scalars by value; NULL for NULL."""
    if whole is None or part is None:
        return None
    have, want = _read(whole), _read_again(part)
    if isinstance(have, list) and not isinstance(want, dict | list):
        return any(_equal(item, want) for item in have)  # at the top only, as there
    return _holds(have, want)


def _holds(have: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return isinstance(have, dict) and all(key in have and _holds(have[key], value) for key, value in want.items())
    if isinstance(want, list):
        return isinstance(have, list) and all(any(_holds(item, value) for item in have) for value in want)
    return _equal(have, want)


def _equal(have: Any, want: Any) -> bool:
    """By value, where true is not 1 and 1.0 is."""
    return isinstance(have, bool) == isinstance(want, bool) and bool(have == want)


def _read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


@lru_cache(maxsize=16)
def _read_again(text: str) -> Any:
    """A filter is the same for every row it looks at."""
    return _read(text)
