"""What a sweep costs on PostgreSQL, in round trips: the same whatever lives or has ended, few for many orphans."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from deerflow_runs.model import OnOrphan, WorkerId
from deerflow_runs.observe import RunRecovered, SweepFailed
from deerflow_runs.store.opening import store_at
from tests.contract.lives import ended, waiting
from tests.manager.workers import Worker
from tests.rules import rule
from tests.support.proxy import RoundTripProxy

DEAD = WorkerId("host:dead")
IDLE = 10
"""Round trips of a sweep that finds nothing to do, without the question when the next run is due."""


@dataclass
class Counted:
    """A worker whose round trips are counted."""

    worker: Worker
    proxy: RoundTripProxy

    async def sweep(self) -> int:
        """Round trips of one sweep."""
        before = self.proxy.turns
        await self.worker.reconciler.sweep()
        assert self.worker.told(SweepFailed) == []
        return self.proxy.turns - before


@asynccontextmanager
async def counted(dsn: str) -> AsyncIterator[Counted]:
    """Warm: every statement is prepared, and what is done only now and then has been done."""
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(dsn), connections=1) as store:
        worker = Worker(store)
        await worker.opens()
        await worker.stage.opens(WorkerId("host:neighbour"))
        for _ in range(2):
            await worker.reconciler.sweep()
        try:
            yield Counted(worker, proxy)
        finally:
            await worker.is_killed()


@rule("F50")
async def test_a_sweep_with_nothing_to_do_costs_the_same_however_much_there_is(postgres_dsn: str) -> None:
    async with counted(postgres_dsn) as one:
        alone = await one.sweep()
        worker = one.worker
        for number in range(30):
            held = await worker.starts(await worker.admits(f"live-{number}"))
            await waiting(worker.store, f"next-{number}", held.run.thread_id, worker_id=worker.me)
            await ended(worker.store, f"past-{number}", f"past-{number}", worker_id=worker.me)
            worker.registry.expect((await worker.admits(f"far-{number}", worker_id=DEAD, take=False)).key, None)
        await worker.stage.opens(DEAD)
        await worker.reconciler.sweep()
        assert alone <= IDLE
        assert await one.sweep() == alone + 1  # whether what is expected has ended


@rule("F50", "O26")
@pytest.mark.parametrize("policy", OnOrphan)
async def test_five_hundred_orphans_cost_a_sweep_ten_round_trips_more(policy: OnOrphan, postgres_dsn: str) -> None:
    async with counted(postgres_dsn) as one:
        await leaves_behind(one.worker, 1, policy)
        idle = await one.sweep()
        await leaves_behind(one.worker, 500, policy)
        cost = await one.sweep()
        assert len(one.worker.told(RunRecovered)) == 501
        assert cost - idle <= 10


async def leaves_behind(worker: Worker, count: int, policy: OnOrphan) -> None:
    """A worker dies with so many runs; the first one is recovered, so that every statement has been prepared."""
    owner = await worker.stage.opens(WorkerId(f"host:dead-{count}"))
    for number in range(count):
        await worker.admits(f"r{count}-{number}", worker_id=owner, on_orphan=policy)
    await worker.stage.dies(owner)
    if count == 1:
        await worker.reconciler.sweep()
