"""A worker whose session was lost takes back what it holds, on both databases: all, or it is told what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deerflow_runs.manager.lease import OwnershipLost
from deerflow_runs.manager.registry import Phase
from deerflow_runs.model import CancelAction, OnOrphan, RunStatus, WorkerId
from deerflow_runs.observe import RunFenced, RunSeized, RunTakenBack, SweepFailed
from deerflow_runs.protocol.decision import Actor
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from tests.manager.workers import Worker, store_without_hints, thread_of, without_runs
from tests.rules import rule

pytestmark = pytest.mark.timeout(30)

OTHER = WorkerId("host:other")


@pytest.fixture
async def store(store_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_without_hints(store_dsn) as store:
        yield store


@pytest.fixture
def units(store: SqlRunStore) -> Units:
    return store.units


@asynccontextmanager
async def a_worker(store: SqlRunStore) -> AsyncIterator[Worker]:
    worker = Worker(store)
    await worker.opens()
    try:
        yield worker
    finally:
        await worker.is_killed()


@pytest.fixture
async def worker(store: SqlRunStore) -> AsyncIterator[Worker]:
    async with a_worker(store) as worker:
        yield worker


async def loses_its_session(worker: Worker) -> WorkerId:
    """Its beat was answered "not live", and another session is open; the id of the one that is lost."""
    await worker.stage.dies(worker.me)
    worker.session.refused()
    return await worker.opens()


@rule("O13")
async def test_a_run_goes_on_under_the_new_session_and_a_new_epoch(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    epoch = held.lease.epoch
    previous = await loses_its_session(worker)
    assert not held.lease.trusted()
    await worker.reconciler.take_back(previous)
    assert held.lease.trusted()
    assert (held.lease.worker_id, held.lease.epoch) == (worker.me, epoch + 1)
    assert [(told.run_id, told.epoch) for told in worker.told(RunTakenBack)] == [("mine", epoch + 1)]
    row = await worker.row(held.run)
    assert (row.owner_worker_id, row.epoch, row.status) == (worker.me, epoch + 1, RunStatus.RUNNING)


@rule("O13", "O12")
async def test_whoever_waits_at_the_gate_goes_on_once_the_run_is_taken_back(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    previous = await loses_its_session(worker)
    at_the_gate = asyncio.create_task(held.lease.check())
    await asyncio.sleep(0)
    assert not at_the_gate.done()
    await worker.reconciler.take_back(previous)
    await at_the_gate


@rule("O13", "O30")
async def test_taking_back_costs_no_attempt(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    for _ in range(5):
        await worker.reconciler.take_back(await loses_its_session(worker))
    assert (await worker.row(held.run)).attempt == 1


@rule("O13", "O18", "I2")
async def test_a_run_that_others_took_meanwhile_is_stopped_and_writes_nothing(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine", on_orphan=OnOrphan.RESUME))
    previous = await loses_its_session(worker)
    await worker.stage.opens(OTHER)
    await worker.stage.sweeps()
    await worker.reconciler.take_back(previous)
    assert held.lease.fenced
    with pytest.raises(OwnershipLost):
        await held.lease.check()
    await held.over.wait()
    assert [told.run_id for told in worker.told(RunFenced)] == ["mine"]
    assert (await worker.row(held.run)).vacant


@rule("O13")
async def test_a_run_that_others_ended_meanwhile_is_known_by_its_end(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    previous = await loses_its_session(worker)
    await worker.stage.sweeps()
    await worker.reconciler.take_back(previous)
    await held.over.wait()
    assert held.ended is not None
    assert held.ended.status is RunStatus.ERROR


@rule("O13")
async def test_a_run_that_nobody_had_come_for_and_that_is_lost_takes_no_slot_any_more(worker: Worker) -> None:
    held = worker.holds(await worker.admits("mine"))
    previous = await loses_its_session(worker)
    await worker.stage.sweeps()
    await worker.reconciler.take_back(previous)
    assert held.over.is_set()
    assert len(worker.registry) == 0


@rule("O13")
async def test_a_reservation_is_taken_back_like_a_run(worker: Worker) -> None:
    held = worker.holds(await worker.stage.reserves("hold", worker_id=worker.me))
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    assert held.lease.trusted()
    assert (await worker.stage.held()).owner_worker_id == worker.me


@rule("O13", "O31")
async def test_what_waits_at_home_moves_to_the_new_session(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("first", "thread"))
    await worker.stage.waits("second", worker_id=worker.me, pinned=True)
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    (waiting,) = await worker.store.queue(held.run.thread_id)
    assert waiting.home_worker_id == worker.me


@rule("O13")
async def test_nothing_is_left_of_many(worker: Worker) -> None:
    held = [await worker.starts(await worker.admits(f"r{number}")) for number in range(25)]
    for number in range(25):
        await worker.stage.waits(f"w{number}", thread_of(f"r{number}"), worker_id=worker.me, pinned=True)
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    assert all(one.lease.trusted() for one in held)
    queues = [await worker.store.queue(one.run.thread_id) for one in held]
    assert {run.home_worker_id for queue in queues for run in queue} == {worker.me}


@rule("O13", "O18")
async def test_a_run_that_is_lost_keeps_no_other_from_being_taken_back(worker: Worker) -> None:
    lost, kept = [await worker.starts(await worker.admits(name)) for name in ("lost", "kept")]
    previous = await loses_its_session(worker)
    by = Actor(worker.me, lost.lease.epoch, previous=previous)
    await worker.stage.happens(RunEvent.TAKE_BACK, lost.run, by=by)
    await worker.stage.happens(RunEvent.HAND_OVER, await worker.row(lost.run))
    await worker.reconciler.take_back(previous)
    assert (lost.lease.fenced, kept.lease.fenced) == (True, False)


# --- Lost answers, and sessions lost in a row -----------------------------------------------------------------------


@rule("O8", "O13")
async def test_a_take_back_whose_answer_was_lost_is_repeated(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    previous = await loses_its_session(worker)
    by = Actor(worker.me, held.lease.epoch, previous=previous)
    await worker.stage.happens(RunEvent.TAKE_BACK, held.run, by=by)
    await worker.reconciler.take_back(previous)
    assert held.lease.trusted()


@rule("O8", "O13")
async def test_a_take_back_whose_answer_was_lost_with_the_session_that_asked_is_gone_on_from(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    first = await loses_its_session(worker)
    await worker.reconciler.take_back(first)
    second = await loses_its_session(worker)
    by = Actor(worker.me, held.lease.epoch, previous=second)
    await worker.stage.happens(RunEvent.TAKE_BACK, held.run, by=by)
    third = await loses_its_session(worker)
    await worker.reconciler.take_back(third)
    assert held.lease.trusted()
    assert (await worker.row(held.run)).owner_worker_id == worker.me


@rule("O13")
async def test_a_session_lost_before_anything_was_taken_back_changes_nothing_for_the_runs(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("first", "thread"))
    await worker.stage.waits("second", worker_id=worker.me, pinned=True)
    first = await loses_its_session(worker)
    second = await loses_its_session(worker)
    await worker.reconciler.take_back(first)
    await worker.reconciler.take_back(second)
    assert held.lease.trusted()
    (waiting,) = await worker.store.queue(held.run.thread_id)
    assert waiting.home_worker_id == worker.me


@rule("O4", "I4", "I16")
async def test_a_body_that_runs_beside_its_own_rollback_is_stopped(worker: Worker) -> None:
    """The run was seized under the old session by a holder that is gone; the body that ran before must not go on."""
    held = await worker.starts(await worker.admits("mine"))
    await worker.stage.is_cancelled(held.run, CancelAction.ROLLBACK)
    seizer = Actor(worker.me, held.lease.epoch, capabilities=worker.capabilities)
    await worker.stage.happens(RunEvent.SEIZE, held.run, by=seizer)
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    assert held.lease.fenced


@rule("O8", "O4")
async def test_a_life_whose_seizure_was_answered_to_nobody_gets_its_run_back(worker: Worker) -> None:
    held = worker.holds(await worker.stage.happens(RunEvent.START, await worker.admits("mine")))
    await worker.stage.is_cancelled(held.run, CancelAction.ROLLBACK)
    seizer = Actor(worker.me, held.lease.epoch, capabilities=worker.capabilities)
    await worker.stage.happens(RunEvent.SEIZE, held.run, by=seizer)
    held.phase = Phase.SETTLING
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    assert held.lease.trusted()
    assert worker.told(RunSeized) == []


@rule("O13")
async def test_a_grant_that_arrives_after_its_session_was_lost_is_taken_back_by_the_next_sweep(worker: Worker) -> None:
    run = await worker.admits("mine")
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    held = worker.holds(run)
    assert not held.lease.trusted()
    await worker.reconciler.sweep()
    assert held.lease.trusted()


@rule("O13", "O29")
async def test_what_the_lost_session_owned_and_nobody_holds_is_an_orphan(worker: Worker) -> None:
    run = await worker.admits("missed", on_orphan=OnOrphan.RESUME)
    previous = await loses_its_session(worker)
    await worker.reconciler.take_back(previous)
    await worker.reconciler.sweep()
    assert (await worker.row(run)).vacant


# --- The store is away ----------------------------------------------------------------------------------------------


@rule("O13")
async def test_it_goes_on_until_the_store_answers_again(worker: Worker, units: Units) -> None:
    held = await worker.starts(await worker.admits("mine"))
    previous = await loses_its_session(worker)
    async with without_runs(units):
        taking = asyncio.create_task(worker.reconciler.take_back(previous))
        await worker.until_told(SweepFailed)
        assert not held.lease.trusted()
    await worker.clock.until_sleeping(1)
    await worker.clock.advance(0.2)
    await taking
    assert held.lease.trusted()
