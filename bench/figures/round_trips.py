"""One run after the other lives through a manager: `create_or_reject`, then `execute` as a block that reports its
usage. On PostgreSQL a proxy counts flights to the server on the store's connections, on SQLite the writer counts its
commits. What goes on by itself beside (claims, sweeps) falls into some lives; the middle one has none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from bench.context import Bench
from bench.results import Line, Measured, Target, line
from deerflow_runs import SqlRunStore, Usage, store_at
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.writer import SqliteUnits
from tests.support.proxy import RoundTripProxy

TITLE: Final = "What a run costs its store"

THREE: Final = Target(3)
USED: Final = Outcome(usage=Usage(input_tokens=10, output_tokens=20, total_tokens=30))


def measure(bench: Bench) -> Measured:
    """Both databases."""
    lives = bench.pick(300, 100)
    lines = [asyncio.run(_postgres(bench.postgres(), lives)), asyncio.run(_sqlite(bench.sqlite(), lives))]
    return Measured(tuple(lines))


async def _postgres(dsn: str, lives: int) -> Line:
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(dsn), connections=1) as store:
        costs = await _costs(store, lambda: proxy.turns, lives)
    return line("Postgres: round trips of a run's life", costs, "", THREE)


async def _sqlite(dsn: str, lives: int) -> Line:
    database = parse_dsn(dsn)
    assert isinstance(database, Sqlite)
    units = SqliteUnits(database)
    async with SqlRunStore(units) as store:
        costs = await _costs(store, lambda: units.stats().commits, lives)
    return line("SQLite: commits of a run's life", costs, "", THREE)


async def _costs(store: SqlRunStore, count: Callable[[], int], lives: int) -> list[float]:
    async with RunManager(store) as manager:
        for number in range(5):  # statements are prepared
            await _live(manager, f"warm-{number}")
        costs = []
        for number in range(lives):
            before = count()
            await _live(manager, f"t-{number}")
            costs.append(float(count() - before))
    return costs


async def _live(manager: RunManager, thread_id: str, **options: Any) -> None:
    admitted = await manager.create_or_reject(thread_id, **options)
    async with manager.execute(admitted) as lease:
        lease.report(USED)
