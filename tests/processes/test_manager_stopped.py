"""Workers are stopped in the middle of anything, for longer than their lease, and go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import random

import pytest

from deerflow_runs import RunKey, RunStatus
from tests.processes.fleet import Fleet, Worker
from tests.rules import rule

pytestmark = pytest.mark.timeout(300)

AWAY = 1.8
"""Seconds: longer than lease and grace and two looks of a judge."""


async def stopped_for_a_while(worker: Worker, chance: random.Random) -> None:
    """At any moment, perhaps inside a transaction."""
    await asyncio.sleep(chance.uniform(0, 0.15))
    worker.stop()
    await asyncio.sleep(AWAY)
    worker.go_on()


async def fenced_or_kept(fleet: Fleet, worker: Worker, key: RunKey) -> None:
    """A run that went on elsewhere was fenced where it was, if it was still under way there."""
    run = await fleet.row(key)
    if run.settled_by not in worker.sessions():
        await fleet.until(lambda: _let_go(worker, key), f"{worker} lets go of {key}")


def _let_go(worker: Worker, key: RunKey) -> bool:
    told = worker.events("RunStarted", "RunFenced", "RunSettled", "RunGivenBack")
    mine = [event["event"] for event in told if event["run_id"] == key.run_id]
    return not mine or mine[-1] != "RunStarted"


@rule("O9", "O12", "O13", "O14", "O18", "O24", "I2", "I3", "I4", "I5", "I8", "I11", "I20", "F21", "P008", "P021")
async def test_workers_that_were_stopped_past_their_leases_write_nothing_of_what_they_lost(
    fleet: Fleet, soak: bool
) -> None:
    """Ten stops and more of them, until one of the stopped was really taken for dead: a writer that is stopped inside
    its transaction on SQLite keeps everybody from judging. Each of the runs is somewhere else in its life."""
    chance = random.Random(7)
    *stopped, _ = await fleet.starts(4)
    rounds = 60 if soak else 4
    while rounds > 0 or not any(worker.events("SessionReplaced") for worker in stopped):
        rounds -= 1
        held = [(worker, await fleet.submits(worker, payload={"steps": 12, "pause": 0.02})) for worker in stopped * 3]
        await fleet.until_started(*(key for _, key in held))
        await asyncio.gather(*(stopped_for_a_while(worker, chance) for worker in stopped))
        rows = await fleet.until_ended(*(key for _, key in held))
        assert {run.status for run in rows} == {RunStatus.SUCCESS}
        for worker, key in held:
            await fenced_or_kept(fleet, worker, key)


@rule("O14", "O34", "O12", "I8", "I11", "I20")
async def test_a_file_whose_writer_is_stopped_suspends_everybody_and_costs_no_run(sqlite_fleet: Fleet) -> None:
    """The same as a database that hangs: locked is no verdict about anybody."""
    fleet = sqlite_fleet
    workers = await fleet.starts(3)
    keys = [await fleet.submits(worker, payload={"steps": 20, "pause": 0.05}) for worker in workers * 2]
    await fleet.until_running(*keys)
    with fleet.database.locked():
        await asyncio.sleep(3.0)
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
