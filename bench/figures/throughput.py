"""So many callers of one manager in a process of its own let runs in that do nothing, over and over:
`create_or_reject`, then an empty `execute` block. Counted are runs that have ended, and the processor time of that
process. The cases take turns, round by round. Default settings but for the number of runs. With latency a proxy holds
back every reply."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Final

from bench.context import Bench
from bench.latency import slower
from bench.results import Line, Measured, line
from bench.workers import Inside, Worker

TITLE: Final = "Runs per second"

AT_ONCE: Final = (1, 16, 128)
CASES: Final = {
    "Postgres": ("Postgres", 0.0),
    "Postgres with 1 ms latency": ("Postgres", 0.001),
    "SQLite": ("SQLite", 0.0),
}


def measure(bench: Bench) -> Measured:
    """All cases side by side, one of them at work."""
    seconds, rounds = bench.pick((2.0, 7), (0.7, 2))
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        workers = {case: _worker(bench, stack, case) for case in CASES}
        for worker in workers.values():
            worker.ask(runs_for, seconds, max(AT_ONCE))
        for _ in range(rounds):
            for case, worker in workers.items():
                for at_once in AT_ONCE:
                    found.setdefault((case, at_once), []).append(worker.ask(runs_for, seconds, at_once))
    lines = [one for (case, at_once), rounds_ in found.items() for one in _lines(case, at_once, rounds_)]
    return Measured(
        tuple(lines),
        ("Reported, not judged. The processors are shared by worker, server and proxy.",),
    )


def _worker(bench: Bench, stack: ExitStack, case: str) -> Worker:
    kind, latency = CASES[case]
    address = stack.enter_context(slower(bench.fresh(kind), latency))
    return stack.enter_context(bench.worker(address, max_concurrent_runs=2 * max(AT_ONCE)))


def _lines(case: str, at_once: int, rounds: list[tuple[float, float]]) -> list[Line]:
    return [
        line(f"{case}, {at_once} at once", [rate for rate, _ in rounds], "runs/s"),
        line(f"{case}, {at_once} at once: client's processor time", [cost for _, cost in rounds], "ms/run"),
    ]


async def runs_for(inside: Inside, seconds: float, at_once: int) -> tuple[float, float]:
    """Runs per second, and milliseconds of processor time for each."""
    manager, ended = inside.manager, 0
    began, used = time.monotonic(), time.process_time()

    async def caller(name: str) -> None:
        nonlocal ended
        number = 0
        while time.monotonic() < began + seconds:
            number += 1
            async with manager.execute(await manager.create_or_reject(f"{name}-{number}-{began}")):
                pass
            ended += 1

    await asyncio.gather(*(caller(f"{at_once}-{number}") for number in range(at_once)))
    took = time.monotonic() - began
    inside.seen.clear()
    return ended / took, 1000 * (time.process_time() - used) / ended
