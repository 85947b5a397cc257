"""Clocks, growth and deployments that the manager that was studied could not stand (flaws C, D and E)."""

from __future__ import annotations

import asyncio

import pytest

from deerflow_runs.manager.executor import LocalExecutor
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.registry import Held
from deerflow_runs.model import OnOrphan, RunStatus
from deerflow_runs.observe import RunFenced, SessionDeclaredDead
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.contract.stage import THREAD
from deerflow_runs.testing.flaky_line import Faults, failing
from deerflow_runs.testing.flaky_store import QUESTIONS, FlakyStore
from tests.contract.lives import executed
from tests.manager.lone import Lone, lone_worker
from tests.manager.spoiled import PATIENCE, Body, manager_on, over, row_of
from tests.manager.workers import Worker, store_without_hints
from tests.rules import rule

pytestmark = pytest.mark.timeout(60)

RUNS = 5


async def no_op(lease: RunLease) -> None:
    """A run that ends at once."""


async def five_runs(one: Lone, body: Body) -> list[Held]:
    """Runs that are under way."""
    runs = [await one.admits(f"run-{number}", f"thread-{number}") for number in range(RUNS)]
    held = [one.granting.take_up(run, LocalExecutor(body)) for run in runs]
    while len(body.begun) < RUNS:
        await body.running.wait()
        await asyncio.sleep(0)
    return held


async def all_succeed(one: Lone, body: Body, held: list[Held]) -> None:
    """Let them go on: each ends well, and none was lost meanwhile."""
    body.go_on.set()
    ends = [await over(one, run) for run in held]
    assert [end.status if end else None for end in ends] == [RunStatus.SUCCESS] * RUNS
    assert "RunFenced" not in one.names()


# --- Clocks ---------------------------------------------------------------------------------------------------------


@rule("F42", "O9", "I13")
@pytest.mark.parametrize("seconds", [31.0, -31.0])
async def test_a_wall_clock_that_is_set_ends_nobodys_trust(seconds: float, store: SqlRunStore) -> None:
    clock, body = ManualClock(), Body()
    one = await lone_worker(store, clock=clock)
    held = await five_runs(one, body)
    left = one.ground.session.trust.remaining(one.ground.session.now())
    clock.step_wall(seconds)
    assert one.ground.session.trust.remaining(one.ground.session.now()) == left
    assert all(run.lease.trusted() for run in held)
    await all_succeed(one, body, held)


@rule("F42", "O11", "O12", "I13")
async def test_a_loop_that_stood_still_longer_than_a_lease_costs_no_run_that_nobody_claimed(store: SqlRunStore) -> None:
    clock, body = ManualClock(), Body()
    one = await lone_worker(store, clock=clock)
    held = await five_runs(one, body)
    clock.jump(1.2 * one.ground.config.lease.total_seconds())
    assert not any(run.lease.trusted() or run.lease.fenced for run in held)
    await one.beat()
    for run in held:
        run.lease.wake()
    await all_succeed(one, body, held)


@rule("F43", "O24", "I13", "P043")
@pytest.mark.parametrize("seconds", [45.0, -45.0, 86_400.0])
async def test_a_judge_whose_wall_clock_is_wrong_recovers_nobody_who_lives(seconds: float, store_dsn: str) -> None:
    async with store_without_hints(store_dsn) as store:
        worker, judge = Worker(store), Worker(store, "judge")
        await worker.opens()
        await judge.opens()
        run = await worker.admits("run", on_orphan=OnOrphan.RESUME)
        judge.clock.step_wall(seconds)
        for _ in range(3):
            await judge.reconciler.sweep()
            await judge.lives(30.0)
            await worker.beats()
        await judge.reconciler.sweep()
        assert judge.told(SessionDeclaredDead) == []
        assert (await judge.row(run)).owner_worker_id == worker.me


@rule("F44", "O12", "O24", "O25", "I13", "P079")
async def test_an_outage_of_many_leases_kills_no_run_of_any_worker(store_dsn: str) -> None:
    faults = Faults()
    async with store_without_hints(store_dsn) as store:
        workers = [Worker(FlakyStore.around(store, faults), f"worker-{number}") for number in range(3)]
        for worker in workers:
            await worker.opens()
        held = [await worker.starts(await worker.admits(f"run-{worker.me}")) for worker in workers]
        await executed(store.units, "UPDATE dr_workers SET expires_at = 1")
        faults.always(failing(), *QUESTIONS)
        for worker in workers:
            for _ in range(10):
                worker.session.failed()
                await worker.reconciler.sweep()
                await worker.clock.advance(worker.config.lease.total_seconds() / 2)
        faults.mend()
        for worker in workers:
            await worker.reconciler.sweep()  # before anybody's first beat: whoever comes first is no judge yet
            await worker.beats()
            await worker.reconciler.sweep()
        for worker, one in zip(workers, held, strict=True):
            one.lease.wake()
            worker.agent.go_on.set()
            await one.over.wait()
            assert (await worker.row(one.run)).status is RunStatus.SUCCESS
            assert worker.told(SessionDeclaredDead) + worker.told(RunFenced) == []


