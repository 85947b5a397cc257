"""How this worker leaves, carried out: its runs stop or pass on, then what they stand on closes, in one order (O35).

How long each step may take and what becomes of a run are decided in ``protocol.drain``; what a step closes is given by
whoever owns it. Nothing here listens to signals or ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, final

from deerflow_runs.errors import UsageError
from deerflow_runs.manager.body import Stopped
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import StopCause
from deerflow_runs.manager.registry import Phase
from deerflow_runs.model import MICROS_PER_SECOND, Run
from deerflow_runs.observe import (
    DrainBegun,
    DrainEnded,
    DrainHurried,
    DrainStepEnded,
    ReservationReleased,
    RunHandedOver,
    RunSettled,
)
from deerflow_runs.observe.base import error_code
from deerflow_runs.protocol.decision import Actor
from deerflow_runs.protocol.drain import LEAST, ORDER, DrainPlan, Step
from deerflow_runs.protocol.trust import BootSeconds
from deerflow_runs.store.signals import Signal

T = TypeVar("T")

Closer = Callable[[float], Awaitable[object]]
"""Closes what belongs to a step within the seconds that it is given; cancelled when they are over. That of RUNS is
begun first: it stops whatever would bring new runs in."""

BATCH: Final = 250
"""Runs that leave with one statement. What one has written stands, should there be no time for the next."""

FIRST_PAUSE: Final = 0.05
LAST_PAUSE: Final = 1.0
"""Seconds between two questions to a store that gives no answer, doubling: a drain has little time."""


@final
class Drain:
    """One worker's leaving. ``begin`` it where the signal arrives and await ``carry_out`` as often as you like.

    Belongs to the main loop. It has a task of its own: who awaits it may go.
    """

    def __init__(self, ground: Ground, granting: Granting, closers: Mapping[Step, Closer] | None = None) -> None:
        self._ground = ground
        self._granting = granting
        self._closers = dict(closers or {})
        self._plan = DrainPlan.begun(at=self._now(), budget=0.0)
        self._hurried = asyncio.Event()
        self._written = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: str | None = None

    @property
    def begun(self) -> bool:
        """Whether this worker is leaving: from then on it admits, claims and starts nothing."""
        return self._task is not None

    @property
    def over(self) -> bool:
        """Whether it has left."""
        return self._task is not None and self._task.done()

    def begin(self, budget: float) -> Drain:
        """Leave within ``budget`` seconds. Nothing comes in between: it does not wait. Only the first call counts."""
        if self._task is None:
            self._plan = DrainPlan.begun(at=self._now(), budget=max(0.0, budget))
            self._ground.session.drain()
            self._ground.observe(DrainBegun(worker_id=self._ground.worker_id, budget=budget))
            self._task = asyncio.create_task(self._carry_out(), name="drain")
            self._ask_all()
        return self

    async def carry_out(self) -> None:
        """Return when it is over. A cancellation, however often it comes, makes it shorter and is raised at the end: no
        step is skipped for it."""
        if self._task is None:
            raise UsageError("begin() the drain first: it needs to know how long it may take")
        cancellation: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                await asyncio.wait({self._task})
            except asyncio.CancelledError as error:
                cancellation = error
                self.hurry()
        if cancellation is not None:
            raise cancellation
        self._task.result()

    def hurry(self) -> None:
        """Somebody is waiting, as another signal says: what is left of the time is halved."""
        if self.begun and not self.over:
            self._plan = self._plan.signalled_again(self._now())
            self._ground.observe(DrainHurried(worker_id=self._ground.worker_id))
            self._hurried.set()

    # --- The steps --------------------------------------------------------------------------------------------------

    async def _carry_out(self) -> None:
        begun_at = self._now()
        for step in ORDER:
            at, self._error = self._now(), None
            await (self._runs() if step is Step.RUNS else self._close(step))
            self._ground.observe(
                DrainStepEnded(
                    worker_id=self._ground.worker_id,
                    step=step,
                    seconds=self._now() - at,
                    runs=len(self._ground.registry),
                    error=self._error,
                )
            )
        await self._abandon()  # what came in after the runs had left, by an answer that took long
        self._ground.observe(DrainEnded(worker_id=self._ground.worker_id, seconds=self._now() - begun_at))

    async def _close(self, step: Step) -> None:
        closer = self._closers.get(step)
        if closer is not None:
            at = self._now()
            await self._within(step, lambda: closer(self._plan.allowed(step, at)))

    async def _within(self, step: Step, work: Callable[[], Awaitable[object]], *, until: Step | None = None) -> None:
        """Let ``work`` do what it can in the time of ``step``. Its errors are its own: the next step is not skipped."""
        at = self._now()
        task = self._begin_part(work, step.value)
        await self._until(lambda: max(self._plan.deadline_for(until or step), at + LEAST), task)
        await self._break_off(task)

    # --- Runs -------------------------------------------------------------------------------------------------------

    async def _runs(self) -> None:
        """Everybody may stop between two steps; then everybody is stopped. Half of the time for that belongs to the
        store, which is then told of all at once: what is not written was in vain (F21), so this may take the time of
        later steps, which are tried all the same."""
        early = self._begin_part(self._end_early, "drain: what waits")
        gone = self._begin_part(self._all_gone, "drain: what is held")
        at = self._now()
        await self._until(lambda: max(self._plan.grace_ends, at + LEAST), gone, early)
        stopped_at = self._stop_all()
        stopped = self._begin_part(self._all_stopped, "drain: bodies")
        await self._until(lambda: (stopped_at + self._plan.deadline_for(Step.RUNS)) / 2, stopped, early)
        await self._break_off(early)
        await self._break_off(stopped)
        await self._within(Step.RUNS, self._leave_the_rest, until=Step.POOLS)
        self._written.set()
        await self._until(lambda: self._plan.deadline_for(Step.RUNS), gone, self._over(self._granting.lives()))
        await self._abandon()
        await self._break_off(gone)

    async def _end_early(self) -> None:
        """What only waits here needs no grace. Nobody expects it any more, and whoever did finds its row ended."""
        closer = self._closers.get(Step.RUNS)
        if closer is not None:
            await self._part(lambda: closer(self._plan.allowed(Step.RUNS, self._now())))
        await self._say_so()
        await self._each_batch(self._ground.store.end_waiting)
        self._expect_nothing()

    async def _say_so(self) -> None:
        """The store must know before anything that waits may be ended. The heartbeat repeats it, sooner or later."""
        ground = self._ground
        hinted = ground.session.session.hinted
        await self._insist(lambda: ground.store.renew(ground.worker_id, hinted=hinted, state=ground.session.state))

    async def _all_gone(self) -> None:
        """Until nothing is held here, what comes in meanwhile included."""
        while held := self._ground.registry.all():
            self._ask_all()
            for one in held:
                await one.over.wait()

    def _ask_all(self) -> None:
        """What has not started does not start any more; what runs is asked to stop between two steps."""
        for held in self._ground.registry.all():
            held.lease.ask_to_drain()
            if held.run.reservation:
                continue
            if held.phase in (Phase.UNATTACHED, Phase.STARTING):
                held.lease.stop(StopCause.DRAIN)
            if held.phase is Phase.UNATTACHED:  # granted, and nobody's work (F23)
                self._granting.end(held, Stopped(StopCause.DRAIN))

    def _stop_all(self) -> BootSeconds:
        for held in self._ground.registry.all():
            if not held.run.reservation and held.lease.stop_cause is None:
                held.together = self._written
            held.lease.stop(StopCause.DRAIN)
        return self._now()

    async def _all_stopped(self) -> None:
        for held in self._ground.registry.all():
            await (held.over if held.together is None else held.stopped).wait()

    # --- What is left -----------------------------------------------------------------------------------------------

    async def _leave_the_rest(self) -> None:
        """By few statements for all runs together, also for those that this process never heard of: a lost reply is no
        reason to let others wait for a verdict. A rollback that is owed stays, for whoever can restore it (O4)."""
        store = self._ground.store
        await self._say_so()
        known = [held.run for held in self._ground.registry.all()]
        if known or list(await self._insist(lambda: store.owned(self._ground.worker_id))):
            # Each leaves other runs, so none waits for the answers to the others.
            await asyncio.gather(*map(self._each_batch, (store.hand_over, store.end_held, store.release_held)))
        await self._each_batch(store.end_waiting)
        self._expect_nothing()

    async def _each_batch(self, leave: Callable[[Actor, int], Awaitable[tuple[Run, ...]]]) -> None:
        appeared, full = False, True
        while full:
            left = await self._insist(lambda: leave(self._ground.actor(), BATCH))
            for run in left:
                self._has_left(run)
            appeared = appeared or any(run.vacant or run.queue_behind for run in left)
            full = len(left) == BATCH
        if appeared:
            await self._ground.store.send(Signal.WORK)

    def _has_left(self, run: Run) -> None:
        """The row says so. Whatever of the run still goes on here is closed out (O18)."""
        registry = self._ground.registry
        held = registry.get(run.run_id)
        if held is not None:
            held.ended = run if run.terminal else None
            if held.together is None or not held.stopped.is_set():
                held.lease.fence("its worker leaves")
            registry.let_go(held)
        registry.give_up(run.run_id)
        self._tell(run)

    def _tell(self, run: Run) -> None:
        names: dict[str, Any] = {
            "worker_id": self._ground.worker_id,
            "run_id": run.run_id,
            "thread_id": run.thread_id,
        }
        if run.reservation:
            self._ground.observe(ReservationReleased(**names, kind=run.kind))
        elif run.terminal:
            begun = run.started_at if run.started_at is not None else run.created_at
            seconds = ((run.settled_at or run.updated_at) - begun) / MICROS_PER_SECOND
            self._ground.observe(
                RunSettled(**names, epoch=run.epoch, status=run.status, stop_reason=run.stop_reason, seconds=seconds)
            )
        else:
            self._ground.observe(RunHandedOver(**names))

    def _expect_nothing(self) -> None:
        for expected in self._ground.registry.waiting():
            self._ground.registry.give_up(expected.key.run_id)

    async def _abandon(self) -> None:
        """The time is up: what is still held is left to whoever finds it once this session is closed, and nothing of it
        is written from here any more."""
        for held in self._ground.registry.all():
            held.lease.fence("its worker has left")
            self._ground.registry.let_go(held)
        lives = self._granting.lives()
        for life in lives:
            life.cancel()
        await self._until_soon(self._over(lives))

    # --- Waiting ----------------------------------------------------------------------------------------------------

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer; who waits for it gives up when the time of the step is over."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await ask()
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may be the one that lets runs go
                self._error = error_code(error)
            await self._ground.clock.sleep(pause)
            pause = min(LAST_PAUSE, 2 * pause)

    def _begin_part(self, work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._part(work), name=name)

    async def _part(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - what cannot be closed must not keep the next from being closed
            self._error = error_code(error)

    def _over(self, tasks: Iterable[asyncio.Task[None]]) -> asyncio.Task[None]:
        return self._begin_part(lambda: _all_done(tasks), "drain: lives")

    async def _break_off(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            task.cancel()
            await self._until_soon(task)

    async def _until_soon(self, task: asyncio.Task[None]) -> None:
        soon = self._now() + LEAST
        await self._until(lambda: soon, task)

    async def _until(self, when: Callable[[], float], *tasks: asyncio.Task[None]) -> None:
        """Until all ``tasks`` are done or ``when`` has come, which moves when somebody is in a hurry. A cancellation of
        this task, as at the end of a loop, is such a hurry."""
        while waiting := [task for task in tasks if not task.done()]:
            left = when() - self._now()
            if left <= 0:
                return
            self._hurried.clear()
            timer = asyncio.create_task(self._ground.clock.sleep(left))
            hurried = asyncio.create_task(self._hurried.wait())
            try:
                await asyncio.wait({timer, hurried, *waiting}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self.hurry()
            finally:
                timer.cancel()
                hurried.cancel()

    def _now(self) -> BootSeconds:
        return BootSeconds(self._ground.clock.boot_time())


async def _all_done(tasks: Iterable[asyncio.Task[None]]) -> None:
    waiting = set(tasks)
    if waiting:
        await asyncio.wait(waiting)
