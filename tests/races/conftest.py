"""Worlds for races, one for each kind of database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.units import open_units
from tests.races.support import World, opened

PLAYERS = 3


@pytest.fixture
async def world(dsn: str) -> AsyncIterator[World]:
    """Three players on a fresh database of each kind."""
    async for each in _world(dsn):
        yield each


@pytest.fixture
async def postgres_world(postgres_dsn: str) -> AsyncIterator[World]:
    """The same for what only PostgreSQL can do: two transactions that are open at once."""
    async for each in _world(postgres_dsn):
        yield each


async def _world(dsn: str) -> AsyncIterator[World]:
    units = open_units(parse_dsn(dsn), connections=1)
    await units.open()
    async with opened(dsn, units, PLAYERS) as world:
        yield world
    await units.close()
