"""A store's clock that is set back: what must not depend on it, and what waits for it, no longer than the step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Final

import pytest

from deerflow_runs.model import Micros, Run, RunId, RunStatus, Session, ThreadId
from deerflow_runs.protocol.decision import Actor
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import reads
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.contract import SqlSubject
from tests.contract.lives import HOUR, ME, THREAD, admitted, asked, delayed, happened, names, started, waiting
from tests.rules import rule

BEGINNING: Final = 10**15


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def stepped(sqlite_dsn: str, clock: ManualClock) -> AsyncIterator[SqlRunStore]:
    """A store on SQLite whose clock the test sets."""
    units = open_units(parse_dsn(sqlite_dsn), clock=clock.wall)
    async with SqlRunStore(units) as store:
        await store.open_session(Session(ME))
        yield store


@rule("I7", "I17")
async def test_what_waits_starts_in_order_and_without_delay_across_a_step(
    stepped: SqlRunStore, clock: ManualClock
) -> None:
    running = await started(stepped, "running")
    await waiting(stepped, "first")
    clock.step_wall(-3600)
    for run_id in ("second", "third"):
        await waiting(stepped, run_id)
    clock.step_wall(-3600)
    await waiting(stepped, "fourth")
    for run_id in ("first", "second", "third", "fourth"):
        await happened(stepped, running, RunEvent.SETTLE_SUCCESS)
        (claimed,) = await stepped.claim(Actor(ME), 10)
        assert claimed.run_id == run_id
        running = await happened(stepped, claimed, RunEvent.START)


@rule("I17")
async def test_a_delayed_run_waits_as_long_as_it_was_told_and_the_step(
    stepped: SqlRunStore, clock: ManualClock
) -> None:
    await delayed(stepped, "later", delay=HOUR)
    clock.step_wall(-600)
    clock.jump(3600)
    assert await stepped.promote(10) == ()
    assert await stepped.next_due() == 600_000_000
    clock.jump(600)
    assert names(await stepped.promote(10)) == ["later"]


@rule("O30", "I8")
async def test_a_vacant_run_from_before_the_step_is_claimed_when_the_clock_has_caught_up(
    stepped: SqlRunStore, clock: ManualClock
) -> None:
    await admitted(stepped, "vacant", take=False)
    clock.step_wall(-60)
    assert await stepped.claim(Actor(ME), 10) == ()
    clock.jump(60)
    assert names(await stepped.claim(Actor(ME), 10)) == ["vacant"]


@rule("I7")
@pytest.mark.parametrize("tick", [1_000, 0, -1_000])
async def test_a_row_says_whether_it_was_delayed_whatever_the_clock_says_at_its_next_reading(
    tick: int, sqlite_dsn: str
) -> None:
    instants = count(BEGINNING, tick)
    units = open_units(parse_dsn(sqlite_dsn), clock=lambda: next(instants))
    async with SqlRunStore(units) as store:
        for run in (await started(store, "running"), await admitted(store, "vacant", "t", take=False)):
            assert (run.delayed, run.due_at, run.not_before) == (False, run.created_at, run.created_at)
        for number in range(3):
            run = await waiting(store, f"waiting-{number}")
            assert (run.delayed, run.due_at) == (False, run.created_at)
            later = await delayed(store, f"later-{number}", delay=Micros(1))
            assert later.due_at - later.created_at == 1
        waited = [run.run_id for run in await store.queue(THREAD) if not run.delayed]
        assert waited == ["waiting-0", "waiting-1", "waiting-2"]


# --- Both databases: rows as the clock before the step left them ------------------------------------------------------


async def _waits_ahead(units: Units, store: SqlRunStore, thread_id: str) -> Run:
    """A run that was never delayed, admitted when the clock said an hour later than now."""
    ahead = Micros(await store.now() + HOUR)
    instants: dict[str, Any] = dict.fromkeys(("created_at", "due_at", "not_before", "updated_at"), ahead)
    run = Run(RunId(f"waits on {thread_id}"), ThreadId(thread_id), status=RunStatus.QUEUED, **instants)
    await SqlSubject(store, units).place([run])
    return run


@rule("I7", "O7")
async def test_no_sweep_is_told_to_wait_for_a_run_that_was_never_delayed(units: Units, store: SqlRunStore) -> None:
    run = await _waits_ahead(units, store, "idle")
    assert await asked(units, reads.idle_threads_with_due_runs, 10) == (run.thread_id,)
    assert await asked(units, reads.next_due) is None
    await delayed(store, "later", "another", delay=HOUR)
    wait = await asked(units, reads.next_due)
    assert wait is not None
    assert 0 < wait <= HOUR


@rule("I17", "O2")
async def test_nobody_enters_before_a_run_that_was_not_delayed_whatever_the_clock_says(
    units: Units, store: SqlRunStore
) -> None:
    run = await _waits_ahead(units, store, THREAD)
    newcomer = await waiting(store, "newcomer")
    assert newcomer.status is RunStatus.QUEUED
    holder = await store.active(THREAD)
    assert holder is not None
    assert holder.run_id == run.run_id
