"""After a session was lost: what waits at home there moves to the new session, and every run held is taken back by one
compare-and-set, or fenced (O13).

Level-triggered: whatever is held under another session than the present one is to be taken back, however many sessions
were lost in between. What nobody here holds is an orphan like anybody's, and is recovered, not taken back.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, assert_never, final

from deerflow_runs.manager.fencing import fence
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.manager.waiting import pause_after
from deerflow_runs.model import Run, WorkerId
from deerflow_runs.observe import RunTakenBack, SweepFailed, error_code
from deerflow_runs.protocol.decision import Actor, Applied, Decision, Refused
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.recovery import being_restored

BATCH: Final = 100
"""Waiting runs that move in one statement."""

AT_ONCE: Final = 8
"""Runs that are asked for at the same time."""


@final
class TakingBack:
    """Takes back for one manager, which may lose several sessions in its life. Belongs to the main loop."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._mine: set[WorkerId] = {ground.worker_id}
        self._homes: set[WorkerId] = set()
        self._one_at_a_time = asyncio.Lock()

    def pending(self) -> tuple[Held, ...]:
        """What is held under a session that is not the present one, and not lost yet."""
        me, held = self._ground.worker_id, self._ground.registry.all()
        return tuple(one for one in held if one.lease.worker_id != me and not one.lease.fenced)

    async def take_back(self, previous: WorkerId) -> None:
        """Until every run held is taken back or fenced and every run that waits has its home here. Safe to cancel, and
        to repeat."""
        self._homes.add(previous)
        failures = 0
        while self._homes or self.pending():
            try:
                await self.once()
            except Exception as error:  # noqa: BLE001 - runs stand still until this has been done, whatever is wrong
                failures += 1
                self._failed(error, failures)
                await self._ground.clock.sleep(pause_after(failures))

    async def once(self) -> int:
        """Ask once for everything that is to be taken back; how much was moved, taken back or fenced."""
        async with self._one_at_a_time:
            self._mine.add(self._ground.worker_id)
            self._homes |= {held.lease.worker_id for held in self.pending()} | self._strange_homes()
            moved = await self._move_homes()
            pending = self.pending()
            for start in range(0, len(pending), AT_ONCE):
                asked = (self._take_back(one) for one in pending[start : start + AT_ONCE])
                await _all_of(*asked)
            return moved + len(pending)

    # --- What waits -------------------------------------------------------------------------------------------------

    def _strange_homes(self) -> set[WorkerId]:
        """Where runs that are expected here are at home, if not here: they were asked for under a session that was lost
        before they were let in."""
        homes = {expected.home for expected in self._ground.registry.waiting()}
        return {home for home in homes if home is not None and home != self._ground.worker_id}

    async def _move_homes(self) -> int:
        """First, so that a waiting run is claimed here and not ended for the death of its home (O31)."""
        moved = 0
        for previous in tuple(self._homes):
            self._mine.add(previous)
            me = self._ground.worker_id
            by = Actor(me, capabilities=self._ground.capabilities, previous=previous)
            waiting = self._ground.registry.waiting()  # those that are let in from here on may be too late
            while runs := await self._ground.store.re_home(by, BATCH):
                moved += len(runs)
            for expected in waiting:
                expected.home = me if expected.home == previous else expected.home
            if me == self._ground.worker_id:
                self._homes.discard(previous)
        return moved

    # --- What is held -----------------------------------------------------------------------------------------------

    async def _take_back(self, held: Held) -> None:
        ground, lease, epoch = self._ground, held.lease, held.lease.epoch
        by = Actor(ground.worker_id, epoch=epoch, capabilities=ground.capabilities, previous=lease.worker_id)
        decision = await ground.store.apply(lease.key, RunEvent.TAKE_BACK, by)
        if held.lease is lease and lease.epoch == epoch and not held.over.is_set():
            self._answered(held, lease, decision)

    def _answered(self, held: Held, lease: RunLease, decision: Decision) -> None:
        match decision:
            case Applied(run):
                lease.saw(run)
                names: dict[str, Any] = {"run_id": run.run_id, "thread_id": run.thread_id, "epoch": run.epoch}
                self._ground.observe(RunTakenBack(worker_id=self._ground.worker_id, **names))
            case Refused(_, run) if run is not None and self._lost_reply(held, run):
                lease.saw(run)  # under a session that is gone as well: asked for again
            case Refused(reason, run):
                held.ended = run if run is not None and run.terminal else held.ended
                fence(self._ground, held, f"not taken back: {reason.value}")
            case _:
                assert_never(decision)

    def _lost_reply(self, held: Held, run: Run) -> bool:
        """The row is at the next epoch, and only this manager can have moved it there: an earlier session took it back,
        or seized it for the life that ends it here, and the answer never came (O8)."""
        moved = run.active and run.owner_worker_id in self._mine and run.epoch == held.lease.epoch + 1
        return moved and (held.phase is Phase.SETTLING or not being_restored(run))

    def _failed(self, error: Exception, failures: int) -> None:
        event = SweepFailed(worker_id=self._ground.worker_id, error=error_code(error), failures=failures)
        self._ground.observe(event)


async def _all_of(*questions: Any) -> None:
    """Every question is asked to its end; then the first error, if any, is raised."""
    answers = await asyncio.gather(*questions, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
