"""A worker process carries out 5,000 runs on PostgreSQL, whose every reply is held back for 5 ms, for as long as two
leases last; default settings but for the number of runs. Another worker stands by and judges. Lost is a run that its
worker gave up, or that the other one took over."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from bench.context import Bench
from bench.latency import slower
from bench.results import Measured, Sense, Target, line
from bench.workers import Inside, begin_runs
from deerflow_runs.observe import RunFenced, RunGivenBack, RunRecovered, SessionDeclaredDead, TrustEnded
from tests.migrations.databases import ask

TITLE: Final = "Thousands of runs and a slow network"

HOUR: Final = 3600.0
LATENCY: Final = 0.005
LEASE: Final = 15.0
NONE: Final = Target(0, Sense.EXACTLY)


def measure(bench: Bench) -> Measured:
    """Once."""
    runs, seconds, dsn = bench.pick(5_000, 1_000), bench.pick(2.0, 0.5) * LEASE, bench.postgres()
    with ExitStack() as stack:
        address = stack.enter_context(slower(dsn, LATENCY))
        judge = stack.enter_context(bench.worker(address, max_concurrent_runs=0))
        worker = stack.enter_context(bench.worker(address, max_concurrent_runs=runs))
        began_at = time.monotonic()
        worker.ask(begin_runs, runs, HOUR)
        begun_after = time.monotonic() - began_at
        time.sleep(seconds)
        lost, doubts = (one + other for one, other in zip(worker.ask(told), judge.ask(told), strict=True))
        [(running,)] = ask(dsn, "SELECT count(*) FROM dr_runs WHERE status = 'running' AND epoch = 1")
    return Measured(
        (
            line("runs", runs, ""),
            line("until all of them were under way", begun_after, "s"),
            line("runs lost", max(lost, runs - running), "", NONE),
            line("times that a worker doubted its own session or judged the other dead", doubts, "", NONE),
        )
    )


async def told(inside: Inside) -> tuple[int, int]:
    """Runs that were lost, and sessions that were doubted, as far as this worker has told."""
    lost = sum(isinstance(event, RunFenced | RunGivenBack | RunRecovered) for _, event in inside.seen)
    return lost, sum(isinstance(event, TrustEnded | SessionDeclaredDead) for _, event in inside.seen)
