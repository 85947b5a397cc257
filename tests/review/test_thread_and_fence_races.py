"""Two races on PostgreSQL: who enters a thread just before its queue is due, and who raises a foreign fence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import Connection, text

from deerflow_runs.model import RunId, RunStatus, Session, Strategy
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor
from deerflow_runs.store import arrivals, fence
from deerflow_runs.store.dialect import POSTGRES
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from tests.contract.lives import HOUR, ME, OTHER, THREAD, Pause, delayed, executed, names, until_somebody_waits
from tests.rules import rule


@pytest.fixture
async def here(postgres_dsn: str) -> AsyncIterator[Units]:
    units = open_units(parse_dsn(postgres_dsn))
    await units.open()
    yield units
    await units.close()


@rule("O7", "O31", "I1")
async def test_a_waiting_run_of_a_dead_home_is_failed_although_somebody_enters_its_thread(here: Units) -> None:
    store = SqlRunStore(here)
    for worker_id in (ME, OTHER):
        await store.open_session(Session(worker_id))
    await delayed(store, "homeless", worker_id=OTHER, pinned=True, delay=HOUR)
    await delayed(store, "next", delay=HOUR)
    newcomer = Newcomer(run_id=RunId("n"), thread_id=THREAD, worker_id=ME, strategy=Strategy.ENQUEUE)
    entering = Pause()
    enters = entering.after(lambda connection: arrivals.enter(connection, POSTGRES, newcomer))
    entered = asyncio.create_task(here.transaction(enters))
    await entering.reached.wait()
    await executed(here, "UPDATE dr_runs SET due_at = 0 WHERE status = 'queued'")  # time passes
    await store.close_session(OTHER)
    swept = asyncio.create_task(store.take_over(Actor(ME), NOTHING_GIVEN, 10))
    await until_somebody_waits(here)
    entering.go_on.set()
    await entered
    assert names((await swept).ended) == ["homeless"]
    assert [(run.run_id, run.status) for run in await store.queue(THREAD)] == [("next", RunStatus.QUEUED)]


@rule("O16", "I2")
async def test_a_fence_is_not_raised_between_a_writers_look_and_its_commit(here: Units) -> None:
    await here.once(lambda connection: fence.raise_fence(connection, POSTGRES, THREAD, 1, 1))
    writing = Pause()

    def looks(connection: Connection) -> bool:
        return fence.passes(connection, POSTGRES, THREAD, 1, 1)

    def raises(connection: Connection) -> bool:
        connection.execute(text("SET LOCAL lock_timeout = '10s'"))
        return fence.raise_fence(connection, POSTGRES, THREAD, 1, 2)

    written = asyncio.create_task(here.transaction(writing.after(looks)))
    await writing.reached.wait()
    raised = asyncio.create_task(here.transaction(raises))
    waits = asyncio.create_task(until_somebody_waits(here))
    first: set[asyncio.Task[Any]] = (await asyncio.wait({raised, waits}, return_when=asyncio.FIRST_COMPLETED))[0]
    writing.go_on.set()
    waits.cancel()
    await asyncio.wait({waits})
    assert first == {waits}
    assert await written
    assert await raised
