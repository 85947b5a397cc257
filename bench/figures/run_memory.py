"""A worker process begins runs of a local function that only waits, and says how much memory it has resident after
the first 300 and after 1,500: the difference, divided by 1,200. On SQLite, whose file is not in that memory."""

from __future__ import annotations

import gc
from typing import Final

from bench.context import Bench
from bench.machine import resident
from bench.results import Measured, line
from bench.workers import Inside, begin_runs

TITLE: Final = "Memory of a run"

FEW: Final = 300
MORE: Final = 1_200
HOUR: Final = 3600.0


def measure(bench: Bench) -> Measured:
    """A few processes, one after the other."""
    return Measured(
        (line("memory for each active run", [_one(bench) for _ in range(bench.pick(5, 2))], "KiB"),),
        ("Reported, not judged. What a graph and its messages take comes in addition.",),
    )


def _one(bench: Bench) -> float:
    with bench.worker(bench.sqlite(), max_concurrent_runs=FEW + MORE) as worker:
        before = worker.ask(resident_with, FEW)
        return (worker.ask(resident_with, MORE) - before) / MORE / 1024


async def resident_with(inside: Inside, more: int) -> int:
    """Bytes, once so many more runs are under way."""
    await begin_runs(inside, more, HOUR, local=True)
    inside.seen.clear()
    gc.collect()
    return resident()
