"""Hooks are called at least once for every end, by any worker that has them, whatever a hook or a worker does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, final

import pytest

from deerflow_runs.manager.deliveries import AT_ONCE, Deliveries
from deerflow_runs.manager.hooks import Hook, Hooks
from deerflow_runs.model import Micros, Run, Session, WorkerId
from deerflow_runs.observe import DeliveryFailed, DeliveryMade, RunSettled
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import OutboxKind
from deerflow_runs.store.units import Units
from tests.contract.lives import ended, happened, started
from tests.manager.leaving import Leaver, leaver, polite
from tests.rules import rule

GONE = WorkerId("host:gone")
HOUR = Micros(3_600_000_000)


@pytest.fixture
async def one(units: Units) -> AsyncIterator[Leaver]:
    """A worker."""
    async with leaver(units) as worker:
        yield worker


@final
class Calls:
    """A hook that writes down whom it was called for, fails as often as it is told, and may be held up."""

    def __init__(self, *, failing: int = 0) -> None:
        self.runs: list[Run] = []
        self.failing = failing
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.at_once = 0
        self.most = 0

    async def __call__(self, run: Run) -> None:
        self.runs.append(run)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await self.go_on.wait()
        finally:
            self.at_once -= 1
        if self.failing:
            self.failing -= 1
            raise ConnectionError("not now")

    @property
    def ids(self) -> list[str]:
        return [run.run_id for run in self.runs]


@asynccontextmanager
async def delivering(one: Leaver, hooks: Hooks, **given: Any) -> AsyncIterator[Deliveries]:
    """The worker tells its hooks meanwhile."""
    deliveries = Deliveries(one.ground, hooks, unit=lambda: 0.5, **given)
    task = asyncio.create_task(deliveries.run())
    await one.is_quiet()
    try:
        yield deliveries
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await deliveries.close(0)


def wanting(*names: str) -> dict[str, Any]:
    async def hook(run: Run) -> None:
        """Only its presence counts."""

    present: dict[str, Hook] = dict.fromkeys(names, hook)
    return {"deliveries": Hooks(**present).deliveries()}


BOTH = wanting("on_settled", "on_recovered")


async def open_rows(one: Leaver) -> int:
    return (await one.store.outbox.pending()).get(OutboxKind.HOOK, 0)


async def taken_over(one: Leaver, run_id: str = "run") -> None:
    """A run whose worker died and that this one ended for it."""
    await one.store.open_session(Session(GONE))
    await started(one.store, run_id, worker_id=GONE, **BOTH)
    await one.store.close_session(GONE)
    assert (await one.store.take_over(one.ground.actor(), Given(), 10)).total == 1


# --- Which hook -----------------------------------------------------------------------------------------------------


@rule("O28")
@pytest.mark.parametrize("how", [RunEvent.SETTLE_SUCCESS, RunEvent.SETTLE_ERROR, RunEvent.SETTLE_CANCELLED])
async def test_every_end_is_told_once_with_its_row(one: Leaver, how: RunEvent) -> None:
    settled, again = Calls(), Calls()
    last = await ended(one.store, "run", how=how, **BOTH)
    async with delivering(one, Hooks(settled, again)):
        assert [(run.run_id, run.status) for run in settled.runs] == [("run", last.status)]
        await one.passes(60)
    assert (len(settled.runs), again.runs, await open_rows(one)) == (1, [], 0)
    assert [(event.kind, event.attempt) for event in one.told(DeliveryMade)] == [("on_settled", 1)]


@rule("O28", "B146")
async def test_a_run_that_a_take_over_ended_is_told_as_recovered(one: Leaver) -> None:
    settled, recovered = Calls(), Calls()
    await taken_over(one)
    async with delivering(one, Hooks(settled, recovered)):
        pass
    assert (settled.ids, recovered.ids) == ([], ["run"])
    assert recovered.runs[0].stop_reason == "orphan_recovered"


@rule("O28")
async def test_without_a_hook_for_the_recovered_the_other_one_hears_of_them(one: Leaver) -> None:
    settled = Calls()
    await taken_over(one)
    async with delivering(one, Hooks(settled)):
        pass
    assert settled.ids == ["run"]


@rule("O28")
async def test_a_run_that_its_own_worker_gave_up_is_no_recovered_one(one: Leaver) -> None:
    settled, recovered = Calls(), Calls()
    run = await started(one.store, "run", worker_id=one.me, **BOTH)
    await happened(one.store, run, RunEvent.GIVE_BACK_FAIL, Given(stop_reason="orphan_recovered"))
    async with delivering(one, Hooks(settled, recovered)):
        pass
    assert (settled.ids, recovered.ids) == (["run"], [])


@rule("O28")
async def test_an_end_that_another_hook_waits_for_is_left_to_who_has_it(one: Leaver) -> None:
    recovered, settled = Calls(), Calls()
    await ended(one.store, "run", **BOTH)
    async with delivering(one, Hooks(None, recovered)):
        assert (recovered.ids, await open_rows(one)) == ([], 1)
    await due_now(one)
    async with delivering(one, Hooks(settled)):
        assert settled.ids == ["run"]


@rule("O28")
async def test_an_end_that_nobody_wanted_to_hear_of_is_done(one: Leaver) -> None:
    recovered = Calls()
    await ended(one.store, "run", **wanting("on_recovered"))
    async with delivering(one, Hooks(None, recovered)):
        assert (recovered.ids, await open_rows(one)) == ([], 0)


async def due_now(one: Leaver) -> None:
    """As if the pause before the next try were over."""
    from tests.contract.lives import executed

    await executed(one.units, "UPDATE dr_outbox SET not_before = 0 WHERE delivered_at IS NULL")


# --- At least once --------------------------------------------------------------------------------------------------


@rule("O28", "B146")
async def test_a_hook_that_fails_is_called_again_later_and_stops_nobody(one: Leaver) -> None:
    failing = Calls(failing=2)
    await ended(one.store, "a", "1", **BOTH)
    async with delivering(one, Hooks(failing)):
        for told in (1, 2):
            assert len(one.told(DeliveryFailed)) == told
            await one.passes(10)
            assert len(failing.runs) == told, "it is called again before its pause is over"
            await due_now(one)
            await one.passes(10)
        await ended(one.store, "b", "2", **BOTH)
        await one.passes(10)
    assert failing.ids == ["a", "a", "a", "b"]
    assert [(event.error, event.attempt) for event in one.told(DeliveryFailed)] == [
        ("ConnectionError", 1),
        ("ConnectionError", 2),
    ]
    assert await open_rows(one) == 0


@rule("O28")
async def test_an_end_whose_teller_died_before_it_was_done_is_told_by_another_worker(units: Units) -> None:
    first, second = Calls(), Calls()
    async with leaver(units) as dying, leaver(units) as other:
        await ended(dying.store, "run", **BOTH)
        first.go_on.clear()
        async with delivering(dying, Hooks(first)):
            assert first.ids == ["run"]
            async with delivering(other, Hooks(second)):
                await other.passes(20)
                assert second.ids == [], "its taker may still be alive"
                await due_now(other)
                await other.passes(20)
                assert second.ids == ["run"]
    assert await open_rows_of(units) == 0


async def open_rows_of(units: Units) -> int:
    async with leaver(units) as one:
        return await open_rows(one)


@rule("O28")
async def test_a_hook_that_takes_too_long_is_cancelled_and_called_again(one: Leaver) -> None:
    slow = Calls()
    slow.go_on.clear()
    await ended(one.store, "run", **BOTH)
    async with delivering(one, Hooks(slow), patience=30.0):
        await one.passes(31)
        assert slow.at_once == 0
        assert [event.error for event in one.told(DeliveryFailed)] == ["TimeoutError"]
        slow.go_on.set()
        await due_now(one)
        await one.passes(10)
    assert slow.ids == ["run", "run"]
    assert await open_rows(one) == 0


@rule("O28")
async def test_a_hook_that_cancels_itself_has_failed(one: Leaver) -> None:
    async def cancels(run: Run) -> None:
        raise asyncio.CancelledError

    await ended(one.store, "run", **BOTH)
    async with delivering(one, Hooks(cancels)):
        assert [event.error for event in one.told(DeliveryFailed)] == ["InterruptedError"]
    assert await open_rows(one) == 1


# --- Time and number ------------------------------------------------------------------------------------------------


@rule("O28")
async def test_an_end_on_this_worker_is_told_at_once_and_one_elsewhere_with_the_next_look(one: Leaver) -> None:
    settled = Calls()
    async with delivering(one, Hooks(settled)) as deliveries:
        last = await ended(one.store, "elsewhere", "1", **BOTH)
        await one.is_quiet()
        assert settled.ids == []
        await one.passes(7)
        assert settled.ids == ["elsewhere"]
        last = await ended(one.store, "here", "2", **BOTH)
        deliveries.observe(
            RunSettled(
                worker_id=one.me,
                run_id=last.run_id,
                thread_id=last.thread_id,
                epoch=last.epoch,
                status=last.status,
                stop_reason=None,
                seconds=0.0,
            )
        )
        await one.is_quiet()
        assert settled.ids == ["elsewhere", "here"]


async def test_no_more_hooks_are_under_way_than_may_be_and_all_are_called(one: Leaver) -> None:
    settled = Calls()
    settled.go_on.clear()
    for number in range(3 * AT_ONCE):
        await ended(one.store, f"{number}", f"{number}", **BOTH)
    async with delivering(one, Hooks(settled)):
        assert settled.at_once == AT_ONCE
        settled.go_on.set()
        await one.is_quiet()
        assert (len(settled.runs), settled.most) == (3 * AT_ONCE, AT_ONCE)
    assert await open_rows(one) == 0


async def test_a_worker_without_hooks_takes_nothing(one: Leaver) -> None:
    await ended(one.store, "run", **BOTH)
    await asyncio.wait_for(Deliveries(one.ground, Hooks()).run(), 1)
    assert len(await one.store.outbox.take([OutboxKind.HOOK], 10, HOUR)) == 1


async def test_what_a_worker_breaks_off_when_it_leaves_is_due_for_others_at_once(one: Leaver) -> None:
    slow, other = Calls(), Calls()
    slow.go_on.clear()
    await ended(one.store, "run", **BOTH)
    async with delivering(one, Hooks(slow)):
        pass
    async with delivering(one, Hooks(other)):
        assert other.ids == ["run"]


@rule("O35")
async def test_what_is_under_way_when_a_worker_leaves_may_finish(one: Leaver) -> None:
    slow = Calls()
    slow.go_on.clear()
    await ended(one.store, "run", **BOTH)
    async with delivering(one, Hooks(slow)) as deliveries:
        closing = asyncio.create_task(deliveries.close(5))
        await one.is_quiet()
        assert not closing.done()
        slow.go_on.set()
        await closing
    assert (slow.ids, await open_rows(one)) == (["run"], 0)


@rule("O28", "O35")
async def test_a_run_that_a_drain_ended_is_told_too(one: Leaver) -> None:
    settled = Calls()
    await one.begins("run", polite(), **BOTH)
    await one.leaves()
    async with delivering(one, Hooks(settled)):
        assert [(run.run_id, run.stop_reason) for run in settled.runs] == [("run", "shutdown")]


@rule("O28")
async def test_an_end_of_a_run_that_is_gone_is_told_to_nobody(one: Leaver) -> None:
    settled = Calls()
    run = await ended(one.store, "run", **BOTH)
    await one.store.apply(run.key, RunEvent.REMOVE, Actor(one.me))
    async with delivering(one, Hooks(settled)):
        assert settled.ids == []
