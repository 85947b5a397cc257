"""10,000 runs live and end in one manager, on SQLite, after some others have warmed it up. Counted are all objects of
this package's own types that the garbage collector knows, before and after, and the memory that is resident."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import Final

from bench.context import Bench
from bench.machine import resident
from bench.results import Measured, Target, line
from bench.workers import Inside

TITLE: Final = "What is kept of ended runs"

RUNS: Final = 10_000
AT_ONCE: Final = 50
LOOKS: Final = 5


def measure(bench: Bench) -> Measured:
    """In a process of its own."""
    with bench.worker(bench.sqlite()) as worker:
        worker.ask(live, bench.pick(5_000, 1_000), "warm")
        objects, resident = worker.ask(weigh)
        worker.ask(live, RUNS, "more")
        objects_after, resident_after = worker.ask(weigh)
    kept = sum((Counter(objects_after) - Counter(objects)).values())
    return Measured(
        (
            line(f"objects kept after {RUNS:,} runs ended", kept, "", Target(0)),
            line("memory that the process has grown by", (resident_after - resident) / RUNS, "B/run"),
        ),
        ("The second line is the allocator's and the database's as well, and is reported only.",),
    )


async def live(inside: Inside, runs: int, name: str) -> None:
    """So many runs come and go."""
    manager = inside.manager

    async def caller(first: int) -> None:
        for number in range(first, runs, AT_ONCE):
            async with manager.execute(await manager.create_or_reject(f"{name}-{number}")):
                pass
            inside.seen.clear()  # what the measurement itself keeps

    await asyncio.gather(*(caller(first) for first in range(AT_ONCE)))


async def weigh(inside: Inside) -> tuple[dict[str, int], int]:
    """Objects of our types by type, and bytes that are resident. The worker goes on beating and sweeping, so what is
    not there every time is not kept."""
    await inside.until(lambda: inside.manager.stats().held == 0)
    kept = _objects()
    for _ in range(LOOKS):
        await asyncio.sleep(0.2)
        kept &= _objects()
    return dict(kept), resident()


def _objects() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__qualname__ for one in gc.get_objects() if _ours(type(one)))


def _ours(kind: type) -> bool:
    return str(kind.__module__).startswith("deerflow_runs.")
