"""Runs that wait and are not taken: what is expected here and has ended meanwhile, and what nobody can take (O31).

Why a run is not taken is decided in ``protocol.recovery``. Nothing here ends or moves a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

from deerflow_runs.manager.ground import Ground
from deerflow_runs.model import Micros, Run, RunId, Session, micros
from deerflow_runs.observe import RunWaitsFor
from deerflow_runs.protocol.recovery import why_waiting

EXPLAINED: Final = 100
"""Vacant runs that one sweep looks at."""

CHECKED_EVERY: Final = micros(60)
"""How old the note that a run cannot be taken may grow, by the store's clock, before it is confirmed."""


@final
class Waiting:
    """What one worker looks at in every sweep. Belongs to the main loop."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._explained: Run | None = None
        self._absent: dict[RunId, float] = {}

    async def give_up_ended(self) -> int:
        """Runs that are expected here and ended while they waited, by whomever: whoever waits for them is told."""
        registry = self._ground.registry
        expected = [one.key.run_id for one in registry.waiting()]
        if not expected:
            return 0
        over = await self._ground.store.have_ended(expected)
        gone = [run_id for run_id in expected if over.get(run_id)]
        gone += self._long_absent(run_id for run_id in expected if run_id not in over)
        for run_id in gone:
            registry.give_up(run_id)
        return len(gone)

    def _long_absent(self, missing: Iterable[RunId]) -> list[RunId]:
        """Rows that are gone, not rows whose admission is still under way."""
        now = self._ground.clock.boot_time()
        self._absent = {run_id: self._absent.get(run_id, now) for run_id in missing}
        patience = self._ground.config.attach_deadline.total_seconds()
        return [run_id for run_id, since in self._absent.items() if now - since >= patience]

    async def explain(self, sessions: Sequence[Session], store_now: Micros) -> None:
        """O31: what no live session can take says so, in its row and once to whoever listens. Every time it goes on
        where it stopped before, so that a few runs that merely wait for a slot hide nobody."""
        store, config = self._ground.store, self._ground.config
        waited = micros(config.sweep.total_seconds())
        found = await store.unclaimed(waited, limit=EXPLAINED, after=self._explained)
        self._explained = found[-1] if len(found) == EXPLAINED else None
        for run in found:
            await self._explain_one(run, sessions, store_now)

    async def _explain_one(self, run: Run, sessions: Sequence[Session], store_now: Micros) -> None:
        ground = self._ground
        why = why_waiting(run, sessions, me=ground.worker_id, now=store_now)
        if why is None:
            if run.waits_for:
                await ground.store.note_waiting(run.key, {})
            return
        known = run.waits_for or {}
        news, checked_at = known.get("message") != why.message, known.get("checked_at")
        fresh = isinstance(checked_at, int) and store_now - checked_at < CHECKED_EVERY
        if fresh and not news:
            return
        if await ground.store.note_waiting(run.key, why.as_json()) and news:
            names: dict[str, Any] = {"run_id": run.run_id, "thread_id": run.thread_id}
            event = RunWaitsFor(worker_id=ground.worker_id, **names, missing=why.missing, message=why.message)
            ground.observe(event)
