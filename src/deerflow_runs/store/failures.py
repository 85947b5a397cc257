"""What an error of a database or a driver means, read from its codes and types: its message is never searched.

Whether to repeat is decided in ``retry``; here stands only what is known after the error.
"""

from __future__ import annotations

import sqlite3
import ssl
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import asyncpg
from sqlalchemy import exc as sa


class ErrorKind(StrEnum):
    """What is known after an error."""

    TRANSIENT = "transient"
    """Nothing was stored, and the same may succeed later."""
    UNKNOWN_OUTCOME = "unknown_outcome"
    """The connection or the disk failed: it may or may not have been stored. Every write may be repeated (O8)."""
    UNIQUE_VIOLATION = "unique_violation"
    """Another row has the key: an answer, not a failure."""
    PERMANENT = "permanent"
    """Repeating it changes nothing: a mistake in a statement, in the settings, or a damaged file."""

    @property
    def repeatable(self) -> bool:
        """Whether asking again may bring an answer."""
        return self in {ErrorKind.TRANSIENT, ErrorKind.UNKNOWN_OUTCOME}


_POSTGRES: Final = {
    "08001": ErrorKind.TRANSIENT,  # could not connect
    "08004": ErrorKind.TRANSIENT,  # connection rejected
    "08": ErrorKind.UNKNOWN_OUTCOME,  # connection exceptions; poolers say 08P01 for nearly everything
    "23505": ErrorKind.UNIQUE_VIOLATION,
    "25006": ErrorKind.TRANSIENT,  # read-only: a fail-over is under way and we are on the old primary
    "25P03": ErrorKind.TRANSIENT,  # idle in transaction for too long (O14): rolled back
    "25P04": ErrorKind.TRANSIENT,  # transaction took too long: rolled back
    "40001": ErrorKind.TRANSIENT,  # serialization failure
    "40003": ErrorKind.UNKNOWN_OUTCOME,  # statement completion unknown
    "40P01": ErrorKind.TRANSIENT,  # deadlock
    "53": ErrorKind.TRANSIENT,  # too many connections, out of memory, disk full: no answer either
    "55P03": ErrorKind.TRANSIENT,  # lock not available
    "57014": ErrorKind.TRANSIENT,  # statement timeout
    "57P01": ErrorKind.UNKNOWN_OUTCOME,  # administrator's shutdown, or a terminated backend
    "57P02": ErrorKind.UNKNOWN_OUTCOME,  # crash of another backend
    "57P03": ErrorKind.TRANSIENT,  # the server starts or stops
    "57P05": ErrorKind.UNKNOWN_OUTCOME,  # the session was idle for too long
    "58030": ErrorKind.UNKNOWN_OUTCOME,  # input/output error
}
"""By SQLSTATE, else by its class (the first two characters); the rest is permanent."""

_SQLITE: Final = {
    sqlite3.SQLITE_BUSY: ErrorKind.TRANSIENT,
    sqlite3.SQLITE_CANTOPEN: ErrorKind.TRANSIENT,  # also when the process is out of file descriptors
    sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY: ErrorKind.UNIQUE_VIOLATION,
    sqlite3.SQLITE_CONSTRAINT_ROWID: ErrorKind.UNIQUE_VIOLATION,
    sqlite3.SQLITE_CONSTRAINT_UNIQUE: ErrorKind.UNIQUE_VIOLATION,
    sqlite3.SQLITE_FULL: ErrorKind.TRANSIENT,  # a full disk is no answer; it was rolled back
    sqlite3.SQLITE_INTERRUPT: ErrorKind.TRANSIENT,
    sqlite3.SQLITE_IOERR: ErrorKind.UNKNOWN_OUTCOME,
    sqlite3.SQLITE_IOERR_CORRUPTFS: ErrorKind.PERMANENT,
    sqlite3.SQLITE_IOERR_DATA: ErrorKind.PERMANENT,  # a page's checksum is wrong
    sqlite3.SQLITE_LOCKED: ErrorKind.TRANSIENT,
    sqlite3.SQLITE_NOMEM: ErrorKind.TRANSIENT,
    sqlite3.SQLITE_PROTOCOL: ErrorKind.TRANSIENT,  # lost a race for the locks of the write-ahead log
    sqlite3.SQLITE_SCHEMA: ErrorKind.TRANSIENT,
}
"""By extended result code, else by the primary code (its lowest byte); the rest is permanent."""

