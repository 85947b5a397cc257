"""How a worker leaves: what finishes keeps its end, what travels is handed over, the rest ends, all in one order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deerflow_runs.manager.drain import Closer
from deerflow_runs.manager.executor import LocalExecutor
from deerflow_runs.manager.lease import RunLease, StopCause
from deerflow_runs.model import CancelAction, OnOrphan, OperationKind, RunStatus, SessionState, Strategy, ThreadId
from deerflow_runs.observe import DrainBegun, DrainEnded, DrainHurried, DrainStepEnded, RunHandedOver, RunSettled
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.drain import ORDER, Step
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.units import Units
from tests.contract.lives import happened, started
from tests.manager.leaving import AGENT, Leaver, leaver, polite
from tests.rules import rule

SHUTDOWN = ("interrupted", "shutdown")


@pytest.fixture
async def one(units: Units) -> AsyncIterator[Leaver]:
    """A worker that is about to leave."""
    async with leaver(units) as leaving:
        yield leaving


async def state_of(one: Leaver) -> tuple[SessionState, bool]:
    (session,) = [each for each in await one.store.sessions() if each.worker_id == one.me]
    return session.state, session.proven


# --- Nothing to do --------------------------------------------------------------------------------------------------


@rule("O35", "B174")
async def test_an_idle_worker_leaves_at_once_and_may_be_told_again(one: Leaver) -> None:
    assert await one.leaves() == 0.0
    before = len(one.events)
    assert await one.leaves() == 0.0
    assert len(one.events) == before
    assert await state_of(one) == (SessionState.DEAD, True)


@rule("O35", "B175", "P041")
async def test_the_steps_come_in_their_order_and_each_is_told(one: Leaver) -> None:
    await one.begins("run", polite())
    await one.leaves()
    assert one.closed == list(ORDER)
    assert [event.step for event in one.told(DrainStepEnded)] == list(ORDER)
    assert [event.runs for event in one.told(DrainStepEnded)] == [0] * len(ORDER)
    assert (len(one.told(DrainBegun)), len(one.told(DrainEnded))) == (1, 1)


# --- What becomes of runs -------------------------------------------------------------------------------------------


@rule("O35", "O23", "P007", "B168")
async def test_a_local_run_ends_by_the_shutdown_once_its_grace_is_over(one: Leaver) -> None:
    held = await one.begins("run", polite())
    assert await one.leaves(10) == pytest.approx(5.0, abs=0.2)
    assert await one.end_of("run") == SHUTDOWN
    assert held.ended is not None
    assert await one.store.active(ThreadId("thread-of-run")) is None


@rule("O35", "I18", "P007")
async def test_a_run_that_travels_stops_between_two_steps_and_is_handed_over_without_an_attempt(one: Leaver) -> None:
    await one.begins_agent("run")
    before = await one.row("run")
    assert await one.leaves() == 0.0
    run = await one.row("run")
    assert (run.vacant, run.attempt, run.epoch) == (True, before.attempt, before.epoch + 1)
    assert len(one.told(RunHandedOver)) == 1


@rule("O35", "B170")
async def test_a_run_that_finishes_meanwhile_keeps_its_status(one: Leaver) -> None:
    async def finishes(lease: RunLease) -> None:
        await lease.until_draining()

    await one.begins("run", LocalExecutor(finishes))
    assert await one.leaves() == 0.0
    assert await one.end_of("run") == ("success", None)


@rule("O35", "B170")
async def test_a_run_that_finishes_although_it_was_stopped_keeps_its_status(one: Leaver) -> None:
    async def finishes(lease: RunLease) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    await one.begins("run", LocalExecutor(finishes))
    await one.leaves()
    assert await one.end_of("run") == ("success", None)


@rule("F21", "B169", "B171")
async def test_a_stubborn_run_costs_nobody_its_end_not_even_itself(one: Leaver) -> None:
    await one.begins("stubborn", one.stubborn.executor)
    await one.begins("travelling", one.stubborn.executor, **AGENT)
    await one.begins("polite", polite())
    assert await one.leaves(10) <= 10.0
    assert await one.end_of("stubborn") == SHUTDOWN
    assert await one.end_of("polite") == SHUTDOWN
    travels = await one.row("travelling")
    assert (travels.vacant, travels.attempt) == (True, 1)
    assert one.closed == list(ORDER)


@rule("F23", "O35", "P060")
async def test_granted_runs_that_nobody_took_up_leave_at_once(one: Leaver) -> None:
    local = one.granting.take_up(await one.admits("local"))
    travels = one.granting.take_up(await one.admits("travels", **{**AGENT, "executor": "elsewhere"}))
    assert await one.leaves() == 0.0
    assert await one.end_of("local") == SHUTDOWN
    assert (await one.row("travels")).vacant
    assert local.over.is_set()
    assert travels.over.is_set()


@rule("P060", "O35")
async def test_a_run_that_was_granted_a_moment_before_does_not_start(one: Leaver) -> None:
    begun: list[str] = []

    async def body(lease: RunLease) -> None:
        begun.append(lease.run_id)

    run = await one.admits("run")
    one.granting.take_up(run, LocalExecutor(body))
    await one.leaves()
    assert begun == []
    assert await one.end_of("run") == SHUTDOWN
    assert (await one.row("run")).turn is None


@rule("O35", "F23")
async def test_what_waits_here_ends_and_what_others_can_take_stays(one: Leaver) -> None:
    await one.begins("holder", polite(), thread_id="busy")
    await one.admits("queued", "busy", strategy=Strategy.ENQUEUE)
    await one.admits("anyone", "busy", strategy=Strategy.ENQUEUE, **AGENT)
    await one.admits("vacant", "free", take=False)
    await one.admits("vacant for anyone", "free too", take=False, **AGENT)
    expected = one.registry.expect((await one.row("queued", "busy")).key, None)
    await one.leaves()
    assert await one.end_of("queued", "busy") == SHUTDOWN
    assert await one.end_of("vacant", "free") == SHUTDOWN
    assert (await one.row("anyone", "busy")).vacant
    assert (await one.row("vacant for anyone", "free too")).vacant
    assert expected.granted.cancelled()


@rule("O35")
async def test_nobody_waits_for_ever_for_a_run_that_others_will_carry_out(one: Leaver) -> None:
    await one.begins("holder", polite(), thread_id="busy")
    queued = await one.admits("queued", "busy", strategy=Strategy.ENQUEUE, **AGENT)
    expected = one.registry.expect(queued.key, one.agent)
    await one.leaves()
    assert expected.granted.cancelled()
    assert (await one.row("queued", "busy")).vacant


@rule("O35", "O12")
async def test_what_the_store_says_is_ours_leaves_too_although_nobody_here_knows_it(one: Leaver) -> None:
    await started(one.store, "local", "t1", worker_id=one.me)
    await started(one.store, "travels", "t2", worker_id=one.me, on_orphan=OnOrphan.RESUME)
    await one.leaves()
    assert await one.end_of("local", "t1") == SHUTDOWN
    assert (await one.row("travels", "t2")).vacant


@rule("O23", "P007", "I6")
@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_cancel_that_came_before_is_what_the_run_ends_by(one: Leaver, stubborn: bool) -> None:
    await one.begins("local", one.stubborn.executor if stubborn else polite())
    await one.begins("travels", one.stubborn.executor if stubborn else polite(), **AGENT)
    for name in ("local", "travels"):
        await happened(one.store, await one.row(name), RunEvent.REQUEST_CANCEL)
    await one.leaves()
    assert await one.end_of("local") == ("interrupted", "interrupt")
    assert await one.end_of("travels") == ("interrupted", "interrupt")


@rule("O35", "O4", "I16", "F20")
async def test_a_rollback_that_is_owed_is_restored_before_anything_is_closed(one: Leaver) -> None:
    restored: list[list[Step]] = []

    async def restore(lease: RunLease) -> None:
        await one.clock.sleep(1)
        restored.append([*one.closed])

    async def body(lease: RunLease) -> None:
        await asyncio.Event().wait()

    held = await one.begins("run", LocalExecutor(body, restore))
    await happened(one.store, await one.row("run"), RunEvent.REQUEST_CANCEL, Given(action=CancelAction.ROLLBACK))
    held.lease.stop(StopCause.CANCEL, CancelAction.ROLLBACK)
    await one.leaves()
    assert restored == [[Step.RUNS]]
    assert await one.end_of("run") == ("interrupted", "rollback")


@rule("O35", "O4", "I16")
async def test_a_rollback_for_which_there_is_no_time_is_left_to_others_and_still_owed(one: Leaver) -> None:
    async def restore(lease: RunLease) -> None:
        await asyncio.Event().wait()

    held = await one.begins("run", LocalExecutor(_until_cancelled, restore))
    await happened(one.store, await one.row("run"), RunEvent.REQUEST_CANCEL, Given(action=CancelAction.ROLLBACK))
    held.lease.stop(StopCause.CANCEL, CancelAction.ROLLBACK)
    assert await one.leaves(10) <= 10.0
    run = await one.row("run")
    assert run.rollback_owed
    assert run.active
    assert one.closed == list(ORDER)
    assert [seizable.run_id for seizable in await one.store.seizable(Actor(one.me), Given(), 10)] == ["run"]


async def _until_cancelled(lease: RunLease) -> None:
    await asyncio.Event().wait()


@rule("O35")
async def test_a_reservation_that_is_in_use_is_released_at_the_end(one: Leaver) -> None:
    reserved = await one.admits("reserved", kind=OperationKind.CHECKPOINT_WRITE, pinned=False)
    held = one.granting.take_up(reserved)
    await one.leaves()
    assert held.over.is_set()
    assert await one.store.active(reserved.thread_id) is None


@rule("F20", "B168", "P041")
async def test_a_run_that_is_still_cleaning_up_is_waited_for_before_savers_close(one: Leaver) -> None:
    cleaned: list[list[Step]] = []

    async def body(lease: RunLease) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await one.clock.sleep(0.5)
            cleaned.append([*one.closed])

    await one.begins("run", LocalExecutor(body))
    await one.leaves(10)
    assert cleaned == [[Step.RUNS]]


# --- Errors, time, hurry --------------------------------------------------------------------------------------------


@rule("O35", "B175")
async def test_a_step_that_fails_keeps_no_other_from_being_tried(units: Units) -> None:
    tried: list[Step] = []

    def broken(step: Step) -> Closer:
        async def close(seconds: float) -> None:
            tried.append(step)
            raise OSError(step.value)

        return close

    closers = {step: broken(step) for step in Step}
    async with leaver(units, closers) as one:
        await one.begins("run", polite())
        await one.leaves()
        assert tried == list(ORDER)
        assert [event.error for event in one.told(DrainStepEnded)] == ["OSError"] * len(ORDER)
        assert await one.end_of("run") == SHUTDOWN


@rule("O35", "B172")
async def test_steps_that_hang_take_no_more_than_the_budget_together(units: Units) -> None:
    given: list[float] = []

    async def hangs(seconds: float) -> None:
        given.append(seconds)
        await asyncio.Event().wait()

    async with leaver(units, dict.fromkeys(Step, hangs)) as one:
        await one.begins("run", polite())
        assert await one.leaves(10) == pytest.approx(10.0, abs=0.2)
        assert await one.end_of("run") == SHUTDOWN
        assert len(given) == len(ORDER)
        assert given[2:] == pytest.approx([0.5, 0.5, 0.5], abs=0.2)


@rule("F19", "B172")
async def test_a_store_that_does_not_answer_cannot_hold_a_worker_up(one: Leaver) -> None:
    await one.begins("run", polite())
    one.units.silent = True
    assert await one.leaves(10) <= 10.2
    assert one.closed == list(ORDER)
    assert len(one.registry) == 0


@rule("F24", "B175", "O35")
async def test_a_cancellation_however_often_it_comes_skips_no_step_and_is_raised_at_the_end(one: Leaver) -> None:
    await one.begins("run", one.stubborn.executor)
    leaving = asyncio.create_task(one.drain.begin(10).carry_out())
    for _ in range(3):
        await one.is_quiet()
        leaving.cancel()
    while not leaving.done():
        await one.clock.advance(0.05)
        await one.is_quiet()
    assert leaving.cancelled()
    assert len(one.told(DrainHurried)) == 3
    assert one.closed == list(ORDER)
    assert await one.end_of("run") == SHUTDOWN


@rule("O35")
async def test_another_signal_ends_the_grace_and_halves_what_is_left(one: Leaver) -> None:
    await one.begins("run", one.stubborn.executor)
    begun_at = one.clock.boot_time()
    one.drain.begin(10)
    await one.passes(1)
    one.drain.hurry()
    assert await one.leaves() + 1 <= 1 + 4.6
    assert one.clock.boot_time() - begun_at <= 5.6
    assert await one.end_of("run") == SHUTDOWN
    assert one.closed == list(ORDER)


@rule("O35", "B174")
async def test_a_second_caller_awaits_the_same_drain(one: Leaver) -> None:
    await one.begins("run", polite())
    first = asyncio.create_task(one.drain.begin(10).carry_out())
    second = asyncio.create_task(one.drain.begin(1).carry_out())
    await one.leaves()
    await asyncio.gather(first, second)
    assert [event.budget for event in one.told(DrainBegun)] == [10]


@rule("O35")
async def test_a_worker_that_has_no_time_at_all_still_leaves_in_order(one: Leaver) -> None:
    await one.begins("run", one.stubborn.executor)
    assert await one.leaves(0) <= 1.0
    assert one.closed == list(ORDER)
    assert await one.end_of("run") == SHUTDOWN


@rule("O35")
async def test_nothing_more_is_claimed_once_a_drain_has_begun(one: Leaver) -> None:
    await one.begins("holder", polite())
    await one.admits("vacant", take=False, **AGENT)
    one.drain.begin(10)
    await one.is_quiet()
    assert await one.store.claim(one.ground.actor(), 10) == ()
    await one.leaves()
    assert (await one.row("vacant")).status is RunStatus.PENDING


# --- Many -----------------------------------------------------------------------------------------------------------


@rule("O35", "F21")
@pytest.mark.parametrize("obeys", [True, False])
async def test_a_thousand_local_runs_end_in_a_second_by_a_few_statements(units: Units, obeys: bool) -> None:
    async with leaver(units, max_concurrent_runs=1000) as one:
        runs = await asyncio.gather(*(one.admits(f"run-{number}") for number in range(1000)))
        for run in runs:
            one.granting.take_up(run, polite() if obeys else one.stubborn.executor)
        while any(held.run.turn is None for held in one.registry.all()):
            await one.is_quiet()
        before = one.units.asked
        assert await one.leaves(1) <= 1.0
        ends = {(event.status.value, event.stop_reason) for event in one.told(RunSettled)}
        assert (len(one.told(RunSettled)), ends) == (1000, {SHUTDOWN})
        assert await one.store.owned(one.me) == ()
        one.stubborn.mercy.set()
        assert one.units.asked - before <= 20
