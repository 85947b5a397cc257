"""Runs are cancelled by workers that do not have them, and by code that does not listen."""

from __future__ import annotations

import asyncio

import pytest

from deerflow_runs import OnOrphan, RunStatus
from tests.processes.fleet import Fleet, Worker
from tests.processes.worker_executors import LATE, RESTORED
from tests.rules import rule

pytestmark = pytest.mark.timeout(300)

LONG = {"steps": 1000, "pause": 0.05}
BOTH = pytest.mark.parametrize("action", ["interrupt", "rollback"])


async def thread_is_free(fleet: Fleet, thread: str) -> None:
    """A newcomer to it gets in at once and ends."""
    living = next(worker for worker in fleet.workers if worker.lives and not worker.spoiled)
    [run] = await fleet.until_ended(await fleet.submits(living, thread, payload={"steps": 1}))
    assert run.status is RunStatus.SUCCESS


@BOTH
@rule("O4", "O19", "O20", "O21", "O33", "I6", "I16", "P109", "P112")
async def test_a_running_run_is_cancelled_from_another_worker(fleet: Fleet, action: str) -> None:
    owner, other = await fleet.starts(2)
    key = await fleet.submits(owner, payload=LONG)
    await fleet.until_running(key)
    outcome, in_force = await fleet.cancels(other, key, action)
    run = await fleet.row(key)
    assert (outcome in ("cancelled", "taken_over"), in_force) == (True, action), outcome
    assert (run.status, run.stop_reason) == (RunStatus.INTERRUPTED, action)
    assert ((await fleet.steps(key))[-1] == RESTORED) == (action == "rollback")
    await thread_is_free(fleet, key.thread_id)


@BOTH
@rule("O19", "O22", "O28", "I6", "I7", "P037")
async def test_a_queued_and_a_delayed_run_are_cancelled_from_another_worker_and_never_start(
    fleet: Fleet, action: str
) -> None:
    owner, other = await fleet.starts(2)
    first = await fleet.submits(owner, "thread", payload=LONG)
    queued = await fleet.submits(owner, "thread", payload=LONG, multitask_strategy="enqueue")
    delayed = await fleet.submits(owner, "elsewhere", payload=LONG, delay=30.0)
    for key in (queued, delayed):
        assert await fleet.cancels(other, key, action) == ("cancelled", action)
    rows = [await fleet.row(key) for key in (queued, delayed)]
    assert [(run.status, run.stop_reason, run.turn) for run in rows] == [(RunStatus.INTERRUPTED, action, None)] * 2
    await fleet.cancels(other, first)
    await thread_is_free(fleet, "elsewhere")


@BOTH
@rule("O4", "O22", "O31", "I6", "I16")
async def test_a_vacant_run_that_nobody_can_take_is_cancelled_from_another_worker(fleet: Fleet, action: str) -> None:
    full = await fleet.start(max_concurrent_runs=0)
    other = await fleet.start(executors=["steps"])
    key = await fleet.submits(full, work="block", payload={"seconds": 0})
    outcome, in_force = await fleet.cancels(other, key, action)
    run = await fleet.row(key)
    assert (run.status, run.stop_reason, in_force) == (RunStatus.INTERRUPTED, action, action), outcome
    await thread_is_free(fleet, key.thread_id)


@BOTH
@rule("O4", "O12", "O19", "O22", "I2", "I6", "I16", "P013", "P005")
async def test_a_run_whose_worker_is_stopped_is_cancelled_from_another_worker(fleet: Fleet, action: str) -> None:
    """What the stopped one wakes up with is written nowhere."""
    owner, other = await fleet.starts(2)
    key = await fleet.submits(owner, payload=LONG)
    await fleet.until_running(key)
    await stopped_outside_a_transaction(fleet, owner)
    outcome, in_force = await fleet.cancels(other, key, action)
    run = await fleet.row(key)
    assert (run.status, run.stop_reason, in_force) == (RunStatus.INTERRUPTED, action, action), outcome
    assert ((await fleet.steps(key))[-1] == RESTORED) == (action == "rollback")
    owner.go_on()
    await thread_is_free(fleet, key.thread_id)


async def stopped_outside_a_transaction(fleet: Fleet, worker: Worker) -> None:
    """On a file, a worker that is stopped while it writes goes on for a moment and is stopped again."""
    worker.stop()
    while fleet.database.sqlite and not await asyncio.to_thread(fleet.database.may_be_written):
        worker.go_on()
        await asyncio.sleep(0.001)
        worker.stop()


@BOTH
@rule("O4", "O19", "O26", "I6", "I16", "P013")
async def test_a_run_whose_worker_was_just_killed_is_cancelled_from_another_worker(fleet: Fleet, action: str) -> None:
    owner, other = await fleet.starts(2)
    key = await fleet.submits(owner, payload=LONG)
    await fleet.until_running(key)
    owner.kill()
    _, in_force = await fleet.cancels(other, key, action)
    run = await fleet.row(key)
    assert (run.status, run.stop_reason, in_force) == (RunStatus.INTERRUPTED, action, action)
    await thread_is_free(fleet, key.thread_id)


