"""A store on each kind of database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from deerflow_runs import store_at
from deerflow_runs.store.sql import SqlRunStore


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SqlRunStore]:
    """In memory, on a file, on a server."""
    dsn = ":memory:" if request.param == "memory" else request.getfixturevalue(f"{request.param}_dsn")
    async with store_at(dsn) as opened:
        yield opened
