"""Stores under test: the model, SQLite and PostgreSQL, each fresh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from deerflow_runs.testing.contract import ModelSubject, SqlSubject, Subject


@pytest.fixture
async def units(dsn: str) -> AsyncIterator[Units]:
    """Units of work on a fresh database of each kind."""
    opened = open_units(parse_dsn(dsn))
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def store(units: Units) -> SqlRunStore:
    """A store on a fresh database of each kind."""
    return SqlRunStore(units)


@pytest.fixture(params=["model", "sqlite", "postgres"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Every store, as the contract sees it."""
    if request.param == "model":
        yield ModelSubject()
        return
    dsn = cast("str", request.getfixturevalue(f"{request.param}_dsn"))
    opened = open_units(parse_dsn(dsn))
    await opened.open()
    yield SqlSubject(SqlRunStore(opened), opened)
    await opened.close()
