"""One sweep of one worker, on both databases: who is dead, what becomes of their runs, and what nobody can take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from deerflow_runs.model import CancelAction, OnOrphan, RunStatus, Session, SessionState, WorkerId, micros
from deerflow_runs.observe import (
    RunForced,
    RunGivenBack,
    RunPromoted,
    RunRecovered,
    RunSeized,
    RunSettled,
    RunWaitsFor,
    SessionDeclaredDead,
    SweepEnded,
    SweepFailed,
)
from deerflow_runs.protocol.judge import How
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from deerflow_runs.testing.contract.stage import key, names
from tests.contract.lives import executed
from tests.manager.workers import AGENT, NEEDS_AGENT, Worker, store_without_hints, thread_of
from tests.rules import rule

pytestmark = pytest.mark.timeout(30)

NEIGHBOUR = WorkerId("host:neighbour")
DEADLINE = 30.0
"""Seconds for which something may be missing, by the default configuration."""

NewWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def store(store_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_without_hints(store_dsn) as store:
        yield store


@pytest.fixture
def units(store: SqlRunStore) -> Units:
    return store.units


@pytest.fixture
async def new_worker(store: SqlRunStore) -> AsyncIterator[NewWorker]:
    """Makes workers with an open session; whatever they still do at the end is stopped."""
    made: list[Worker] = []

    async def make(**settings: Any) -> Worker:
        worker = Worker(store, f"host-{len(made)}", **settings)
        made.append(worker)
        await worker.opens()
        return worker

    yield make
    for worker in made:
        await worker.is_killed()


@pytest.fixture
async def worker(new_worker: NewWorker) -> Worker:
    """The worker whose sweeps are looked at."""
    return await new_worker()


async def silent_session(store: SqlRunStore, units: Units) -> WorkerId:
    """A session of a process that is gone: its lease has run out by the store's clock, and nobody has said so."""
    await store.open_session(Session(NEIGHBOUR))
    await executed(units, "UPDATE dr_workers SET expires_at = 1 WHERE worker_id = :worker", worker=NEIGHBOUR)
    return NEIGHBOUR


async def states(store: SqlRunStore) -> dict[str, SessionState]:
    return {one.worker_id: one.state for one in await store.sessions()}


# --- The dead -------------------------------------------------------------------------------------------------------


@rule("O24", "I10")
async def test_one_look_condemns_nobody(worker: Worker, units: Units) -> None:
    silent = await silent_session(worker.store, units)
    await worker.reconciler.sweep()
    assert (await states(worker.store))[silent] is SessionState.LIVE


@rule("O24", "O26", "O29")
async def test_a_session_that_stays_silent_is_declared_dead_and_its_runs_are_recovered_in_the_same_sweep(
    worker: Worker, units: Units
) -> None:
    silent = await silent_session(worker.store, units)
    run = await worker.admits("left", worker_id=silent, on_orphan=OnOrphan.RESUME)
    await worker.reconciler.sweep()
    await worker.lives(15.0)
    swept = await worker.reconciler.sweep()
    assert [(told.judged, told.how) for told in worker.told(SessionDeclaredDead)] == [(silent, How.EXPIRY)]
    assert names(swept.resumed) == ["left"]
    assert [(told.run_id, told.how) for told in worker.told(RunRecovered)] == [("left", "resumed")]
    assert (await worker.row(run)).vacant


@rule("O24", "I10", "I13")
async def test_a_session_that_beats_between_two_looks_lives_on(worker: Worker, units: Units) -> None:
    silent = await silent_session(worker.store, units)
    await worker.reconciler.sweep()
    await worker.lives(15.0)
    await executed(units, "UPDATE dr_workers SET beat = beat + 1 WHERE worker_id = :worker", worker=silent)
    await worker.reconciler.sweep()
    assert worker.told(SessionDeclaredDead) == []


@rule("O24", "I13")
async def test_a_judge_whose_own_beats_failed_condemns_nobody(worker: Worker, units: Units) -> None:
    await silent_session(worker.store, units)
    await worker.reconciler.sweep()
    await worker.lives(15.0)
    worker.session.failed()
    await worker.reconciler.sweep()
    assert worker.told(SessionDeclaredDead) == []


@rule("O26")
async def test_runs_of_an_owner_that_never_had_a_session_are_recovered(worker: Worker) -> None:
    run = await worker.admits("left", worker_id=WorkerId("host:never-seen"), on_orphan=OnOrphan.RESUME)
    await worker.reconciler.sweep()
    assert (await worker.row(run)).vacant


