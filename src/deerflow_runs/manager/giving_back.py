"""What the store says this worker owns, against what it holds (O12): what is missing here for too long is given back,
and what is held here without being owned is fenced.

One rule for every lost reply, for runs that nobody came for, and for what was aborted. When a run counts as missing is
measured on this process's clock only. Runs of other workers are never looked at here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

from deerflow_runs.manager.fencing import fence
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.life import Life
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.model import EVERYONE, MICROS_PER_SECOND, Run, RunId, RunStatus, StopReason, WorkerId, micros
from deerflow_runs.observe import ReservationReleased, RunGivenBack, RunSeized, RunSettled
from deerflow_runs.protocol.decision import Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.recovery import Recovery, verdict

Grant = tuple[RunId, int]
"""A run and its epoch: what a process holds or does not."""

NOT_OURS: Final = "the store names another holder"

WAYS: Final[Mapping[Recovery, RunEvent]] = MappingProxyType(
    {
        Recovery.FAIL: RunEvent.GIVE_BACK_FAIL,
        Recovery.POISON: RunEvent.GIVE_BACK_FAIL,
        Recovery.RESUME: RunEvent.GIVE_BACK_RESUME,
        Recovery.SEIZE: RunEvent.SEIZE,
        Recovery.FORCE: RunEvent.SETTLE_CANCELLED,
        Recovery.RELEASE: RunEvent.RELEASE,
    }
)
"""What would be due if this process were dead, as its own session says it."""


@final
@dataclass(frozen=True, slots=True)
class _Running:
    """A run whose body ran here before the question was sent, so that its row must be in the answer."""

    held: Held
    lease: RunLease
    epoch: int

    @property
    def still(self) -> bool:
        """Whether it is what it was: nothing has ended, moved or replaced it since."""
        same = self.held.lease is self.lease and self.lease.epoch == self.epoch
        return same and self.held.phase is Phase.RUNNING and not self.held.over.is_set()


@final
class GivingBack:
    """Compares, and remembers since when each grant has been missing. Belongs to the main loop."""

    def __init__(self, ground: Ground, granting: Granting) -> None:
        self._ground = ground
        self._granting = granting
        self._missing: dict[Grant, float] = {}
        self._one_at_a_time = asyncio.Lock()

    async def reconcile(self) -> int:
        """Compare once; how many runs were changed. Does nothing while the session is not trusted."""
        async with self._one_at_a_time:
            me = self._ground.worker_id
            if not self._ground.session.trusted():
                return 0
            running = self._running(me)
            owned = await self._ground.store.owned(me)
            if self._ground.worker_id != me:
                return 0  # O13: what the old session owned is taken back, or an orphan
            fenced = self._fence(running, {(run.run_id, run.epoch) for run in owned})
            fenced += await self._fence_ending(me, {run.run_id for run in owned})
            given_up = self._give_up_unattached()
            given_back = [run for run in self._ripe(owned) if await self._give_back(run)]
            return fenced + given_up + len(given_back)

    # --- Held, but not owned ----------------------------------------------------------------------------------------

    def _running(self, me: WorkerId) -> list[_Running]:
        """Only those whose row nobody in this process is about to change."""
        held = [one for one in self._ground.registry.all() if one.phase is Phase.RUNNING and one.lease.worker_id == me]
        return [_Running(one, one.lease, one.lease.epoch) for one in held if not one.lease.fenced]

    def _fence(self, running: list[_Running], owned: set[Grant]) -> int:
        lost = [one for one in running if (one.held.run.run_id, one.epoch) not in owned and one.still]
        for one in lost:
            fence(self._ground, one.held, NOT_OURS)
        return len(lost)

    async def _fence_ending(self, me: WorkerId, owned: set[RunId]) -> int:
        """What is being ended or restored here changes its own row, so that only a row that names somebody else is a
        loss: another worker has seized what took longer than the grace (O4), and two would restore it side by side."""
        held = [one for one in self._ground.registry.all() if one.phase is Phase.SETTLING and one.lease.worker_id == me]
        lost = 0
        for one in held:
            if one.run.run_id in owned or one.lease.fenced or one.over.is_set():
                continue
            lease, epoch = one.lease, one.lease.epoch
            row = await self._ground.store.get(one.key, scope=EVERYONE)
            elsewhere = row is not None and row.active and row.owner_worker_id not in (None, me)
            if elsewhere and one.lease is lease and lease.epoch == epoch:
                fence(self._ground, one, NOT_OURS)
                lost += 1
        return lost

    # --- Held, and nobody came for it -------------------------------------------------------------------------------

    def _give_up_unattached(self) -> int:
        """Each in a task of its own, which asks until the store answers; from now on nobody can come for it."""
        registry, now = self._ground.registry, self._ground.clock.boot_time()
        late = registry.unattached(before=now - self._patience)
        for held in late:
            if held.run.reservation:
                self._missing[held.run.run_id, held.lease.epoch] = held.since
                registry.let_go(held)
            else:
                held.phase = Phase.SETTLING
                self._granting.begin(held, self._part_with(Life(self._ground, held)))
        return len(late)

    async def _part_with(self, life: Life) -> None:
        try:
            await life.give_back(StopReason.NOT_ATTACHED.value)
        finally:
            life.leave()

    # --- Owned, but not held ----------------------------------------------------------------------------------------

    def _ripe(self, owned: tuple[Run, ...]) -> list[Run]:
        """What has been missing for ``attach_deadline``. What came, or went, is forgotten."""
        now = self._ground.clock.boot_time()
        missing = {(run.run_id, run.epoch): run for run in owned if not self._holds(run)}
        self._missing = {grant: self._missing.get(grant, now) for grant in missing}
        return [run for grant, run in missing.items() if now - self._missing[grant] >= self._patience]

    def _holds(self, run: Run) -> bool:
        held = self._ground.registry.get(run.run_id)
        return held is not None and held.lease.epoch == run.epoch

    async def _give_back(self, run: Run) -> bool:
        """As if this process had died with it. A refusal needs no answer: the next comparison sees what is true."""
        ground, event = self._ground, WAYS.get(verdict(run))
        if event is None:
            return False
        decision = await ground.store.apply(run.key, event, ground.actor(run.epoch), self._given(run))
        if not isinstance(decision, Applied):
            return False
        self._happened(event, decision.run, run)
        if decision.run.vacant or run.queue_behind:
            await ground.work_appeared()
        return True

    def _happened(self, event: RunEvent, run: Run, before: Run) -> None:
        ground = self._ground
        names: dict[str, Any] = {"worker_id": ground.worker_id, "run_id": run.run_id, "thread_id": run.thread_id}
        match event:
            case RunEvent.SEIZE:
                ground.observe(RunSeized(**names, epoch=run.epoch, attempt=run.attempt))
                self._granting.restore(run)
            case RunEvent.RELEASE:
                ground.observe(ReservationReleased(**names, kind=before.kind))
            case RunEvent.SETTLE_CANCELLED:
                seconds = ((run.settled_at or 0) - (run.granted_at or 0)) / MICROS_PER_SECOND
                how: dict[str, Any] = {"status": run.status, "stop_reason": run.stop_reason, "seconds": seconds}
                ground.observe(RunSettled(**names, epoch=run.epoch, **how))
            case _:
                ground.observe(RunGivenBack(**names, status=run.status))

    def _given(self, run: Run) -> Given:
        config = self._ground.config
        started = run.status is RunStatus.RUNNING
        return Given(
            backoff=micros(config.backoff_min.total_seconds()),
            backoff_limit=micros(config.backoff_max.total_seconds()),
            cancel_grace=micros(config.cancel_grace.total_seconds()),
            stop_reason=(StopReason.ORPHAN_RECOVERED if started else StopReason.NOT_ATTACHED).value,
        )

    @property
    def _patience(self) -> float:
        return self._ground.config.attach_deadline.total_seconds()
