"""Waiting for a run's end, wherever it is carried out (O28): the end is derived from the row, never from a message.

A run that is held here wakes its waiters; of others, and of what is lost here although its body goes on, the row is
read, first often, then less often.
"""

from __future__ import annotations

import asyncio
from typing import Final, final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.scoping import visible
from deerflow_runs.model import Run, RunKey, Scope

FIRST_LOOK: Final = 0.05
LAST_LOOK: Final = 1.0
"""Seconds between two looks at a run that is carried out elsewhere."""


@final
class Joining:
    """Waits for ends. Any number of callers may wait for one run; nothing is kept for them."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def join(self, key: RunKey, *, scope: Scope, timeout: float | None) -> Run | None:
        """The run's last row; None: there is no such run for this reader. Raises ``TimeoutError`` when it has not ended
        in time. Safe to cancel: the run does not notice."""
        async with asyncio.timeout(timeout):
            return await self._until_terminal(key, scope)

    async def _until_terminal(self, key: RunKey, scope: Scope) -> Run | None:
        pause = FIRST_LOOK
        while True:
            held = self._ground.registry.get(key.run_id)
            if held is not None and held.key == key and visible(held.run, scope):
                await held.lease.until_over()
                if held.ended is not None:
                    return held.ended
            try:
                run = await self._ground.store.get(key, scope=scope)
            except StoreUnavailable:
                pass  # the question stays; the answer comes when the store does
            else:
                if run is None or run.terminal:
                    return run
            await self._ground.clock.sleep(pause)
            pause = min(LAST_LOOK, pause * 1.5)
