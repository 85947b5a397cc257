"""The only worker of a database is killed with SIGKILL while it has 100 running runs, and started again at once. The
time is from opening the store in the new process until the last run is recovered, that is vacant and about to be
claimed by it; that a process starts and imports its modules comes before. Default settings."""

from __future__ import annotations

import time
from typing import Final

from bench.context import Bench
from bench.figures.recovery import recovered
from bench.results import Line, Measured, Target, line
from bench.workers import Inside, begin_runs
from deerflow_runs.observe import RunStarted

TITLE: Final = "Restart of the only worker"

RUNS: Final = 100
HOUR: Final = 3600.0
TARGETS: Final = {"SQLite": 1.0, "Postgres": 2 * 2.5 + 1.0}


def measure(bench: Bench) -> Measured:
    """On both databases."""
    lines = [one for kind in TARGETS for one in _on(bench, kind, bench.pick(5, 1))]
    return Measured(
        tuple(lines),
        (
            "The target is what the slowest round may take.",
            "A recovered run begins after a random pause (`backoff_min`); a new worker takes up five a second.",
        ),
    )


def _on(bench: Bench, kind: str, rounds: int) -> list[Line]:
    taken = [_one(bench, bench.fresh(kind)) for _ in range(rounds)]
    return [
        line(f"{kind}: the last run is recovered", [one for one, _ in taken], "s", Target(TARGETS[kind], worst=True)),
        line(f"{kind}: the first run is running again", [one for _, one in taken], "s"),
    ]


def _one(bench: Bench, dsn: str) -> tuple[float, float]:
    with bench.worker(dsn) as before:
        before.ask(begin_runs, RUNS, HOUR)
        time.sleep(bench.random.uniform(0, 2.5))
        before.kill()
    with bench.worker(dsn) as after:
        opened_at = after.ask(opened)
        _, recovered_at = after.ask(recovered, RUNS)
        running_at = after.ask(running)
        return recovered_at - opened_at, running_at - opened_at


async def opened(inside: Inside) -> float:
    """When the store was about to be opened."""
    return inside.began_at


async def running(inside: Inside) -> float:
    """When the first of them was under way."""
    await inside.until(lambda: bool(inside.times_of(RunStarted)))
    return inside.times_of(RunStarted)[0]
