"""A PostgreSQL server for tests: one that was given to us, or one that we start, kill and restart ourselves.

``open_server()`` is the way in. Every test works in a database made for it, so nothing here ever writes into a
database it did not create. No pytest in here, and no knowledge of our tables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from urllib.parse import quote, urlencode

from deerflow_runs.testing.postgres.binaries import NoPostgres, binary_places, find_binaries, unfit
from deerflow_runs.testing.postgres.cluster import PostgresCluster, Settings
from deerflow_runs.testing.postgres.server import PostgresServer

__all__ = [
    "NoPostgres",
    "PostgresCluster",
    "PostgresServer",
    "Settings",
    "binary_places",
    "find_binaries",
    "given_dsn",
    "open_server",
    "unfit",
]

DSN_VARIABLE = "DEERFLOW_RUNS_TEST_DSN"
LIBPQ_VARIABLE = "DEERFLOW_RUNS_TEST_USE_LIBPQ_ENV"


@contextlib.contextmanager
def open_server(*, durable: bool = False, settings: Settings | None = None) -> Iterator[PostgresServer]:
    """The server named by the environment, else a ``PostgresCluster`` started for this block.

    ``DEERFLOW_RUNS_TEST_DSN`` names a server whose user may create databases; ``DEERFLOW_RUNS_TEST_USE_LIBPQ_ENV=1``
    takes ``PGHOST`` and its relatives. A server that merely listens on this machine is never used uninvited.
    ``durable`` and ``settings`` are for a server of our own. Raises ``NoPostgres``.
    """
    given = given_dsn(os.environ)
    if given is not None:
        yield PostgresServer(given)
        return
    with PostgresCluster(durable=durable, settings=settings) as cluster:
        yield cluster


def given_dsn(environment: Mapping[str, str]) -> str | None:
    """The server that ``environment`` names for tests, if it names one."""
    if environment.get(DSN_VARIABLE):
        return environment[DSN_VARIABLE]
    if environment.get(LIBPQ_VARIABLE) != "1":
        return None
    host = environment.get("PGHOST", "127.0.0.1")
    address = urlencode({"host": host, "port": environment.get("PGPORT", "5432")})  # a host may be a directory
    login = quote(environment.get("PGUSER", "postgres"), safe="")
    if "PGPASSWORD" in environment:
        login += ":" + quote(environment["PGPASSWORD"], safe="")
    return f"postgresql://{login}@/{quote(environment.get('PGDATABASE', 'postgres'), safe='')}?{address}"