@rule("O26")
async def test_an_unproven_death_ends_no_run_before_a_lease_has_passed(worker: Worker) -> None:
    await worker.stage.opens(NEIGHBOUR)
    run = await worker.admits("left", worker_id=NEIGHBOUR)
    await worker.stage.is_believed_dead(NEIGHBOUR)
    await worker.reconciler.sweep()
    assert (await worker.row(run)).active


@rule("O29", "O27")
async def test_a_proven_death_ends_runs_that_nobody_can_resume(worker: Worker) -> None:
    await worker.stage.opens(NEIGHBOUR)
    run = await worker.admits("left", worker_id=NEIGHBOUR)
    await worker.stage.dies(NEIGHBOUR)
    swept = await worker.reconciler.sweep()
    assert names(swept.ended) == ["left"]
    assert [told.how for told in worker.told(RunRecovered)] == ["ended"]
    ended = await worker.row(run)
    assert (ended.status, ended.stop_reason) == (RunStatus.ERROR, "orphan_recovered")


@rule("O26")
async def test_reservations_of_the_dead_are_released(worker: Worker) -> None:
    await worker.stage.opens(NEIGHBOUR)
    await worker.stage.reserves("held", worker_id=NEIGHBOUR)
    await worker.stage.dies(NEIGHBOUR)
    swept = await worker.reconciler.sweep()
    assert names(swept.released) == ["held"]
    assert await worker.stage.holder() is None


@rule("O30")
async def test_what_is_resumed_stays_away_for_a_while(worker: Worker) -> None:
    run = await worker.stage.is_orphaned("left")
    before = await worker.store.now()
    await worker.reconciler.sweep()
    assert (await worker.row(run)).not_before >= before + micros(1)


@rule("O7", "O28")
async def test_the_end_of_an_orphan_lets_in_who_waits_and_wakes_who_may_take_it(worker: Worker) -> None:
    await worker.stage.opens(NEIGHBOUR)
    await worker.stage.starts("left", worker_id=NEIGHBOUR)
    await worker.stage.waits("next", worker_id=worker.me)
    await worker.stage.dies(NEIGHBOUR)
    await worker.reconciler.sweep()
    assert (await worker.stage.held()).run_id == "next"
    assert worker.ground.work.is_set()


