"""Threads and workers that the manager that was studied brought to a halt (flaws B): nobody waits for what is stuck,
and nothing stays stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deerflow_runs.manager.answers import CancelOutcome
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunOptions
from deerflow_runs.model import CancelAction, OnOrphan, RunStatus, SessionState
from deerflow_runs.observe import SessionDeclaredDead
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import NotLive
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.contract.stage import THREAD
from deerflow_runs.testing.flaky_line import Faults, Gate, failing
from deerflow_runs.testing.flaky_store import QUESTIONS
from tests.contract.lives import executed
from tests.manager.spoiled import PATIENCE, Body, Echo, Stubborn, calm, gated, manager_on, row_of, until
from tests.manager.workers import Worker, store_without_hints
from tests.rules import rule

pytestmark = pytest.mark.timeout(60)


async def no_op(lease: RunLease) -> None:
    """A run that ends at once."""


@rule("F18", "F49", "O1")
async def test_an_admission_that_hangs_holds_up_no_other_thread(store: SqlRunStore) -> None:
    faults, body = Faults(), Body()
    async with manager_on(store, faults) as manager:
        running = await manager.submit("running", body)
        await body.running.wait()
        stuck = gated(faults, "admit")
        admission = asyncio.create_task(manager.create_or_reject("stuck"))
        await stuck.reached()
        others = [await manager.submit(f"thread-{number}", no_op) for number in range(50)]
        ends = [await one.join(timeout=PATIENCE) for one in others]
        assert {end.status for end in ends} == {RunStatus.SUCCESS}
        assert await manager.get(running) is not None
        assert len((await manager.list_by_thread("running")).runs) == 1
        assert (await manager.cancel(running, wait=True, timeout=PATIENCE)).outcome is CancelOutcome.CANCELLED
        assert not admission.done()
        stuck.open()
        async with manager.execute(await admission):
            pass


@rule("F49", "O1")
async def test_fifty_admissions_are_before_the_store_at_once(store: SqlRunStore) -> None:
    faults, gate = Faults(), Gate()
    async with manager_on(store, faults) as manager:
        faults.always(gate.before, "admit")
        admissions = [asyncio.create_task(manager.submit(f"thread-{number}", no_op)) for number in range(50)]
        await until(lambda: faults.count("admit") == 50)
        gate.open()
        for admission in admissions:
            assert (await (await admission).join(timeout=PATIENCE)).status is RunStatus.SUCCESS


@rule("F25", "O6")
@pytest.mark.parametrize("answered", [False, True], ids=["before the insert", "after the insert"])
async def test_a_caller_that_goes_while_its_admission_is_in_flight_leaves_the_thread_free(
    answered: bool, store: SqlRunStore
) -> None:
    faults = Faults()
    gate = gated(faults, "admit", answered=answered)
    async with manager_on(store, faults) as manager:
        caller = asyncio.create_task(manager.create_or_reject(THREAD, run_id="left"))
        await gate.reached()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        gate.open()
        await until(lambda: faults.count(RunEvent.SETTLE_CANCELLED) > 0 and manager.stats().held == 0)
        async with manager.execute(await manager.create_or_reject(THREAD)):
            pass


@rule("F26", "O5", "I14")
async def test_a_run_that_was_reused_elsewhere_blocks_nobody_there(store: SqlRunStore, store_dsn: str) -> None:
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        body = Body()
        run = await one.submit(THREAD, body, idempotency_key="key")
        await body.running.wait()
        again = await other.create_or_reject(THREAD, idempotency_key="key")
        assert (again.run_id, again.reused, other.stats().held, other.stats().expected) == (run.run_id, True, 0, 0)
        body.go_on.set()
        await run.join(timeout=PATIENCE)
        found = await other.get(again)
        assert found is not None
        assert found.status is RunStatus.SUCCESS
        async with other.execute(await other.create_or_reject(THREAD)):
            pass


@rule("F27", "O5", "I14", "P083")
@pytest.mark.parametrize("user", [None, "ann"])
async def test_a_key_is_found_again_whether_or_not_a_user_is_named(
    user: str | None, store: SqlRunStore, store_dsn: str
) -> None:
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        first = await one.create_or_reject(THREAD, idempotency_key="key", user_id=user)
        asked = RunOptions(idempotency_key="key", user_id=user)
        answers = [await manager.create_or_reject(THREAD, **asked) for manager in (one, other)]
        assert [(answer.run_id, answer.reused) for answer in answers] == [(first.run_id, True)] * 2
        async with one.execute(first):
            pass


@rule("F28", "O5", "I14")
async def test_a_duplicate_that_overtakes_the_first_takes_no_executor_from_it(store: SqlRunStore) -> None:
    faults = Faults()
    slow = gated(faults, "admit", answered=True)
    async with manager_on(store, faults) as manager:
        asked = RunOptions(idempotency_key="key", multitask_strategy="interrupt")
        first = asyncio.create_task(manager.create_or_reject(THREAD, **asked))
        await slow.reached()
        again = await manager.create_or_reject(THREAD, **asked)
        slow.open()
        mine = await first
        assert (again.run_id, again.reused, mine.reused) == (mine.run_id, True, False)
        async with manager.execute(mine):
            pass
        assert (await row_of(store, mine.key)).status is RunStatus.SUCCESS


@rule("F32", "O24", "O26")
async def test_a_silent_workers_runs_go_on_after_its_lease_the_grace_and_a_sweep(store_dsn: str) -> None:
    async with store_without_hints(store_dsn) as store:
        judge, silent = Worker(store, "judge"), Worker(store, "silent")
        await judge.opens()
        await silent.opens()
        run = await silent.admits("run", on_orphan=OnOrphan.RESUME)
        await judge.lives(judge.config.lease.total_seconds() + judge.config.grace.total_seconds())
        await executed(store.units, "UPDATE dr_workers SET expires_at = 1 WHERE worker_id = :worker", worker=silent.me)
        passed, sweep = 0.0, judge.config.sweep.total_seconds()
        while not judge.told(SessionDeclaredDead):
            await judge.reconciler.sweep()
            await judge.lives(sweep)
            passed += sweep
        assert (await judge.row(run)).vacant
        config = judge.config
        assert passed <= (config.lease + config.grace + 2 * config.sweep).total_seconds()


@rule("F33", "O13", "O35", "I12")
@pytest.mark.parametrize("lost", ["declared dead", "closed"])
async def test_a_session_that_is_over_keeps_no_lease_and_no_late_beat_brings_it_back(
    lost: str, store: SqlRunStore
) -> None:
    worker, neighbour = Worker(store), Worker(store, "neighbour")
    await worker.opens()
    await neighbour.opens()
    run = await worker.admits("run", on_orphan=OnOrphan.RESUME)
    await store.renew(worker.me, hinted=True)
    await (neighbour.stage.is_believed_dead(worker.me) if lost == "declared dead" else neighbour.stage.dies(worker.me))
    before = await neighbour.stage.session(worker.me)
    assert isinstance(await store.renew(worker.me), NotLive)
    after = await neighbour.stage.session(worker.me)
    assert (after.state, after.expires_at, after.beat) == (SessionState.DEAD, before.expires_at, before.beat)
    await neighbour.reconciler.sweep()
    assert (await neighbour.row(run)).vacant


@rule("F34", "O29", "O30")
async def test_a_run_whose_worker_died_is_carried_out_by_another_one(store: SqlRunStore) -> None:
    worker, neighbour = Worker(store), Worker(store, "neighbour", backoff_min="10 ms", backoff_max="10 ms")
    await worker.opens()
    await neighbour.opens()
    held = await worker.starts(await worker.admits("run", on_orphan=OnOrphan.RESUME))
    await worker.is_killed()
    await worker.stage.dies(worker.me)
    async with neighbour.running():
        while not neighbour.agent.begun:
            await neighbour.lives(1.0)
        neighbour.agent.go_on.set()
        await until(lambda: len(neighbour.registry) == 0)
    run = await neighbour.row(held.run)
    assert (run.status, run.attempt, run.settled_by) == (RunStatus.SUCCESS, 2, neighbour.me)


@rule("F36", "O4", "P029")
async def test_a_clean_up_that_never_ends_keeps_no_successor_waiting(store: SqlRunStore) -> None:
    stubborn = Stubborn()
    async with manager_on(store, config=calm(beat="100 ms", cancel_grace="200 ms")) as manager:
        first = await manager.submit(THREAD, stubborn)
        await stubborn.running.wait()
        after = await manager.submit(THREAD, no_op, multitask_strategy="interrupt")
        assert (await after.join(timeout=PATIENCE)).status is RunStatus.SUCCESS
        ended = await first.join(timeout=PATIENCE)
        assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "interrupt")
        assert manager.stats().lingering == 1
        stubborn.let_go.set()


@rule("F37", "O19", "I6")
@pytest.mark.parametrize("action", list(CancelAction))
@pytest.mark.parametrize("store_is", ["hung", "away"])
async def test_a_local_cancel_stops_the_body_although_no_question_is_answered(
    store_is: str, action: CancelAction, store: SqlRunStore
) -> None:
    faults, hung, restored = Faults(), Gate(), asyncio.Event()
    running, told, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def cleans_up(lease: RunLease) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()
            await let_go.wait()

    async def restore(lease: RunLease) -> None:
        restored.set()

    async with manager_on(store, faults) as manager:
        run = await manager.submit(THREAD, cleans_up, restore=restore)
        await running.wait()
        faults.always(hung.before if store_is == "hung" else failing(), *QUESTIONS)
        try:
            answer = await asyncio.wait_for(manager.cancel(run, action), PATIENCE / 4)
            await told.wait()
        finally:
            let_go.set()
        assert answer.outcome is CancelOutcome.REQUESTED
        faults.mend()
        hung.open()
        ended = await run.join(timeout=PATIENCE)
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, action.value)
    assert restored.is_set() is (action is CancelAction.ROLLBACK)


@rule("F38", "O21", "P029")
async def test_waiting_for_a_cancel_is_bounded_and_raises_nothing_of_the_run(store: SqlRunStore) -> None:
    stubborn, running = Stubborn(), asyncio.Event()

    async def crashes(lease: RunLease) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("in the clean-up") from None

    async with manager_on(store) as manager:
        run = await manager.submit("stubborn", stubborn)
        await stubborn.running.wait()
        bounded = await manager.cancel(run, wait=True, timeout=0.01)
        assert bounded.outcome is CancelOutcome.REQUESTED
        stubborn.let_go.set()
        await run.join(timeout=PATIENCE)
        run = await manager.submit("crashing", crashes)
        await running.wait()
        answer = await manager.cancel(run, wait=True, timeout=PATIENCE)
        assert answer.outcome is CancelOutcome.CANCELLED
        assert answer.run is not None
        assert answer.run.status is RunStatus.INTERRUPTED


@rule("F39", "O2", "I17")
async def test_runs_may_be_queued_without_an_end_and_go_in_their_order(store: SqlRunStore, store_dsn: str) -> None:
    echo, body = Echo(), Body()
    able: Any = {"executors": {"echo": echo}}
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere, **able) as other:
        first = await one.submit(THREAD, body)
        await body.running.wait()
        queued = [await other.submit(THREAD, "echo", input=number, multitask_strategy="enqueue") for number in range(5)]
        body.go_on.set()
        ends = [await run.join(timeout=PATIENCE) for run in (first, *queued)]
    assert {end.status for end in ends} == {RunStatus.SUCCESS}
    assert echo.ran == [run.run_id for run in queued]
