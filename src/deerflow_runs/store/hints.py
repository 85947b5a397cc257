"""Hints that the kernel or the server takes back when a session's process dies (O27): how they are held and looked at.

On SQLite a locked file for each session, on PostgreSQL an advisory lock of its connection. What a free one means is
decided in ``protocol.judge``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Final, final

from sqlalchemy import BigInteger, Connection, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY

from deerflow_runs.model import WorkerId
from deerflow_runs.store.forks import DESCRIPTORS

TRIES: Final = 20
PAUSE: Final = 0.01
"""Seconds between two tries for a hint: somebody may just be looking at it, or our last connection is still ending."""


@cache
def boot_id() -> str:
    """What this machine's kernel called itself when it started; empty where nobody can say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# --- SQLite: a locked file ------------------------------------------------------------------------------------------

if sys.platform == "win32":

    def _locked(descriptor: int, *, shared: bool) -> bool:  # noqa: ARG001 - there is no flock
        return False

else:
    import fcntl

    def _locked(descriptor: int, *, shared: bool) -> bool:
        """Lock the file behind it, if nobody is in the way."""
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def folder_beside(database: Path) -> Path:
    """Where the sessions' files are, wherever the path leads: all processes must agree."""
    real = Path(os.path.realpath(database))
    return real.with_name(real.name + "-sessions")


def file_name(worker_id: WorkerId) -> str:
    """Readable, safe as a file's name, and different for each worker."""
    readable = re.sub(r"[^A-Za-z0-9]", "_", worker_id)[:60]
    return f"{readable}-{_digest(worker_id).hex()[:16]}.lock"


@final
class FileLock:
    """The locked file of one session, held from ``take`` to ``release`` or to the death of the process.

    A file that is gone says nothing about its session: only the lock of one that is there does.
    """

    def __init__(self, worker_id: WorkerId, path: Path, descriptor: int) -> None:
        self.worker_id: Final = worker_id
        self._path = path
        self._descriptor: int | None = descriptor

    @classmethod
    async def take(cls, folder: Path, worker_id: WorkerId) -> FileLock | None:
        """Make and lock the session's file; None where that cannot be done."""
        path = folder / file_name(worker_id)
        for _ in range(TRIES if sys.platform != "win32" else 0):
            try:
                if (descriptor := _open_locked(path)) is not None:
                    return cls(worker_id, path, descriptor)
            except OSError:
                return None
            await asyncio.sleep(PAUSE)
        return None

    @property
    def held(self) -> bool:
        """Whether others find it locked."""
        return self._descriptor is not None and _is_at(self._descriptor, self._path)

    def release(self) -> None:
        """Remove the file, then let its lock go: whoever finds the file finds it locked. Never raises."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            _close(descriptor)


def _open_locked(path: Path) -> int | None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    since = DESCRIPTORS.now()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
    try:
        safe = DESCRIPTORS.keep(descriptor, None, since=since)
        if safe and _locked(descriptor, shared=False) and _is_at(descriptor, path):
            return descriptor
    except OSError:
        _close(descriptor)
        raise
    _close(descriptor)
    return None


def is_free(path: Path) -> bool | None:
    """Whether nobody holds the lock of a session's file; None: there is no such file, or nobody can say."""
    descriptor = _opened(path)
    if descriptor is None:
        return None
    try:
        # Shared: two who look at once must not take each other for the session.
        free = _locked(descriptor, shared=True)
        return (True if _is_at(descriptor, path) else None) if free else False
    except OSError:
        return None
    finally:
        os.close(descriptor)


def remove_if_free(path: Path) -> None:
    """Remove the file of a session that is dead, unless its process still holds it."""
    descriptor = _opened(path)
    if descriptor is None:
        return
    try:
        if _locked(descriptor, shared=False) and _is_at(descriptor, path):
            path.unlink()
    except OSError:
        return
    finally:
        os.close(descriptor)


_NO_LINK: Final = getattr(os, "O_NOFOLLOW", 0)


def _opened(path: Path) -> int | None:
    if sys.platform == "win32":
        return None
    try:
        return os.open(path, os.O_RDONLY | _NO_LINK)
    except OSError:
        return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name: a lock on a removed file locks nobody out."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except OSError:
        return False


def _close(descriptor: int) -> None:
    DESCRIPTORS.forget(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)


# --- PostgreSQL: an advisory lock -----------------------------------------------------------------------------------


def advisory_key(worker_id: WorkerId) -> int:
    """The 64 bits that stand for a session among the advisory locks of a database; the same in every process."""
    return int.from_bytes(_digest(worker_id)[:8], "big", signed=True)


def _digest(worker_id: WorkerId) -> bytes:
    return hashlib.sha256(f"deerflow_runs session {worker_id}".encode()).digest()


def try_advisory_lock(connection: Connection, key: int) -> bool:
    """Let this connection hold the lock for as long as it lasts."""
    return bool(connection.scalar(_TRY, {"key": key}))


_TRY: Final = text("SELECT pg_try_advisory_lock(:key)").bindparams(bindparam("key", type_=BigInteger))


def held_keys(connection: Connection, keys: Collection[int]) -> frozenset[int]:
    """Which of the advisory locks are held, by whomever: one query for all."""
    found: Sequence[int] = connection.scalars(_HELD, {"keys": list(keys)}).all()
    return frozenset(found) & frozenset(keys)


_HELD: Final = text(
    "SELECT key FROM (SELECT CAST(classid AS bigint) << 32 | CAST(objid AS bigint) AS key FROM pg_locks"
    " WHERE locktype = 'advisory' AND objsubid = 1 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS held"
    " WHERE key = ANY(:keys)"
).bindparams(bindparam("keys", type_=ARRAY(BigInteger)))
