"""A running server and what may be done on it: make, copy and drop databases.

Statements go through short-lived connections of their own. Whether the server is ours to kill is the business of
``cluster.py``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")

_T = TypeVar("_T")


class PostgresServer:
    """A running server on which databases may be made. Names are plain lower-case identifiers; others are refused.

    The methods block, from any thread, also from one that runs an event loop.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = urlsplit(dsn)
        self._maintenance = self._dsn.path.removeprefix("/") or "postgres"

    def dsn(self, database: str | None = None) -> str:
        """A ``postgresql://`` URL, password included, for ``database`` or for the one we administrate from."""
        return urlunsplit(self._dsn._replace(path=f"/{database or self._maintenance}"))

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Make the database, as a copy of ``template`` if given, and return its URL. Nobody may use the template."""
        copy = "" if template is None else f" TEMPLATE {_identifier(template)}"
        self.execute(f"CREATE DATABASE {_identifier(name)}{copy}")
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop the database if it exists, closing the connections that are still open to it."""
        self.execute(f"DROP DATABASE IF EXISTS {_identifier(name)} WITH (FORCE)")

    def ensure_template(self, name: str, build: Callable[[str], None]) -> str:
        """Make the database ``name`` by ``build(url)``, once, whoever asks first; the others wait. Returns ``name``.

        A ``build`` that raises leaves no template behind. It runs in a thread without an event loop.
        """
        return _run(self._ensure_template(name, build))

    def execute(self, statement: str, *, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement, outside a transaction, on a connection of its own."""
        return _run(self._execute(statement, database))

    async def _execute(self, statement: str, database: str | None) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(self.dsn(database))
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    async def _ensure_template(self, name: str, build: Callable[[str], None]) -> str:
        unfinished = f"{name[:58]}_new"
        connection = await asyncpg.connect(self.dsn())
        try:
            await connection.execute("SELECT pg_advisory_lock(hashtext($1))", name)
            if await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", name):
                return name
            await connection.execute(f"DROP DATABASE IF EXISTS {_identifier(unfinished)} WITH (FORCE)")
            await connection.execute(f"CREATE DATABASE {_identifier(unfinished)}")
            await asyncio.to_thread(build, self.dsn(unfinished))
            await connection.execute(f"ALTER DATABASE {_identifier(unfinished)} RENAME TO {_identifier(name)}")
            return name
        finally:
            await connection.close()


def _identifier(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ValueError(f"not a plain lower-case database name: {name!r}")
    return f'"{name}"'


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """In a thread of its own: the caller's thread may be running an event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="postgres-admin") as pool:
        return pool.submit(asyncio.run, work).result()
