"""Three workers with the default settings carry out 100 runs on PostgreSQL, each as long as chance says: some end
before the server is killed (-9), some while it is away, some after it is back. Every run notes when its body begins.
Lost is a run that does not end as success; twice is one whose body began more than once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, Final

from bench.context import Bench
from bench.results import Measured, Sense, Target, line
from bench.workers import WAIT, Inside
from deerflow_runs import RunStatus
from deerflow_runs.observe import RunSettled, TrustEnded
from deerflow_runs.store.migrate import upgrade

TITLE: Final = "An outage of the database"

RUNS: Final = 100
WORKERS: Final = 3
NONE: Final = Target(0, Sense.EXACTLY)
QUICK: Final = {"lease": 2.0, "lease_floor": 0.5, "grace": 1.0}
"""Leases so short that a short outage is longer than they are."""


def measure(bench: Bench) -> Measured:
    """One outage; a short one with short leases if there is little time."""
    away, after, settings = bench.pick((60.0, 15.0, {}), (10.0, 5.0, QUICK))
    lasting = [bench.random.uniform(1.0, away + after) for _ in range(RUNS)]
    with bench.own_cluster() as cluster:
        upgrade(cluster.dsn())
        workers = [bench.worker(cluster.dsn(), **settings) for _ in range(WORKERS)]
        try:
            for worker in workers:
                worker.answer()
            for number, worker in enumerate(workers):
                worker.ask(submit, lasting[number::WORKERS], f"w{number}")
            time.sleep(2.0)
            cluster.kill()
            time.sleep(away)
            cluster.start()
            back_at = time.monotonic()
            for worker in workers:
                worker.begin(all_ended)
            told = [worker.answer() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    return _measured(told, back_at, away, min(lasting), max(lasting))


def _measured(told: list[Any], back_at: float, away: float, shortest: float, longest: float) -> Measured:
    statuses = Counter(status for one in told for status in one["statuses"])
    begun = Counter(run_id for one in told for run_id in one["begun"])
    during = sum(1 for one in told for at in one["finished"] if back_at - away <= at < back_at)
    return Measured(
        (
            line("runs", statuses.total(), ""),
            line("of which their bodies ended while the database was away", during, ""),
            line("workers that had to suspend their runs", sum(one["suspended"] for one in told), ""),
            line("runs lost", RUNS - statuses[RunStatus.SUCCESS], "", NONE),
            line("runs begun twice", sum(1 for times in begun.values() if times > 1), "", NONE),
            line("until what ended meanwhile was stored", [one["stored_at"] - back_at for one in told], "s"),
        ),
        (f"The server was away for {away:g} s. Runs lasted {shortest:.0f} to {longest:.0f} s.",),
    )


async def submit(inside: Inside, lasting: list[float], name: str) -> None:
    """One run for each length."""
    asked = [inside.manager.submit(f"{name}-{number}", WAIT, input=seconds) for number, seconds in enumerate(lasting)]
    inside.handles = list(await asyncio.gather(*asked))


async def all_ended(inside: Inside) -> dict[str, Any]:
    """Once all of them have: how, how often they began, and when the store had caught up."""
    asked_at = time.monotonic()
    runs = await asyncio.gather(*(handle.join() for handle in inside.handles))
    return {
        "statuses": [run.status for run in runs],
        "begun": [run_id for run_id, _ in inside.begun],
        "finished": [at for _, at in inside.finished],
        "suspended": bool(inside.times_of(TrustEnded)),
        "stored_at": _caught_up(inside, asked_at),
    }


def _caught_up(inside: Inside, asked_at: float) -> float:
    """When the last run whose body had ended before ``asked_at`` was settled."""
    ended = {run_id for run_id, at in inside.finished if at < asked_at}
    settled = (at for at, event in inside.seen if isinstance(event, RunSettled) and event.run_id in ended)
    return max(settled, default=asked_at)