@rule("F47", "O10")
async def test_beats_do_not_touch_the_rows_of_runs(store: SqlRunStore) -> None:
    worker = Worker(store)
    await worker.opens()
    held = await worker.starts(await worker.admits("run"))
    before = await worker.row(held.run)
    await worker.lives(30.0)
    assert await worker.row(held.run) == before


@rule("F60", "O24", "P078")
async def test_a_session_is_judged_by_its_own_lease_and_not_by_the_judges(store_dsn: str) -> None:
    async with store_without_hints(store_dsn) as store:
        slow, judge = Worker(store, lease="60 s"), Worker(store, "judge", lease="5 s")
        await slow.opens()
        await judge.opens()
        run = await slow.admits("run", on_orphan=OnOrphan.RESUME)
        await executed(store.units, "UPDATE dr_workers SET expires_at = 1 WHERE worker_id = :slow", slow=slow.me)
        await judge.reconciler.sweep()
        await judge.lives(50.0)
        await judge.reconciler.sweep()
        assert judge.told(SessionDeclaredDead) == []
        await judge.lives(15.0)
        await judge.reconciler.sweep()
        assert [event.judged for event in judge.told(SessionDeclaredDead)] == [slow.me]
        assert (await judge.row(run)).vacant


# --- Growth ---------------------------------------------------------------------------------------------------------


@rule("F51", "F52", "F53", "P092")
async def test_two_hundred_ended_runs_leave_nothing_in_memory_that_an_admission_would_look_through(
    store: SqlRunStore,
) -> None:
    one = await lone_worker(store, clock=ManualClock())
    body = Body()
    body.go_on.set()
    for number in range(200):
        run = await one.admits(f"run-{number}", f"thread-{number % 20}", idempotency_key=f"key-{number}")
        await over(one, one.granting.take_up(run, LocalExecutor(body)))
    registry = one.ground.registry
    assert (len(registry), registry.waiting(), list(registry.lingering())) == (0, (), [])
    assert [registry.of_thread(run.thread_id) for run in (run,)] == [()]
    assert registry.next_deadline is None
    assert one.granting.lives() == frozenset()


@rule("F51", "O2")
async def test_runs_that_end_while_they_wait_leave_nothing_in_memory_either(store: SqlRunStore) -> None:
    async with manager_on(store) as manager:
        body = Body()
        first = await manager.submit(THREAD, body)
        queued = [await manager.submit(THREAD, no_op, multitask_strategy="enqueue") for _ in range(20)]
        assert manager.stats().expected == 20
        for run in queued:
            await manager.cancel(run)
        assert (manager.stats().expected, manager.stats().held) == (0, 1)
        body.go_on.set()
        await first.join(timeout=PATIENCE)


# --- Deployments ----------------------------------------------------------------------------------------------------


@rule("F59", "F61", "O26", "O27")
async def test_a_worker_that_starts_beside_another_one_takes_nothing_from_it(
    store: SqlRunStore, store_dsn: str
) -> None:
    body, waiting = Body(), Body()
    async with manager_on(store) as one:
        running = await one.submit(THREAD, body)
        await body.running.wait()
        unattached = await one.create_or_reject("unattached")
        queued = await one.submit(THREAD, waiting, multitask_strategy="enqueue")
        for _ in range(2):  # a rolling update, with a surge
            async with store_at(store_dsn) as elsewhere, manager_on(elsewhere) as other:
                assert (await other.reconcile_orphaned_inflight_runs()).total == 0
                assert other.stats().held == 0
        assert (await row_of(store, running.key)).owner_worker_id == one.worker_id
        body.go_on.set()
        waiting.go_on.set()
        for run in (running, queued):
            assert (await run.join(timeout=PATIENCE)).status is RunStatus.SUCCESS
        async with one.execute(unattached):
            pass


@rule("F60", "O26", "I8")
async def test_every_run_is_owned_by_a_session_from_its_first_moment(store: SqlRunStore) -> None:
    async with manager_on(store) as manager:
        run = await manager.create_or_reject(THREAD)
        assert run.run.owner_worker_id in {session.worker_id for session in await store.sessions()}
        async with manager.execute(run):
            pass
