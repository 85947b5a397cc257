"""One upgrade at a time on one database: the lock, polled, that every upgrade holds from before its first look.

Polled, because a statement that waits for a lock is itself what ``CREATE INDEX CONCURRENTLY`` waits for. Both locks
belong to the kernel or the server and end with their holder, also by kill -9. Nothing here knows what is upgraded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from deerflow_runs.errors import StoreUnavailable

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_CLASS, _NUMBER = 0x64726D67, 1
"""Two numbers: a key space apart from that of one number, where the threads' locks are (O7)."""

_TRY: Final = text("SELECT pg_try_advisory_lock(:class, :number)")
_HOLDERS: Final = text(
    "SELECT l.pid, a.application_name FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.classid = :class AND l.objid = :number AND l.objsubid = 2 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_KEY: Final = {"class": _CLASS, "number": _NUMBER}


@final
@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the lock, in seconds; setting ``given_up`` ends the wait early, from any thread."""

    seconds: float
    given_up: threading.Event = field(default_factory=threading.Event)

    def pauses(self) -> Iterator[float]:
        """Pauses between attempts, with jitter, as long as there is time; at least one, so one attempt is made."""
        deadline = time.monotonic() + self.seconds
        yield 0.0
        while time.monotonic() < deadline and not self.given_up.is_set():
            yield random.uniform(0.02, 0.08)


@contextlib.contextmanager
def sqlite_lock(path: Path, patience: Patience) -> Iterator[None]:
    """Hold the file ``<database>-migrate.lock``; it stays behind, since removing it would let two hold it.

    A file of its own: closing any descriptor of the database itself would drop SQLite's locks in this process.
    """
    database = path.resolve()  # two names of one file are one lock
    file = database.with_name(database.name + "-migrate.lock")
    try:
        handle = file.open("a+")
    except OSError as error:
        raise StoreUnavailable(f"cannot open {file}, the lock of the upgrade: {error.strerror}") from error
    with handle:
        for pause in patience.pauses():
            time.sleep(pause)
            if _lock(handle):
                break
        else:
            raise StoreUnavailable(f"another upgrade (process {_holder(handle)}) still holds {file}; try again later")
        try:
            yield
        finally:
            _unlock(handle)


def _lock(handle: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            handle.seek(0)
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return True


def _unlock(handle: IO[str]) -> None:
    """By word, not by closing: a child forked in between would keep the lock open."""
    if sys.platform == "win32":
        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)


def _holder(handle: IO[str]) -> str:
    with contextlib.suppress(OSError):
        handle.seek(0)
        return handle.read() or "unknown"
    return "unknown"


async def postgres_lock(connection: AsyncConnection, patience: Patience) -> None:
    """Take the advisory lock, which lasts until the connection closes. No transaction stays open while waiting."""
    for pause in patience.pauses():
        await asyncio.sleep(pause)
        taken = await connection.scalar(_TRY, _KEY)
        await connection.commit()
        if taken:
            return
    raise StoreUnavailable(f"another upgrade ({await _holders(connection)}) still holds the lock; try again later")


async def _holders(connection: AsyncConnection) -> str:
    rows = (await connection.execute(_HOLDERS, _KEY)).all()
    return ", ".join(f"server process {pid} {name!r}" for pid, name in rows) or "unknown"
