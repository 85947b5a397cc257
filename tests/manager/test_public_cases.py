"""Public reports about leases and recovery, tried on this library: a live run is never taken, a dead one always is."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import pytest

from deerflow_runs.manager.executor import LocalExecutor
from deerflow_runs.manager.lease import OwnershipLost
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.model import EVERYONE, CancelAction, OneUser, OnOrphan, Run, RunStatus, Strategy, ThreadId, WorkerId
from deerflow_runs.observe import RunRecovered, SessionDeclaredDead, SweepFailed
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Decision, Refused
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store.base import Swept
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.threads import NewThread, ThreadStatus
from deerflow_runs.testing.contract.stage import THREAD, Stage
from deerflow_runs.testing.flaky_line import Faults
from deerflow_runs.testing.flaky_store import FlakyStore
from tests.contract.lives import executed
from tests.manager.lone import lone_worker
from tests.manager.spoiled import PATIENCE, Body, Echo, gated, manager_on, over, until
from tests.manager.workers import NEEDS_AGENT, Worker, store_without_hints
from tests.rules import rule

pytestmark = pytest.mark.timeout(60)

RESUMES: Final[Any] = {"backoff_min": "10 ms", "backoff_max": "10 ms"}
"""Settings under which what was left may be taken up again at once."""


async def opened(store: SqlRunStore, *names: str) -> list[Worker]:
    """Workers with open sessions."""
    workers = [Worker(store, name, **RESUMES) for name in names]
    for worker in workers:
        await worker.opens()
    return workers


async def dies(worker: Worker) -> None:
    """Its process is gone, and the kernel has said so."""
    await worker.is_killed()
    await worker.stage.dies(worker.me)


@rule("P002", "O24", "I10")
async def test_an_owner_that_renews_between_the_look_and_the_verdict_keeps_its_run(store_dsn: str) -> None:
    faults = Faults()
    verdict = gated(faults, "declare_dead")
    async with store_without_hints(store_dsn) as store:
        owner, judge = Worker(store, "owner"), Worker(FlakyStore.around(store, faults), "judge")
        await owner.opens()
        await judge.opens()
        held = await owner.starts(await owner.admits("run", on_orphan=OnOrphan.RESUME))
        await executed(store.units, "UPDATE dr_workers SET expires_at = 1 WHERE worker_id = :owner", owner=owner.me)
        await judge.reconciler.sweep()
        await judge.lives(20.0)
        sweeping = asyncio.create_task(judge.reconciler.sweep())
        await verdict.reached()
        await owner.beats()
        verdict.open()
        assert (await sweeping).total == 0
        assert judge.told(SessionDeclaredDead) + judge.told(SweepFailed) == []
        owner.agent.go_on.set()
        await held.over.wait()
        assert (await owner.row(held.run)).status is RunStatus.SUCCESS


@rule("P008", "O13", "O14", "O17", "I2", "I4")
async def test_an_attempt_that_is_over_changes_nothing_although_its_own_process_has_the_run_again(
    store: SqlRunStore,
) -> None:
    worker, neighbour = await opened(store, "worker", "neighbour")
    before = await worker.starts(await worker.admits("run", on_orphan=OnOrphan.RESUME))
    await store.close_session(worker.me)
    await neighbour.reconciler.sweep()
    lost = await worker.opens()
    await worker.reconciler.take_back(lost)
    assert before.lease.fenced
    await before.over.wait()
    async with worker.running():
        while len(worker.agent.begun) < 2:
            await worker.lives(1.0)
        now = worker.registry.get(before.run.run_id)
        assert now is not None
        assert (now.lease.trusted(), now.lease.epoch > before.lease.epoch) == (True, True)
        untouched = await worker.row(before.run)
        with pytest.raises(OwnershipLost):
            await before.lease.check()
        stale = Actor(worker.me, before.lease.epoch, capabilities=NEEDS_AGENT)
        writes = (RunEvent.SETTLE_SUCCESS, RunEvent.SETTLE_ERROR, RunEvent.PROGRESS, RunEvent.HAND_OVER)
        answers = [await store.apply(before.key, event, stale) for event in writes]
        assert [isinstance(answer, Refused) and answer.reason for answer in answers] == [Refusal.LOST] * len(writes)
        assert await worker.row(before.run) == untouched
        worker.agent.go_on.set()
        await now.over.wait()
    assert (await worker.row(before.run)).status is RunStatus.SUCCESS


@rule("P013", "O4", "O28")
@pytest.mark.parametrize("when", ["before its death is known", "after it"])
async def test_a_dead_workers_run_is_cancelled_through_another_one_and_its_thread_is_free(
    when: str, store: SqlRunStore
) -> None:
    (worker,) = await opened(store, "worker")
    held = await worker.starts(await worker.admits("run", THREAD, on_orphan=OnOrphan.RESUME))
    await worker.is_killed()
    if when == "after it":
        await worker.stage.dies(worker.me)
    async with manager_on(store) as manager:
        await manager.cancel(held.run)
        if when != "after it":
            await worker.stage.dies(worker.me)
            await manager.reconcile_orphaned_inflight_runs()
        ended = await manager.join(held.run, timeout=PATIENCE)
        assert ended is not None
        assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "interrupt")
        async with manager.execute(await manager.create_or_reject(THREAD)):
            pass


@rule("P034", "O7", "O28", "I7")
async def test_a_recovery_frees_the_thread_for_those_who_wait_there(store: SqlRunStore) -> None:
    await store.threads.create(NewThread(thread_id=ThreadId(THREAD)))
    (worker,) = await opened(store, "worker")
    held = await worker.starts(await worker.admits("run", THREAD, on_orphan=OnOrphan.FAIL))
    echo = Echo()
    async with manager_on(store, executors={"echo": echo}) as peer:
        behind = [await peer.submit(THREAD, "echo", input=n, multitask_strategy="enqueue") for n in range(2)]
        await dies(worker)
        await peer.reconcile_orphaned_inflight_runs()
        assert {(await run.join(timeout=PATIENCE)).status for run in behind} == {RunStatus.SUCCESS}
    assert echo.ran == [run.run_id for run in behind]
    assert (await worker.row(held.run)).stop_reason == "orphan_recovered"
    thread = await store.threads.get(ThreadId(THREAD), scope=EVERYONE)
    assert thread is not None
    assert thread.status is ThreadStatus.IDLE


@rule("P038", "I4", "I5", "O14", "O26")
async def test_in_three_hundred_races_a_run_is_finished_or_recovered_and_never_both(store: SqlRunStore) -> None:
    stage, outcomes = Stage(store), Counter[tuple[str, bool, bool]]()
    judge = Actor(await stage.opens())
    for number in range(10):
        owner = await stage.opens(WorkerId(f"host:owner-{number}"))
        names = [f"{number}-{run}" for run in range(30)]
        runs = [await stage.starts(name, f"thread-{name}", worker_id=owner, on_orphan=OnOrphan.FAIL) for name in names]
        finishing = [store.apply(run.key, RunEvent.SETTLE_SUCCESS, Actor(owner, run.epoch)) for run in runs]
        recovering = _recovered_when_dead(stage, owner, judge)
        *finished, swept = await asyncio.gather(*finishing[:15], recovering, *finishing[15:])
        decisions = [one for one in (*finished, swept) if not isinstance(one, Swept)]
        recovered = {run.run_id for one in (*finished, swept) if isinstance(one, Swept) for run in one.ended}
        for run, decision in zip(runs, decisions, strict=True):
            ended = await stage.now(run)
            outcomes[_outcome(decision, ended, recovered=run.run_id in recovered)] += 1
            assert await store.outbox.receipt(run.key, scope=EVERYONE) is not None
    assert set(outcomes) <= {("success", True, False), ("error", False, True)}
    assert outcomes.total() == 300


async def _recovered_when_dead(stage: Stage, owner: WorkerId, judge: Actor) -> Swept:
    await stage.dies(owner)
    return await stage.store.take_over(judge, NOTHING_GIVEN, 100)


def _outcome(decision: Decision | Swept, ended: Run, *, recovered: bool) -> tuple[str, bool, bool]:
    return ended.status.value, isinstance(decision, Applied), recovered


@rule("P053", "O26", "I8")
async def test_rows_without_a_living_owner_are_recovered_and_fresh_ones_are_left_alone(store: SqlRunStore) -> None:
    (worker,) = await opened(store, "worker")
    ghost = WorkerId("host:never-was")
    running = await worker.stage.starts("running", "one", worker_id=ghost, on_orphan=OnOrphan.RESUME)
    pending = await worker.stage.arrives("pending", "two", worker_id=ghost, on_orphan=OnOrphan.RESUME)
    fresh = await worker.admits("fresh", take=False)
    mine = await worker.starts(await worker.admits("mine"))
    await worker.reconciler.sweep()
    assert [(await worker.row(run)).vacant for run in (running, pending)] == [True, True]
    assert await worker.row(fresh) == fresh
    assert (await worker.row(mine.run)).owner_worker_id == worker.me


@rule("P074", "P075", "O26", "I5")
async def test_runs_that_wait_for_a_human_are_left_alone_by_every_restart(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    asks = Body(Outcome(status=RunStatus.INTERRUPTED, interrupts=[{"value": "shall I?"}]))
    asks.go_on.set()
    parked = []
    for number in range(50):
        await store.threads.create(NewThread(thread_id=ThreadId(f"parked-{number}")))
        run = await one.admits(f"parked-{number}", f"parked-{number}")
        ended = await over(one, one.granting.take_up(run, LocalExecutor(asks)))
        assert ended is not None
        parked.append(await Stage(store).now(ended))
    (worker,) = await opened(store, "worker")
    for number in range(3):
        await worker.starts(await worker.admits(f"running-{number}", on_orphan=OnOrphan.RESUME))
    await dies(worker)
    await one.store.close_session(one.ground.worker_id)
    recovered: list[str] = []
    for restart in range(3):
        (worker,) = await opened(store, f"restart-{restart}")
        await worker.reconciler.sweep()
        recovered += [event.run_id for event in worker.told(RunRecovered)]
        await dies(worker)
    assert sorted(recovered) == ["running-0", "running-1", "running-2"]
    assert [await Stage(store).now(run) for run in parked] == parked
    thread = await store.threads.get(ThreadId("parked-7"), scope=EVERYONE)
    assert thread is not None
    assert (thread.status, thread.interrupts) == (ThreadStatus.INTERRUPTED, [{"value": "shall I?"}])


@rule("P075", "O1", "I1")
async def test_of_two_clients_that_answer_a_question_at_once_one_gets_the_thread(
    store: SqlRunStore, store_dsn: str
) -> None:
    asks, answers = Body(Outcome(status=RunStatus.INTERRUPTED)), Body()
    asks.go_on.set()
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        parked = await (await one.submit(THREAD, asks)).join(timeout=PATIENCE)
        assert parked.status is RunStatus.INTERRUPTED
        racers = [manager.submit(THREAD, answers) for manager in (one, other)]
        results = await asyncio.gather(*racers, return_exceptions=True)
        won = [result for result in results if not isinstance(result, BaseException)]
        assert [type(result).__name__ for result in results if isinstance(result, BaseException)] == ["ThreadBusy"]
        answers.go_on.set()
        assert (await won[0].join(timeout=PATIENCE)).status is RunStatus.SUCCESS


@rule("P048", "O3", "O4", "O26", "I7", "I8")
async def test_a_displacement_whose_incumbent_dies_leaves_nobody_half_displaced(store: SqlRunStore) -> None:
    owner, peer = await opened(store, "owner", "peer")
    a = await owner.starts(await owner.admits("a", THREAD, on_orphan=OnOrphan.RESUME))
    waiting = [await owner.admits(name, THREAD, strategy=Strategy.ENQUEUE) for name in ("b", "c")]
    d = await peer.admits("d", THREAD, strategy=Strategy.INTERRUPT)
    await dies(owner)
    async with peer.running():
        while not peer.agent.begun:
            await peer.lives(1.0)
        peer.agent.go_on.set()
        await until(lambda: len(peer.registry) == 0)
    rows = [await peer.row(run) for run in (a.run, *waiting, d)]
    assert [(row.status.value, row.stop_reason) for row in rows] == [("interrupted", "interrupt")] * 3 + [
        ("success", None)
    ]
    assert len(peer.agent.begun) == 1


@rule("P019", "P095", "O21")
async def test_a_stranger_reads_and_cancels_nothing_by_any_pair_of_ids(store: SqlRunStore) -> None:
    ann, bob = OneUser("ann"), OneUser("bob")
    bodies = {user: Body() for user in ("ann", "bob")}
    async with manager_on(store) as manager:
        runs = {user: await manager.submit(f"of-{user}", bodies[user], user_id=user) for user in bodies}
        for body in bodies.values():
            await body.running.wait()
        theirs = runs["bob"].key
        for key in (theirs, type(theirs)(runs["ann"].key.thread_id, theirs.run_id)):
            assert await manager.get(key, scope=ann) is None
            assert await manager.join(key, scope=ann, timeout=PATIENCE) is None
            for action in CancelAction:
                assert (await manager.cancel(key, action, scope=ann)).outcome == "unknown"
        assert await manager.get_many_by_thread("of-bob", [theirs.run_id], scope=ann) == {}
        assert (await manager.list_by_thread("of-bob", scope=ann)).runs == ()
        assert await manager.get(theirs, scope=bob) is not None
        for body in bodies.values():
            body.go_on.set()
        assert (await runs["bob"].join(timeout=PATIENCE)).status is RunStatus.SUCCESS
