"""What the main loop does with each message of the heartbeat's thread: it stops what it names, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deerflow_runs.manager.attaching import Attaching
from deerflow_runs.manager.lease import RunLease, StopCause
from deerflow_runs.manager.listening import Listening
from deerflow_runs.manager.messages import (
    DrainWanted,
    Heard,
    Reconnected,
    SessionReplaced,
    TrustEnded,
    TrustRegained,
    WorkWanted,
)
from deerflow_runs.manager.registry import Phase
from deerflow_runs.manager.tasks import Tasks
from deerflow_runs.model import CancelAction, OnOrphan, RunKey
from deerflow_runs.observe import CancelHeard, RunAborted, RunClaimed, SweepEnded
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import CancelRequest
from deerflow_runs.store.sql import SqlRunStore
from tests.manager.workers import AGENT, Worker, store_without_hints
from tests.rules import rule

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
async def store(store_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_without_hints(store_dsn) as store:
        yield store


class Hearing:
    """A worker and its ear."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.tasks = Tasks()
        attaching = Attaching(worker.ground, self.tasks.spawn, self._withdraw)
        self.listening = Listening(worker.ground, attaching, worker.reconciler, self.tasks.spawn)

    def hear(self, *messages: Any) -> None:
        for message in messages:
            self.listening.hear(message)

    async def _withdraw(self, key: RunKey) -> None:
        raise AssertionError(f"nobody came for {key}")

    async def done(self) -> None:
        """What the messages began is over."""
        await self.tasks.finished()


@pytest.fixture
async def one(store: SqlRunStore) -> AsyncIterator[Hearing]:
    hearing = Hearing(Worker(store, max_suspend="60 s", resumes_per_second=1.0))
    await hearing.worker.opens()
    yield hearing
    await hearing.worker.is_killed()
    await hearing.tasks.stop()


def told(lease: RunLease) -> tuple[StopCause | None, CancelAction | None]:
    """What a run's code was told, if it was told to stop."""
    return lease.stop_cause, lease.cancel_action


@rule("O19", "O22", "O23")
async def test_a_cancel_stops_the_run_it_names_at_the_epoch_it_names(one: Hearing) -> None:
    held = await one.worker.starts(await one.worker.admits("run"))
    other = await one.worker.starts(await one.worker.admits("other"))
    epoch = held.lease.epoch
    one.hear(Heard((CancelRequest(held.key, epoch - 1, CancelAction.INTERRUPT),)))
    assert told(held.lease) == (None, None)
    one.hear(Heard((CancelRequest(held.key, epoch, CancelAction.ROLLBACK),)))
    one.hear(Heard((CancelRequest(held.key, epoch, CancelAction.INTERRUPT),)))
    held.lease.stop(StopCause.DRAIN)
    assert told(held.lease) == (StopCause.CANCEL, CancelAction.ROLLBACK)
    assert len(one.worker.told(CancelHeard)) == 1
    assert other.lease.stop_cause is None


@rule("O20", "O22")
async def test_a_cancel_does_not_reach_what_is_being_settled(one: Hearing) -> None:
    held = one.worker.holds(await one.worker.admits("run"))
    held.phase = Phase.SETTLING
    one.hear(Heard((CancelRequest(held.key, held.lease.epoch, CancelAction.INTERRUPT),)))
    assert (held.lease.stop_cause, one.worker.told(CancelHeard)) == (None, [])


@rule("O12", "I11")
async def test_bodies_are_aborted_after_the_longest_suspension_and_given_back_once_there_is_trust(one: Hearing) -> None:
    worker = one.worker
    held = await worker.starts(await worker.admits("run", on_orphan=OnOrphan.RESUME))
    settling = worker.holds(await worker.admits("settling"))
    settling.phase = Phase.SETTLING
    await worker.clock.advance(worker.session.trust.remaining(worker.session.now()))
    one.hear(TrustEnded())
    await worker.clock.advance(59.0)
    assert told(held.lease) == (None, None)
    await worker.clock.advance(2.0)
    assert told(held.lease) == (StopCause.SUSPENDED, None)
    assert told(settling.lease) == (None, None)
    assert [event.run_id for event in worker.told(RunAborted)] == ["run"]
    await worker.beats()
    one.hear(TrustRegained(61.0))
    await held.over.wait()
    await one.done()
    assert (await worker.row(held.run)).vacant


@rule("O12")
async def test_trust_that_is_back_in_time_aborts_nothing_and_wakes_who_waits(one: Hearing) -> None:
    worker = one.worker
    held = await worker.starts(await worker.admits("run"))
    await worker.clock.advance(worker.session.trust.remaining(worker.session.now()))
    one.hear(TrustEnded())
    waiting = asyncio.create_task(held.lease.check())
    await worker.clock.advance(30.0)
    assert not waiting.done()
    await worker.beats()
    one.hear(TrustRegained(30.0))
    await waiting
    await worker.lives(60.0)
    assert held.lease.stop_cause is None
    await one.done()


@rule("O13")
async def test_a_new_session_takes_back_what_the_old_one_owned(one: Hearing) -> None:
    held = await one.worker.starts(await one.worker.admits("run"))
    before = held.lease.epoch
    await one.worker.stage.dies(one.worker.me)
    one.hear(SessionReplaced(await one.worker.opens()))
    await one.done()
    assert (held.lease.worker_id, held.lease.trusted()) == (one.worker.me, True)
    assert held.lease.epoch == before + 1


@rule("O32", "O33")
async def test_after_a_reconnect_runs_of_others_are_resumed_one_after_the_other(one: Hearing) -> None:
    worker = one.worker
    async with worker.running():
        await worker.until_told(SweepEnded)
        await worker.until_idle()
        await worker.lives(10.0)
        await worker.until_idle()
        for number in range(5):
            await worker.stage.is_orphaned(f"left-{number}", f"left-{number}", executor=AGENT)
        await worker.stage.sweeps()
        one.hear(Reconnected())
        await one.done()
        await worker.clock.until_sleeping(3)
        await worker.lives(1.0)
        await worker.until_idle()
        assert len(worker.told(RunClaimed)) == 1


@rule("O33", "O35")
async def test_work_and_drains_are_passed_on(one: Hearing) -> None:
    worker = one.worker
    worker.ground.work.clear()
    one.hear(WorkWanted(), DrainWanted())
    assert (worker.ground.work.is_set(), one.listening.drain_wanted.is_set()) == (True, True)


@rule("O12", "O8")
async def test_after_a_reconnect_what_is_owned_is_compared_with_what_is_held(one: Hearing) -> None:
    worker = one.worker
    held = await worker.starts(await worker.admits("run", on_orphan=OnOrphan.RESUME))
    await worker.stage.happens(RunEvent.HAND_OVER, held.run)
    one.hear(Reconnected())
    await one.done()
    assert held.lease.fenced
    assert (await worker.row(held.run)).vacant
