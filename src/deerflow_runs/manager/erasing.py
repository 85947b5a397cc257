"""Removing threads with everything that hangs on them. What is active there is stopped first, in order."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, final

from deerflow_runs.errors import StoreUnavailable, ThreadBusy
from deerflow_runs.manager.admitting import Admitting
from deerflow_runs.manager.cancelling import Cancelling
from deerflow_runs.manager.ground import Ground
from deerflow_runs.model import EVERYONE, CancelAction, OneUser, OperationKind, Run, RunId, RunKey, Scope, ThreadId
from deerflow_runs.protocol.decision import Refused

TRIES: Final = 5
"""How often a thread may turn out to be held again before its erasure is refused."""


@final
class Erasing:
    """Erases threads and users. Checkpoints in a database of their own are their saver's to delete."""

    def __init__(self, ground: Ground, admitting: Admitting, cancelling: Cancelling) -> None:
        self._ground = ground
        self._admitting = admitting
        self._cancelling = cancelling

    async def user(self, user_id: str) -> int:
        """Erase all threads of a user; how many there were."""
        erased, after, scope = 0, None, OneUser(user_id)
        while threads := await self._ground.store.threads_of(user_id, after=after):
            for thread_id in threads:
                erased += await self.thread(thread_id, scope)
            after = threads[-1]
        return erased

    async def thread(self, thread_id: ThreadId, scope: Scope) -> bool:
        """Erase one thread; False: for this reader there is none. Raises ``ThreadBusy`` if it stays held."""
        for left in reversed(range(TRIES)):
            try:
                reservation = await self._admitting.reserve(thread_id, OperationKind.DELETE, None)
            except ThreadBusy as busy:
                if left == 0 or busy.holder is None:
                    raise
                await self._stop(thread_id, RunId(busy.holder))
                continue
            return await self._erase(reservation, scope)
        return False

    async def _stop(self, thread_id: ThreadId, run_id: RunId) -> None:
        key = RunKey(thread_id, run_id)
        await self._cancelling.cancel(key, CancelAction.INTERRUPT, wait=True, timeout=None, scope=EVERYONE)

    async def _erase(self, reservation: Run, scope: Scope) -> bool:
        store, registry = self._ground.store, self._ground.registry
        by = self._ground.actor(reservation.epoch)
        try:
            deleted = await store.threads.delete(reservation.key, by, scope=scope)
        except StoreUnavailable:
            with suppress(StoreUnavailable):  # then a sweep does it
                await self._admitting.release(reservation)
            raise
        if isinstance(deleted, Refused):
            await self._admitting.release(reservation)
            return False
        held = registry.get(reservation.run_id)
        if held is not None:
            registry.let_go(held)
        for run in deleted.ended:
            registry.give_up(run.run_id)
        return True
