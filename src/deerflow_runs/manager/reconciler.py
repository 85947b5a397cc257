"""The part of a worker that looks after the others and takes work: sweeps by clock, claims by signal, slot or clock.

Only when and in which order; what a sweep does stands in ``sweeping``, what is given back or taken back in the modules
of these names, claims in ``claiming``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, final

from deerflow_runs.manager.claiming import Claiming
from deerflow_runs.manager.giving_back import GivingBack
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import StopCause
from deerflow_runs.manager.sweeping import Sweeping
from deerflow_runs.manager.taking_back import TakingBack
from deerflow_runs.manager.waiting import pause_after
from deerflow_runs.model import MICROS_PER_SECOND, WorkerId
from deerflow_runs.observe import SweepFailed, error_code
from deerflow_runs.protocol.recovery import next_sweep, sweep_phase
from deerflow_runs.store.base import Swept

SHORTEST: Final = 0.05
"""Seconds between two sweeps, however soon the next delayed run is due."""

PROOFS_EVERY: Final = 0.5
"""Seconds between two looks at the locks of others where they cost no question to the database."""

DEADLINES_EVERY: Final = 1.0
"""Seconds between two looks at the deadlines of held runs, less when one is known to come sooner."""


@final
class Reconciler:
    """Recovers and claims for one manager. Belongs to the main loop; ``unit`` is random in [0, 1)."""

    def __init__(self, ground: Ground, granting: Granting, *, unit: Callable[[], float] = random.random) -> None:
        self._ground = ground
        self._unit = unit
        self._giving_back = GivingBack(ground, granting)
        self._taking_back = TakingBack(ground)
        self._sweeping = Sweeping(ground, granting, self._giving_back, self._taking_back)
        self._claiming = Claiming(ground, granting, unit)

    async def run(self) -> None:
        """For ever, until cancelled. One sweep precedes the first claim, so that a worker that was restarted finds its
        own orphans before it takes on more (O27)."""
        await self._seen_through(self.sweep)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._seen_through(self._sweep_on), name="sweeps")
            parts.create_task(self._seen_through(self._claiming.run), name="claims")
            parts.create_task(self._seen_through(self._watch_deadlines), name="deadlines")

    async def _seen_through(self, part: Callable[[], Awaitable[object]]) -> None:
        """Begin ``part`` again whatever broke it off, also a cancellation that a driver made up: a worker that has
        stopped sweeping or claiming looks healthy and is not."""
        failures = 0
        while True:
            try:
                await part()
                return
            except (Exception, asyncio.CancelledError) as error:
                if _to_be_cancelled():
                    raise
                failures += 1
                self._failed(error, failures)
            await self._ground.clock.sleep(pause_after(failures))

    async def sweep(self) -> Swept:
        """One whole sweep now; while another is under way, after it. Answers what became of the runs of the dead; never
        raises: what failed is told in events, and is tried again."""
        return await self._sweeping.sweep()

    async def take_back(self, previous: WorkerId) -> None:
        """A new session is open and ``previous`` is lost: until everything held is taken back or fenced (O13)."""
        await self._taking_back.take_back(previous)

    async def reconcile_owned(self) -> None:
        """Compare what is owned with what is held, first thing after trust is back (O12). Never raises: the next sweep
        does the same."""
        try:
            await self._giving_back.reconcile()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next sweep asks again
            self._failed(error)

    def reconnected(self) -> None:
        """From now on runs of others are resumed slowly at first (O32)."""
        self._claiming.reconnected()

    # --- When -------------------------------------------------------------------------------------------------------

    async def _sweep_on(self) -> None:
        ground = self._ground
        await ground.clock.sleep(sweep_phase(ground.worker_id, self._interval))
        while True:
            await self.sweep()
            failures = self._sweeping.failures
            if failures:
                await ground.clock.sleep(pause_after(failures))
            else:
                await self._rest(await self._until_next())

    async def _rest(self, seconds: float) -> None:
        """Until the next sweep is due, or somebody is proven dead (O27)."""
        clock = self._ground.clock
        until = clock.boot_time() + seconds
        while (left := until - clock.boot_time()) > 0:
            if not self._ground.store.proves_deaths:
                await clock.sleep(left)
                return
            await clock.sleep(min(left, PROOFS_EVERY))
            if await self._sweeping.sees_death():
                return

    async def _until_next(self) -> float:
        """Seconds; a delayed run that is known to come due brings the next sweep forward (O7), and so does a session
        that can be declared dead at a known time."""
        try:
            due = await self._ground.store.next_due()
        except Exception as error:  # noqa: BLE001 - the clock alone is good enough
            self._failed(error)
            due = None
        known = [] if due is None else [due / MICROS_PER_SECOND]
        if (ripens_at := self._sweeping.ripens_at) is not None:
            known.append(ripens_at - self._ground.clock.boot_time())
        return max(SHORTEST, next_sweep(self._interval, unit=self._unit(), until_due=min(known, default=None)))

    async def _watch_deadlines(self) -> None:
        """Runs whose time is up are told to stop (I8). Asks nobody, so it works while the store is away."""
        ground = self._ground
        while True:
            now = ground.clock.boot_time()
            for held in ground.registry.overdue(now):
                held.deadline = None
                held.lease.stop(StopCause.TIMEOUT)
            deadline = ground.registry.next_deadline
            await ground.clock.sleep(DEADLINES_EVERY if deadline is None else min(DEADLINES_EVERY, deadline - now))

    def _failed(self, error: BaseException, failures: int = 1) -> None:
        event = SweepFailed(worker_id=self._ground.worker_id, error=error_code(error), failures=failures)
        self._ground.observe(event)

    @property
    def _interval(self) -> float:
        return self._ground.config.sweep.total_seconds()


def _to_be_cancelled() -> bool:
    """Whether somebody has cancelled the present task, as opposed to something it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
