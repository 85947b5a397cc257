"""Wrong outcomes of the manager that was studied (flaws A): every run ends once, as its row says, whoever ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deerflow_runs.errors import ThreadBusy
from deerflow_runs.manager.answers import CancelOutcome
from deerflow_runs.manager.executor import LocalExecutor
from deerflow_runs.manager.hooks import ON_RECOVERED, ON_SETTLED, WANTED
from deerflow_runs.manager.lease import RunLease, StopCause
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.model import EVERYONE, CancelAction, OnDisconnect, OnOrphan, Run, RunStatus, ThreadId
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import OutboxKind
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.threads import NewThread, ThreadStatus
from deerflow_runs.testing.contract.stage import THREAD, Stage, key
from deerflow_runs.testing.flaky_line import Fault, Faults, failing, losing
from deerflow_runs.testing.flaky_store import FlakyStore
from tests.contract.lives import executed
from tests.manager.spoiled import PATIENCE, Body, Stubborn, carried_out, gated, lone_on, manager_on, over, row_of
from tests.manager.workers import Worker
from tests.rules import rule

pytestmark = pytest.mark.timeout(60)

HOOKS = {OutboxKind.HOOK.value: {WANTED: [ON_SETTLED, ON_RECOVERED]}}
"""What the end of a run of a worker with hooks puts into the outbox."""


@rule("F01", "O12", "O26")
async def test_a_run_that_takes_long_to_settle_is_neither_given_back_nor_recovered(store: SqlRunStore) -> None:
    faults = Faults()
    asks = gated(faults, RunEvent.SETTLE_SUCCESS)
    worker, neighbour = Worker(FlakyStore.around(store, faults)), Worker(store, "neighbour")
    await worker.opens()
    await neighbour.opens()
    held = await worker.starts(await worker.admits("run"))
    worker.agent.go_on.set()
    await asks.reached()
    for _ in range(3):
        await worker.lives(60)
        await neighbour.lives(60)
        await worker.reconciler.sweep()
        await neighbour.reconciler.sweep()
    settling = await worker.row(held.run)
    assert (settling.status, settling.owner_worker_id) == (RunStatus.RUNNING, worker.me)
    asks.open()
    await held.over.wait()
    assert (await worker.row(held.run)).status is RunStatus.SUCCESS


@rule("F05", "O4", "I1")
async def test_a_thread_is_held_until_a_rollback_on_another_worker_is_done(store: SqlRunStore, store_dsn: str) -> None:
    restoring, restored = asyncio.Event(), asyncio.Event()

    async def restore(lease: RunLease) -> None:
        restoring.set()
        await restored.wait()

    body = Body()
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        run = await one.submit(THREAD, body, restore=restore)
        await body.running.wait()
        await one.cancel(run, CancelAction.ROLLBACK)
        await restoring.wait()
        with pytest.raises(ThreadBusy) as busy:
            await other.create_or_reject(THREAD)
        assert busy.value.holder == run.run_id
        restored.set()
        assert (await run.join(timeout=PATIENCE)).stop_reason == "rollback"
        after = await other.create_or_reject(THREAD)
        async with other.execute(after):
            pass


@rule("F06", "O8", "O20")
@pytest.mark.parametrize(
    "fault",
    [failing(), failing(OSError("connection reset")), failing(RuntimeError("deadlock detected")), losing],
    ids=["unavailable", "cut", "unknown", "lost reply"],
)
async def test_errors_of_the_database_at_the_end_of_a_run_cost_no_success(fault: Fault, store: SqlRunStore) -> None:
    faults = Faults()
    faults.once(RunEvent.SETTLE_SUCCESS, fault, times=3)
    one = await lone_on(store, faults)
    body = Body()
    body.go_on.set()
    run = await carried_out(one, body)
    assert run is not None
    assert (run.status, len(body.begun), one.names().count("RunSettled")) == (RunStatus.SUCCESS, 1, 1)


@rule("F07", "O8")
async def test_a_start_whose_answer_is_lost_starts_the_run_once(store: SqlRunStore) -> None:
    faults = Faults()
    faults.once(RunEvent.START, losing, times=2)
    one = await lone_on(store, faults)
    body = Body()
    body.go_on.set()
    run = await carried_out(one, body)
    assert run is not None
    assert (run.status, run.attempt, len(body.begun)) == (RunStatus.SUCCESS, 1, 1)


async def orphan(store: SqlRunStore, **asked: Any) -> Run:
    """A run with hooks on a thread with a row, whose owner is dead."""
    await store.threads.create(NewThread(thread_id=ThreadId(THREAD)))
    return await Stage(store).is_orphaned("orphan", deliveries=HOOKS, **asked)


async def status_of(store: SqlRunStore) -> ThreadStatus:
    thread = await store.threads.get(ThreadId(THREAD), scope=EVERYONE)
    assert thread is not None
    return thread.status


@rule("F08", "O21", "O28", "P013")
async def test_a_cancel_that_ends_a_dead_workers_run_leaves_nobody_waiting(store: SqlRunStore) -> None:
    run = await orphan(store)
    told: asyncio.Queue[Run] = asyncio.Queue()
    async with manager_on(store, on_settled=told.put) as manager:
        reader = asyncio.create_task(manager.join(run, timeout=PATIENCE))
        answer = await manager.cancel(run, wait=True)
        assert answer.outcome in (CancelOutcome.TAKEN_OVER, CancelOutcome.CANCELLED)
        hooked = await asyncio.wait_for(told.get(), PATIENCE)
        joined = await reader
    assert joined is not None
    assert (hooked.run_id, hooked.status, joined.status) == (run.run_id, RunStatus.INTERRUPTED, RunStatus.INTERRUPTED)
    assert await store.outbox.receipt(run.key, scope=EVERYONE) is not None
    assert await status_of(store) is not ThreadStatus.BUSY


@rule("F09", "F31", "O1", "O28")
async def test_an_admission_that_displaces_a_dead_workers_run_tells_of_its_end(store: SqlRunStore) -> None:
    run = await orphan(store, on_orphan=OnOrphan.FAIL)
    told: asyncio.Queue[Run] = asyncio.Queue()
    async with manager_on(store, on_settled=told.put) as manager:
        admitted = await manager.create_or_reject(THREAD, multitask_strategy="reject")
        hooked = await asyncio.wait_for(told.get(), PATIENCE)
        assert (hooked.run_id, hooked.status, hooked.stop_reason) == (run.run_id, RunStatus.ERROR, "orphan_recovered")
        assert await store.outbox.receipt(run.key, scope=EVERYONE) is not None
        async with manager.execute(admitted):
            pass


@rule("F10", "O28", "P034")
async def test_the_status_of_a_thread_follows_a_recovery(store: SqlRunStore) -> None:
    run = await orphan(store, on_orphan=OnOrphan.FAIL)
    assert await status_of(store) is ThreadStatus.BUSY
    worker = Worker(store)
    await worker.opens()
    await worker.reconciler.sweep()
    assert (await worker.row(run)).status is RunStatus.ERROR
    assert await status_of(store) is ThreadStatus.ERROR


@rule("F11", "I5")
async def test_a_run_whose_row_was_erased_does_not_come_back(store: SqlRunStore) -> None:
    one = await lone_on(store, Faults())
    body = Body()
    held = one.granting.take_up(await one.admits(), LocalExecutor(body))
    await body.running.wait()
    await executed(store.units, "DELETE FROM dr_runs")
    body.go_on.set()
    await held.over.wait()
    assert await store.get(held.key, scope=EVERYONE) is None
    assert one.names() == ["RunStarted", "RunFenced"]


@rule("F12", "O19", "O21", "I6")
async def test_a_second_action_is_answered_with_the_one_in_force_while_the_body_still_cleans_up(
    store: SqlRunStore, store_dsn: str
) -> None:
    stubborn, restored = Stubborn(), asyncio.Event()

    async def restore(lease: RunLease) -> None:
        restored.set()

    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        run = await one.submit(THREAD, stubborn, restore=restore)
        await stubborn.running.wait()
        answers = [await one.cancel(run, CancelAction.INTERRUPT)]
        await stubborn.told.wait()
        answers += [await manager.cancel(run, CancelAction.ROLLBACK) for manager in (one, other)]
        assert [answer.action for answer in answers] == [CancelAction.INTERRUPT] * 3
        stubborn.let_go.set()
        assert (await run.join(timeout=PATIENCE)).stop_reason == "interrupt"
    assert not restored.is_set()


@rule("F13", "I5", "I16")
async def test_a_rollback_is_seen_as_one_end_and_as_nothing_before(store: SqlRunStore) -> None:
    one = await lone_on(store, Faults())
    seen: list[RunStatus] = []

    async def restore(lease: RunLease) -> None:
        seen.append((await row_of(store, lease.key)).status)

    body = Body()
    held = one.granting.take_up(await one.admits(), LocalExecutor(body, restore))
    await body.running.wait()
    held.lease.stop(StopCause.CANCEL, CancelAction.ROLLBACK)
    seen.append((await row_of(store, held.key)).status)
    run = await over(one, held)
    assert run is not None
    assert (run.status, run.stop_reason) == (RunStatus.INTERRUPTED, "rollback")
    assert {RunStatus.PENDING, RunStatus.RUNNING} >= set(seen)


@rule("F15", "O6")
@pytest.mark.parametrize("asked", list(OnDisconnect))
async def test_what_a_disconnect_does_is_stored_and_any_worker_reads_it(
    asked: OnDisconnect, store: SqlRunStore, store_dsn: str
) -> None:
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        run = await one.create_or_reject(THREAD, on_disconnect=asked.value)
        found = await other.get(run)
        assert found is not None
        assert found.on_disconnect is asked
        async with one.execute(run):
            pass


@rule("F16", "O28", "P085")
async def test_whoever_joins_a_run_gets_its_own_end_and_not_its_successors(store: SqlRunStore) -> None:
    first, second = Body(Outcome(status=RunStatus.ERROR, error="mine")), Body()
    async with manager_on(store) as manager:
        run = await manager.submit(THREAD, first)
        after = await manager.submit(THREAD, second, multitask_strategy="enqueue")
        first.go_on.set()
        await second.running.wait()
        ended = await run.join(timeout=PATIENCE)
        assert (ended.run_id, ended.status, ended.error) == (run.run_id, RunStatus.ERROR, "mine")
        second.go_on.set()
        assert (await after.join(timeout=PATIENCE)).status is RunStatus.SUCCESS


@rule("F17", "F67")
async def test_a_run_says_why_it_ended_and_never_on_which_worker(store: SqlRunStore) -> None:
    async def fails(lease: RunLease) -> None:
        raise ValueError("no such model")

    reasons = {}
    async with manager_on(store) as manager:
        reasons["failed"] = await (await manager.submit("failed", fails)).join(timeout=PATIENCE)
        for action in CancelAction:
            body = Body()
            run = await manager.submit(action.value, body)
            await body.running.wait()
            await manager.cancel(run, action)
            reasons[action.value] = await run.join(timeout=PATIENCE)
        await Stage(store).is_orphaned("orphan", "orphan", on_orphan=OnOrphan.FAIL)
        await manager.reconcile_orphaned_inflight_runs()
        left = await manager.join(key("orphan", "orphan"), timeout=PATIENCE)
        assert left is not None
        reasons["orphan"] = left
    told = {name: (run.status.value, run.stop_reason, run.error) for name, run in reasons.items()}
    assert told["failed"] == ("error", None, "ValueError: no such model")
    assert told["interrupt"] == ("interrupted", "interrupt", None)
    assert told["rollback"] == ("interrupted", "rollback", None)
    assert told["orphan"][:2] == ("error", "orphan_recovered")
    assert [name for name, run in reasons.items() if "host:" in (run.error or "")] == []