@rule("O13")
async def test_runs_held_here_under_a_lost_session_are_not_recovered_as_somebodys(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine", on_orphan=OnOrphan.RESUME))
    await worker.stage.dies(worker.me)
    await worker.opens()
    swept = await worker.reconciler.sweep()
    assert swept.total == 0
    assert held.lease.trusted()


# --- Cancelled, and nobody ends them --------------------------------------------------------------------------------


@rule("O4")
async def test_a_cancelled_run_whose_owner_is_dead_is_forced(worker: Worker) -> None:
    run = await worker.stage.is_cancelled(await worker.stage.is_orphaned("left"))
    await worker.reconciler.sweep()
    assert [told.run_id for told in worker.told(RunForced)] == ["left"]
    assert (await worker.row(run)).status is RunStatus.INTERRUPTED


@rule("O4")
async def test_a_cancelled_run_is_left_to_its_owner_for_the_grace(worker: Worker) -> None:
    await worker.stage.opens(NEIGHBOUR)
    run = await worker.stage.is_cancelled(await worker.stage.starts("slow", worker_id=NEIGHBOUR))
    await worker.reconciler.sweep()
    assert (await worker.row(run)).active


@rule("O4", "O18")
async def test_a_held_run_that_is_forced_is_stopped(new_worker: NewWorker, units: Units) -> None:
    worker = await new_worker()
    held = await worker.starts(await worker.admits("mine"))
    await worker.stage.is_cancelled(held.run)
    await executed(units, "UPDATE dr_runs SET cancel_requested_at = 1, granted_at = 1")
    await worker.reconciler.sweep()
    assert held.lease.fenced
    await held.over.wait()
    assert held.ended is not None
    assert held.ended.status is RunStatus.INTERRUPTED


@rule("O4", "I16", "I8")
async def test_an_owed_rollback_of_the_dead_is_carried_out(worker: Worker) -> None:
    run = await worker.stage.is_orphaned("left", executor=AGENT, required_capabilities=NEEDS_AGENT)
    await worker.stage.is_cancelled(run, CancelAction.ROLLBACK)
    await worker.reconciler.sweep()
    await worker.until_told(RunSettled)
    assert [told.attempt for told in worker.told(RunSeized)] == [1]
    assert worker.agent.restored == ["left"]
    assert (await worker.row(run)).stop_reason == "rollback"


@rule("O4", "I19")
async def test_nothing_is_seized_without_a_free_slot(new_worker: NewWorker) -> None:
    worker = await new_worker(max_concurrent_runs=1)
    await worker.starts(await worker.admits("mine"))
    run = await worker.stage.is_orphaned("left", executor=AGENT, required_capabilities=NEEDS_AGENT)
    await worker.stage.is_cancelled(run, CancelAction.ROLLBACK)
    await worker.reconciler.sweep()
    assert worker.told(RunSeized) == []


@rule("O35")
async def test_a_worker_that_drains_seizes_nothing(worker: Worker) -> None:
    run = await worker.stage.is_orphaned("left", executor=AGENT, required_capabilities=NEEDS_AGENT)
    await worker.stage.is_cancelled(run, CancelAction.ROLLBACK)
    worker.session.drain()
    await worker.reconciler.sweep()
    assert worker.told(RunSeized) == []


@rule("O4")
async def test_a_rollback_that_this_worker_is_about_to_carry_out_is_not_seized_once_more(worker: Worker) -> None:
    held = await worker.starts(await worker.admits("mine"))
    await worker.stage.is_cancelled(held.run, CancelAction.ROLLBACK)
    await worker.reconciler.sweep()
    assert (await worker.row(held.run)).epoch == held.lease.epoch


# --- Idle threads ---------------------------------------------------------------------------------------------------


@rule("O7", "I7")
async def test_a_delayed_run_comes_to_life_once_it_is_due(worker: Worker, units: Units) -> None:
    await worker.stage.waits("later", delay=micros(3600))
    await executed(units, "UPDATE dr_runs SET due_at = 1")
    await worker.reconciler.sweep()
    assert [told.run_id for told in worker.told(RunPromoted)] == ["later"]
    assert (await worker.stage.held()).vacant
    assert worker.ground.work.is_set()


# --- What it owns and does not hold ---------------------------------------------------------------------------------


@rule("O12", "F29")
async def test_a_run_that_nobody_comes_for_is_given_back(worker: Worker) -> None:
    held = worker.holds(await worker.admits("mine"))
    await worker.lives(DEADLINE)
    await worker.reconciler.sweep()
    await held.over.wait()
    ended = await worker.row(held.run)
    assert (ended.status, ended.stop_reason) == (RunStatus.ERROR, "not_attached")


@rule("O12")
async def test_a_run_that_somebody_may_still_come_for_is_kept(worker: Worker) -> None:
    held = worker.holds(await worker.admits("mine"))
    await worker.lives(DEADLINE - 1)
    await worker.reconciler.sweep()
    assert not held.over.is_set()
    assert (await worker.row(held.run)).active


@rule("O12", "O8", "F25")
async def test_an_admission_whose_answer_was_lost_is_given_back(worker: Worker) -> None:
    run = await worker.admits("mine", on_orphan=OnOrphan.RESUME)
    await worker.reconciler.sweep()
    await worker.lives(DEADLINE)
    assert (await worker.row(run)).owner_worker_id == worker.me
    await worker.reconciler.sweep()
    assert (await worker.row(run)).vacant
    assert [told.status for told in worker.told(RunGivenBack)] == [RunStatus.PENDING]


@rule("O12")
async def test_it_is_missing_since_it_was_missed_and_not_since_it_was_granted(worker: Worker) -> None:
    run = await worker.admits("mine", on_orphan=OnOrphan.RESUME)
    await worker.lives(DEADLINE)
    await worker.reconciler.sweep()
    assert (await worker.row(run)).owner_worker_id == worker.me


@rule("O12")
async def test_a_grant_that_turned_up_in_between_has_to_be_missed_anew(worker: Worker) -> None:
    run = await worker.admits("mine", on_orphan=OnOrphan.RESUME)
    await worker.reconciler.sweep()
    await worker.lives(DEADLINE - 1)
    held = worker.holds(run)
    await worker.reconciler.sweep()
    worker.registry.let_go(held)
    await worker.lives(1)
    await worker.reconciler.sweep()
    assert (await worker.row(run)).owner_worker_id == worker.me


@rule("O12", "O4")
@pytest.mark.parametrize("action", CancelAction)
async def test_what_is_missing_and_cancelled_is_ended_as_its_cancel_says(action: CancelAction, worker: Worker) -> None:
    run = await worker.stage.happens(RunEvent.START, await worker.admits("mine"))
    await worker.stage.is_cancelled(run, action)
    await worker.reconciler.sweep()
    await worker.lives(DEADLINE)
    await worker.reconciler.sweep()
    if (held := worker.registry.get(run.run_id)) is not None:
        await held.over.wait()
    ended = await worker.row(run)
    assert (ended.status, ended.stop_reason) == (RunStatus.INTERRUPTED, action.value)
    assert worker.agent.restored == (["mine"] if action is CancelAction.ROLLBACK else [])


@rule("O12", "F25")
async def test_a_reservation_whose_release_was_lost_is_released(worker: Worker) -> None:
    await worker.stage.reserves("held", worker_id=worker.me)
    await worker.reconciler.sweep()
    await worker.lives(DEADLINE)
    await worker.reconciler.sweep()
    assert await worker.stage.holder() is None


@rule("O12")
async def test_a_suspended_worker_gives_nothing_back(worker: Worker) -> None:
    run = await worker.admits("mine", on_orphan=OnOrphan.RESUME)
    await worker.reconciler.sweep()
    await worker.clock.advance(DEADLINE)
    await worker.reconciler.sweep()
    assert (await worker.row(run)).owner_worker_id == worker.me


@rule("O18", "I2")
async def test_a_run_that_the_store_calls_somebody_elses_is_stopped(worker: Worker, units: Units) -> None:
    held = await worker.starts(await worker.admits("mine"))
    await executed(units, "UPDATE dr_runs SET epoch = epoch + 1, owner_worker_id = :other", other=NEIGHBOUR)
    await worker.reconciler.reconcile_owned()
    assert held.lease.fenced
    await held.over.wait()


# --- What waits -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def waited(worker: Worker) -> Worker:
    """A worker beside a run that is vacant for longer than a sweep, and that needs what nobody has."""
    await worker.stage.arrives("odd", take=False, required_capabilities=frozenset({"gpu"}))
    await executed(worker.store.units, "UPDATE dr_runs SET not_before = 1")
    return worker


@rule("O31")
async def test_a_run_that_nobody_can_take_says_what_it_waits_for(waited: Worker) -> None:
    await waited.reconciler.sweep()
    run = await waited.stage.held()
    assert run.waits_for is not None
    assert run.waits_for["missing"] == ["gpu"]
    assert run.waits_for["checked_by"] == waited.me
    assert [(told.run_id, told.missing) for told in waited.told(RunWaitsFor)] == [("odd", ("gpu",))]


@rule("O31")
async def test_the_same_reason_is_told_once_and_written_once(waited: Worker) -> None:
    await waited.reconciler.sweep()
    first = (await waited.stage.held()).waits_for
    await waited.reconciler.sweep()
    assert (await waited.stage.held()).waits_for == first
    assert len(waited.told(RunWaitsFor)) == 1


@rule("O31")
async def test_a_note_that_has_grown_old_is_confirmed_in_silence(waited: Worker) -> None:
    await waited.reconciler.sweep()
    run = await waited.stage.held()
    assert run.waits_for is not None
    old = dict(run.waits_for) | {"checked_at": 1, "since": 1}
    await waited.store.note_waiting(run.key, old)
    await waited.reconciler.sweep()
    note = (await waited.stage.held()).waits_for
    assert note is not None
    assert note["checked_at"] > 1
    assert note["since"] == 1
    assert len(waited.told(RunWaitsFor)) == 1


@rule("O31")
async def test_a_note_that_has_become_wrong_is_taken_away(waited: Worker) -> None:
    await waited.reconciler.sweep()
    await waited.stage.opens(NEIGHBOUR, capabilities=frozenset({"gpu"}))
    await waited.reconciler.sweep()
    assert not (await waited.stage.held()).waits_for


@rule("O31")
async def test_a_run_that_merely_waits_for_a_slot_waits_for_nothing(worker: Worker) -> None:
    await worker.admits("full", take=False)
    await executed(worker.store.units, "UPDATE dr_runs SET not_before = 1")
    await worker.reconciler.sweep()
    assert worker.told(RunWaitsFor) == []


@rule("O31")
async def test_however_many_wait_for_a_slot_each_that_cannot_be_taken_is_found(worker: Worker) -> None:
    for number in range(150):
        await worker.admits(f"r{number:03}", take=False)
    await worker.stage.arrives("s-odd", take=False, required_capabilities=frozenset({"gpu"}))
    await executed(worker.store.units, "UPDATE dr_runs SET not_before = 1")
    await worker.reconciler.sweep()
    await worker.reconciler.sweep()
    assert [told.run_id for told in worker.told(RunWaitsFor)] == ["s-odd"]


@rule("O28", "O22")
async def test_whoever_waits_for_a_run_that_others_ended_is_told(worker: Worker) -> None:
    await worker.stage.starts("first", worker_id=worker.me)
    waiting = await worker.stage.waits("second", worker_id=worker.me, pinned=True)
    expected = worker.registry.expect(waiting.key, None)
    await worker.reconciler.sweep()
    assert not expected.granted.done()
    await worker.stage.happens(RunEvent.CANCEL_QUEUED, waiting)
    await worker.reconciler.sweep()
    assert expected.granted.cancelled()
    assert worker.registry.waiting() == ()


@rule("O28")
async def test_whoever_waits_for_a_run_that_is_gone_altogether_is_told_in_the_end(worker: Worker) -> None:
    expected = worker.registry.expect(key("never", "nowhere"), None)
    await worker.reconciler.sweep()
    assert not expected.granted.done()
    await worker.lives(DEADLINE)
    await worker.reconciler.sweep()
    assert expected.granted.cancelled()


# --- What is kept ---------------------------------------------------------------------------------------------------


async def test_ended_runs_are_kept_as_long_as_the_configuration_says(new_worker: NewWorker, units: Units) -> None:
    worker = await new_worker(runs_kept=3600)
    old, young = [await worker.stage.starts(name, thread_of(name), worker_id=worker.me) for name in ("old", "young")]
    for run in (old, young):
        await worker.stage.ends(run)
    await executed(units, "UPDATE dr_runs SET settled_at = 1 WHERE run_id = 'old'")
    await worker.reconciler.sweep()
    assert await worker.stage.row(old) is None
    assert await worker.stage.row(young) is not None


@rule("O26")
async def test_sessions_of_the_long_dead_are_forgotten_but_only_now_and_then(worker: Worker, units: Units) -> None:
    await worker.reconciler.sweep()
    await worker.stage.opens(NEIGHBOUR)
    await worker.stage.dies(NEIGHBOUR)
    await executed(units, "UPDATE dr_workers SET dead_at = 1 WHERE worker_id = :worker", worker=NEIGHBOUR)
    await worker.reconciler.sweep()
    assert NEIGHBOUR in await states(worker.store)
    await worker.lives(300)
    await worker.reconciler.sweep()
    assert NEIGHBOUR not in await states(worker.store)


# --- Sweeping as such -----------------------------------------------------------------------------------------------


async def test_every_sweep_tells_how_much_it_changed(worker: Worker) -> None:
    await worker.stage.is_orphaned("left")
    await worker.reconciler.sweep()
    await worker.reconciler.sweep()
    assert [told.changed for told in worker.told(SweepEnded)] == [1, 0]
    assert worker.told(SweepFailed) == []


@rule("O26")
async def test_a_step_that_fails_keeps_no_other_from_running(worker: Worker, units: Units) -> None:
    """The row of one session is broken, so that every look at the sessions fails."""
    run = await worker.stage.is_orphaned("left")
    await executed(units, "UPDATE dr_workers SET capabilities = '[[\"no name\"]]' WHERE worker_id = :me", me=worker.me)
    await worker.reconciler.sweep()
    assert len(worker.told(SweepFailed)) == 1
    assert (await worker.row(run)).vacant


@rule("P105")
async def test_rows_that_cannot_be_read_stop_no_recovery(worker: Worker, units: Units) -> None:
    for number in range(5):
        await worker.stage.is_orphaned(f"r{number}", f"t{number}")
    await executed(units, "UPDATE dr_runs SET metadata = '{' WHERE run_id = 'r2'")
    await worker.reconciler.sweep()
    await worker.reconciler.sweep()
    assert sorted(told.run_id for told in worker.told(RunRecovered)) == ["r0", "r1", "r3", "r4"]
    assert worker.told(SweepFailed) == []