@rule("O19", "O21", "O22", "I6", "P108", "P080")
async def test_of_many_cancels_through_all_workers_each_is_answered_and_the_first_action_stands(fleet: Fleet) -> None:
    workers = await fleet.starts(4)
    key = await fleet.submits(workers[0], payload=LONG)
    await fleet.until_running(key)
    first = await fleet.cancels(workers[1], key, "interrupt", wait=False)
    answers = await asyncio.gather(
        *(
            fleet.cancels(worker, key, action, wait=wait)
            for worker in workers
            for action, wait in (("rollback", True), ("interrupt", False))
        )
    )
    assert {in_force for _, in_force in [first, *answers]} == {"interrupt"}
    [run] = await fleet.until_ended(key)
    assert (run.status, run.stop_reason) == (RunStatus.INTERRUPTED, "interrupt")
    await thread_is_free(fleet, key.thread_id)


# --- Code that does not listen --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("work", ["block", "stubborn"])
@rule("O4", "O11", "O14", "O18", "O21", "I2", "I6", "P005", "P029", "P008")
async def test_a_body_that_goes_on_after_a_cancel_lingers_and_writes_nothing(
    fleet: Fleet, work: str, action: str
) -> None:
    owner, other = await fleet.starts(2)
    key = await fleet.submits(owner, work=work, payload={"seconds": 2.0})
    await fleet.until_started(key)
    _, in_force = await fleet.cancels(other, key, action)
    run = await fleet.row(key)
    assert (run.status, run.stop_reason, in_force) == (RunStatus.INTERRUPTED, action, action)
    newer = await fleet.submits(other, key.thread_id, payload={"steps": 3, "pause": 0.5})
    if work == "stubborn":
        await fleet.until_event(owner, "RunLingers")
        await fleet.until_event(owner, "LingeringEnded")
        assert (await fleet.stats(owner)).lingering == 0
    await fleet.until_ended(newer)
    assert LATE not in await fleet.steps(key)
    assert (await fleet.row(key)).last_checkpoint != LATE


@rule("O9", "O10", "O11", "I8", "P011", "P078")
async def test_a_body_that_never_gives_the_loop_back_keeps_its_run_and_its_session(fleet: Fleet) -> None:
    """For two leases, with a heartbeat in a thread of its own."""
    owner, other = await fleet.starts(2, lease=2.0, beat=0.16)
    key = await fleet.submits(owner, work="spin", payload={"seconds": 4.0})
    await fleet.until_started(key)
    [run] = await fleet.until_ended(key)
    assert (run.status, run.attempt) == (RunStatus.SUCCESS, 1)
    assert await fleet.steps(key) == ("spun",)
    await fleet.until_ended(await fleet.submits(other, key.thread_id, payload={"steps": 1}))


# --- Strategies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
@rule("O3", "O4", "I1", "I6", "I16", "I17", "T5", "F30", "P005", "P048")
async def test_of_32_that_displace_each_other_on_one_thread_none_is_refused_and_one_is_left(
    fleet: Fleet, strategy: str
) -> None:
    workers = await fleet.starts(2)
    keys = await asyncio.gather(
        *(
            fleet.submits(workers[number % 2], "thread", payload={"steps": 3}, multitask_strategy=strategy)
            for number in range(32)
        )
    )
    rows = sorted(await fleet.until_ended(*keys), key=lambda run: run.seq)
    assert rows[-1].status is RunStatus.SUCCESS
    assert {run.status for run in rows[:-1]} <= {RunStatus.INTERRUPTED, RunStatus.SUCCESS}
    started = [run for run in rows if run.started_at is not None]
    assert len(started) < len(rows)


@rule("O3", "O26", "O28", "I7", "I8", "P048")
async def test_a_displacement_survives_the_worker_that_was_to_make_room(fleet: Fleet) -> None:
    owner, other = await fleet.starts(2)
    first = await fleet.submits(owner, "thread", payload=LONG, on_orphan=OnOrphan.FAIL)
    await fleet.until_running(first)
    behind = [
        await fleet.submits(owner, "thread", payload=LONG, multitask_strategy="enqueue", on_orphan=OnOrphan.FAIL)
        for _ in range(2)
    ]
    owner.kill()
    last = await fleet.submits(other, "thread", payload={"steps": 2}, multitask_strategy="interrupt")
    rows = await fleet.until_ended(first, *behind)
    assert {run.status for run in rows} == {RunStatus.INTERRUPTED}
    [run] = await fleet.until_ended(last)
    assert run.status is RunStatus.SUCCESS


@rule("O5", "I14", "P083")
async def test_fifty_requests_with_one_key_over_two_workers_are_one_run(fleet: Fleet) -> None:
    workers = await fleet.starts(2)
    keys = await asyncio.gather(
        *(
            fleet.submits(workers[number % 2], "thread", payload={"steps": 2}, idempotency_key="key")
            for number in range(50)
        )
    )
    assert len({key.run_id for key in keys}) == 1
    await fleet.until_ended(*keys)
