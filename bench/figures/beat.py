"""Sessions with 10, 100, 1,000 and 10,000 active runs in one database beat in turn, each on the connection that a
worker's heartbeat uses. The time is that of one beat, the middle one of each round. Statements are counted where they
are handed to the driver, round trips by a proxy, and the write-ahead log by PostgreSQL itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

from sqlalchemy import Engine, event

from bench.context import Bench
from bench.filling import multiply, run_of
from bench.results import Line, Measured, Sense, Target, line
from deerflow_runs import SqlRunStore, WorkerId, store_at
from deerflow_runs.model import Session, SessionState, micros
from deerflow_runs.store.base import Renewed, SessionLine
from tests.migrations.databases import ask, do
from tests.support.proxy import RoundTripProxy

TITLE: Final = "What a heartbeat costs"

SIZES: Final = (10, 100, 1_000, 10_000)
COUNTED: Final = 20
ONE: Final = Target(1, Sense.EXACTLY)
UPDATES: Final = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'dr_workers'"


def measure(bench: Bench) -> Measured:
    """Times on both databases, counts where there is something to count."""
    lines = [one for kind in ("Postgres", "SQLite") for one in asyncio.run(_times(bench, kind))]
    lines += asyncio.run(_counts(bench))
    return Measured(
        tuple(lines),
        ("Flat: the ratio of the two times, round by round. What may still be called flat, 1.5, is our choice.",),
    )


async def _times(bench: Bench, kind: str) -> list[Line]:
    dsn = bench.fresh(kind)
    async with store_at(dsn) as store:
        lines = {size: await _session(store, dsn, size) for size in SIZES}
        rounds = [await _round(lines, bench.pick(40, 15)) for _ in range(bench.pick(15, 5))]
        for session_line in lines.values():
            await session_line.close()
    times = [line(f"{kind}, one beat with {size:,} runs", [one[size] for one in rounds], "ms") for size in SIZES]
    shares = [one[SIZES[-1]] / one[SIZES[0]] for one in rounds]
    return [*times, line(f"{kind}, {SIZES[-1]:,} runs ÷ {SIZES[0]} runs", shares, "x", Target(1.5))]


async def _session(store: SqlRunStore, dsn: str, size: int) -> SessionLine:
    """A line whose session owns so many running runs."""
    worker_id = _name(size)
    session_line = store.session_line()
    await session_line.connect(worker_id)
    await session_line.open_session(Session(worker_id, lease=micros(3600)))
    await run_of(store, worker_id, f"of-{size}")
    if size > 1:
        await asyncio.to_thread(multiply, dsn, f"of-{size}", size - 1)
    return session_line


def _name(size: int) -> WorkerId:
    return WorkerId(f"host:{size}")


async def _round(lines: dict[int, SessionLine], beats: int) -> dict[int, float]:
    """Milliseconds for each size; the sizes take turns."""
    taken: dict[int, list[float]] = {size: [] for size in lines}
    for _ in range(beats):
        for size, session_line in lines.items():
            before = time.perf_counter()
            await _beat(session_line, size)
            taken[size].append(1000 * (time.perf_counter() - before))
    return {size: median(times) for size, times in taken.items()}


async def _beat(session_line: SessionLine, size: int) -> None:
    answer = await session_line.renew(_name(size), state=SessionState.LIVE)
    assert isinstance(answer, Renewed), answer


# --- Counts ---------------------------------------------------------------------------------------------------------


async def _counts(bench: Bench) -> list[Line]:
    dsn, beats, found = bench.postgres(), bench.pick(400, 100), []
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(dsn), connections=1) as store:
        for size in SIZES:
            session_line = await _session(store, dsn, size)
            await _beat(session_line, size)
            with _statements() as statements:
                before = proxy.turns
                for _ in range(COUNTED):
                    await _beat(session_line, size)
                found.append((proxy.turns - before) / COUNTED)
            found.append(statements() / COUNTED)
            if size == 1_000:
                log = await _log_of(dsn, session_line, size, beats)
            await session_line.close()
    return [
        line("Postgres, statements and round trips of a beat, each of the four sizes", found, "", ONE),
        line("Postgres, write-ahead log of a beat with 1,000 runs", log[0], "B", Target(200)),
        line("Postgres, share of heap-only updates", log[1], "%", Target(100, Sense.AT_LEAST)),
    ]


@contextmanager
def _statements() -> Iterator[Callable[[], int]]:
    """How many statements are handed to a driver meanwhile."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield lambda: len(seen)
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def _log_of(dsn: str, session_line: SessionLine, size: int, beats: int) -> tuple[list[float], float]:
    """Bytes for each beat, in each round, after a checkpoint and the full pages that follow it; and how many of a
    hundred updates touched no index. The server's own writing falls into some rounds."""
    await asyncio.to_thread(do, dsn, "CHECKPOINT")
    for _ in range(COUNTED):
        await _beat(session_line, size)
    written = []
    for _ in range(beats // COUNTED):
        before = await _written(dsn)
        for _ in range(COUNTED):
            await _beat(session_line, size)
        written.append((await _written(dsn) - before) / COUNTED)
    updates, heap_only = await _counted_updates(dsn, session_line, size, beats)
    return written, 100 * heap_only / updates


async def _written(dsn: str) -> int:
    [(log,)] = await asyncio.to_thread(ask, dsn, "SELECT CAST(pg_current_wal_insert_lsn() - '0/0' AS bigint)")
    return int(log)


async def _counted_updates(dsn: str, session_line: SessionLine, size: int, beats: int) -> tuple[int, int]:
    """Of all sessions in this database so far. A connection tells its statistics with the first statement after a
    second, so it has to say something now and then."""
    while True:
        [(updates, heap_only)] = await asyncio.to_thread(ask, dsn, UPDATES)
        if updates >= beats:
            return int(updates), int(heap_only)
        await asyncio.sleep(1.1)
        await _beat(session_line, size)
