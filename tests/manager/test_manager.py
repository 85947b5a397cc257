"""The public verbs of one manager, and of two on one database, with everything real but the network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import (
    IdempotencyMismatch,
    InvalidValue,
    QueueFull,
    ReservationLost,
    RunCancelled,
    StillWaiting,
    ThreadBusy,
    UsageError,
    UserBusy,
)
from deerflow_runs.manager.answers import CancelOutcome, Ended, Started, Waiting
from deerflow_runs.manager.lease import OwnershipLost, RunLease, StopCause, check, current_lease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    OneUser,
    OperationKind,
    Run,
    RunKey,
    RunStatus,
    Strategy,
    ThreadId,
    Usage,
)
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from tests.rules import rule


class Steps:
    """A named executor: each run does its steps, and waits at "wait" until the test says "go"."""

    payload_version = 2

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.restored: list[str] = []

    def encode(self, payload: Any) -> Mapping[str, Any]:
        if not isinstance(payload, list):
            raise InvalidValue("input", "must be a list of steps")
        return {"steps": payload}

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:
        assert version == 2
        return stored["steps"]

    async def heads(self, run: Run) -> Mapping[str, str]:
        return {}

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        for step in payload:
            await lease.check()
            self.done.append((lease.run_id, step))
            if step == "wait":
                self.waiting.set()
                await self.go.wait()
        return Outcome(values={"steps": payload})

    async def restore(self, lease: RunLease) -> None:
        self.restored.append(lease.run_id)


CALM = RunsConfig.for_tests(attach_deadline="60 s", cancel_grace="30 s")
"""A busy machine comes late for its own runs, and hears late of its cancels."""


@pytest.fixture
async def manager(store: SqlRunStore) -> AsyncIterator[RunManager]:
    """One worker with the executor ``steps``."""
    async with RunManager(store, executors={"steps": Steps()}, config=CALM) as running:
        yield running


@pytest.fixture
async def other(store_dsn: str) -> AsyncIterator[RunManager]:
    """Another worker on the same database, over a store of its own, that can run only local code."""
    async with store_at(store_dsn) as own, RunManager(own, config=CALM) as running:
        yield running


def steps(manager: RunManager) -> Steps:
    found = manager._setup.executors["steps"]  # noqa: SLF001 - the test's own object
    assert isinstance(found, Steps)
    return found


async def for_ever(lease: RunLease) -> None:
    await asyncio.Event().wait()


async def no_longer_held(manager: RunManager) -> None:
    """Let the last lives end."""
    while manager.stats().held:  # noqa: ASYNC110 - nobody is told of it, and it takes a turn of the loop or two
        await asyncio.sleep(0)


# --- Submit ---------------------------------------------------------------------------------------------------------


async def test_a_function_runs_in_the_background_with_its_own_context(manager: RunManager) -> None:
    async def work(lease: RunLease) -> Outcome:
        await check()
        assert current_lease() is lease
        return Outcome(usage=Usage(total_tokens=7))

    handle = await manager.submit("thread", work)
    run = await handle.join(timeout=20)
    assert (run.status, run.usage.total_tokens) == (RunStatus.SUCCESS, 7)
    with pytest.raises(UsageError):
        current_lease()


async def test_a_named_executor_gets_its_payload_in_the_version_that_was_written(manager: RunManager) -> None:
    handle = await manager.submit("thread", "steps", input=["a", "b"])
    assert (await handle.join(timeout=20)).status is RunStatus.SUCCESS
    assert steps(manager).done == [(handle.run_id, "a"), (handle.run_id, "b")]


async def test_what_cannot_travel_is_refused_by_its_name_and_nothing_is_stored(manager: RunManager) -> None:
    with pytest.raises(InvalidValue, match="input: must be a list"):
        await manager.submit("thread", "steps", input="abc")
    with pytest.raises(UsageError, match="no executor 'steps2'"):
        await manager.submit("thread", "steps2")
    with pytest.raises(InvalidValue, match="multitask_strategy: must be one of reject"):
        await manager.submit("thread", for_ever, multitask_strategy="queue")
    with pytest.raises(UsageError, match="no option colour"):
        await manager.submit("thread", for_ever, colour="red")  # type: ignore[call-arg]
    assert not await manager.has_inflight("thread")


@rule("F51")
async def test_nothing_of_ended_runs_is_kept_in_memory(manager: RunManager) -> None:
    async def work(lease: RunLease) -> None:
        pass

    handles = await asyncio.gather(*(manager.submit(f"thread-{n}", work) for n in range(50)))
    await asyncio.gather(*(handle.join(timeout=30) for handle in handles))
    await no_longer_held(manager)  # a row is terminal a moment before its life is over
    stats = manager.stats()
    assert (stats.held, stats.expected, stats.lingering) == (0, 0, 0)
    assert (await handles[0].join()).status is RunStatus.SUCCESS


# --- Strategies -----------------------------------------------------------------------------------------------------


@rule("O1", "B022")
async def test_a_busy_thread_says_who_holds_it_and_when_to_come_back(manager: RunManager) -> None:
    first = await manager.submit("thread", for_ever)
    with pytest.raises(ThreadBusy) as refused:
        await manager.submit("thread", for_ever)
    assert (refused.value.holder, refused.value.owner) == (first.run_id, manager.worker_id)
    assert refused.value.retry_after >= 1


@rule("O2", "I7", "I17")
async def test_queued_runs_go_one_after_the_other_in_their_order(manager: RunManager) -> None:
    begun: list[str] = []

    async def work(lease: RunLease) -> None:
        begun.append(lease.run_id)

    handles = [await manager.submit("thread", work, multitask_strategy="enqueue") for _ in range(5)]
    await asyncio.gather(*(handle.join(timeout=30) for handle in handles))
    assert begun == [handle.run_id for handle in handles]


@rule("O3", "B023")
async def test_an_interrupt_stops_the_incumbent_and_runs_after_it(manager: RunManager) -> None:
    first = await manager.submit("thread", for_ever)
    second = await manager.submit("thread", "steps", input=["a"], multitask_strategy="interrupt")
    assert (await first.join(timeout=20)).stop_reason == "interrupt"
    assert (await second.join(timeout=20)).status is RunStatus.SUCCESS


@rule("O3", "O4", "I16", "B024")
async def test_a_rollback_restores_before_the_newcomer_begins(manager: RunManager) -> None:
    first = await manager.submit("thread", "steps", input=["wait"])
    await steps(manager).waiting.wait()
    second = await manager.submit("thread", "steps", input=["a"], multitask_strategy=Strategy.ROLLBACK)
    assert (await second.join(timeout=20)).status is RunStatus.SUCCESS
    assert steps(manager).restored == [first.run_id]
    ended = await first.join()
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "rollback")


@rule("O3", "O19", "F30")
async def test_an_interrupt_on_another_worker_is_not_refused_and_stops_the_owner(
    manager: RunManager, other: RunManager
) -> None:
    first = await manager.submit("thread", "steps", input=["wait"])
    await steps(manager).waiting.wait()
    second = await other.submit("thread", for_ever, multitask_strategy="interrupt")
    assert (await first.join(timeout=20)).stop_reason == "interrupt"
    await other.cancel(second, wait=True)


# --- Idempotency ----------------------------------------------------------------------------------------------------


@rule("O5", "I14", "B040", "B041", "F26", "F28")
async def test_the_same_key_is_the_same_run_from_any_worker_and_runs_once(
    manager: RunManager, other: RunManager
) -> None:
    first = await manager.create_or_reject("thread", kwargs={"a": 1}, idempotency_key="k", user_id="u")
    again = await manager.create_or_reject("thread", kwargs={"a": 1}, idempotency_key="k", user_id="u")
    there = await other.create_or_reject("thread", kwargs={"a": 1}, idempotency_key="k", user_id="u")
    assert (first.reused, again.reused, there.reused) == (False, True, True)
    assert first.run_id == again.run_id == there.run_id
    with pytest.raises(IdempotencyMismatch):
        await manager.create_or_reject("thread", kwargs={"a": 2}, idempotency_key="k", user_id="u")
    with pytest.raises(UsageError, match="carried out by whoever admitted it"):
        await other.try_start(there)
    async with manager.execute(first):
        pass
    assert not await other.has_inflight("thread")
    after = await other.create_or_reject("thread", kwargs={"a": 3}, user_id="u")
    assert not after.reused


# --- The caller's own task ------------------------------------------------------------------------------------------


async def test_a_block_is_the_runs_body_and_ends_it(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    async with manager.execute(run) as lease:
        assert current_lease() is lease
        lease.report(Outcome(usage=Usage(total_tokens=5)))
    ended = await manager.get(run)
    assert ended is not None
    assert (ended.status, ended.usage.total_tokens) == (RunStatus.SUCCESS, 5)


async def test_an_error_in_the_block_is_raised_on_and_ends_the_run(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    with pytest.raises(ZeroDivisionError):
        async with manager.execute(run):
            raise ZeroDivisionError("zero")
    ended = await manager.get(run)
    assert ended is not None
    assert (ended.status, ended.error) == (RunStatus.ERROR, "ZeroDivisionError: zero")


@rule("O19", "O22")
async def test_a_cancelled_block_ends_with_run_cancelled_and_its_task_goes_on(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    inside = asyncio.Event()

    async def caller() -> str | None:
        try:
            async with manager.execute(run):
                inside.set()
                await asyncio.Event().wait()
        except RunCancelled as stopped:
            await asyncio.sleep(0)  # a task that is still being cancelled would not come back from here
            return stopped.stop_reason
        return "not cancelled"

    task = asyncio.create_task(caller())
    await inside.wait()
    result = await manager.cancel(run, wait=True)
    assert result.outcome is CancelOutcome.CANCELLED
    assert await task == "interrupt"
    assert task.cancelling() == 0


@rule("O6")
async def test_a_caller_that_is_cancelled_inside_leaves_an_ended_run(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    inside = asyncio.Event()

    async def caller() -> None:
        async with manager.execute(run):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(caller())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ended = await manager.join(run, timeout=20)
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "caller_gone")


@rule("O2")
async def test_whoever_waits_for_a_turn_keeps_the_place_and_gets_it(manager: RunManager) -> None:
    first = await manager.create_or_reject("thread")
    second = await manager.create_or_reject("thread", multitask_strategy="enqueue")
    assert second.run.status is RunStatus.QUEUED
    async with manager.execute(first):
        with pytest.raises(StillWaiting):
            async with manager.execute(second, timeout=0.01):
                raise AssertionError
        assert isinstance(await manager.try_start(second, timeout=0.01), Waiting)
    started = await manager.try_start(second, timeout=20)
    assert isinstance(started, Started)
    settled = await manager.settle(started.lease)
    assert settled.status is RunStatus.SUCCESS


@rule("O22", "B064", "P037")
async def test_a_run_cancelled_while_it_waits_never_starts(manager: RunManager, other: RunManager) -> None:
    first = await manager.submit("thread", for_ever)
    second = await manager.create_or_reject("thread", multitask_strategy="enqueue")
    waiting = asyncio.create_task(manager.try_start(second, timeout=30))
    result = await other.cancel(second.key)
    assert result.outcome is CancelOutcome.CANCELLED
    answer = await waiting
    assert isinstance(answer, Ended)
    assert answer.run is not None
    assert answer.run.status is RunStatus.INTERRUPTED
    await manager.cancel(first)


async def test_a_start_that_cannot_be_is_told_once_and_only_while_it_is_pending(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    assert await manager.fail_start_if_pending(run, "no model")
    assert not await manager.fail_start_if_pending(run, "no model")
    ended = await manager.get(run)
    assert ended is not None
    assert (ended.status, ended.error) == (RunStatus.ERROR, "no model")


@rule("O12", "F29", "F23")
async def test_a_run_that_nobody_comes_for_is_given_back(store: SqlRunStore) -> None:
    config = RunsConfig.for_tests(attach_deadline="300 ms")
    async with RunManager(store, config=config) as manager:
        run = await manager.create_or_reject("thread")
        ended = await manager.join(run, timeout=30)
        assert ended is not None
        assert (ended.status, ended.stop_reason) == (RunStatus.ERROR, "not_attached")
        assert not await manager.has_inflight("thread")


# --- Cancel ---------------------------------------------------------------------------------------------------------


@rule("O19", "O21", "B098", "F12")
async def test_the_first_action_stays_in_force(manager: RunManager) -> None:
    handle = await manager.submit("thread", "steps", input=["wait"])
    await steps(manager).waiting.wait()
    first = await manager.cancel(handle, CancelAction.INTERRUPT)
    second = await manager.cancel(handle, CancelAction.ROLLBACK, wait=True)
    assert (first.action, second.action) == (CancelAction.INTERRUPT, CancelAction.INTERRUPT)
    assert (await handle.join(timeout=20)).stop_reason == "interrupt"
    assert steps(manager).restored == []
    assert (await manager.cancel(handle)).outcome is CancelOutcome.CANCELLED


@rule("O22", "O6", "B101")
async def test_a_run_cancelled_before_its_caller_came_ends_at_once(manager: RunManager, other: RunManager) -> None:
    here = await manager.create_or_reject("here")
    there = await manager.create_or_reject("there")
    assert (await manager.cancel(here, wait=True, timeout=20)).outcome is CancelOutcome.CANCELLED
    assert (await other.cancel(there.key, wait=True, timeout=20)).outcome is CancelOutcome.CANCELLED
    with pytest.raises(RunCancelled):
        async with manager.execute(here):
            raise AssertionError


@rule("O21", "B093")
async def test_a_run_that_has_succeeded_cannot_be_cancelled_and_nobody_knows_what_is_not_there(
    manager: RunManager,
) -> None:
    handle = await manager.submit("thread", "steps", input=[])
    await handle.join(timeout=20)
    result = await manager.cancel(handle)
    assert result.outcome is CancelOutcome.NOT_CANCELLABLE
    assert result.run is not None
    missing = RunKey(ThreadId("thread"), handle.run_id[:-1] + "x")  # type: ignore[arg-type]
    assert (await manager.cancel(missing)).outcome is CancelOutcome.UNKNOWN


@rule("O21", "P019", "F63")
async def test_a_foreign_run_reads_as_missing_and_goes_on(manager: RunManager, other: RunManager) -> None:
    handle = await manager.submit("thread", for_ever, user_id="owner")
    stranger = OneUser("stranger")
    for one in (manager, other):
        assert await one.get(handle.key, scope=stranger) is None
        assert (await one.cancel(handle.key, scope=stranger)).outcome is CancelOutcome.UNKNOWN
        assert await one.join(handle.key, scope=stranger, timeout=5) is None
        assert (await one.list_by_thread("thread", scope=stranger)).runs == ()
    found = await manager.get(handle, scope=OneUser("owner"))
    assert found is not None
    assert found.active
    assert found.cancel_action is None
    elsewhere = RunKey(ThreadId("another"), handle.run_id)
    assert (await manager.cancel(elsewhere)).outcome is CancelOutcome.UNKNOWN


@rule("O19", "O21", "O33", "B104", "F45", "T6")
async def test_a_cancel_from_another_worker_reaches_the_owner(manager: RunManager, other: RunManager) -> None:
    handle = await manager.submit("thread", for_ever)
    result = await other.cancel(handle.key, wait=True, timeout=20)
    assert (result.outcome, result.action) == (CancelOutcome.CANCELLED, CancelAction.INTERRUPT)
    assert (await handle.join(timeout=20)).status is RunStatus.INTERRUPTED


@rule("O4", "O22", "B101")
async def test_a_vacant_run_is_cancelled_at_once(other: RunManager, manager: RunManager) -> None:
    handle = await manager.submit("thread", "steps", input=[], requirements=frozenset({"gpu"}))
    assert handle.admitted.run.vacant
    result = await other.cancel(handle.key)
    assert result.outcome is CancelOutcome.CANCELLED
    assert (await handle.join(timeout=20)).stop_reason == "interrupt"


@rule("O22", "F65")
async def test_a_reservation_cannot_be_cancelled_by_its_id(manager: RunManager, other: RunManager) -> None:
    async with manager.reserve_thread_operation("thread", OperationKind.CHECKPOINT_WRITE) as lease:
        for one in (manager, other):
            assert (await one.cancel(lease.key)).outcome is CancelOutcome.UNKNOWN
            assert await one.get(lease.key) is None
        assert not lease.fenced


# --- Reservations ---------------------------------------------------------------------------------------------------


@rule("B047", "B049", "B052")
async def test_a_reservation_excludes_runs_and_others_while_it_lasts(manager: RunManager, other: RunManager) -> None:
    async with manager.reserve_thread_operation("thread", OperationKind.ARTIFACT_WRITE):
        for asked in ("reject", "interrupt", "rollback"):
            with pytest.raises(ThreadBusy):
                await other.submit("thread", for_ever, multitask_strategy=asked)
        with pytest.raises(ThreadBusy):
            async with other.reserve_thread_operation("thread", OperationKind.DELETE):
                raise AssertionError
    async with other.reserve_thread_operation("thread", OperationKind.DELETE):
        pass


@rule("B052", "B053")
async def test_a_body_that_fails_releases_its_reservation_and_raises_its_own_error(manager: RunManager) -> None:
    with pytest.raises(ZeroDivisionError):
        async with manager.reserve_thread_operation("thread", OperationKind.DELETE):
            raise ZeroDivisionError
    assert manager.stats().held == 0
    async with manager.reserve_thread_operation("thread", OperationKind.DELETE):
        pass


@rule("B048")
async def test_a_reservation_of_a_run_is_a_mistake(manager: RunManager) -> None:
    with pytest.raises(UsageError):
        manager.reserve_thread_operation("thread", OperationKind.RUN)


async def loses(block: AbstractAsyncContextManager[RunLease]) -> None:
    """Lose what a block holds, inside it."""
    async with block as lease:
        lease.fence("told so")
        await asyncio.Event().wait()


@rule("B054")
async def test_the_loss_of_a_reservation_stops_its_body_and_surfaces_as_a_conflict(manager: RunManager) -> None:
    with pytest.raises(ReservationLost):
        await loses(manager.reserve_thread_operation("thread", OperationKind.DELETE))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@rule("O17", "O18")
async def test_a_block_that_loses_its_run_is_stopped_with_ownership_lost(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    with pytest.raises(OwnershipLost):
        await loses(manager.execute(run))


# --- Limits ---------------------------------------------------------------------------------------------------------


@rule("I19")
async def test_no_more_runs_than_slots_are_carried_out_at_once_and_all_are(store: SqlRunStore) -> None:
    config = RunsConfig.for_tests(max_concurrent_runs=3)
    at_once: list[int] = []
    running = 0

    async def work(lease: RunLease) -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0)
        running -= 1

    async with RunManager(store, config=config) as manager:
        handles = await asyncio.gather(*(manager.submit(f"thread-{n}", work) for n in range(20)))
        ended = await asyncio.gather(*(handle.join(timeout=40) for handle in handles))
    assert {run.status for run in ended} == {RunStatus.SUCCESS}
    assert max(at_once) <= 3


@rule("I19")
async def test_a_full_queue_and_a_busy_user_are_refused(store: SqlRunStore) -> None:
    config = RunsConfig.for_tests(max_queued_per_thread=1, max_active_per_user=2)
    async with RunManager(store, config=config) as manager:
        await manager.submit("a", for_ever, user_id="u")
        await manager.submit("a", for_ever, user_id="u", multitask_strategy="enqueue")
        with pytest.raises(QueueFull) as full:
            await manager.submit("a", for_ever, user_id="u", multitask_strategy="enqueue")
        assert full.value.limit == 1
        await manager.submit("b", for_ever, user_id="u")
        with pytest.raises(UserBusy) as busy:
            await manager.submit("c", for_ever, user_id="u")
        assert busy.value.limit == 2


# --- Erase, resubmit, the manager itself ----------------------------------------------------------------------------


@rule("F66")
async def test_an_erased_thread_leaves_nothing_and_stops_what_ran_on_it(manager: RunManager) -> None:
    running = await manager.submit("thread", for_ever, user_id="u")
    await manager.submit("thread", for_ever, user_id="u", multitask_strategy="enqueue")
    assert await manager.erase(thread_id="thread") == 1
    assert await manager.get(running.key) is None
    assert (await manager.list_by_thread("thread")).runs == ()
    kept = await manager.submit("thread-of-another", "steps", input=[], user_id="v")
    gone = await manager.submit("thread-2", "steps", input=[], user_id="u")
    await asyncio.gather(kept.join(timeout=20), gone.join(timeout=20))
    assert await manager.erase(user_id="u") == 1
    assert await manager.get(gone.key) is None
    assert await manager.get(kept.key) is not None


async def test_a_run_is_submitted_again_with_its_stored_input(manager: RunManager) -> None:
    first = await manager.submit("thread", "steps", input=["a"], user_id="u", metadata={"m": 1})
    await first.join(timeout=20)
    second = await manager.resubmit(first)
    ended = await second.join(timeout=20)
    assert (ended.status, ended.user_id, ended.metadata) == (RunStatus.SUCCESS, "u", {"m": 1})
    assert [step for _, step in steps(manager).done] == ["a", "a"]
    assert await manager.is_newest(second)
    assert not await manager.is_newest(first)


@rule("O35", "F22")
async def test_a_manager_that_has_left_admits_nothing_and_may_leave_again(store: SqlRunStore) -> None:
    manager = RunManager(store, config=RunsConfig.for_tests())
    with pytest.raises(UsageError, match="not running"):
        await manager.submit("thread", for_ever)
    await manager.start_heartbeat()
    handle = await manager.submit("thread", for_ever)
    await manager.shutdown()
    await manager.shutdown()
    with pytest.raises(UsageError, match="shutting down"):
        await manager.submit("thread", for_ever)
    with pytest.raises(UsageError, match="was shut down"):
        await manager.start_heartbeat()
    found = await store.get(handle.key, scope=EVERYONE)
    assert found is not None
    assert (found.status, found.stop_reason) == (RunStatus.INTERRUPTED, "shutdown")
    assert [session.state.value for session in await store.sessions()] == ["dead"]


# --- Callers that go ------------------------------------------------------------------------------------------------


@rule("O6", "B006", "B034")
async def test_a_caller_that_goes_while_it_waits_for_its_turn_takes_its_run_along(manager: RunManager) -> None:
    first = await manager.submit("thread", for_ever)
    second = await manager.create_or_reject("thread", multitask_strategy="enqueue")

    async def caller() -> None:
        async with manager.execute(second):
            raise AssertionError

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ended = await manager.join(second, timeout=20)
    assert ended is not None
    assert ended.status is RunStatus.INTERRUPTED
    await manager.cancel(first)


@rule("O6", "F25", "B006")
@pytest.mark.parametrize("turns", range(0, 24, 3))
async def test_a_caller_cancelled_at_any_moment_of_its_admission_leaves_the_thread_free(
    turns: int, manager: RunManager
) -> None:
    task = asyncio.create_task(manager.create_or_reject("thread"))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        run = await task
        await manager.fail_start_if_pending(run, "never mind")
    async with asyncio.timeout(20):
        while await manager.has_inflight("thread"):  # noqa: ASYNC110 - nobody is told of a withdrawal
            await asyncio.sleep(0)


@rule("O19")
async def test_a_cancel_that_the_block_never_notices_does_not_leak_into_its_task(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    async with manager.execute(run) as lease:
        lease.stop(StopCause.CANCEL, CancelAction.INTERRUPT)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)
    ended = await manager.get(run)
    assert ended is not None
    assert ended.status is RunStatus.SUCCESS  # no row ever said that it was cancelled


@rule("O28")
async def test_the_hook_of_any_worker_is_told_of_an_end(store: SqlRunStore) -> None:
    told: asyncio.Queue[Run] = asyncio.Queue()
    async with RunManager(store, config=RunsConfig.for_tests(), on_settled=told.put) as manager:

        async def work(lease: RunLease) -> Outcome:
            return Outcome(usage=Usage(last_ai_message="hello"))

        handle = await manager.submit("thread", work)
        run = await asyncio.wait_for(told.get(), 30)
    assert (run.run_id, run.status, run.usage.last_ai_message) == (handle.run_id, RunStatus.SUCCESS, "hello")
    assert await store.outbox.pending() == {}
