"""Claims: while slots are free, take vacant runs that this worker can carry out, and begin them (O31, O32, I19).

Which run may be claimed by whom is the table's; how fast a worker resumes what others left is decided in
``protocol.recovery``. Nothing here looks at dead workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, final

from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.waiting import first_of, pause_after
from deerflow_runs.model import Run, SessionState
from deerflow_runs.observe import ClaimFailed, RunClaimed, error_code
from deerflow_runs.protocol.recovery import ResumeBudget

BATCH: Final = 100
"""Runs in one claim."""

LOOK_EVERY: Final = 1.0
"""Seconds between two claims while nobody says that there is work, a fifth more or less."""


@final
class Claiming:
    """Claims for one manager. ``unit`` is random in [0, 1). Belongs to the main loop."""

    def __init__(self, ground: Ground, granting: Granting, unit: Callable[[], float]) -> None:
        self._ground = ground
        self._granting = granting
        self._unit = unit
        config = ground.config
        self._budget = ResumeBudget.empty(
            rate=config.resumes_per_second, burst=max(1, config.max_concurrent_runs), at=ground.session.now()
        )

    def reconnected(self) -> None:
        """The store was away, for everybody perhaps: what peace has saved up is not spent on it now (O32)."""
        self._budget = self._budget.reconnected(self._ground.session.now())

    async def run(self) -> None:
        """Claim for ever, until cancelled."""
        failures = 0
        while True:
            await self._slot()
            self._ground.work.clear()  # before the question: what is said meanwhile is worth another one
            try:
                wanted = self._wanted()
                claimed = await self.claim(wanted)
            except Exception as error:  # noqa: BLE001 - a worker that has stopped claiming looks healthy and is not
                failures += 1
                event = ClaimFailed(worker_id=self._ground.worker_id, error=error_code(error), failures=failures)
                self._ground.observe(event)
                await self._ground.clock.sleep(pause_after(failures))
                continue
            failures = 0
            if claimed < max(wanted, 1):
                await self._until_work()

    async def claim(self, limit: int) -> int:
        """Ask once for up to ``limit`` runs and begin them; how many there were. Meanwhile their slots are taken."""
        registry, kept = self._ground.registry, 0
        while kept < limit and registry.take_slot():
            kept += 1
        try:
            claimed = await self._ground.store.claim(self._ground.actor(), kept) if kept else ()
            for run in claimed:
                self._begin(run)
        finally:
            for _ in range(kept):
                registry.arrived()
        resumed = sum(1 for run in claimed if was_begun(run))
        self._budget = self._budget.spent(resumed, self._ground.session.now())
        return len(claimed)

    def _begin(self, run: Run) -> None:
        ground = self._ground
        self._granting.take_up(run)
        ground.observe(
            RunClaimed(worker_id=ground.worker_id, run_id=run.run_id, thread_id=run.thread_id, epoch=run.epoch)
        )

    def _wanted(self) -> int:
        """How many to ask for. Nothing is claimed without trust, nor by a worker that drains (O12, O35). Half of the
        free slots are left to admissions that come meanwhile: without one they would have to be claimed as well."""
        ground = self._ground
        if not ground.session.trusted() or ground.session.state is not SessionState.LIVE:
            return 0
        free = ground.registry.free_slots
        return min(BATCH, free, max(1, free // 2), self._budget.available(ground.session.now()))

    # --- Waiting ----------------------------------------------------------------------------------------------------

    async def _slot(self) -> None:
        """Until there is one. A slot that was kept for an admission in vain says nothing when it is free again."""
        while self._ground.registry.free_slots == 0:
            await self._first(self._ground.registry.slot_freed())

    async def _until_work(self) -> None:
        """Until somebody says so, or the time is over; with an empty budget, until it holds one run again."""
        ground = self._ground
        if self._budget.available(ground.session.now()) == 0:
            await ground.clock.sleep(1 / ground.config.resumes_per_second)
        else:
            await self._first(ground.work.wait())

    async def _first(self, said: Coroutine[Any, Any, object]) -> None:
        waiting = asyncio.create_task(said)
        try:
            await first_of(self._ground.clock, LOOK_EVERY * (0.8 + 0.4 * self._unit()), waiting)
        finally:
            waiting.cancel()


def was_begun(run: Run) -> bool:
    """Whether somebody had this run before: claiming it resumes it."""
    return run.attempt > 1 or run.turn is not None
