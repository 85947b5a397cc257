"""Stores for the manager's tests: a real one of each kind, empty."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from tests.contract.emptying import emptied


@pytest.fixture(params=["sqlite", "postgres"])
async def store_dsn(request: pytest.FixtureRequest) -> str:
    """Where an empty, migrated database of each kind is."""
    name = {"sqlite": "sqlite_dsn", "postgres": "emptied_postgres_dsn"}[request.param]
    dsn = cast("str", request.getfixturevalue(name))
    if request.param == "postgres":
        units = open_units(parse_dsn(dsn))
        await units.open()
        await emptied(units)
        await units.close()
    return dsn


@pytest.fixture
async def store(store_dsn: str) -> AsyncIterator[SqlRunStore]:
    """An open store on it."""
    async with store_at(store_dsn) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgres"])
async def units(request: pytest.FixtureRequest) -> AsyncIterator[Units]:
    """Units of work on an empty database of each kind."""
    name = {"sqlite": "sqlite_dsn", "postgres": "emptied_postgres_dsn"}[request.param]
    opened = open_units(parse_dsn(cast("str", request.getfixturevalue(name))))
    await opened.open()
    if request.param == "postgres":
        await emptied(opened)
    yield opened
    await opened.close()
