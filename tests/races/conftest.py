"""Worlds for races, one for each kind of database. They last for a module: a test sets the scene by itself."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.units import open_units
from deerflow_runs.testing.postgres import PostgresServer
from tests.races.support import World, opened

PLAYERS = 3


@pytest.fixture(scope="module")
def module_postgres(postgres_cluster: PostgresServer, postgres_template: str) -> Iterator[str]:
    """A migrated database that the tests of a module share."""
    name = f"{postgres_template}_{secrets.token_hex(4)}"
    yield postgres_cluster.create_database(name, template=postgres_template)
    postgres_cluster.drop_database(name)


@pytest.fixture(scope="module")
def module_sqlite(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> str:
    """The same as a file."""
    path = tmp_path_factory.mktemp("races") / "runs.db"
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sqlite", "postgres"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Three players on a database of each kind."""
    dsn = cast("str", request.getfixturevalue(f"module_{request.param}"))
    async for each in _world(dsn):
        yield each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def postgres_world(module_postgres: str) -> AsyncIterator[World]:
    """The same for what only PostgreSQL can do: two transactions that are open at once."""
    async for each in _world(module_postgres):
        yield each


async def _world(dsn: str) -> AsyncIterator[World]:
    units = open_units(parse_dsn(dsn), connections=1)
    await units.open()
    async with opened(dsn, units, PLAYERS) as world:
        yield world
    await units.close()
