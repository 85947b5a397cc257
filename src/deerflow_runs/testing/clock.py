"""A clock that a test owns: time stands still until the test moves it, and sleepers wake in the order of their time.

Nothing here waits for real time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from typing import Final, final

from deerflow_runs.model import MICROS_PER_SECOND, Micros, micros

TURNS: Final = 20
"""How often the event loop goes round before time goes on: enough for a woken task to reach its next wait, unless it
waits for something real, which the test must then wait for itself."""

_Sleeper = tuple[int, int, asyncio.Future[None]]


@final
class ManualClock:
    """Starts at a boot time of 1,000 seconds and a wall clock of its own. Counts in whole microseconds.

    Sleepers may belong to several event loops and threads; those of the loop that moves the time wake in a fixed
    order, those of others when their loop comes to it.
    """

    def __init__(self, *, boot_time: float = 1_000.0, wall: float = 1_000_000_000.0) -> None:
        self._now = micros(boot_time)
        self._wall_offset = micros(wall) - self._now
        self._sleepers: list[_Sleeper] = []
        self._order = itertools.count()
        self._lock = threading.Lock()

    def boot_time(self) -> float:
        """Seconds, as far as the test has moved the time."""
        return self._now / MICROS_PER_SECOND

    def wall(self) -> Micros:
        """Moves with the boot time, and by ``step_wall``."""
        return Micros(self._now + self._wall_offset)

    async def sleep(self, seconds: float) -> None:
        """Wait until the test has moved the time so far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        with self._lock:
            until = self._now + max(1, micros(seconds))  # less would never be over: whoever asks again asks for ever
            heapq.heappush(self._sleepers, (until, next(self._order), woken))
        await woken

    @property
    def sleeping(self) -> int:
        """How many tasks sleep."""
        with self._lock:
            return sum(not woken.done() for _, _, woken in self._sleepers)

    async def until_sleeping(self, count: int) -> None:
        """Let others run until at least ``count`` tasks sleep."""
        while self.sleeping < count:  # noqa: ASYNC110 (sleepers may come from other threads, where no event reaches us)
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Move the time on, stopping for each sleeper when its time has come: it acts, and may sleep again."""
        target = self._now + micros(seconds)
        await _let_others_run()
        while (due := self._pop_due(target)) is not None:
            self._now = Micros(max(self._now, due[0]))
            _wake(due[2])
            await _let_others_run()
        self._now = Micros(target)

    def jump(self, seconds: float) -> None:
        """Move the time on at once, as after a suspended machine or a blocked loop: sleepers wake late, in order."""
        self._now = Micros(self._now + micros(seconds))
        while (due := self._pop_due(self._now)) is not None:
            _wake(due[2])

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back; nobody wakes and no deadline moves."""
        self._wall_offset += micros(seconds)

    def _pop_due(self, now: int) -> _Sleeper | None:
        with self._lock:
            while self._sleepers and self._sleepers[0][0] <= now:
                sleeper = heapq.heappop(self._sleepers)
                if not sleeper[2].done():  # a cancelled one is left where it was
                    return sleeper
        return None


async def _let_others_run() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _wake(woken: asyncio.Future[None]) -> None:
    loop = woken.get_loop()
    if loop is _running_loop():
        woken.set_result(None)
    else:
        loop.call_soon_threadsafe(_wake_once, woken)


def _wake_once(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
