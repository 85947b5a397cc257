"""The life of one held run: it starts once, ends once, and ends as the row says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from deerflow_runs.manager.executor import Drained, LocalExecutor, NeedsCapability
from deerflow_runs.manager.lease import OwnershipLost, RunLease, RunStopped, StopCause, check, current_lease
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    OnOrphan,
    Run,
    RunStatus,
    Session,
    ThreadOutcome,
    Usage,
    WorkerId,
    micros,
)
from deerflow_runs.protocol.decision import Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.clock import ManualClock
from tests.manager.lone import Lone, lone_worker, over
from tests.rules import rule


async def carried_out(one: Lone, body: Any, *, restore: Any = None, **asked: Any) -> Run | None:
    """Admit a run and carry it out to its end."""
    run = await one.admits(**asked)
    return await over(one.granting.take_up(run, LocalExecutor(body, restore)))


async def row(one: Lone, run: Run) -> Run:
    found = await one.store.get(run.key, scope=EVERYONE)
    assert found is not None
    return found


@rule("O15", "O17")
async def test_a_run_that_returns_has_succeeded_and_left_the_process(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    seen: list[RunLease] = []

    async def body(lease: RunLease) -> Outcome:
        await check()
        seen.append(current_lease())
        assert current_lease() is lease
        return Outcome(usage=Usage(total_tokens=3), values={"a": 1})

    ended = await carried_out(one, body)
    assert ended is not None
    assert (ended.status, ended.usage.total_tokens, ended.settled_by) == (RunStatus.SUCCESS, 3, one.ground.worker_id)
    assert seen[0].token.turn == ended.turn
    assert seen[0].idempotency_key("step") == f"run:{ended.epoch}:step"
    assert len(one.ground.registry) == 0
    assert one.names() == ["RunStarted", "RunSettled"]
    with pytest.raises(OwnershipLost):
        await seen[0].check()


async def test_a_run_that_raises_ends_as_error_with_its_type_and_message(store: SqlRunStore) -> None:
    one = await lone_worker(store)

    async def body(lease: RunLease) -> None:
        raise ValueError("bad weather")

    ended = await carried_out(one, body)
    assert ended is not None
    assert (ended.status, ended.error) == (RunStatus.ERROR, "ValueError: bad weather")


async def test_a_long_error_is_cut_at_a_character(store: SqlRunStore) -> None:
    one = await lone_worker(store)

    async def body(lease: RunLease) -> None:
        raise ValueError("é" * 10_000)

    ended = await carried_out(one, body)
    assert ended is not None
    assert ended.error is not None
    assert len(ended.error.encode()) <= one.ground.config.max_error_text


async def test_a_run_that_waits_for_a_human_ends_as_interrupted_and_so_does_its_thread(store: SqlRunStore) -> None:
    one = await lone_worker(store)

    async def body(lease: RunLease) -> Outcome:
        return Outcome(status=RunStatus.INTERRUPTED, thread_outcome=ThreadOutcome.INTERRUPTED, stop_reason="asks")

    ended = await carried_out(one, body)
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "asks")


# --- Cancel ---------------------------------------------------------------------------------------------------------


async def for_ever(lease: RunLease) -> None:
    await asyncio.Event().wait()


async def started(one: Lone, body: Any = for_ever, *, restore: Any = None, **asked: Any) -> Any:
    """A run whose body has begun."""
    begun = asyncio.Event()

    async def run(lease: RunLease) -> Any:
        begun.set()
        return await body(lease)

    held = one.granting.take_up(await one.admits(**asked), LocalExecutor(run, restore))
    await begun.wait()
    return held


@rule("O19", "O20", "I6", "F37")
async def test_a_cancel_that_the_store_never_heard_of_is_recorded_before_the_run_ends(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    held = await started(one)
    held.lease.stop(StopCause.CANCEL, CancelAction.INTERRUPT)
    ended = await over(held)
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "interrupt")
    assert ended.cancel_action is CancelAction.INTERRUPT


@rule("O20", "I6", "B109")
async def test_what_finishes_over_a_recorded_cancel_is_interrupted(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    go = asyncio.Event()
    held = await started(one, lambda _: go.wait())
    await store.apply(held.key, RunEvent.REQUEST_CANCEL, one.ground.actor(), Given(action=CancelAction.INTERRUPT))
    go.set()
    ended = await over(held)
    assert ended is not None
    assert ended.status is RunStatus.INTERRUPTED


@rule("O4", "O20", "I16")
async def test_a_rollback_is_carried_out_under_a_new_epoch_before_the_run_ends(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    restored: list[tuple[int, bool]] = []

    async def restore(lease: RunLease) -> None:
        await check()
        restored.append((lease.epoch, current_lease() is lease))

    held = await started(one, restore=restore)
    before = held.lease
    held.lease.stop(StopCause.CANCEL, CancelAction.ROLLBACK)
    ended = await over(held)
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "rollback")
    assert restored == [(before.epoch + 1, True)]
    with pytest.raises(RunStopped):
        await before.check()


@rule("O4", "I16")
async def test_a_restore_that_fails_is_tried_again_until_it_ends_as_rollback_failed(store: SqlRunStore) -> None:
    clock = ManualClock()
    one = await lone_worker(store, clock=clock)
    epochs: list[int] = []

    async def restore(lease: RunLease) -> None:
        epochs.append(lease.epoch)
        raise OSError("disk full")

    held = await started(one, restore=restore, max_attempts=2)
    held.lease.stop(StopCause.CANCEL, CancelAction.ROLLBACK)
    while not held.over.is_set():
        await one.beat()
        await clock.advance(0.2)
        await asyncio.sleep(0.001)
    assert held.ended is not None
    assert (held.ended.status, held.ended.stop_reason) == (RunStatus.ERROR, "rollback_failed")
    assert epochs == [2, 3]


@rule("O4", "O22", "P029")
async def test_a_body_that_swallows_every_cancellation_is_left_behind_and_can_write_nothing(
    store: SqlRunStore,
) -> None:
    clock = ManualClock()
    one = await lone_worker(store, clock=clock)
    let_go = asyncio.Event()
    seen: list[BaseException] = []

    async def stubborn(lease: RunLease) -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        try:
            await lease.check()
        except BaseException as error:
            seen.append(error)
            raise

    held = await started(one, stubborn)
    lease = held.lease
    held.lease.stop(StopCause.CANCEL, CancelAction.INTERRUPT)
    while not held.over.is_set():
        await one.beat()
        await clock.advance(0.1)
        await asyncio.sleep(0.001)
    assert held.ended is not None
    assert held.ended.status is RunStatus.INTERRUPTED
    assert "RunLingers" in one.names()
    bodies = list(one.ground.registry.lingering())
    assert len(bodies) == 1
    assert not lease.trusted()
    let_go.set()
    await asyncio.wait(bodies)
    assert isinstance(seen[0], RunStopped)
    assert list(one.ground.registry.lingering()) == []


# --- Loss -----------------------------------------------------------------------------------------------------------


async def taken_over(one: Lone, held: Any) -> None:
    """Another worker has declared this one dead and ended its run."""
    other = WorkerId("host:other")
    await one.store.open_session(Session(other))
    await one.store.close_session(one.ground.worker_id)
    decision = await one.store.apply(held.key, RunEvent.TAKE_OVER_FAIL, Actor(other))
    assert isinstance(decision, Applied), decision


@rule("O17", "O18", "I2")
async def test_one_of_eight_members_that_learns_of_the_loss_stops_all_and_none_is_recorded(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    ready, lost = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    async def member(number: int, lease: RunLease) -> None:
        ready.set()
        await lost.wait()
        if number == 3:
            lease.fence("told so")
        await lease.check()
        done.append(number)

    async def body(lease: RunLease) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(member(number, lease))

    held = await started(one, body)
    await ready.wait()
    await taken_over(one, held)
    lost.set()
    assert await over(held) is None
    assert [number for number in done if number >= 3] == []
    assert (await row(one, held.run)).stop_reason == "orphan_recovered"
    assert "RunSettled" not in one.names()


@rule("O18", "I5", "F02", "P042")
async def test_a_result_that_comes_after_the_loss_changes_nothing_and_is_told_as_a_loss(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    go = asyncio.Event()
    held = await started(one, lambda _: go.wait())
    await taken_over(one, held)
    go.set()
    await over(held)
    found = await row(one, held.run)
    assert (found.status, found.stop_reason) == (RunStatus.ERROR, "orphan_recovered")
    assert one.names() == ["RunStarted", "RunFenced"]


# --- Other ways out -------------------------------------------------------------------------------------------------


@rule("O30")
async def test_a_run_that_needs_another_capability_goes_on_without_losing_an_attempt(store: SqlRunStore) -> None:
    one = await lone_worker(store)

    async def body(lease: RunLease) -> None:
        raise NeedsCapability("gpu")

    held = one.granting.take_up(await one.admits(on_orphan=OnOrphan.RESUME), LocalExecutor(body))
    await over(held)
    found = await row(one, held.run)
    assert (found.vacant, found.required_capabilities, found.attempt) == (True, frozenset({"gpu"}), 1)


@rule("O35", "I18")
async def test_a_run_that_stops_between_steps_for_a_drain_is_handed_over(store: SqlRunStore) -> None:
    one = await lone_worker(store)

    async def body(lease: RunLease) -> None:
        await lease.until_draining()
        raise Drained

    held = await started(one, body, on_orphan=OnOrphan.RESUME)
    held.lease.ask_to_drain()
    await over(held)
    found = await row(one, held.run)
    assert (found.vacant, found.attempt) == (True, 1)


@rule("O23", "O35")
async def test_a_local_run_stopped_by_a_drain_ends_as_shut_down(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    held = await started(one)
    held.lease.stop(StopCause.DRAIN)
    ended = await over(held)
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, "shutdown")


@rule("I8", "F35")
async def test_a_run_whose_time_is_up_ends_as_timeout(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    held = await started(one, run_timeout=micros(5))
    assert held.deadline == pytest.approx(one.ground.clock.boot_time() + 5)
    held.lease.stop(StopCause.TIMEOUT)
    ended = await over(held)
    assert ended is not None
    assert (ended.status, ended.stop_reason) == (RunStatus.TIMEOUT, "timeout")


@rule("O12", "I11")
async def test_a_suspended_run_starts_no_step_and_settles_nothing_until_trust_is_back(store: SqlRunStore) -> None:
    clock = ManualClock()
    one = await lone_worker(store, clock=clock)
    go = asyncio.Event()
    steps: list[str] = []

    async def body(lease: RunLease) -> None:
        await go.wait()
        await lease.check()
        steps.append("step")

    held = await started(one, body)
    await clock.advance(one.ground.config.lease.total_seconds())
    assert not held.lease.trusted()
    go.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert steps == []
    await one.beat()
    held.lease.wake()
    ended = await over(held)
    assert ended is not None
    assert (ended.status, steps) == (RunStatus.SUCCESS, ["step"])


@rule("B064", "O6")
async def test_a_run_cancelled_before_it_began_never_runs_its_body(store: SqlRunStore) -> None:
    one = await lone_worker(store)
    called: list[bool] = []

    async def body(lease: RunLease) -> None:
        called.append(True)

    run = await one.admits()
    await store.apply(run.key, RunEvent.REQUEST_CANCEL, one.ground.actor(), Given(action=CancelAction.ROLLBACK))
    ended = await over(one.granting.take_up(run, LocalExecutor(body)))
    assert ended is not None
    assert (ended.status, ended.stop_reason, called) == (RunStatus.INTERRUPTED, "rollback", [])


async def test_an_executor_that_cannot_read_its_payload_ends_the_run_as_error(store: SqlRunStore) -> None:
    class Broken:
        payload_version = 1

        def encode(self, payload: Any) -> Mapping[str, Any]:
            return {}

        def decode(self, stored: Mapping[str, Any], version: int) -> Any:
            raise KeyError("messages")

        async def heads(self, run: Run) -> Mapping[str, str]:
            return {}

        async def run(self, lease: RunLease, payload: Any) -> None:
            raise AssertionError

        async def restore(self, lease: RunLease) -> None:
            raise AssertionError

    one = await lone_worker(store, executors={"broken": Broken()})
    run = await one.admits(executor="broken")
    ended = await over(one.granting.take_up(run))
    assert ended is not None
    assert (ended.status, ended.error) == (RunStatus.ERROR, "KeyError: 'messages'")
