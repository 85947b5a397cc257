"""Two worker processes share a database. One carries out a run, the other is asked to cancel it, again and again. The
time is from the call of `cancel()` in the one until the run's body in the other is told to stop. Between two cancels
passes a random time, so that they fall anywhere between two looks at the database."""

from __future__ import annotations

import time
from typing import Any, Final

from bench.context import Bench
from bench.results import Line, Measured, Target, line
from bench.summary import percentile
from bench.workers import Inside, begin_runs

TITLE: Final = "Cancel by another process"

HOUR: Final = 3600.0
TARGETS: Final = {"Postgres": (5, 50), "SQLite": (60, 150)}
"""Milliseconds, for the middle one and for all but one in a hundred."""


def measure(bench: Bench) -> Measured:
    """On both databases."""
    lines = [one for kind in TARGETS for one in _on(bench, kind, bench.pick(400, 60))]
    return Measured(tuple(lines))


def _on(bench: Bench, kind: str, samples: int) -> list[Line]:
    dsn = bench.fresh(kind)
    with bench.worker(dsn) as owner, bench.worker(dsn, max_concurrent_runs=0) as other:
        taken = [_one(bench, owner, other) for _ in range(samples)]
    middle, most = TARGETS[kind]
    told = f"{kind}, {{}} of {samples}"
    return [
        line(told.format("p50"), percentile(taken, 0.5), "ms", Target(middle)),
        line(told.format("p99"), percentile(taken, 0.99), "ms", Target(most)),
    ]


def _one(bench: Bench, owner: Any, other: Any) -> float:
    [key] = owner.ask(begin_runs, 1, HOUR)
    time.sleep(bench.random.uniform(0, 0.1))
    asked_at = other.ask(cancel, key)
    return 1000 * float(owner.ask(stopped, key) - asked_at)


async def cancel(inside: Inside, key: Any) -> float:
    """Ask for it, and say when."""
    asked_at = time.monotonic()
    await inside.manager.cancel(key)
    return asked_at


async def stopped(inside: Inside, key: Any) -> float:
    """When the body was told."""
    await inside.until(lambda: key.run_id in inside.stopped)
    return inside.stopped[key.run_id]