_TYPES: Final[tuple[tuple[type[BaseException], ErrorKind], ...]] = (
    (asyncpg.ClientConfigurationError, ErrorKind.PERMANENT),
    (asyncpg.DataError, ErrorKind.PERMANENT),
    (asyncpg.UnsupportedClientFeatureError, ErrorKind.PERMANENT),
    (asyncpg.UnsupportedServerFeatureError, ErrorKind.PERMANENT),
    (asyncpg.TargetServerAttributeNotMatched, ErrorKind.TRANSIENT),  # no host is the primary: a fail-over
    (asyncpg.OutdatedSchemaCacheError, ErrorKind.TRANSIENT),
    (asyncpg.InterfaceError, ErrorKind.UNKNOWN_OUTCOME),  # a connection that is closed
    (asyncpg.InternalClientError, ErrorKind.UNKNOWN_OUTCOME),
    (ssl.SSLCertVerificationError, ErrorKind.PERMANENT),
    (OSError, ErrorKind.UNKNOWN_OUTCOME),  # refused, reset, unreachable, and TimeoutError
    (sa.TimeoutError, ErrorKind.TRANSIENT),  # no connection of the pool became free
    (sa.PendingRollbackError, ErrorKind.TRANSIENT),  # the connection failed before; nothing was sent
    (sa.DisconnectionError, ErrorKind.UNKNOWN_OUTCOME),
)
"""Errors that have no code, the first that fits."""


def classify(error: BaseException) -> ErrorKind:
    """What is known after ``error``, which may be the driver's own or wrapped by SQLAlchemy."""
    links = list(chain(error))
    for link in links:
        kind = _by_code(link)
        if kind is not None:
            return kind
    for link in reversed(links):
        for cls, kind in _TYPES:
            if isinstance(link, cls):
                return kind
    lost = any(isinstance(link, sa.DBAPIError) and link.connection_invalidated for link in links)
    return ErrorKind.UNKNOWN_OUTCOME if lost else ErrorKind.PERMANENT


def error_code(error: Exception) -> str:
    """The database's code of an error for messages: SQLSTATE, SQLite's name, else the type. Holds no values."""
    links = list(chain(error))
    codes = (_sqlstate(link) or getattr(link, "sqlite_errorname", None) for link in links)
    return next((code for code in codes if code), type(links[-1]).__name__)


def driver_error(error: Exception) -> BaseException:
    """The error as the driver raised it: SQLAlchemy's wrapper shows the statement's parameters."""
    *_, last = chain(error)
    return last


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it wraps, from the outside in; an ending by cancellation is not an error's cause."""
    seen: set[int] = set()
    link: BaseException | None = error
    while isinstance(link, Exception) and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = (link.orig if isinstance(link, sa.StatementError) else None) or link.__cause__


def _by_code(link: BaseException) -> ErrorKind | None:
    if isinstance(link, asyncpg.InvalidCachedStatementError):
        return ErrorKind.TRANSIENT  # a migration changed a table; the plan is made anew
    state = _sqlstate(link)
    if state is not None:
        return _POSTGRES.get(state) or _POSTGRES.get(state[:2], ErrorKind.PERMANENT)
    code = getattr(link, "sqlite_errorcode", None) if isinstance(link, sqlite3.Error) else None
    if code is not None:
        return _SQLITE.get(code) or _SQLITE.get(code & 0xFF, ErrorKind.PERMANENT)
    return None


def _sqlstate(link: BaseException) -> str | None:
    state = getattr(link, "sqlstate", None)
    return state if isinstance(state, str) and len(state) == 5 else None
