"""Public reports about admission, strategies, cancels and shutdowns, tried on this library without its HTTP surface."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from deerflow_runs.errors import IdempotencyMismatch, InvalidValue, ThreadBusy, UsageError
from deerflow_runs.manager.answers import CancelOutcome
from deerflow_runs.manager.handle import RunHandle
from deerflow_runs.manager.lease import RunLease, check_in_thread
from deerflow_runs.manager.manager import RunManager, RunOptions
from deerflow_runs.model import CancelAction, OperationKind, RunStatus, Strategy
from deerflow_runs.observe import LogObserver
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.contract.stage import THREAD, key
from deerflow_runs.testing.flaky_line import Faults
from tests.manager.spoiled import PATIENCE, Body, Echo, Stubborn, calm, gated, manager_on, row_of, until
from tests.rules import rule

pytestmark = pytest.mark.timeout(60)

SWIFT: dict[str, Any] = {"beat": "100 ms", "cancel_grace": "200 ms"}
"""Settings under which what does not stop is soon left behind."""


async def no_op(lease: RunLease) -> None:
    """A run that ends at once."""


# --- Admission ------------------------------------------------------------------------------------------------------


@rule("P117", "O1", "I1")
async def test_of_twenty_requests_at_once_over_two_workers_exactly_one_is_let_in(
    store: SqlRunStore, store_dsn: str
) -> None:
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        for number in range(10):
            body = Body()
            racers = [(one, other)[racer % 2].submit(f"fresh-{number}", body) for racer in range(20)]
            results = await asyncio.gather(*racers, return_exceptions=True)
            won = [result for result in results if isinstance(result, RunHandle)]
            busy = [result for result in results if isinstance(result, ThreadBusy)]
            assert (len(won), len(busy)) == (1, 19)
            assert {error.holder for error in busy} == {won[0].run_id}
            body.go_on.set()
            assert (await won[0].join(timeout=PATIENCE)).status is RunStatus.SUCCESS
            assert len((await one.list_by_thread(f"fresh-{number}")).runs) == 1


@rule("P081", "O1", "O5")
async def test_conflicts_of_different_kinds_have_different_answers(store: SqlRunStore) -> None:
    async with manager_on(store) as manager:
        held = await manager.create_or_reject(THREAD, run_id="taken", idempotency_key="key", kwargs={"a": 1})
        with pytest.raises(InvalidValue, match="belongs to another run"):
            await manager.create_or_reject("elsewhere", run_id="taken")
        with pytest.raises(IdempotencyMismatch):
            await manager.create_or_reject(THREAD, idempotency_key="key", kwargs={"a": 2})
        with pytest.raises(ThreadBusy) as busy:
            await manager.create_or_reject(THREAD)
        assert busy.value.holder == held.run_id
        assert not await manager.has_inflight("elsewhere")
        async with manager.execute(held), manager.execute(await manager.create_or_reject("elsewhere")):
            pass


@rule("P083", "O5", "I14")
async def test_a_repeated_request_is_the_same_run_until_its_row_is_gone_and_for_its_user_only(
    store: SqlRunStore, store_dsn: str
) -> None:
    asked = RunOptions(idempotency_key="key", user_id="ann")
    body = Body()
    async with store_at(store_dsn) as elsewhere, manager_on(elsewhere) as other:
        async with manager_on(store) as one:
            first = await one.submit(THREAD, body, **asked)
            await body.running.wait()
            crowd = [(one, other)[number % 2].create_or_reject(THREAD, **asked) for number in range(50)]
            assert {(run.run_id, run.reused) for run in await asyncio.gather(*crowd)} == {(first.run_id, True)}
            with pytest.raises(IdempotencyMismatch):
                await one.create_or_reject(THREAD, kwargs={"other": "body"}, **asked)
            with pytest.raises(ThreadBusy):
                await one.create_or_reject(THREAD, idempotency_key="key", user_id="bob")
            body.go_on.set()
            await first.join(timeout=PATIENCE)
            assert (await one.create_or_reject(THREAD, **asked)).run_id == first.run_id
        assert (await other.create_or_reject(THREAD, **asked)).run_id == first.run_id  # after the restart of the first
        bobs = await other.create_or_reject(THREAD, idempotency_key="key", user_id="bob")
        assert (bobs.run_id != first.run_id, bobs.reused) == (True, False)
        async with other.execute(bobs):
            pass
    assert len(body.begun) == 1


@rule("P039", "O6", "O8")
async def test_three_hundred_callers_that_go_leave_no_connection_and_no_thread_behind(
    store: SqlRunStore, store_dsn: str
) -> None:
    async with store_at(store_dsn, connections=2) as small, manager_on(small) as manager:
        for round_ in range(10):
            callers = [asyncio.create_task(manager.create_or_reject(f"{round_}-{number}")) for number in range(30)]
            for caller in callers:
                await asyncio.sleep(0)
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        # Behind whatever is still being withdrawn: on a thread that stayed held they would wait for ever.
        threads = [f"{number % 10}-{number // 10}" for number in range(50)]
        runs = [await manager.submit(thread, no_op, multitask_strategy="enqueue") for thread in threads]
        assert {(await run.join(timeout=PATIENCE)).status for run in runs} == {RunStatus.SUCCESS}
        if store_dsn.startswith("postgres"):
            idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
            assert await store.units.read(lambda connection: connection.scalar(text(idle))) == 0


# --- Strategies -----------------------------------------------------------------------------------------------------


@rule("P005", "O3", "O4", "I1", "I16")
@pytest.mark.parametrize("strategy", [Strategy.INTERRUPT, Strategy.ROLLBACK])
async def test_nothing_of_a_slow_predecessor_comes_after_its_successor_has_begun(
    strategy: Strategy, store: SqlRunStore, store_dsn: str
) -> None:
    wrote: list[str] = []
    stubborn, told = Stubborn(), asyncio.Event()

    async def first(lease: RunLease) -> None:
        await stubborn(lease)
        wrote.append("clean-up of the first")

    async def restore(lease: RunLease) -> None:
        wrote.append("state before the first")

    async def second(lease: RunLease) -> None:
        wrote.append("second")
        told.set()

    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        old = await one.submit(THREAD, first, restore=restore)
        await stubborn.running.wait()
        new = await other.submit(THREAD, second, multitask_strategy=strategy)
        await stubborn.told.wait()
        assert not told.is_set()
        stubborn.let_go.set()
        assert (await new.join(timeout=PATIENCE)).status is RunStatus.SUCCESS
        assert (await old.join(timeout=PATIENCE)).stop_reason == strategy.value
    restored = ["state before the first"] if strategy is Strategy.ROLLBACK else []
    assert wrote == ["clean-up of the first", *restored, "second"]


async def create(manager: RunManager, thread_id: str, **options: Any) -> str:
    return (await manager.create_or_reject(thread_id, **options)).run_id


async def submit_function(manager: RunManager, thread_id: str, **options: Any) -> str:
    return (await manager.submit(thread_id, no_op, **options)).run_id


async def submit_named(manager: RunManager, thread_id: str, **options: Any) -> str:
    return (await manager.submit(thread_id, "echo", input="x", **options)).run_id


@rule("P085", "O1", "O2", "O3")
@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("way", [create, submit_function, submit_named], ids=["create", "function", "named"])
async def test_a_strategy_does_the_same_on_every_way_in(way: Any, strategy: Strategy, store: SqlRunStore) -> None:
    body = Body()
    async with manager_on(store, executors={"echo": Echo()}) as manager:
        first = await manager.submit(THREAD, body)
        await body.running.wait()
        queued = await manager.submit(THREAD, body, multitask_strategy="enqueue")
        if strategy is Strategy.REJECT:
            with pytest.raises(ThreadBusy):
                await way(manager, THREAD, multitask_strategy=strategy)
        else:
            newcomer = await way(manager, THREAD, multitask_strategy=strategy)
            assert newcomer in {run.run_id for run in (await manager.list_by_thread(THREAD)).runs}
        if strategy in (Strategy.INTERRUPT, Strategy.ROLLBACK):
            ends = [await run.join(timeout=PATIENCE) for run in (first, queued)]
            assert [end.status for end in ends] == [RunStatus.INTERRUPTED] * 2
            assert ends[0].stop_reason == strategy.value
        body.go_on.set()


@rule("P103", "O2", "O7", "O31")
async def test_a_delayed_run_holds_its_thread_by_a_documented_rule_and_survives_its_worker(
    store: SqlRunStore, store_dsn: str
) -> None:
    echo = Echo()
    able: Any = {"executors": {"echo": echo}}
    later = RunOptions(multitask_strategy="enqueue", delay=timedelta(hours=1))
    async with store_at(store_dsn) as elsewhere, manager_on(elsewhere, **able) as other:
        async with manager_on(store, **able) as one:
            due, never = [await one.submit(THREAD, "echo", input=name, **later) for name in ("due", "never")]
            with pytest.raises(ThreadBusy):
                await one.submit(THREAD, no_op)
            between = await one.submit(THREAD, no_op, multitask_strategy="enqueue")
            assert (await between.join(timeout=PATIENCE)).status is RunStatus.SUCCESS
        assert (await other.cancel(never)).outcome is CancelOutcome.CANCELLED
        assert (await row_of(store, due.key)).status is RunStatus.QUEUED
        await store.units.transaction(lambda connection: connection.execute(text("UPDATE dr_runs SET due_at = 1")))
        await other.reconcile_orphaned_inflight_runs()
        ended = await other.join(due, timeout=PATIENCE)
        assert ended is not None
        assert ended.status is RunStatus.SUCCESS
    assert echo.ran == [due.run_id]


@rule("P112", "O19", "I1")
async def test_a_write_to_a_threads_state_comes_after_the_cancel_that_was_waited_for(store: SqlRunStore) -> None:
    body = Body()
    async with manager_on(store) as manager:
        run = await manager.submit(THREAD, body)
        await body.running.wait()
        with pytest.raises(ThreadBusy):
            async with manager.reserve_thread_operation(THREAD, OperationKind.CHECKPOINT_WRITE):
                raise AssertionError
        queued = await manager.submit(THREAD, no_op, multitask_strategy="enqueue")
        await manager.cancel(queued, wait=True, timeout=PATIENCE)
        assert (await manager.cancel(run, wait=True, timeout=PATIENCE)).outcome is CancelOutcome.CANCELLED
        async with manager.reserve_thread_operation(THREAD, OperationKind.CHECKPOINT_WRITE) as lease:
            await lease.check()


@rule("P101", "I17")
async def test_a_threads_list_is_the_same_on_every_worker_and_repeats_nothing(
    store: SqlRunStore, store_dsn: str
) -> None:
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        made = []
        for number in range(30):
            run = await (one, other)[number % 2].submit(THREAD, no_op, multitask_strategy="enqueue")
            made.append(run.run_id)
        seen: list[str] = []
        after: str | None = None
        for number in range(5):
            page = await (one, other)[number % 2].list_by_thread(THREAD, limit=7, after=after)
            seen += [run.run_id for run in page.runs]
            after = page.after
        assert (seen, after) == (made[::-1], None)
        for run_id in made:
            await one.join(key(run_id), timeout=PATIENCE)


# --- Cancels --------------------------------------------------------------------------------------------------------


@rule("P023", "O20", "O22", "I5", "I6")
@pytest.mark.parametrize("committed", [False, True], ids=["before the commit", "after the commit"])
async def test_cancels_while_a_run_is_being_settled_find_one_end_and_a_free_thread(
    committed: bool, store: SqlRunStore, store_dsn: str
) -> None:
    faults, body = Faults(), Body()
    settling = gated(faults, RunEvent.SETTLE_SUCCESS, answered=committed)
    async with store_at(store_dsn) as elsewhere, manager_on(store, faults) as one, manager_on(elsewhere) as other:
        run = await one.submit(THREAD, body)
        await body.running.wait()
        body.go_on.set()
        await settling.reached()
        answers = [await manager.cancel(run) for manager in (one, other, one)]
        settling.open()
        ended = await run.join(timeout=PATIENCE)
        if committed:
            assert {answer.outcome for answer in answers} == {CancelOutcome.NOT_CANCELLABLE}
            assert ended.status is RunStatus.SUCCESS
        else:
            assert {answer.outcome for answer in answers} == {CancelOutcome.REQUESTED}
            assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "interrupt")
        assert await row_of(store, run.key) == await row_of(elsewhere, run.key)
        async with other.execute(await other.create_or_reject(THREAD)):
            pass


@rule("P037", "O20", "O22", "I6")
@pytest.mark.parametrize("action", list(CancelAction))
async def test_a_run_that_is_cancelled_between_its_admission_and_its_start_never_runs(
    action: CancelAction, store: SqlRunStore, store_dsn: str
) -> None:
    faults, body = Faults(), Body()
    starting = gated(faults, RunEvent.START)
    async with store_at(store_dsn) as elsewhere, manager_on(store, faults) as one, manager_on(elsewhere) as other:
        run = await one.submit(THREAD, body)
        await starting.reached()
        await other.cancel(run, action)
        starting.open()
        ended = await run.join(timeout=PATIENCE)
        assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, action.value)
        async with one.execute(await one.create_or_reject(THREAD)):
            pass
    assert body.begun == []


@rule("P029", "O4", "O17", "O22", "I2")
async def test_a_thread_that_cannot_be_stopped_holds_nobody_and_its_late_write_is_refused(store: SqlRunStore) -> None:
    in_thread, let_go = threading.Event(), threading.Event()
    outcomes: list[str] = []

    def blocks() -> None:
        in_thread.set()
        let_go.wait(PATIENCE)
        try:
            check_in_thread()
            outcomes.append("wrote")
        except asyncio.CancelledError as stopped:
            outcomes.append(type(stopped).__name__)
            raise

    async def body(lease: RunLease) -> None:
        work = asyncio.create_task(asyncio.to_thread(blocks))
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                continue

    async with manager_on(store, config=calm(**SWIFT)) as manager:
        run = await manager.submit(THREAD, body)
        await until(in_thread.is_set)
        after = await manager.submit(THREAD, no_op, multitask_strategy="interrupt")
        assert (await after.join(timeout=PATIENCE)).status is RunStatus.SUCCESS
        assert (await run.join(timeout=PATIENCE)).status is RunStatus.INTERRUPTED
        assert manager.stats().lingering == 1
        let_go.set()
        await until(lambda: manager.stats().lingering == 0)
    assert outcomes == ["RunStopped"]


@rule("P080", "O21")
@pytest.mark.parametrize("action", list(CancelAction))
async def test_a_stop_that_comes_too_late_changes_nothing_and_the_next_message_is_let_in(
    action: CancelAction, store: SqlRunStore
) -> None:
    async with manager_on(store) as manager:
        run = await manager.submit(THREAD, no_op)
        before = await run.join(timeout=PATIENCE)
        for wait in (False, True):
            answer = await manager.cancel(run, action, wait=wait)
            assert (answer.outcome, answer.run) == (CancelOutcome.NOT_CANCELLABLE, before)
        assert await row_of(store, run.key) == await row_of(store, before.key)
        async with manager.execute(await manager.create_or_reject(THREAD)):
            pass


@rule("P108", "O19", "O21")
async def test_ten_cancels_at_once_through_two_workers_are_one_cancel(store: SqlRunStore, store_dsn: str) -> None:
    body = Body()
    async with store_at(store_dsn) as elsewhere, manager_on(store) as one, manager_on(elsewhere) as other:
        run = await one.submit(THREAD, body)
        await body.running.wait()
        cancels = [(one, other)[n % 2].cancel(run, wait=n % 3 == 0, timeout=PATIENCE) for n in range(10)]
        answers = await asyncio.gather(*cancels)
        assert {answer.action for answer in answers} == {CancelAction.INTERRUPT}
        assert {answer.outcome for answer in answers} <= {CancelOutcome.REQUESTED, CancelOutcome.CANCELLED}
        assert (await run.join(timeout=PATIENCE)).stop_reason == "interrupt"
        async with other.execute(await other.create_or_reject(THREAD)):
            pass


@rule("P116", "P113", "O22")
async def test_two_hundred_cancels_write_no_error_and_leave_nothing_that_counts_as_active(
    store: SqlRunStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with manager_on(store, observers=[LogObserver()], config=calm(max_concurrent_runs=300)) as manager:
        bodies = [Body() for _ in range(200)]
        runs = [await manager.submit(f"thread-{number}", body) for number, body in enumerate(bodies)]
        for body in bodies:
            await body.running.wait()
        counts = await store.counts()
        assert (counts.by_status[RunStatus.RUNNING], manager.stats().held) == (200, 200)
        for run in runs:
            await manager.cancel(run)
        assert {(await run.join(timeout=PATIENCE)).status for run in runs} == {RunStatus.INTERRUPTED}
        await until(lambda: manager.stats().held == 0)
        assert set((await store.counts()).by_status.values()) == {0}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# --- Shutdown -------------------------------------------------------------------------------------------------------


@rule("P007", "O23", "O35", "I6", "I18")
@pytest.mark.parametrize("cancelled", [False, True], ids=["nobody cancels", "a user cancels meanwhile"])
async def test_a_shutdown_is_no_cancel_but_a_users_cancel_during_it_counts(
    cancelled: bool, store: SqlRunStore, store_dsn: str
) -> None:
    told, let_go = asyncio.Event(), asyncio.Event()
    running = asyncio.Event()

    async def cleans_up(lease: RunLease) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()
            await let_go.wait()

    async with store_at(store_dsn) as elsewhere, manager_on(elsewhere) as other:
        leaving = RunManager(store, config=calm(drain="6 s"))
        await leaving.start_heartbeat()
        run = await leaving.submit(THREAD, cleans_up)
        await running.wait()
        shutdown = asyncio.create_task(leaving.shutdown())
        await asyncio.wait_for(told.wait(), PATIENCE)
        if cancelled:
            assert (await other.cancel(run)).outcome is CancelOutcome.REQUESTED
        let_go.set()
        await shutdown
        ended = await other.join(run, timeout=PATIENCE)
        assert ended is not None
        assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "interrupt" if cancelled else "shutdown")
        async with other.execute(await other.create_or_reject(THREAD)):
            pass
        with pytest.raises(UsageError, match="shutting down"):
            await leaving.create_or_reject(THREAD)
