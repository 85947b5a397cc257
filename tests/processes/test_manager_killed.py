"""Workers are killed with -9 while they carry out runs: what was recorded stands, and nothing is left undone."""

from __future__ import annotations

import os

import pytest

from deerflow_runs import OnOrphan, RunStatus, StopReason
from tests.processes.fleet import Fleet, killing
from tests.rules import rule

pytestmark = pytest.mark.timeout(300)

STEPS = 4
ALL_STEPS = tuple(f"step-{number}" for number in range(STEPS))


@rule("O26", "O27", "O29", "O30", "I1", "I5", "I8", "I9", "I20", "P034")
async def test_runs_of_a_killed_worker_go_on_elsewhere_and_no_recorded_step_is_done_again(fleet: Fleet) -> None:
    doomed, other = await fleet.starts(2)
    keys = [await fleet.submits(doomed, payload={"steps": STEPS, "pause": 0.1}) for _ in range(5)]
    await fleet.until_running(*keys)
    doomed.kill()
    rows = await fleet.until_ended(*keys)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}
    assert [await fleet.steps(key) for key in keys] == [ALL_STEPS] * 5
    assert await other.ready() in {run.settled_by for run in rows}
    assert (await fleet.stats(other)).held == 0


@rule("O26", "O28", "O29", "O31", "I8", "P034")
async def test_runs_that_are_to_fail_with_their_worker_do_and_free_their_threads(fleet: Fleet) -> None:
    doomed, other = await fleet.starts(2)
    named = await fleet.submits(doomed, "named", payload={"steps": 100}, on_orphan=OnOrphan.FAIL)
    local = await fleet.submits(doomed, "local", "local", payload={"steps": 100})
    behind = await fleet.submits(doomed, "named", payload={"steps": 1}, multitask_strategy="enqueue")
    await fleet.until_running(named, local)
    doomed.kill()
    ends = await fleet.until_ended(named, local)
    assert [(run.status, run.stop_reason) for run in ends] == [(RunStatus.ERROR, StopReason.ORPHAN_RECOVERED)] * 2
    [next_run] = await fleet.until_ended(behind)
    assert next_run.status is RunStatus.SUCCESS
    await fleet.until_ended(await fleet.submits(other, "local", payload={"steps": 1}))


@rule("O30", "O31", "I9", "I8")
async def test_a_run_that_kills_every_worker_before_its_first_step_is_poison_at_last(fleet: Fleet) -> None:
    """Its workers are killed, not the run; to the protocol it is the same."""
    key = None
    for _ in range(2):
        doomed = await fleet.start()
        key = key or await fleet.submits(doomed, payload={"steps": 1, "pause": 60}, max_attempts=2)
        await fleet.until_event(doomed, "RunStarted")
        doomed.kill()
        await doomed.gone()
    await fleet.start()
    [run] = await fleet.until_ended()
    assert (run.status, run.stop_reason) == (RunStatus.ERROR, StopReason.POISON)


@rule("O1", "O28", "I15", "I8", "I14")
async def test_what_was_acknowledged_survives_the_end_of_everything(breakable_fleet: Fleet) -> None:
    """All workers are killed, and the server with them."""
    fleet = breakable_fleet
    workers = await fleet.starts(2)
    running = [await fleet.submits(worker, payload={"steps": STEPS, "pause": 0.1}) for worker in workers * 2]
    waiting = [
        await fleet.submits(workers[0], key.thread_id, payload={"steps": 1}, multitask_strategy="enqueue")
        for key in running
    ]
    later = await fleet.submits(workers[0], payload={"steps": 1}, delay=1.0)
    await fleet.until_running(*running)
    for worker in workers:
        worker.kill()
    if fleet.database.cluster is not None:
        fleet.database.cluster.kill()
        fleet.database.cluster.start()
    await fleet.start()
    rows = await fleet.until_ended(*running, *waiting, later)
    assert {run.status for run in rows} == {RunStatus.SUCCESS}


@rule("O27", "I8")
async def test_a_restarted_process_recovers_its_orphans_before_its_first_claim(sqlite_fleet: Fleet) -> None:
    fleet = sqlite_fleet
    before = await fleet.start()
    keys = [await fleet.submits(before, payload={"steps": STEPS, "pause": 0.2}) for _ in range(3)]
    await fleet.until_running(*keys)
    before.kill()
    await before.gone()
    after = await fleet.start()
    await fleet.until_ended(*keys)
    told = [event["event"] for event in after.events("SessionDeclaredDead", "RunRecovered", "RunClaimed")]
    assert told[:4] == ["SessionDeclaredDead"] + ["RunRecovered"] * 3
    assert told.count("RunClaimed") == 3
    assert fleet.database.rows("SELECT DISTINCT state, proven FROM dr_workers WHERE dead_at IS NOT NULL") == [
        ("dead", 1)
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@rule("O27", "I8")
async def test_a_forked_child_is_refused_its_parent_s_manager_and_keeps_no_hint_alive(fleet: Fleet) -> None:
    parent, other = await fleet.starts(2)
    mine = await parent.ready()
    running = await fleet.submits(parent, payload={"steps": 100, "pause": 0.05})
    child, told = await parent.tells("fork")
    with killing(child):
        assert [line.split(":")[0] for line in told] == ["UsageError"] * 3, told
        await fleet.until_ended(await fleet.submits(parent, payload={"steps": 1}))  # the parent goes on
        parent.kill()
        [verdict] = await fleet.until_event(other, "SessionDeclaredDead")
        assert verdict["judged"] == mine
        assert verdict["how"] in ("hint", "proof"), verdict
        await fleet.cancels(other, running)
