"""When a worker sweeps, on both databases: at its phase, in its interval, sooner for due runs, later if it failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deerflow_runs.manager.lease import StopCause
from deerflow_runs.model import RunStatus, micros
from deerflow_runs.observe import RunPromoted, RunSettled, SweepEnded, SweepFailed
from deerflow_runs.protocol.recovery import sweep_phase
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from tests.contract.lives import executed
from tests.manager.workers import Worker, store_without_hints, without_runs
from tests.rules import rule

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
async def store(store_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_without_hints(store_dsn) as store:
        yield store


@pytest.fixture
def units(store: SqlRunStore) -> Units:
    return store.units


@pytest.fixture
async def worker(store: SqlRunStore) -> AsyncIterator[Worker]:
    """A worker that runs and has swept once. Its phase is about half of its interval of 2 s."""
    worker = Worker(store)
    await worker.opens()
    while not 0.9 < sweep_phase(worker.me, 2.0) < 1.1:
        await worker.opens()
    async with worker.running():
        await worker.until_told(SweepEnded)
        await worker.until_idle()
        yield worker
        await worker.is_killed()


async def sweeps_within(worker: Worker, seconds: float) -> int:
    """How many sweeps so much time brings."""
    before = len(worker.told(SweepEnded))
    await worker.clock.advance(seconds)
    await worker.until_idle()
    return len(worker.told(SweepEnded)) - before


@rule("O32")
async def test_the_sweep_after_the_first_comes_at_the_phase_of_the_worker(worker: Worker) -> None:
    assert await sweeps_within(worker, 0.8) == 0
    assert await sweeps_within(worker, 0.4) == 1


@rule("O26", "O32")
async def test_from_then_on_sweeps_come_in_their_interval(worker: Worker) -> None:
    await sweeps_within(worker, 1.2)
    assert [await sweeps_within(worker, 2.0) for _ in range(3)] == [1, 1, 1]


@rule("O7", "I7")
async def test_a_delayed_run_that_is_known_brings_the_next_sweep_forward(worker: Worker, units: Units) -> None:
    await worker.stage.waits("later", delay=micros(0.4))
    await sweeps_within(worker, 1.2)
    await executed(units, "UPDATE dr_runs SET due_at = 1")
    assert await sweeps_within(worker, 0.5) == 1
    assert [told.run_id for told in worker.told(RunPromoted)] == ["later"]


@rule("O26", "I8")
async def test_after_a_failure_sweeps_come_again_at_longer_and_longer_pauses(worker: Worker, units: Units) -> None:
    async with without_runs(units):
        await sweeps_within(worker, 1.2)
        pauses = [await sweeps_within(worker, seconds) for seconds in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)]
    assert pauses == [1] * 7
    assert [told.failures for told in worker.told(SweepFailed)] == list(range(1, 9))
    assert await sweeps_within(worker, 5.0) == 1
    assert len(worker.told(SweepFailed)) == 8


@rule("O26")
async def test_sweeps_of_one_worker_never_run_into_each_other(worker: Worker) -> None:
    before = len(worker.events)
    await worker.stage.is_orphaned("left")
    both = await asyncio.gather(worker.reconciler.sweep(), worker.reconciler.sweep())
    assert [swept.total for swept in both] == [1, 0]
    assert [told.changed for told in worker.events[before:] if isinstance(told, SweepEnded)] == [1, 0]


@rule("I8")
async def test_a_run_whose_time_is_up_is_stopped_and_ends_as_timed_out(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("slow", run_timeout=micros(3)))
    causes = []
    for seconds in (2.0, 1.5):
        await worker.lives(seconds)
        causes.append(held.lease.stop_cause)
    assert causes == [None, StopCause.TIMEOUT]
    await worker.until_told(RunSettled)
    assert (await worker.row(held.run)).status is RunStatus.TIMEOUT


@rule("I8")
async def test_a_run_whose_time_is_up_is_stopped_while_the_store_is_away(worker: Worker, units: Units) -> None:
    held = await worker.starts(await worker.admits("slow", run_timeout=micros(3)))
    async with without_runs(units):
        await worker.clock.advance(3.5)
        assert held.lease.stop_cause is StopCause.TIMEOUT
