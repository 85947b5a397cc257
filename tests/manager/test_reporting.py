"""What a run reports on the way is written under the epoch that it is held by, or not at all (O13, O14, O18)."""

from __future__ import annotations

import asyncio

from deerflow_runs.manager.lease import RunLease, enter, leave
from deerflow_runs.manager.registry import Held
from deerflow_runs.manager.reporting import Reporting
from deerflow_runs.model import EVERYONE
from deerflow_runs.protocol.decision import Actor, Applied
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.sql import SqlRunStore
from tests.manager.lone import Lone, lone_worker
from tests.rules import rule


async def held_and_started(lone: Lone) -> Held:
    """A run without code of its own, which is under way."""
    held = lone.granting.take_up(await lone.admits())
    started = await lone.store.apply(held.key, RunEvent.START, lone.ground.actor(1))
    assert isinstance(started, Applied)
    held.lease.saw(started.run)
    return held


@rule("O13", "O18", "F21")
async def test_progress_that_meets_a_take_back_on_its_way_is_reported_again_and_loses_no_run(
    store: SqlRunStore,
) -> None:
    lone = await lone_worker(store)
    held, session = await held_and_started(lone), lone.ground.session
    before, sent_at = session.worker_id, session.now()
    opened = await store.open_session(session.fresh())
    await store.close_session(before)
    by = Actor(opened.worker_id, epoch=1, previous=before)
    moved = await store.apply(held.key, RunEvent.TAKE_BACK, by)
    assert isinstance(moved, Applied)
    asked = asyncio.create_task(Reporting(lone.ground).progress(held.key, "checkpoint", None, None))
    await asyncio.sleep(0)  # it has found the gate open, and asks under an epoch that has passed
    session.opened(opened, sent_at=sent_at, answered_at=session.now())
    for _ in range(3):  # by now it was refused, and the answer to the take-back is still on its way
        await store.now()
    held.lease.saw(moved.run)
    assert await asked
    assert not held.lease.fenced
    row = await store.get(held.key, scope=EVERYONE)
    assert row is not None
    assert (row.epoch, row.last_checkpoint) == (2, "checkpoint")


@rule("O14", "O18")
async def test_progress_of_a_run_that_somebody_else_has_fences_it_here(store: SqlRunStore) -> None:
    lone = await lone_worker(store)
    held = await held_and_started(lone)
    moved = await store.apply(held.key, RunEvent.HAND_OVER, lone.ground.actor(1))
    assert isinstance(moved, Applied)
    assert not await Reporting(lone.ground).progress(held.key, "checkpoint", None, None)
    assert held.lease.fenced
    assert lone.names() == ["RunFenced"]


@rule("O12")
async def test_progress_that_waits_for_trust_ends_with_the_run(store: SqlRunStore) -> None:
    lone = await lone_worker(store)
    held = await held_and_started(lone)
    lone.ground.session.refused()
    asked = asyncio.create_task(Reporting(lone.ground).progress(held.key, "checkpoint", None, None))
    await asyncio.sleep(0)
    lone.ground.registry.let_go(held)
    assert not await asked


@rule("O4", "O18")
async def test_a_body_that_was_left_behind_reports_nothing_of_the_run_that_goes_on_without_it(
    store: SqlRunStore,
) -> None:
    lone = await lone_worker(store)
    held = await held_and_started(lone)
    here = enter(held.lease)
    try:
        held.lease = RunLease(held.run, lone.ground.session)
        assert not await Reporting(lone.ground).progress(held.key, "late", None, None)
    finally:
        leave(here)
    assert await Reporting(lone.ground).progress(held.key, "in time", None, None)
