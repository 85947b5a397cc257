"""Reading runs: the store's rows, and while it gives no answer, what this process holds (behaviours §14).

Every read is scoped; a foreign row reads as missing. Rows held here are never newer than the store's, only closer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.scoping import visible
from deerflow_runs.model import Run, RunId, RunKey, Scope, ThreadId
from deerflow_runs.observe import ReadDegraded, error_code
from deerflow_runs.store.base import Page, RunFilter


@final
class Reading:
    """The manager's reads. Belongs to the main loop."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def get(self, key: RunKey, *, scope: Scope) -> Run | None:
        """See ``RunManager.get``."""
        try:
            return await self._ground.store.get(key, scope=scope)
        except StoreUnavailable as error:
            held = [run for run in self._held(key.thread_id, scope) if run.run_id == key.run_id]
            if not held:
                raise
            self._degraded(error)
            return held[0]

    async def get_many(self, thread_id: ThreadId, run_ids: Collection[RunId], *, scope: Scope) -> dict[RunId, Run]:
        """See ``RunManager.get_many_by_thread``."""
        try:
            return await self._ground.store.get_many(thread_id, run_ids, scope=scope)
        except StoreUnavailable as error:
            held = {run.run_id: run for run in self._held(thread_id, scope) if run.run_id in run_ids}
            if not held:
                raise
            self._degraded(error)
            return held

    async def page(
        self, thread_id: ThreadId, *, scope: Scope, only: RunFilter | None, limit: int, after: str | None
    ) -> Page:
        """See ``RunManager.list_by_thread``."""
        try:
            return await self._ground.store.list_runs(thread_id, scope=scope, only=only, limit=limit, after=after)
        except StoreUnavailable as error:
            held = self._held(thread_id, scope)
            if not held or after is not None or only is not None:
                raise
            self._degraded(error)
            return Page(held[:limit])

    def _held(self, thread_id: ThreadId, scope: Scope) -> tuple[Run, ...]:
        """Newest first. Reservations are no runs."""
        rows = (held.run for held in self._ground.registry.of_thread(thread_id))
        mine = [run for run in rows if not run.reservation and visible(run, scope)]
        return tuple(sorted(mine, key=lambda run: run.seq, reverse=True))

    def _degraded(self, error: StoreUnavailable) -> None:
        self._ground.observe(ReadDegraded(worker_id=self._ground.worker_id, error=error_code(error)))
