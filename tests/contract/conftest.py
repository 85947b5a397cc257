"""Stores under test: the model, SQLite and PostgreSQL, each fresh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from deerflow_runs.testing.contract import ModelSubject, SqlSubject, Subject
from tests.contract.emptying import emptied


@pytest.fixture(params=["sqlite", "postgres"])
async def units(request: pytest.FixtureRequest) -> AsyncIterator[Units]:
    """Units of work on an empty database of each kind."""
    opened = await _opened(request)
    yield opened
    await opened.close()


@pytest.fixture
async def store(units: Units) -> SqlRunStore:
    """A store on an empty database of each kind."""
    return SqlRunStore(units)


@pytest.fixture(params=["model", "sqlite", "postgres"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Every store, as the contract sees it."""
    if request.param == "model":
        yield ModelSubject()
        return
    opened = await _opened(request)
    yield SqlSubject(SqlRunStore(opened), opened)
    await opened.close()


async def _opened(request: pytest.FixtureRequest) -> Units:
    where = {"sqlite": "sqlite_dsn", "postgres": "emptied_postgres_dsn"}
    opened = open_units(parse_dsn(cast("str", request.getfixturevalue(where[request.param]))))
    await opened.open()
    if request.param == "postgres":
        await emptied(opened)
    return opened
