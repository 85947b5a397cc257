"""What every session line does, whatever the database."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.model import CancelAction, Session, SessionState, WorkerId
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import CancelRequest, NotLive, RunStore, SessionLine
from deerflow_runs.store.signals import Signal, SignalMode
from tests.contract.lives import admitted, started
from tests.lines.support import LIVE, ME, OTHER, SOON, beat, beating, connected, ending, heard_out
from tests.rules import rule

INTERRUPT = Given(action=CancelAction.INTERRUPT)


@rule("O10")
async def test_a_beat_counts_on_and_extends_the_lease(store: RunStore) -> None:
    async with beating(store) as line:
        (opened,) = await store.sessions()
        first, second = await beat(line), await beat(line)
        assert [first.beat, second.beat] == [1, 2]
        assert opened.expires_at < first.expires_at < second.expires_at


@rule("O10")
async def test_a_beat_answers_the_cancel_requests_of_its_own_runs_again_and_again(store: RunStore) -> None:
    async with beating(store) as line, beating(store, OTHER):
        mine = await started(store, "mine", "t1", worker_id=ME)
        theirs = await started(store, "theirs", "t2", worker_id=OTHER)
        await admitted(store, "quiet", "t3", worker_id=ME)
        assert (await beat(line)).requests == ()
        for run in (mine, theirs):
            await store.apply(run.key, RunEvent.REQUEST_CANCEL, Actor(OTHER), INTERRUPT)
        asked = (CancelRequest(mine.key, mine.epoch, CancelAction.INTERRUPT),)
        assert [(await beat(line)).requests for _ in range(2)] == [asked, asked]
        assert await line.requests(ME) == asked


@rule("O10")
async def test_asking_for_requests_renews_nothing(store: RunStore) -> None:
    async with beating(store) as line:
        before = await store.sessions()
        assert await line.requests(ME) == ()
        assert await store.sessions() == before


@rule("I12", "O13")
async def test_a_dead_session_never_beats_again_and_its_id_is_never_opened_again(store: RunStore) -> None:
    async with beating(store) as line:
        assert await line.close_session(ME)
        assert await line.renew(ME, state=LIVE) == NotLive()
        with pytest.raises(UsageError, match="dead session"):
            await line.open_session(Session(ME))
        await line.connect(OTHER)
        assert (await line.open_session(Session(OTHER))).state is SessionState.LIVE


@rule("O10")
async def test_a_session_that_drains_says_so_with_its_beat(store: RunStore) -> None:
    async with beating(store) as line:
        await line.renew(ME, state=SessionState.DRAINING)
        (session,) = await store.sessions()
        assert session.state is SessionState.DRAINING


@rule("O27")
async def test_every_beat_says_whether_the_hint_is_held(store: RunStore) -> None:
    async with connected(store) as line:
        opened = await line.open_session(Session(ME, hinted=not line.hinted))
        assert opened.hinted is line.hinted
        await beat(line)
        (session,) = await store.sessions()
        assert session.hinted is line.hinted
        assert line.hinted is (line.mode is not SignalMode.IN_PROCESS)


async def test_a_line_that_is_not_connected_has_no_answer(store: RunStore) -> None:
    line = store.session_line()
    await line.close()  # harmless
    for question in (line.wait(0), store.session_line().wait(0)):
        with pytest.raises(StoreUnavailable):
            await question
    assert not line.hinted


# --- Signals --------------------------------------------------------------------------------------------------------


@rule("O33")
async def test_a_signal_wakes_the_worker_it_is_for_and_nobody_else(store: RunStore) -> None:
    async with beating(store) as mine, beating(store, OTHER) as theirs:
        await heard_out(mine, theirs)
        waits = asyncio.create_task(theirs.wait(60))
        await store.send(Signal.CANCEL, ME)
        assert await ending(mine.wait(60)) == {Signal.CANCEL}
        await store.send(Signal.DRAIN, OTHER)
        assert await ending(waits) == {Signal.DRAIN}
        await store.send(Signal.DRAIN, ME)
        assert await ending(mine.wait(60)) == {Signal.DRAIN}  # and nothing twice


@rule("O33")
async def test_a_signal_for_nobody_in_particular_wakes_everybody(store: RunStore) -> None:
    async with beating(store) as mine, beating(store, OTHER) as theirs:
        await heard_out(mine, theirs)
        await store.send(Signal.WORK)
        assert await ending(mine.wait(60)) == await ending(theirs.wait(60)) == {Signal.WORK}


async def test_signals_that_come_between_two_waits_are_in_the_next(store: RunStore) -> None:
    async with beating(store) as line:
        await heard_out(line)
        await store.send(Signal.WORK)
        await store.send(Signal.CANCEL, ME)
        assert await ending(_heard(line, 2)) == {Signal.WORK, Signal.CANCEL}


async def test_a_wait_that_is_cancelled_loses_no_signal(store: RunStore) -> None:
    async with beating(store) as line:
        await heard_out(line)
        for _ in range(20):
            wait = asyncio.create_task(line.wait(60))
            await asyncio.sleep(0)
            wait.cancel()
            await store.send(Signal.WORK)
            await asyncio.gather(wait, return_exceptions=True)
            assert await ending(line.wait(60)) == {Signal.WORK}


async def test_a_wait_ends_without_a_signal_when_its_time_is_over(store: RunStore) -> None:
    async with beating(store) as line:
        await heard_out(line)
        assert await ending(line.wait(0.01)) == frozenset()


@rule("O10")
async def test_a_line_beats_and_hears_in_an_event_loop_of_another_thread(store: RunStore) -> None:
    line, ready = store.session_line(), threading.Event()

    async def heartbeat() -> tuple[int, frozenset[Signal]]:
        await line.connect(ME)
        await line.open_session(Session(ME))
        await line.probe()
        await line.wait(0)
        number = (await beat(line)).beat
        await heard_out(line)
        ready.set()
        heard = await line.wait(2 * SOON)
        await line.close()
        return number, heard

    thread = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(heartbeat())))
    assert await asyncio.to_thread(ready.wait, 10)
    await store.send(Signal.CANCEL, ME)
    assert await ending(thread) == (1, frozenset({Signal.CANCEL}))


async def _heard(line: SessionLine, many: int) -> set[Signal]:
    heard: set[Signal] = set()
    while len(heard) < many:
        heard |= await line.wait(60)
    return heard


# --- Who reads what -------------------------------------------------------------------------------------------------


async def test_a_worker_s_id_may_be_anything(store: RunStore) -> None:
    strange = WorkerId("../häst: 'a'\n" + "x" * 200)
    async with beating(store, strange) as line:
        await heard_out(line)
        await store.send(Signal.CANCEL, strange)
        assert await ending(line.wait(60)) == {Signal.CANCEL}
