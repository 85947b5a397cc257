"""The database goes away, hangs, answers too late or is set to another time: no run is lost, and none is done twice."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from deerflow_runs import RunId, RunKey, RunStatus
from tests.processes.fleet import PATIENT, Fleet, Worker
from tests.rules import rule

pytestmark = pytest.mark.timeout(300)

LEASES = 3.2
"""Seconds: three leases and a little."""


@rule("O8", "O9", "O12", "O13", "O32", "I1", "I5", "I8", "I14", "I15", "I20", "F30", "P051")
async def test_a_server_that_is_killed_and_restarted_under_load_costs_no_run(breakable_fleet: Fleet) -> None:
    """On a file there is no server: there its lock is taken for as long."""
    fleet = breakable_fleet
    workers = await fleet.starts(3)
    async with fleet.under_load(workers, {"steps": 5, "pause": 0.1}) as admitted:
        await fleet.until(lambda: len(admitted) >= 20, "20 runs were let in")
        if fleet.database.cluster is None:
            with fleet.database.locked():
                await asyncio.sleep(1.5)
        else:
            fleet.database.cluster.kill()
            await asyncio.sleep(0.5)
            fleet.database.cluster.start()
        before = len(admitted)
        await fleet.until(lambda: len(admitted) >= before + 10, "10 more were let in")
    rows = await fleet.until_ended()
    assert {run.status for run in rows} == {RunStatus.SUCCESS}


@rule("O9", "O12", "O13", "O24", "I8", "I11", "I13", "I20", "P021", "P079")
async def test_a_database_that_hangs_for_three_leases_costs_no_run_and_starts_no_step(fleet: Fleet) -> None:
    """What was sent meanwhile arrives late."""
    workers = await fleet.starts(3, wired=True)
    fleet.knows["outage"] = True
    keys = [await fleet.submits(worker, payload={"steps": 15, "pause": 0.05}) for worker in workers * 3]
    await fleet.until_running(*keys)
    if fleet.database.sqlite:
        fleet.knows["healthy"] = [session for worker in workers for session in worker.sessions()]
    with fleet.hung(workers):
        await asyncio.sleep(LEASES)
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    for worker in workers:
        assert worker.events("TrustEnded"), worker
        assert worker.events("TrustRegained", "SessionReplaced"), worker


@rule("O12", "O30", "I8", "I11", "I20")
async def test_runs_that_are_suspended_for_too_long_are_given_back_and_end_all_the_same(fleet: Fleet) -> None:
    workers = await fleet.starts(2, wired=True, max_suspend=0.3)
    keys = [await fleet.submits(worker, payload={"steps": 8, "pause": 0.1}) for worker in workers * 2]
    await fleet.until_running(*keys)
    with fleet.hung(workers):
        await asyncio.sleep(1.8)
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    aborted = {event["run_id"] for worker in workers for event in worker.events("RunAborted")}
    assert aborted
    assert aborted <= {key.run_id for key in keys}


@rule("O9", "O12", "I8", "I15", "I20", "P067")
async def test_a_table_that_somebody_locks_costs_no_run(postgres_fleet: Fleet) -> None:
    """For longer than a lease, and while callers ask for more."""
    fleet = postgres_fleet
    workers = await fleet.starts(2)
    keys = [await fleet.submits(worker, payload={"steps": 8, "pause": 0.1}) for worker in workers * 2]
    await fleet.until_running(*keys)
    asked = asyncio.gather(*(_asks_later(fleet, worker) for worker in workers))
    with fleet.database.table_locked("dr_runs"):
        await asyncio.sleep(2.0)
    keys += await asked
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}


async def _asks_later(fleet: Fleet, worker: Worker) -> RunKey:
    await asyncio.sleep(0.5)
    return await fleet.submits(worker, payload={"steps": 1})


@rule("O9", "O12", "O13", "O14", "O18", "O24", "O26", "I2", "I4", "I8", "I20", "P021")
async def test_runs_of_a_worker_that_is_cut_off_go_on_elsewhere_or_stay_never_both(postgres_fleet: Fleet) -> None:
    """Cut off for a while that others may take for death, and once for one that they must."""
    fleet = postgres_fleet
    cut_off, _ = await fleet.starts(2, wired=True)
    assert cut_off.wire is not None
    for seconds in (0.8, 1.3, 2.2):
        keys = [await fleet.submits(cut_off, payload={"steps": 30, "pause": 0.05}) for _ in range(4)]
        await fleet.until_running(*keys)
        cut_off.spoiled = True
        cut_off.wire.hold()
        await asyncio.sleep(seconds)
        cut_off.wire.mend()
        rows = await fleet.until_ended(*keys)
        assert {run.status for run in rows} == {RunStatus.SUCCESS}


@rule("O12", "O26", "O32", "I8", "I20")
async def test_a_worker_without_a_network_is_outlived_by_its_runs(postgres_fleet: Fleet) -> None:
    fleet = postgres_fleet
    cut_off, other = await fleet.starts(2, wired=True)
    assert cut_off.wire is not None
    keys = [await fleet.submits(cut_off, payload={"steps": 10, "pause": 0.05}) for _ in range(4)]
    await fleet.until_running(*keys)
    cut_off.spoiled = True
    cut_off.wire.sever()
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    assert await other.ready() in {run.settled_by for run in rows}


@rule("O6", "O8", "I5", "I14", "I15", "I20", "F30")
async def test_whichever_reply_about_a_run_is_lost_it_is_carried_out_once(postgres_fleet: Fleet) -> None:
    """Admission, start, step, progress, settle: each is committed, and the worker is not told."""
    fleet = postgres_fleet
    worker = await fleet.start(wired=True)
    assert worker.wire is not None
    worker.spoiled = True
    lost = 0
    for number in range(1, 9):
        run_id = RunId(f"run-{secrets.token_hex(8)}")
        before = worker.wire.lost
        worker.wire.lose_reply_about(run_id, number)
        key = await fleet.submits(worker, payload={"steps": 1, "pause": 0.0}, run_id=run_id)
        [run] = await fleet.until_ended(key)
        assert (run.status, run.attempt, await fleet.steps(key)) == (RunStatus.SUCCESS, 1, ("step-0",)), number
        lost += worker.wire.lost - before
    assert lost >= 5  # in fewer places a run has nothing to say


@rule("O24", "O27", "O7", "I8", "I10", "I13", "P043")
async def test_a_database_whose_clock_is_set_kills_nobody(fleet: Fleet) -> None:
    """By two minutes forth and back, again and again."""
    fleet.database.own_the_clock()
    workers = await fleet.starts(3, **PATIENT)
    fleet.knows |= {"outage": True, "without": ("I11",)}  # the times of steps and of leases are not of one clock
    keys = [await fleet.submits(worker, payload={"steps": 90, "pause": 0.05}) for worker in workers * 2]
    await fleet.until_running(*keys)
    for seconds in (120, 0, 120, -120, 0, 120):
        fleet.database.step_clock(seconds)
        await asyncio.sleep(0.8)
    rows = await fleet.until_ended(*keys)
    assert {(run.status, run.attempt) for run in rows} == {(RunStatus.SUCCESS, 1)}
    assert [worker for worker in workers if worker.trusted_throughout()]


@rule("O24", "O26", "O27", "I8")
async def test_a_clock_that_was_set_back_does_not_hide_the_dead(fleet: Fleet) -> None:
    """Its lease would last for two minutes more; but the kernel knows."""
    fleet.database.own_the_clock()
    doomed, _ = await fleet.starts(2)
    fleet.knows["without"] = ("I11",)
    keys = [await fleet.submits(doomed, payload={"steps": 5, "pause": 0.1}) for _ in range(3)]
    await fleet.until_running(*keys)
    doomed.stop()
    fleet.database.step_clock(-120)
    doomed.kill()
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
