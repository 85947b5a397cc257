"""The commit happened and its reply was lost on the way: the store asks again by itself and answers the truth (O8)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from deerflow_runs import EVERYONE, store_at
from deerflow_runs.model import OnOrphan, Run, RunId, RunKey, RunStatus, Session, Strategy, ThreadId, WorkerId
from deerflow_runs.protocol.admission import Newcomer, Reuse
from deerflow_runs.protocol.decision import Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted, Renewed
from deerflow_runs.store.sql import SqlRunStore
from tests.contract.lives import ME, OTHER, admitted, happened, reserved, started, waiting
from tests.rules import rule
from tests.support.proxy import RoundTripProxy

Lossy = tuple[SqlRunStore, RoundTripProxy]


@pytest.fixture
async def lossy(postgres_dsn: str) -> AsyncIterator[Lossy]:
    """A store behind a proxy that can swallow replies; it has one connection, so the next reply is the one meant."""
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(postgres_dsn), connections=1) as store:
        for worker in (ME, OTHER):
            await store.open_session(Session(worker))
        yield store, proxy


Prepare = Callable[[str], Awaitable[Any]]
Act = Callable[[Any], Awaitable[Any]]


async def with_every_reply_lost_once(
    lossy: Lossy, replies: int, prepare: Prepare, act: Act
) -> AsyncIterator[tuple[str, Any]]:
    """Act on a fresh thread each time, losing the first reply to it, then the second …"""
    _, proxy = lossy
    await act(await prepare("warm"))
    for number in range(1, replies + 1):
        prepared = await prepare(f"lost-{number}")
        proxy.lose_reply(number)
        answer = await act(prepared)
        proxy.lose_reply(0)
        yield f"lost-{number}", answer


@rule("O1", "O8", "I14", "I15")
@pytest.mark.parametrize("strategy", Strategy)
async def test_a_newcomer_is_let_in_once_whichever_reply_is_lost(strategy: Strategy, lossy: Lossy) -> None:
    store, _ = lossy

    async def prepare(name: str) -> str:
        await started(store, f"{name}-holder", name, worker_id=OTHER)
        if strategy is Strategy.REJECT:
            await store.apply(RunKey(ThreadId(name), RunId(f"{name}-holder")), RunEvent.SETTLE_SUCCESS, Actor(OTHER, 1))
        return name

    async def act(name: str) -> Any:
        return await _admit(store, name, strategy)

    async for name, answer in with_every_reply_lost_once(lossy, 6, prepare, act):
        assert isinstance(answer, Admitted) or (isinstance(answer, Reuse) and not answer.by_key)
        active, queue = await store.active(ThreadId(name)), await store.queue(ThreadId(name))
        assert active is not None
        assert [run.run_id for run in (active, *queue)].count(answer.run.run_id) == 1
        assert active.epoch == 1


async def _admit(store: SqlRunStore, name: str, strategy: Strategy) -> Any:
    newcomer = Newcomer(run_id=RunId(f"{name}-new"), thread_id=ThreadId(name), worker_id=ME, strategy=strategy)
    return await store.admit(newcomer)


HOLDERS = [
    RunEvent.START,
    RunEvent.SETTLE_SUCCESS,
    RunEvent.SETTLE_ERROR,
    RunEvent.SETTLE_CANCELLED,
    RunEvent.REQUEST_CANCEL,
    RunEvent.PROGRESS,
]


@rule("O8", "O20")
@pytest.mark.parametrize("event", HOLDERS)
@pytest.mark.parametrize("queued", [False, True])
async def test_an_event_happens_once_whichever_reply_is_lost(event: RunEvent, queued: bool, lossy: Lossy) -> None:
    store, _ = lossy

    async def prepare(name: str) -> Run:
        run = await admitted(store, name, name)
        if event is not RunEvent.START:
            run = await happened(store, run, RunEvent.START)
        if queued:
            await waiting(store, f"{name}-next", name)
        return run

    async def act(run: Run) -> Any:
        return await store.apply(run.key, event, Actor(ME, run.epoch))

    async for name, answer in with_every_reply_lost_once(lossy, 6 if queued else 2, prepare, act):
        assert isinstance(answer, Applied), name
        assert answer.run.epoch == 1
        if answer.run.terminal:
            assert answer.run.settled_by == ME
            await _one_receipt(store, answer)
            holder = await store.active(ThreadId(name))
            assert (holder is not None) == queued


async def _one_receipt(store: SqlRunStore, answer: Applied) -> None:
    receipt = await store.outbox.receipt(answer.run.key, scope=EVERYONE)
    assert receipt is not None
    assert receipt.status is answer.run.status


@rule("O8", "O13")
async def test_a_take_back_happens_once_whichever_reply_is_lost(lossy: Lossy) -> None:
    store, _ = lossy
    dead = WorkerId("host:dead")
    await store.open_session(Session(dead))
    runs = [await started(store, f"r{n}", f"r{n}", worker_id=dead, on_orphan=OnOrphan.RESUME) for n in range(4)]
    await store.close_session(dead)
    names = iter(runs)

    async def prepare(_: str) -> Run:
        return next(names)

    async def act(run: Run) -> Any:
        return await store.apply(run.key, RunEvent.TAKE_BACK, Actor(ME, 1, previous=dead))

    async for _, answer in with_every_reply_lost_once(lossy, 2, prepare, act):
        assert isinstance(answer, Applied)
        assert (answer.run.owner_worker_id, answer.run.epoch) == (ME, 2)


@rule("O8", "O21")
async def test_a_queued_run_is_cancelled_once_whichever_reply_is_lost(lossy: Lossy) -> None:
    store, _ = lossy

    async def prepare(name: str) -> Run:
        await started(store, f"{name}-holder", name)
        return await waiting(store, name, name)

    async def act(run: Run) -> Any:
        return await store.apply(run.key, RunEvent.CANCEL_QUEUED, Actor(ME), Given())

    async for _, answer in with_every_reply_lost_once(lossy, 5, prepare, act):
        assert isinstance(answer, Applied)
        assert answer.run.status is RunStatus.INTERRUPTED


@rule("O8")
async def test_a_released_reservation_is_gone_whichever_reply_is_lost(lossy: Lossy) -> None:
    store, _ = lossy

    async def prepare(name: str) -> Run:
        return await reserved(store, name, name)

    async def act(run: Run) -> Any:
        await store.apply(run.key, RunEvent.RELEASE, Actor(ME, run.epoch))
        return await store.active(run.thread_id)

    async for _, answer in with_every_reply_lost_once(lossy, 2, prepare, act):
        assert answer is None


@rule("O8", "O10", "I12")
async def test_sessions_open_beat_and_close_whichever_reply_is_lost(lossy: Lossy) -> None:
    store, _ = lossy

    async def prepare(name: str) -> WorkerId:
        return WorkerId(f"host:{name}")

    async def act(worker: WorkerId) -> Any:
        opened = await store.open_session(Session(worker))
        beat = await store.renew(worker)
        return opened, beat, await store.close_session(worker)

    async for _, (opened, beat, closed) in with_every_reply_lost_once(lossy, 8, prepare, act):
        assert opened.beat == 0
        assert isinstance(beat, Renewed)
        assert closed
