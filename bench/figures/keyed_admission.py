"""A database with 100,000 ended runs, each with an idempotency key, and one without a past. In turn: an admission
with a fresh key, one without a key, and one that repeats the key of an ended run, all by one manager and one caller.
The time is the middle one of each round; ratios are those of the same round."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Final

from bench.context import Bench
from bench.filling import happened, multiply, run_of
from bench.results import Line, Measured, Target, line
from deerflow_runs import SqlRunStore, WorkerId, store_at
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.model import Session
from deerflow_runs.protocol.lifecycle import RunEvent

TITLE: Final = "Admission with an idempotency key"

WORKER: Final = WorkerId("host:past")


def measure(bench: Bench) -> Measured:
    """Both databases."""
    lines = [one for kind in ("Postgres", "SQLite") for one in asyncio.run(_on(bench, kind))]
    return Measured(tuple(lines), ("Independent of history: the ratio to the same admission without a past.",))


async def _on(bench: Bench, kind: str) -> list[Line]:
    old, new, ended = bench.fresh(kind), bench.fresh(kind), bench.pick(100_000, 10_000)
    async with store_at(old) as past, store_at(new) as none:
        await _fill(past, old, ended)
        async with RunManager(past) as with_past, RunManager(none) as without:
            rounds = [
                await _round(with_past, without, f"{number}", bench.pick(60, 25))
                for number in range(bench.pick(13, 5) + 1)
            ][1:]

    def ratio(one: str, other: str) -> list[float]:
        return [times[one] / times[other] for times in rounds]

    return [
        line(f"{kind}, with a key, {ended:,} ended runs", [times["keyed"] for times in rounds], "ms"),
        line(f"{kind}, the same ÷ without a key", ratio("keyed", "unkeyed"), "x", Target(2.0)),
        line(f"{kind}, the same ÷ with a key and no past", ratio("keyed", "no past"), "x", Target(2.0)),
        line(f"{kind}, a repeated key ÷ without a key", ratio("repeated", "unkeyed"), "x"),
    ]


async def _fill(store: SqlRunStore, dsn: str, ended: int) -> None:
    await store.open_session(Session(WORKER))
    run = await run_of(store, WORKER, "past", key="key")
    await happened(store, run, RunEvent.SETTLE_SUCCESS)
    await asyncio.to_thread(multiply, dsn, "past", ended - 1)


async def _round(with_past: RunManager, without: RunManager, name: str, samples: int) -> dict[str, float]:
    """Milliseconds for each kind of admission; they take turns."""
    taken: dict[str, list[float]] = {}
    last = "0"
    for number in range(samples):
        one = f"{name}-{number}"
        for kind, manager, thread, key in (
            ("keyed", with_past, f"k-{one}", one),
            ("unkeyed", with_past, f"u-{one}", None),
            ("no past", without, f"k-{one}", one),
            ("repeated", with_past, f"k-{last}", last),
        ):
            if kind == "repeated" and last == "0":
                continue
            before = time.perf_counter()
            handle = await manager.submit(thread, _nothing, idempotency_key=key)
            taken.setdefault(kind, []).append(1000 * (time.perf_counter() - before))
            await handle.join()
        last = one
    return {kind: median(times) for kind, times in taken.items()}


async def _nothing(_: RunLease) -> None:
    """A run that is over as soon as it begins."""
