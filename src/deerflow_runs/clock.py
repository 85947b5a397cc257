"""Time, so that a test can own it: how long this machine has been up, what its wall clock says, and waiting.

Deadlines are made of ``boot_time`` only (O9). The wall clock of one machine is never compared with that of another.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, final

from deerflow_runs.model import Micros


class Clock(Protocol):
    """What may be asked about time. Safe to ask from any thread; ``sleep`` belongs to the running event loop."""

    def boot_time(self) -> float:
        """Seconds since some moment on this machine; never goes back, and counts while the machine is suspended."""

    def wall(self) -> Micros:
        """Microseconds since 1970 by the wall clock, which may be set back: the store's clock on SQLite."""

    async def sleep(self, seconds: float) -> None:
        """Let others run, and return when the time has passed. At once (but others run) if it is not positive."""


@final
class SystemClock:
    """The machine's own clocks."""

    def boot_time(self) -> float:
        """``CLOCK_BOOTTIME`` where there is one. Elsewhere the monotonic clock, which may stand while suspended."""
        return _boot_time()

    def wall(self) -> Micros:
        """The time of day of this machine."""
        return Micros(time.time_ns() // 1000)

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop; a suspended machine sleeps longer than asked."""
        await asyncio.sleep(seconds)


if hasattr(time, "CLOCK_BOOTTIME"):

    def _boot_time() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    _boot_time = time.monotonic
