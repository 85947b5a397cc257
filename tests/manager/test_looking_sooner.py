"""A worker that sees a lock let go, or knows when it may declare somebody dead, does not wait for its next sweep."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from deerflow_runs import store_at
from deerflow_runs.manager.reconciler import PROOFS_EVERY
from deerflow_runs.model import Session, WorkerId
from deerflow_runs.observe import SessionDeclaredDead, SweepEnded
from deerflow_runs.protocol.judge import How
from deerflow_runs.protocol.recovery import sweep_phase
from deerflow_runs.store import hints
from deerflow_runs.store.base import SessionLine
from tests.manager.workers import Worker
from tests.rules import rule

OTHER: Final = WorkerId("host:other")
TENTH: Final = 0.1


@asynccontextmanager
async def two_sessions(dsn: str) -> AsyncIterator[tuple[Worker, SessionLine, float]]:
    """A worker that runs and has just swept for the second time, the line of another session that it has seen, and when
    it saw that first. Its sweeps come 0.6 s, 2.6 s, 4.6 s… after that, or nearly so."""
    async with store_at(dsn) as store:
        other = store.session_line()
        await other.connect(OTHER)
        await other.open_session(Session(OTHER))
        worker = Worker(store)
        await worker.opens()
        while not 0.5 < sweep_phase(worker.me, 2.0) < 0.7:
            await worker.opens()
        async with worker.running():
            await worker.until_told(SweepEnded)
            seen_at = worker.clock.boot_time()
            await after_a_sweep(worker)
            yield worker, other, seen_at
        await other.close()


async def after_a_sweep(worker: Worker) -> None:
    before = len(worker.told(SweepEnded))
    while len(worker.told(SweepEnded)) == before:
        await passes(worker, TENTH)


async def passes(worker: Worker, seconds: float) -> None:
    await worker.until_idle()
    await worker.lives(seconds)
    await worker.until_idle()


def left_behind(dsn: str) -> Path:
    """The file that a session keeps locked; one that is killed leaves it behind."""
    return hints.folder_beside(Path(dsn.removeprefix("sqlite:///"))) / hints.file_name(OTHER)


@pytest.mark.skipif(sys.platform == "win32", reason="no flock there")
@rule("O27")
async def test_a_lock_on_a_file_that_is_let_go_is_seen_long_before_the_next_sweep(sqlite_dsn: str) -> None:
    async with two_sessions(sqlite_dsn) as (worker, other, _):
        await other.close()
        left_behind(sqlite_dsn).touch()
        await passes(worker, PROOFS_EVERY + TENTH)
        [verdict] = worker.told(SessionDeclaredDead)
        assert (verdict.judged, verdict.how) == (OTHER, How.PROOF)


@rule("O27")
async def test_a_lock_that_is_held_brings_no_sweep_forward(sqlite_dsn: str) -> None:
    async with two_sessions(sqlite_dsn) as (worker, _, _):
        before = len(worker.told(SweepEnded))
        await passes(worker, 2 * PROOFS_EVERY)
        assert len(worker.told(SweepEnded)) == before


@rule("O27")
async def test_a_free_advisory_lock_is_judged_as_soon_as_two_beats_have_been_silent(postgres_dsn: str) -> None:
    async with two_sessions(postgres_dsn) as (worker, other, seen_at):
        await other.close()
        patience = 2 * Session(OTHER).beat_interval / 1_000_000
        while not worker.told(SessionDeclaredDead):
            await passes(worker, TENTH)
        [verdict] = worker.told(SessionDeclaredDead)
        assert (verdict.judged, verdict.how) == (OTHER, How.HINT)
        assert worker.clock.boot_time() - seen_at <= patience + 2 * TENTH
