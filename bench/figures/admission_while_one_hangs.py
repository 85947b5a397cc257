"""Four callers of one manager admit runs to threads of their own, over and over, each waiting for its answer. In
every other round somebody else's open transaction holds the row that a fifth admission runs into, which therefore
hangs. The ratio divides the p99 of the two rounds of a pair. The hanging admission keeps one of the store's five
connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import asyncpg

from bench.context import Bench
from bench.results import Measured, Sense, Target, line
from bench.summary import percentile
from deerflow_runs import DeerflowRunsError, RunsConfig, store_at
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager

TITLE: Final = "Admission while another one hangs"

CALLERS: Final = 4
STUCK: Final = "stuck"


def measure(bench: Bench) -> Measured:
    """Postgres: on SQLite there is one writer for all, and what holds the file holds everybody."""
    return asyncio.run(_measure(bench.postgres(), bench.pick(11, 4), bench.pick(1.5, 1.0)))


async def _measure(dsn: str, pairs: int, seconds: float) -> Measured:
    lost: list[str] = []
    async with store_at(dsn) as store, RunManager(store, config=RunsConfig(max_concurrent_runs=1_000)) as manager:
        holder = await manager.submit(STUCK, _for_ever)
        await _admissions(manager, seconds / 2, lost)
        idle, hanging = [], []
        for _ in range(pairs):
            idle.append(await _admissions(manager, seconds, lost))
            async with _hanging(dsn, manager, holder.run_id):
                hanging.append(await _admissions(manager, seconds, lost))
    shares = [one / other for one, other in zip(hanging, idle, strict=True)]
    return Measured(
        (
            line("p99 while nothing hangs", idle, "ms"),
            line("p99 while one hangs", hanging, "ms"),
            line("p99 while one hangs ÷ while nothing hangs", shares, "x", Target(2.0)),
            line("admissions on other threads that failed", len(lost), "", Target(0, Sense.EXACTLY)),
        )
    )


async def _admissions(manager: RunManager, seconds: float, lost: list[str]) -> float:
    """The p99 of all admissions of so many seconds, in milliseconds."""
    taken: list[float] = []
    until = time.perf_counter() + seconds

    async def caller(name: str) -> None:
        number = 0
        while time.perf_counter() < until:
            before = time.perf_counter()
            try:
                handle = await manager.submit(f"{name}-{number}-{until}", _nothing)
            except DeerflowRunsError as error:
                lost.append(type(error).__name__)
                continue
            taken.append(1000 * (time.perf_counter() - before))
            number += 1
            if number % 50 == 0:  # what was admitted also has to end
                await handle.join()

    await asyncio.gather(*(caller(f"caller-{number}") for number in range(CALLERS)))
    return percentile(taken, 0.99)


@asynccontextmanager
async def _hanging(dsn: str, manager: RunManager, run_id: str) -> AsyncIterator[None]:
    """Meanwhile an admission waits for a transaction that somebody forgot to end."""
    connection = await asyncpg.connect(dsn)
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("UPDATE dr_runs SET status = 'interrupted' WHERE run_id = $1", run_id)
        admission = asyncio.create_task(_refused(manager))
        await _until_locked(connection)
        yield
        assert not admission.done(), "it did not hang"
    finally:
        await transaction.rollback()
        await connection.close()
    await admission


async def _refused(manager: RunManager) -> None:
    with suppress(DeerflowRunsError):
        await manager.submit(STUCK, _nothing)


async def _until_locked(connection: asyncpg.Connection) -> None:
    while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
        pass


async def _nothing(_: RunLease) -> None:
    """A run that is over as soon as it begins."""


async def _for_ever(_: RunLease) -> None:
    await asyncio.Event().wait()
