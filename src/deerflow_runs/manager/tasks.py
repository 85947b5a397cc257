"""The manager's own tasks: each has a name and a parent here, and none is forgotten before it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar, final

T = TypeVar("T")

logger = logging.getLogger("deerflow_runs.manager")


@final
class Tasks:
    """Keeps tasks until they end. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begin ``work``. Its error is the awaiting caller's; if that one is gone, its type is logged."""
        task = asyncio.get_running_loop().create_task(work, name=f"deerflow_runs {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A refusal is its caller's and has been raised there; the text may hold what a caller sent.
            logger.debug("%s ended with %s", task.get_name(), type(error).__name__)

    async def finished(self) -> None:
        """Wait until all that is under way has ended."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """Cancel what is under way, and wait for it."""
        for task in self._tasks:
            task.cancel()
        await self.finished()
