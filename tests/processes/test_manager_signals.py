"""Workers that no notification reaches, or that share few connections behind a pooler, do the same more slowly."""

from __future__ import annotations

import asyncio

import pytest

from deerflow_runs import RunStatus
from deerflow_runs.store.signals import SignalMode
from tests.processes.fleet import Fleet
from tests.rules import rule
from tests.support.pooler import pgbouncer

pytestmark = pytest.mark.timeout(300)

LONG = {"steps": 1000, "pause": 0.05}


@rule("O10", "O19", "O33", "I6", "I8", "P109")
async def test_a_foreign_cancel_and_a_recovery_need_no_notification(postgres_fleet: Fleet) -> None:
    fleet = postgres_fleet
    owner, other = await fleet.starts(2, muted=True)
    assert [(await fleet.stats(worker)).mode for worker in (owner, other)] == [SignalMode.POLLING] * 2
    cancelled, left = [await fleet.submits(owner, payload=LONG) for _ in range(2)]
    await fleet.until_running(cancelled, left)
    await fleet.cancels(other, cancelled)
    owner.kill()
    await fleet.until_event(other, "RunClaimed")
    await fleet.cancels(other, left)
    ends = await fleet.until_ended(cancelled, left)
    assert {run.status for run in ends} == {RunStatus.INTERRUPTED}


@rule("O27", "O33", "I1", "I6", "I8", "I20", "P087")
async def test_workers_behind_a_transaction_pooler_carry_out_cancel_and_recover(postgres_fleet: Fleet) -> None:
    """Two connections for all of them; no LISTEN, no hint."""
    fleet = postgres_fleet
    with pgbouncer(fleet.database.dsn, connections=2) as dsn:
        workers = await fleet.starts(3, dsn=f"{dsn}?pooler=true")
        short = await asyncio.gather(
            *(fleet.submits(worker, payload={"steps": 2}) for worker in workers for _ in range(10))
        )
        long = [await fleet.submits(worker, payload=LONG) for worker in workers]
        rows = await fleet.until_ended(*short)
        assert {run.status for run in rows} == {RunStatus.SUCCESS}
        doomed, *others = workers
        doomed.kill()
        await asyncio.gather(*(fleet.cancels(others[number % 2], key) for number, key in enumerate(long)))
        ends = await fleet.until_ended(*long)
        assert {run.status for run in ends} == {RunStatus.INTERRUPTED}
        await fleet.comes_to_rest()  # while there is a pooler
