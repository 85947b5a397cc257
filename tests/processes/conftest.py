"""Fleets of worker processes: each test runs on SQLite and on Postgres, and its history is judged at its end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from deerflow_runs.store.migrate import upgrade_async
from deerflow_runs.testing.postgres import PostgresCluster
from tests.processes.fleet import Database, Fleet, fleet_on


@pytest.fixture
def soak() -> bool:
    """Whether there is time for many rounds: ``DEERFLOW_RUNS_SOAK=1``."""
    return os.environ.get("DEERFLOW_RUNS_SOAK") == "1"


@pytest.fixture(params=["sqlite", "postgres"])
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet on a file, or on a database of the session's server, which must be left running."""
    dsn = cast("str", request.getfixturevalue(f"{request.param}_dsn"))
    async with fleet_on(Database(dsn, tmp_path), tmp_path) as fleet:
        yield fleet


@pytest.fixture
async def sqlite_fleet(sqlite_dsn: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    """For what only a file can do."""
    async with fleet_on(Database(sqlite_dsn, tmp_path), tmp_path) as fleet:
        yield fleet


@pytest.fixture
async def postgres_fleet(postgres_dsn: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    """For what only a network can do."""
    async with fleet_on(Database(postgres_dsn, tmp_path), tmp_path) as fleet:
        yield fleet


@pytest.fixture(params=["sqlite", "postgres"])
async def breakable_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    """The same as ``fleet``, and a server of this test alone (``database.cluster``), which may be killed."""
    cluster: PostgresCluster | None = None
    if request.param == "sqlite":
        dsn = cast("str", request.getfixturevalue("sqlite_dsn"))
    else:
        cluster = cast("PostgresCluster", request.getfixturevalue("private_postgres"))
        dsn = cluster.dsn()
        await upgrade_async(dsn)
    async with fleet_on(Database(dsn, tmp_path, cluster), tmp_path) as fleet:
        yield fleet
