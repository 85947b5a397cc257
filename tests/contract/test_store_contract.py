"""The shipped contract, on the model store, SQLite and PostgreSQL.

Each database is opened once and emptied before every sentence: connections and prepared statements are most of what a
short test costs.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from deerflow_runs.testing.contract import CHECKS, Check, ModelSubject, SqlSubject, Subject
from tests.contract.emptying import emptied
from tests.rules import rule

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(params=["model", "sqlite", "postgres"], scope="module", loop_scope="module")
async def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Units | None]:
    """Units of work for all sentences; the model needs none."""
    match request.param:
        case "model":
            yield None
            return
        case "sqlite":
            template: Path = request.getfixturevalue("sqlite_template")
            dsn = f"sqlite:///{shutil.copyfile(template, tmp_path_factory.mktemp('contract') / 'runs.db')}"
        case _:
            dsn = request.getfixturevalue("emptied_postgres_dsn")
    opened = open_units(parse_dsn(dsn))
    await opened.open()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def subject(kept: Units | None) -> Subject:
    """A store that holds nothing yet."""
    if kept is None:
        return ModelSubject()
    await emptied(kept)
    return SqlSubject(SqlRunStore(kept), kept)


@pytest.mark.parametrize("check", [pytest.param(check, id=str(check), marks=rule(*check.rules)) for check in CHECKS])
async def test_every_store_keeps_the_contract(check: Check, subject: Subject) -> None:
    await check(subject)
