"""Owners that stop in the middle: what they hold comes free, and what they began did not happen."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator

import pytest

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Micros, RunId, SessionState, Strategy
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted
from deerflow_runs.store.connections import Limits, PostgresUnits
from deerflow_runs.store.database import Postgres, Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.writer import SqliteUnits
from tests.races.stepping import ONCE, Player, PostgresSteps
from tests.races.support import ME, OTHER, THREAD, World, apply, opened, queued, running, the_active
from tests.rules import rule

HELD = running("held", queue_behind=True)


@pytest.fixture
async def fresh(postgres_dsn: str) -> AsyncIterator[World]:
    """A world without players on a database of this test alone, whose store waits a few seconds once."""
    database = parse_dsn(postgres_dsn)
    assert isinstance(database, Postgres)
    units = PostgresUnits(database, connections=2, limits=Limits(lock=5.0), policy=ONCE)
    await units.open()
    async with opened(postgres_dsn, units, 0) as world:
        yield world
    await units.close()


@rule("O14", "T16")
async def test_an_owner_that_stops_inside_its_transaction_is_cut_off_and_nothing_of_it_happened(fresh: World) -> None:
    """The server does that once it has been idle for long enough; whoever waits goes on."""
    await fresh.set(HELD, queued("waits"))
    assert fresh.observer is not None
    steps = PostgresSteps(fresh.dsn, fresh.observer, Limits(idle_in_transaction=0.2))
    await steps.open()
    stopped = Player(steps)
    await stopped.begin(apply(HELD, RunEvent.SETTLE_SUCCESS))
    while stopped.at != "COMMIT":
        await stopped.step()
    asked = Newcomer(run_id=RunId("new"), thread_id=THREAD, worker_id=OTHER, strategy=Strategy.INTERRUPT)
    admitted = await SqlRunStore(fresh.units).admit(asked)
    assert isinstance(admitted, Admitted)
    assert admitted.incumbent is not None
    assert admitted.incumbent.run_id == "held"
    with pytest.raises(StoreUnavailable):
        await stopped.finish()
    await fresh.look()
    assert the_active(await fresh.rows()) == "held"
    await steps.close()


@rule("O14", "O26", "O34", "T16")
async def test_a_file_that_somebody_blocks_is_no_verdict_on_anybody(sqlite_dsn: str) -> None:
    database = parse_dsn(sqlite_dsn)
    assert isinstance(database, Sqlite)
    assert database.path is not None
    units = SqliteUnits(database, lock_timeout=0.05, policy=ONCE)
    await units.open()
    async with opened(sqlite_dsn, units, 0) as world:
        await world.set(HELD, queued("waits"))
        before = await world.rows()
        store = SqlRunStore(units)
        blocking = sqlite3.connect(database.path, isolation_level=None)
        blocking.execute("BEGIN IMMEDIATE")
        verdict = Verdict(ME, beat=0, how=How.PROOF, grace=Micros(0))
        verbs = [
            store.declare_dead(verdict),
            store.take_over(Actor(OTHER), Given(), 10),
            store.apply(HELD.key, RunEvent.REQUEST_CANCEL, Actor(OTHER)),
            store.renew(OTHER),
        ]
        answers = await asyncio.gather(*verbs, return_exceptions=True)
        assert [type(answer) for answer in answers if not hasattr(answer, "total")] == [StoreUnavailable] * 3
        assert await world.rows() == before
        assert {session.state for session in await store.sessions() if session.worker_id == ME} == {SessionState.LIVE}
        blocking.execute("ROLLBACK")
        blocking.close()
        assert await store.declare_dead(verdict)
    await units.close()
