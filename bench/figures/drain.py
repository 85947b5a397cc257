"""A worker process with 1,000 running runs is told to leave within one second. Half of the runs are of a named
executor, so others can go on with them, half are local and end with their worker. Persisted is a run whose row says
afterwards that it was handed over, or has ended with the stop reason of a shutdown. With latency a proxy holds back
every reply."""

from __future__ import annotations

import time
from typing import Final

from bench.context import Bench
from bench.latency import slower
from bench.results import Line, Measured, Sense, Target, line
from bench.workers import Inside, begin_runs
from tests.migrations.databases import ask

TITLE: Final = "Leaving with 1,000 runs"

RUNS: Final = 1_000
HOUR: Final = 3600.0
BUDGET: Final = 1.0
CASES: Final = {
    "Postgres": ("Postgres", 0.0),
    "Postgres with 5 ms latency": ("Postgres", 0.005),
    "SQLite": ("SQLite", 0.0),
}
PERSISTED: Final = """
SELECT count(*) FROM dr_runs
WHERE status = 'pending' AND owner_worker_id IS NULL OR status = 'interrupted' AND stop_reason = 'shutdown'
"""


def measure(bench: Bench) -> Measured:
    """Each case a few times."""
    lines = [one for case in CASES for one in _case(bench, case)]
    return Measured(tuple(lines))


def _case(bench: Bench, case: str) -> list[Line]:
    kind, latency = CASES[case]
    rounds = [_one(bench, bench.fresh(kind), latency) for _ in range(bench.pick(4, 1))]
    return [
        line(f"{case}: persisted", [count for count, _ in rounds], "", Target(RUNS, Sense.EXACTLY)),
        line(f"{case}: shutdown took", [taken for _, taken in rounds], "s"),
    ]


def _one(bench: Bench, dsn: str, latency: float) -> tuple[int, float]:
    with slower(dsn, latency) as address, bench.worker(address, max_concurrent_runs=RUNS) as worker:
        worker.ask(begin_runs, RUNS // 2, HOUR)
        worker.ask(begin_runs, RUNS // 2, HOUR, local=True)
        taken = worker.ask(leave, BUDGET)
    [(persisted,)] = ask(dsn, PERSISTED)
    return int(persisted), taken


async def leave(inside: Inside, budget: float) -> float:
    """As at SIGTERM; how long it took."""
    before = time.monotonic()
    await inside.manager.shutdown(timeout=budget)
    return time.monotonic() - before
