"""The contract's part about a store's clock that was set back: rows bear instants that lie ahead of it.

By a step, or by a fail-over to a server whose clock is behind. Such rows are put there as the clock before the step
would have left them, an hour ahead, so that no check needs a clock of its own. What only waits longer for it (a
backoff, a grace) is not told here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, final

from deerflow_runs.model import CancelAction, Micros, Run, RunId, RunStatus, Strategy, ThreadId, WorkerId
from deerflow_runs.protocol.decision import Actor
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.protocol.recovery import being_restored
from deerflow_runs.testing.contract.check import Check
from deerflow_runs.testing.contract.stage import HOUR, INSTANT, ME, OTHER, THREAD, Stage, at, names
from deerflow_runs.testing.contract.subject import Subject

CLOCK_STEPS: Final[list[Check]] = []

Scene = Callable[[Stage, "_Past"], Awaitable[None]]


def _tells(*rules: str) -> Callable[[Scene], Scene]:
    def adding(scene: Scene) -> Scene:
        async def body(subject: Subject) -> None:
            await scene(Stage(subject.store), _Past(subject, await subject.store.now()))

        name = getattr(scene, "__name__", "")
        CLOCK_STEPS.append(Check(name.replace("_s_", "'s ").replace("_", " "), body, rules))
        return scene

    return adding


@final
class _Past:
    """What a store holds whose clock was set back by an hour, just now."""

    def __init__(self, subject: Subject, now: Micros) -> None:
        self._subject = subject
        self.before = Micros(now + HOUR)
        """What the clock said before."""

    async def was_there(self, run_id: str, **fields: Any) -> Run:
        """A row from before the step. It was admitted before everything that the check admits."""
        usual: dict[str, Any] = {"due_at": self.before, "not_before": self.before, "created_at": self.before}
        run = replace(Run(RunId(run_id), ThreadId(THREAD), updated_at=self.before), **usual | fields)
        await self._subject.place([run])
        return run

    async def held_its_thread(self, **fields: Any) -> Run:
        """A run of mine was under way."""
        granted: dict[str, Any] = {"owner_worker_id": ME, "epoch": 1, "attempt": 1, "granted_at": self.before}
        return await self.was_there("holder", **{"status": RunStatus.RUNNING, "turn": 1} | granted | fields)

    async def waited(self, run_id: str, **fields: Any) -> Run:
        """A run waited that was not delayed."""
        return await self.was_there(run_id, **{"status": RunStatus.QUEUED} | fields)


async def _order(stage: Stage) -> list[str]:
    """End whatever holds the thread until nothing does; who held it, in order."""
    held: list[str] = []
    while (run := await stage.holder()) is not None:
        held.append(run.run_id)
        await stage.is_cancelled(run)
        await stage.happens(RunEvent.FORCE if run.vacant else RunEvent.SETTLE_CANCELLED, run)
    return held


# --- Runs that were never delayed -----------------------------------------------------------------------------------


@_tells("I7")
async def a_row_tells_exactly_whether_its_run_was_delayed(stage: Stage, _: _Past) -> None:
    at_once = [await stage.arrives("owned"), await stage.arrives("vacant", "another", take=False)]
    at_once += [await stage.waits(f"behind-{number}") for number in range(3)]
    at_once += [await stage.arrives(f"{way}", strategy=way) for way in (Strategy.INTERRUPT, Strategy.ROLLBACK)]
    for run in at_once:
        assert (run.delayed, run.due_at) == (False, run.created_at), run
    later = [await stage.waits(f"later-{number}", delay=INSTANT) for number in range(3)]
    later += [await stage.arrives("alone", "idle", delay=INSTANT)]
    for run in later:
        assert (run.delayed, run.due_at - run.created_at) == (True, INSTANT), run


@_tells("I7", "O7")
async def the_end_of_the_incumbent_lets_in_a_run_that_was_never_delayed_whatever_the_clock_says(
    stage: Stage,
    past: _Past,
) -> None:
    holder = await past.held_its_thread(queue_behind=True)
    await past.waited("next")
    await stage.ends(holder)
    assert (names([await stage.held()]), await stage.queue()) == (["next"], [])


@_tells("I7", "O7", "O2")
async def a_sweep_and_whoever_comes_find_a_run_that_was_never_delayed_on_an_idle_thread(
    stage: Stage, past: _Past
) -> None:
    await past.waited("next")
    await stage.waits("newcomer")
    assert (names([await stage.held()]), await stage.queue()) == (["next"], ["newcomer"])
    await past.waited("lost", thread_id=ThreadId("idle"))
    assert names(await stage.store.promote(10)) == ["lost"]


@_tells("I17")
async def whoever_comes_after_the_step_waits_behind_those_that_came_before_it(stage: Stage, past: _Past) -> None:
    await past.held_its_thread(queue_behind=True)
    await past.waited("first")
    second = await stage.waits("second")
    third = await stage.waits("third")
    assert (second.delayed, third.delayed) == (False, False)
    assert await stage.queue() == ["first", "second", "third"]
    assert await _order(stage) == ["holder", "first", "second", "third"]


@_tells("I17", "O3")
async def whoever_displaces_after_the_step_is_due_at_once(stage: Stage, past: _Past) -> None:
    holder = await past.held_its_thread(queue_behind=True)
    await past.waited("first")
    await stage.arrives("newcomer", strategy=Strategy.INTERRUPT)
    await stage.waits("last")
    await stage.happens(RunEvent.SETTLE_CANCELLED, await stage.now(holder))
    assert (names([await stage.held()]), await stage.queue()) == (["newcomer"], ["last"])


@_tells("I17", "O7")
async def a_delayed_run_takes_its_place_by_its_time_and_keeps_nobody_waiting_until_then(
    stage: Stage, past: _Past
) -> None:
    holder = await past.held_its_thread(queue_behind=True)
    await past.waited("first")
    await stage.waits("soon", delay=INSTANT)
    await stage.waits("in half an hour", delay=Micros(HOUR // 2))
    await stage.waits("in two hours", delay=Micros(2 * HOUR))
    await stage.waits("second")
    await stage.passes(INSTANT)
    assert await stage.queue() == ["soon", "in half an hour", "first", "second", "in two hours"]
    assert (await _order(stage))[1:] == ["soon", "first", "second"]
    assert await stage.refused(RunEvent.RELEASE, holder) is Refusal.TERMINAL


@_tells("I17")
async def a_delayed_run_from_before_the_step_delays_nobody_and_is_not_due_early(stage: Stage, past: _Past) -> None:
    await past.waited("later", due_at=Micros(past.before + HOUR))
    first = await stage.starts("first", strategy=Strategy.ENQUEUE)
    second = await stage.waits("second")
    assert second.created_at < past.before, "only those that were never delayed are waited for"
    assert await stage.queue() == ["second", "later"]
    await stage.ends(first)
    assert (await _order(stage), await stage.queue()) == (["second"], ["later"])
    assert await stage.store.promote(10) == ()


# --- Grants and cancels ---------------------------------------------------------------------------------------------


@_tells("I16", "I9", "O4")
async def a_rollback_of_a_run_that_was_granted_before_the_step_has_all_its_attempts(stage: Stage, past: _Past) -> None:
    await stage.opens(ME)
    claimed = await past.held_its_thread(status=RunStatus.PENDING, epoch=4, attempt=3)
    cancelled = await stage.is_cancelled(claimed, CancelAction.ROLLBACK)
    assert not being_restored(cancelled), "nobody has seized it"
    seized = await stage.happens(RunEvent.SEIZE, cancelled, by=at(cancelled))
    assert (seized.attempt, being_restored(seized)) == (1, True)
    assert await stage.refused(RunEvent.SETTLE_ROLLBACK_FAILED, seized) is Refusal.TOO_EARLY


@_tells("I16", "I9", "O4")
async def restores_are_counted_although_the_cancel_lies_ahead_of_the_clock(stage: Stage, past: _Past) -> None:
    await stage.opens(ME)
    cancel: dict[str, Any] = {"cancel_action": CancelAction.ROLLBACK, "cancel_requested_at": past.before}
    run = await past.held_its_thread(granted_at=Micros(past.before - 1), **cancel)
    counted = []
    for _ in range(4):
        run = await stage.happens(RunEvent.SEIZE, run, by=at(run))
        counted.append(run.attempt)
    assert counted == [1, 2, 3, 4]
    assert (await stage.happens(RunEvent.SETTLE_ROLLBACK_FAILED, run)).stop_reason == "rollback_failed"


@_tells("I4", "I16", "O8", "O13")
async def whoever_seized_its_own_run_over_a_cancel_that_lies_ahead_has_not_taken_it_back(
    stage: Stage, past: _Past
) -> None:
    await stage.opens(ME)
    await stage.opens(OTHER)
    cancel: dict[str, Any] = {"cancel_action": CancelAction.ROLLBACK, "cancel_requested_at": past.before}
    run = await past.held_its_thread(owner_worker_id=OTHER, granted_at=Micros(past.before - 1), **cancel)
    await stage.dies(OTHER)
    seized = await stage.happens(RunEvent.SEIZE, run, by=Actor(ME))
    assert (seized.epoch, seized.owner_worker_id) == (run.epoch + 1, ME)
    again = Actor(ME, run.epoch, previous=WorkerId(OTHER))
    assert await stage.refused(RunEvent.TAKE_BACK, run, by=again) is Refusal.LOST


@_tells("O13", "O8")
async def a_take_back_is_still_a_yes_when_the_cancel_came_after_a_grant_that_lies_ahead(
    stage: Stage, past: _Past
) -> None:
    await stage.opens(ME)
    claimed = await past.held_its_thread(status=RunStatus.PENDING, owner_worker_id=OTHER)
    await stage.opens(OTHER)
    await stage.is_cancelled(claimed, CancelAction.ROLLBACK)
    await stage.dies(OTHER)
    back = Actor(ME, claimed.epoch, previous=WorkerId(OTHER))
    await stage.happens(RunEvent.TAKE_BACK, claimed, by=back)
    await stage.repeats(RunEvent.TAKE_BACK, claimed, by=back)
