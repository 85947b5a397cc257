"""Workers come together, go one by one, and share processes and threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from deerflow_runs import RunKey, RunsConfig, RunStatus, SqlRunStore, StopReason, UsageError, WorkerId, store_at
from deerflow_runs.manager.handle import RunHandle
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.testing.recording import write_step
from tests.processes.fleet import PATIENT, Fleet
from tests.rules import rule

pytestmark = pytest.mark.timeout(300)

WORKERS = 6


# --- They come ------------------------------------------------------------------------------------------------------


@rule("O25", "O26", "I1", "I8", "I10", "I14")
async def test_six_workers_that_start_together_on_an_empty_database_share_the_work(fleet: Fleet) -> None:
    workers = await fleet.starts(WORKERS)
    keys = await asyncio.gather(
        *(fleet.submits(worker, payload={"steps": 2}) for worker in workers for _ in range(5)),
        *(fleet.submits(worker, "one", payload={"steps": 1}, multitask_strategy="enqueue") for worker in workers),
    )
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    assert len({run.settled_by for run in rows}) > 1


@rule("O25", "O26", "O29", "O30", "O31", "I1", "I6", "I8", "I16", "I20", "P105")
async def test_six_workers_that_start_together_finish_what_the_dead_left(fleet: Fleet) -> None:
    """Running, queued, delayed, local and cancelled runs, and ended ones."""
    first = await fleet.start()
    ended = [await fleet.submits(first, payload={"steps": 1}) for _ in range(3)]
    await fleet.until_ended(*ended)
    running = [await fleet.submits(first, payload={"steps": 6, "pause": 0.1}) for _ in range(6)]
    queued = [
        await fleet.submits(first, key.thread_id, payload={"steps": 1}, multitask_strategy="enqueue")
        for key in running[:3]
    ]
    delayed = await fleet.submits(first, payload={"steps": 1}, delay=0.5)
    local = await fleet.submits(first, work="local", payload={"steps": 100})
    stubborn = await fleet.submits(first, work="stubborn", payload={"seconds": 30})
    await fleet.until_running(*running, local)
    await fleet.until_started(stubborn)
    await fleet.cancels(first, stubborn, "rollback", wait=False)
    first.kill()
    await fleet.starts(WORKERS, cancel_grace=5.0)  # a busy machine must not look like a seizer that is overdue
    rows = await fleet.until_ended(*running, *queued, delayed)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    ends = await fleet.until_ended(local, stubborn)
    assert [run.status for run in ends] == [RunStatus.ERROR, RunStatus.INTERRUPTED]


@rule("I19", "O31")
async def test_no_worker_carries_out_more_than_it_may(fleet: Fleet) -> None:
    fleet.knows["max_running"] = 2
    workers = await fleet.starts(2, max_concurrent_runs=2)
    keys = [await fleet.submits(workers[0], payload={"steps": 2, "pause": 0.05}) for _ in range(14)]
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    assert len({run.settled_by for run in rows}) == 2


# --- They go --------------------------------------------------------------------------------------------------------


@rule("O23", "O35", "I8", "I18", "I20", "P007", "P041", "P060")
async def test_a_rolling_restart_under_load_loses_no_run_and_no_attempt(fleet: Fleet) -> None:
    workers = await fleet.starts(3, **PATIENT)
    async with fleet.under_load(workers, {"steps": 4, "pause": 0.1}) as admitted:
        for old in list(workers):
            await fleet.until(lambda: len(admitted) >= 15, "there is load")
            workers.append(await fleet.start(**PATIENT))
            old.terminate()
            assert await old.gone() == 0
            workers.remove(old)
    rows = await fleet.until_ended()
    assert {(run.status, run.attempt) for run in rows} == {(RunStatus.SUCCESS, 1)}
    assert not any(worker.events("SessionDeclaredDead") for worker in fleet.workers)


@rule("O23", "O35", "I8", "I18", "P007")
async def test_a_worker_that_leaves_hands_over_what_travels_and_ends_what_is_local(fleet: Fleet) -> None:
    leaving = await fleet.start()
    travels = await fleet.submits(leaving, payload={"steps": 40, "pause": 0.1})
    local = await fleet.submits(leaving, work="local", payload={"steps": 1000})
    waits = await fleet.submits(leaving, local.thread_id, "local", payload={}, multitask_strategy="enqueue")
    blocked = await fleet.submits(leaving, work="block", payload={"seconds": 30})
    cancelled = await fleet.submits(leaving, work="stubborn", payload={"seconds": 30})
    await fleet.until_running(travels, local)
    await fleet.until_started(blocked, cancelled)
    leaving.terminate()
    await fleet.until_event(leaving, "DrainBegun")
    other = await fleet.start()
    await fleet.cancels(other, cancelled, wait=False)  # a user's word counts during a drain too
    assert await leaving.gone() == 0
    ends = await fleet.until_ended(local, waits)
    assert {(run.status, run.stop_reason) for run in ends} == {(RunStatus.INTERRUPTED, StopReason.SHUTDOWN)}
    for key in (travels, blocked):
        assert (await fleet.row(key)).attempt == 1
        await fleet.cancels(other, key)
    [run] = await fleet.until_ended(cancelled)
    assert (run.status, run.stop_reason) == (RunStatus.INTERRUPTED, StopReason.INTERRUPT)


# --- They share a process -------------------------------------------------------------------------------------------


@dataclass
class Lone:
    """A manager in the loop that runs here, and its store."""

    store: SqlRunStore
    manager: RunManager

    async def submits(self, thread: str, steps: int) -> RunHandle:
        """A local run that writes so many steps."""

        async def work(lease: RunLease) -> None:
            for step in range(steps):
                await lease.check()
                assert await write_step(self.store, lease, f"step-{step}")
                await asyncio.sleep(0.01)

        return await self.manager.submit(thread, work)


@asynccontextmanager
async def lone(dsn: str) -> AsyncIterator[Lone]:
    """Until the block is left."""
    async with store_at(dsn) as store, RunManager(store, config=RunsConfig.for_tests()) as manager:
        yield Lone(store, manager)


@rule("I1", "I4", "I8", "I12")
async def test_managers_of_one_process_and_of_several_loops_are_workers_like_any_other(fleet: Fleet) -> None:
    """Two loops, each in a thread, and two managers in each."""

    async def in_a_loop() -> tuple[set[WorkerId], list[RunKey]]:
        async with lone(fleet.database.dsn) as one, lone(fleet.database.dsn) as two:
            ids = {some.manager.worker_id for some in (one, two)}
            asked = [
                some.submits(f"{some.manager.worker_id} {number}", 3) for some in (one, two) for number in range(5)
            ]
            rows = [await handle.join(30) for handle in await asyncio.gather(*asked)]
            assert {run.status for run in rows} == {RunStatus.SUCCESS}
            return ids, [run.key for run in rows]

    found = await asyncio.gather(*(asyncio.to_thread(asyncio.run, in_a_loop()) for _ in range(2)))
    assert len(found[0][0] | found[1][0]) == 4
    for _, keys in found:
        fleet.submitted |= {key.run_id: key for key in keys}


@rule("O6")
async def test_a_manager_is_refused_in_a_loop_that_is_not_its_own(fleet: Fleet) -> None:
    async with lone(fleet.database.dsn) as here:
        handle = await here.submits("thread", 1)
        fleet.submitted[handle.run_id] = handle.key
        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, here.submits("other", 1))
        await handle.join(30)
