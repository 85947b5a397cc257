"""A worker takes work, on both databases: as much as it has slots for, what it can run, and when somebody says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deerflow_runs.manager.claiming import Claiming, was_begun
from deerflow_runs.manager.executor import LocalExecutor
from deerflow_runs.manager.registry import Phase
from deerflow_runs.model import OnOrphan, Run, WorkerId
from deerflow_runs.observe import ClaimFailed, RunClaimed, RunHandedOver, RunSettled, SweepEnded
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from tests.manager.workers import AGENT, NEEDS_AGENT, Worker, store_without_hints, thread_of, without_runs
from tests.rules import rule

pytestmark = pytest.mark.timeout(30)

NEIGHBOUR = WorkerId("host:neighbour")
AT_ONCE: dict[str, Any] = {"resumes_per_second": 1000.0}
"""What has been begun elsewhere is resumed without delay."""


@pytest.fixture
async def store(store_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_without_hints(store_dsn) as store:
        yield store


@pytest.fixture
def units(store: SqlRunStore) -> Units:
    return store.units


@asynccontextmanager
async def at_work(store: SqlRunStore, **settings: Any) -> AsyncIterator[Worker]:
    """A worker that has swept once, has saved up what it may resume, and has found nothing to do."""
    worker = Worker(store, **settings)
    await worker.opens()
    async with worker.running():
        await worker.until_told(SweepEnded)
        await worker.until_idle()
        await saves_up(worker)
        try:
            yield worker
        finally:
            await worker.is_killed()


async def saves_up(worker: Worker) -> None:
    """It has been open for a while, in peace."""
    await worker.lives(1.0)
    await worker.until_idle()


async def looks(worker: Worker) -> None:
    """So much time passes that it asks for work again."""
    await worker.lives(1.25)


async def vacant(worker: Worker, run_id: str, **asked: Any) -> Run:
    return await worker.admits(run_id, take=False, **asked)


# --- When -----------------------------------------------------------------------------------------------------------


@rule("O31", "I8")
async def test_a_vacant_run_is_taken_up_with_the_next_look(store: SqlRunStore) -> None:
    async with at_work(store) as worker:
        await vacant(worker, "r", kwargs={"question": "why"})
        await looks(worker)
        await worker.agent.until_begun(1)
        assert worker.agent.payloads == [{"question": "why"}]
        assert [told.run_id for told in worker.told(RunClaimed)] == ["r"]


@rule("O33", "I8")
async def test_a_run_is_taken_up_as_soon_as_somebody_says_that_there_is_work(store: SqlRunStore) -> None:
    async with at_work(store) as worker:
        await vacant(worker, "r")
        worker.ground.work.set()
        await worker.agent.until_begun(1)


@rule("O27")
async def test_one_sweep_precedes_the_first_claim(store: SqlRunStore) -> None:
    worker = Worker(store, **AT_ONCE)
    await worker.opens()
    await vacant(worker, "r")
    await worker.lives(1.0)  # so that it may resume whatever there is
    async with worker.running():
        await worker.until_told(SweepEnded)
        assert worker.told(RunClaimed) == []
        await worker.clock.until_sleeping(1)
        await worker.clock.advance(1.25)
        await worker.until_told(RunClaimed)
        await worker.is_killed()


# --- How many -------------------------------------------------------------------------------------------------------


@rule("I19")
async def test_a_worker_takes_no_more_than_it_has_slots_for(store: SqlRunStore) -> None:
    async with at_work(store, max_concurrent_runs=2) as worker:
        for number in range(4):
            await vacant(worker, f"r{number}")
        worker.ground.work.set()
        await worker.agent.until_begun(2)
        worker.ground.work.set()
        await looks(worker)
        await worker.until_idle()
        assert len(worker.told(RunClaimed)) == 2
        worker.agent.go_on.set()
        await worker.until_told(RunSettled, 4)


@rule("I19")
async def test_a_slot_that_is_kept_for_an_admission_is_not_claimed_for(store: SqlRunStore) -> None:
    async with at_work(store, max_concurrent_runs=1) as worker:
        assert worker.registry.take_slot()
        await vacant(worker, "r")
        worker.ground.work.set()
        await looks(worker)
        await worker.until_idle()
        assert worker.told(RunClaimed) == []
        worker.registry.arrived()
        await looks(worker)
        await worker.until_told(RunClaimed)


@rule("I19")
async def test_a_claim_leaves_slots_to_admissions_that_come_meanwhile(store: SqlRunStore) -> None:
    async with at_work(store, max_concurrent_runs=8, **AT_ONCE) as worker:
        for number in range(2):
            await vacant(worker, f"r{number}")
        free: list[int] = []
        worker.also = lambda event: free.append(worker.registry.free_slots) if isinstance(event, RunClaimed) else None
        worker.ground.work.set()
        await worker.until_told(RunClaimed, 2)
        assert min(free) > 0


@rule("I19")
async def test_a_worker_without_slots_leaves_everything_to_others(store: SqlRunStore) -> None:
    async with at_work(store, max_concurrent_runs=0) as worker:
        await vacant(worker, "r")
        worker.ground.work.set()
        await looks(worker)
        await worker.until_idle()
        assert worker.told(RunClaimed) == []


# --- What -----------------------------------------------------------------------------------------------------------


@rule("O31")
async def test_what_this_worker_cannot_run_stays_where_it_is(store: SqlRunStore) -> None:
    async with at_work(store) as worker:
        await vacant(worker, "odd", required_capabilities=frozenset({"gpu"}))
        await vacant(worker, "usual")
        worker.ground.work.set()
        await worker.agent.until_begun(1)
        assert [told.run_id for told in worker.told(RunClaimed)] == ["usual"]


@rule("O31", "I8")
async def test_a_local_run_whose_turn_has_come_is_carried_out_by_whoever_expects_it(store: SqlRunStore) -> None:
    async with at_work(store) as worker:
        first = await worker.stage.starts("first", worker_id=worker.me)
        waiting = await worker.stage.waits("second", worker_id=worker.me, pinned=True)
        expected = worker.registry.expect(waiting.key, LocalExecutor(lambda lease: worker.agent.run(lease, {})))
        await worker.stage.ends(first)
        worker.ground.work.set()
        await worker.agent.until_begun(1)
        assert (await expected.granted).run.run_id == "second"


@rule("O12")
async def test_a_run_that_nobody_here_expects_waits_for_whoever_comes(store: SqlRunStore) -> None:
    async with at_work(store) as worker:
        await vacant(worker, "r", executor=None, required_capabilities=frozenset(), pinned=True)
        worker.ground.work.set()
        await worker.until_told(RunClaimed)
        (held,) = worker.registry.all()
        assert held.phase is Phase.UNATTACHED


@rule("O12", "O35")
@pytest.mark.parametrize("leaving", ["suspended", "draining"])
async def test_a_worker_that_may_not_go_on_claims_nothing(leaving: str, store: SqlRunStore) -> None:
    async with at_work(store) as worker:
        if leaving == "draining":
            worker.session.drain()
        else:
            worker.session.refused()
        await vacant(worker, "r")
        worker.ground.work.set()
        await worker.clock.advance(1.25)
        await worker.until_idle()
        assert worker.told(RunClaimed) == []


# --- What others left -----------------------------------------------------------------------------------------------


@rule("O32")
async def test_right_after_it_opened_a_worker_resumes_slowly(store: SqlRunStore) -> None:
    worker = Worker(store, resumes_per_second=1.0)
    await worker.opens()
    for number in range(3):
        await left_behind(worker, f"r{number}")
    async with worker.running():
        await worker.until_told(SweepEnded)
        claimed = []
        for _ in range(3):
            await worker.until_idle()
            await worker.lives(1.0)
            await worker.until_idle()
            claimed.append(len(worker.told(RunClaimed)))
        assert claimed == [1, 2, 3]
        await worker.is_killed()


@rule("O32")
async def test_after_a_reconnect_what_peace_has_saved_up_is_gone(store: SqlRunStore) -> None:
    async with at_work(store, resumes_per_second=1.0) as worker:
        await worker.lives(10.0)
        await worker.until_idle()
        worker.reconciler.reconnected()
        for number in range(5):
            await left_behind(worker, f"r{number}")
        worker.ground.work.set()
        await worker.clock.until_sleeping(3)
        await worker.lives(1.0)
        await worker.until_idle()
        assert len(worker.told(RunClaimed)) == 1


@rule("O32")
async def test_in_peace_all_that_others_left_is_taken_up_at_once(store: SqlRunStore) -> None:
    async with at_work(store, resumes_per_second=1.0) as worker:
        await worker.lives(10.0)
        await worker.until_idle()
        for number in range(5):
            await left_behind(worker, f"r{number}")
        worker.ground.work.set()
        await worker.until_told(RunClaimed, 5)


@rule("O32")
async def test_runs_that_nobody_has_begun_cost_nothing_of_it(store: SqlRunStore) -> None:
    async with at_work(store, resumes_per_second=1.0) as worker:
        for number in range(5):
            await vacant(worker, f"r{number}")
        worker.ground.work.set()
        await worker.until_told(RunClaimed, 5)


async def left_behind(worker: Worker, run_id: str) -> Run:
    """A run that was begun elsewhere, and that waits for somebody to go on with it."""
    asked = {"executor": AGENT, "required_capabilities": NEEDS_AGENT}
    run = await worker.stage.is_orphaned(run_id, thread_of(run_id), **asked)
    await worker.stage.sweeps()
    left = await worker.row(run)
    assert left.vacant
    assert was_begun(left)
    return left


# --- Failures -------------------------------------------------------------------------------------------------------


@rule("I8")
async def test_a_claim_that_failed_is_tried_again(store: SqlRunStore, units: Units) -> None:
    async with at_work(store) as worker:
        await vacant(worker, "r")
        async with without_runs(units):
            worker.ground.work.set()
            (failed,) = await worker.until_told(ClaimFailed)
        assert failed.failures == 1
        await worker.until_idle()
        await worker.clock.advance(0.2)
        await worker.until_told(RunClaimed)


@rule("O35")
async def test_what_is_claimed_while_the_drain_begins_is_handed_over(store: SqlRunStore) -> None:
    worker = Worker(store)
    await worker.opens()
    run = await vacant(worker, "r", on_orphan=OnOrphan.RESUME)
    worker.session.drain()  # heard here; the store hears of it with the next beat
    claimed = await Claiming(worker.ground, worker.granting, lambda: 0.5).claim(1)
    assert claimed == 1
    await worker.until_told(RunHandedOver)
    assert (await worker.row(run)).vacant
    assert worker.agent.begun == []
