"""Waiting by the worker's own clock: for an answer that may never come, and for the first of several things.

Time is asked of ``clock`` only, so that a test owns it. Nothing here knows sessions, runs or the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from deerflow_runs.clock import Clock
from deerflow_runs.errors import DeerflowRunsError

T = TypeVar("T")

OBEDIENCE: Final = 1.0
"""Seconds that something cancelled gets to end before nobody waits for it any more."""

FIRST_PAUSE: Final = 0.2
LAST_PAUSE: Final = 5.0
"""Seconds between two tries to tell the store something that it did not answer, doubling."""


class GivenUp(DeerflowRunsError):
    """There was no answer in time; what was asked may have happened. ``ended``: nothing of it goes on any more."""

    def __init__(self, seconds: float, *, ended: bool) -> None:
        super().__init__(f"the store gave no answer within {seconds:g} s")
        self.ended = ended


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` answers, or ``GivenUp``. Cancelling the caller cancels ``work``.

    A cancellation that comes out of ``work`` itself is no answer either: drivers cancel what waits for them.
    """
    task = asyncio.create_task(work)
    await first_of(clock, seconds, task)
    if task.done() and not task.cancelled():
        return task.result()
    raise GivenUp(seconds, ended=await ended(clock, task))


async def first_of(clock: Clock, seconds: float, *tasks: asyncio.Task[Any]) -> None:
    """Wait until one of ``tasks`` is done or the time has passed. Cancelling the caller cancels them all."""
    timer = asyncio.create_task(clock.sleep(seconds))
    try:
        await asyncio.wait({timer, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await ended(clock, *tasks)
        raise
    finally:
        timer.cancel()


async def ended(clock: Clock, *tasks: asyncio.Task[Any]) -> bool:
    """Cancel ``tasks`` and wait for their end, but not for ever; False: at least one goes on all the same."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
        task.add_done_callback(_forget)
    if not pending:
        return True
    patience = asyncio.create_task(clock.sleep(OBEDIENCE))
    try:
        await _all_or_first(pending, patience)
    finally:
        patience.cancel()
    return all(task.done() for task in pending)


async def _all_or_first(tasks: Iterable[asyncio.Task[Any]], limit: asyncio.Task[None]) -> None:
    left = set(tasks)
    while left and not limit.done():
        done, _ = await asyncio.wait({*left, limit}, return_when=asyncio.FIRST_COMPLETED)
        left -= done


def _forget(task: asyncio.Task[Any]) -> None:
    """Nobody asks for the outcome of what was cancelled; asyncio would complain of an error nobody looked at."""
    if not task.cancelled():
        task.exception()


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return float(min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10)))
