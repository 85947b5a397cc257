"""A worker with 500 running runs of a named executor is killed with SIGKILL at a random moment while another one
stands by; both have the default settings but for the number of runs they take. The time is from the kill until the
last of the 500 is vacant, free for whoever can take it. Runs that are to fail with their worker end a lease later: on
PostgreSQL no verdict is proof. Without the hint the workers speak to the database as through a transaction pooler,
where a dead worker shows by nothing but its silence."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bench.context import Bench
from bench.results import Line, Measured, Target, line
from bench.workers import Inside, begin_runs
from deerflow_runs import OnOrphan
from deerflow_runs.observe import RunRecovered, SessionDeclaredDead

TITLE: Final = "Recovery after a worker was killed"

RUNS: Final = 500
HOUR: Final = 3600.0
LEASE, GRACE, BEAT = 15.0, 5.0, 2.5
CASES: Final = {
    "SQLite, with proof": ("SQLite", "", OnOrphan.RESUME, 1.0),
    "Postgres, with the kernel's hint": ("Postgres", "", OnOrphan.RESUME, 8.0),
    "the same, runs that fail with their worker": ("Postgres", "", OnOrphan.FAIL, 8.0 + LEASE),
    "Postgres, without the hint": ("Postgres", "?pooler=true", OnOrphan.RESUME, LEASE + GRACE + 2 * BEAT),
}
"""The kind of database, what its address says in addition, the runs' `on_orphan`, and the most seconds allowed."""


def measure(bench: Bench) -> Measured:
    """What takes long is mostly waiting: the rounds of one case go on side by side, half a second apart."""
    lines = [one for case in CASES for one in _case(bench, case)]
    return Measured(tuple(lines), (f"The target is what the slowest round may take. Each round recovers {RUNS} runs.",))


def _case(bench: Bench, case: str) -> list[Line]:
    kind, more, policy, most = CASES[case]
    rounds = bench.pick(6, 1)
    moments = [bench.random.uniform(0, 2.5) for _ in range(rounds)]
    databases = [bench.fresh(kind) + more for _ in moments]
    at_once = 1 if kind == "SQLite" else 3
    with ThreadPoolExecutor(at_once) as pool:
        taken = list(pool.map(lambda dsn, moment: _one(bench, dsn, moment, policy), databases, moments))
    return [
        line(f"{case}: from the kill to the last run", [whole for whole, _ in taken], "s", Target(most, worst=True)),
        line(f"{case}: of which from the verdict on", [1000 * since for _, since in taken], "ms"),
    ]


def _one(bench: Bench, dsn: str, moment: float, policy: OnOrphan) -> tuple[float, float]:
    with bench.worker(dsn, max_concurrent_runs=0) as standing_by, bench.worker(dsn, max_concurrent_runs=RUNS) as doomed:
        doomed.ask(begin_runs, RUNS, HOUR, on_orphan=policy)
        time.sleep(moment)
        killed_at = doomed.kill()
        dead_at, recovered_at = standing_by.ask(recovered, RUNS)
        return recovered_at - killed_at, recovered_at - dead_at


async def recovered(inside: Inside, runs: int) -> tuple[float, float]:
    """When the verdict fell, and when the last of so many runs was free."""
    await inside.until(lambda: len(inside.times_of(RunRecovered)) >= runs)
    return inside.times_of(SessionDeclaredDead)[0], inside.times_of(RunRecovered)[-1]
