"""The heartbeat's thread: it starts, speaks to the main loop, survives it, and ends (O10–O12, O35).

Real stores, real threads; where time matters it is the test's. What the thread does with its time is told in
``test_pulse``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, final

import asyncpg
import pytest

from deerflow_runs import RunsConfig, SqlRunStore, StoreUnavailable, UsageError, store_at
from deerflow_runs.clock import Clock, SystemClock
from deerflow_runs.manager import messages
from deerflow_runs.manager.heartbeat import Heartbeat
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import CancelAction, Session, SessionState, WorkerId
from deerflow_runs.observe import Event, LoopRecovered, LoopStalled
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import SessionLine
from deerflow_runs.store.signals import Signal, SignalMode
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.flaky_line import Faults, FlakyLine, Gate, Verb, failing
from tests.contract.lives import started
from tests.rules import rule

NAME = "deerflow-runs-heartbeat"

SOON = 20.0
"""Seconds for what happens within milliseconds; only a failing test waits for them."""


def threads() -> list[threading.Thread]:
    """The heartbeats of this process."""
    return [thread for thread in threading.enumerate() if thread.name == NAME]


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until it holds; what changes it happens in another thread."""
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110 (no event of this loop reaches us from there)
            await asyncio.sleep(0)


@final
class Worker:
    """A heartbeat on a real store. Its messages and the threads they arrived in are kept."""

    def __init__(self, store: SqlRunStore, clock: Clock, **settings: Any) -> None:
        self.store = store
        self.faults = Faults()
        self.posted: list[messages.Message] = []
        self.posted_in: set[threading.Thread] = set()
        self.events: list[Event] = []
        config = RunsConfig.for_tests(**settings)
        self.session = WorkerSession(Session(WorkerId(""), host="host"), config, clock)
        self.heartbeat = Heartbeat(self.session, self._line, config, clock, self._post, self.events.append)

    async def states(self) -> list[SessionState]:
        """Of all sessions that ever were."""
        return [one.state for one in await self.store.sessions()]

    async def hears(self, kind: type[messages.Message]) -> None:
        """Wait for a message of this kind."""
        await until(lambda: any(isinstance(one, kind) for one in self.posted))

    async def beats(self, count: int) -> None:
        """Wait for so many more beats."""
        enough = self.heartbeat.beats + count
        await until(lambda: self.heartbeat.beats >= enough)

    def blocks_the_loop_for(self, *, beats: int) -> None:
        """Not a turn of the main loop until the thread has sent so many."""
        enough = self.heartbeat.beats + beats
        self.blocks_the_loop_until(lambda: self.heartbeat.beats >= enough)

    def blocks_the_loop_until(self, condition: Callable[[], bool]) -> None:
        """Not a turn of the main loop until this holds."""
        while not condition():
            pass

    def _line(self) -> SessionLine:
        return FlakyLine(self.store.session_line(), self.faults)

    def _post(self, message: messages.Message) -> None:
        self.posted.append(message)
        self.posted_in.add(threading.current_thread())


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[SqlRunStore]:
    opened = store_at(dsn)
    await opened.open()
    yield opened
    await opened.close()
    assert threads() == [], "a test left its thread behind"


@asynccontextmanager
async def beating(store: SqlRunStore, clock: Clock | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """Started, and stopped afterwards."""
    worker = Worker(store, clock or SystemClock(), **settings)
    await worker.heartbeat.start()
    try:
        yield worker
    finally:
        await worker.heartbeat.stop(10)


# --- Start ----------------------------------------------------------------------------------------------------------


@rule("O10")
async def test_a_started_heartbeat_is_trusted_and_has_a_daemon_thread_of_its_own(store: SqlRunStore) -> None:
    async with beating(store, ManualClock()) as worker:
        (thread,) = threads()
        assert thread.daemon
        assert worker.session.trusted()
        assert [one.worker_id for one in await store.sessions()] == [worker.session.worker_id]


async def test_a_start_that_fails_says_what_the_store_says_and_may_be_tried_again(store: SqlRunStore) -> None:
    worker = Worker(store, ManualClock())
    worker.faults.once(Verb.CONNECT, failing(StoreUnavailable("no such server")))
    with pytest.raises(StoreUnavailable, match="no such server"):
        await worker.heartbeat.start()
    assert threads() == []
    await worker.heartbeat.start()
    assert worker.session.trusted()
    await worker.heartbeat.stop(5)


@pytest.mark.parametrize("verb", [Verb.CONNECT, Verb.OPEN_SESSION])
async def test_a_cancelled_start_leaves_no_thread_and_no_live_session(store: SqlRunStore, verb: Verb) -> None:
    worker, gate = Worker(store, ManualClock()), Gate()
    worker.faults.once(verb, gate.after)
    starting = asyncio.create_task(worker.heartbeat.start())
    await gate.reached()
    starting.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert threads() == []
    assert set(await worker.states()) <= {SessionState.DEAD}


async def test_a_heartbeat_is_started_once(store: SqlRunStore) -> None:
    async with beating(store, ManualClock()) as worker:
        with pytest.raises(UsageError, match="started before"):
            await worker.heartbeat.start()


# --- Between the threads --------------------------------------------------------------------------------------------


@rule("O10")
async def test_messages_arrive_in_the_main_loop(store: SqlRunStore) -> None:
    clock = ManualClock()
    async with beating(store, clock) as worker:
        await store.send(Signal.WORK, None)
        worker.faults.once(Verb.RENEW, failing())
        worker.heartbeat.beat_now()
        await until(lambda: worker.heartbeat.failures == 1)
        worker.heartbeat.beat_now()
        await worker.hears(messages.Reconnected)
    assert worker.posted_in == {threading.current_thread()}


@rule("O10", "O11")
async def test_what_a_blocked_main_loop_was_told_again_and_again_it_hears_once(store: SqlRunStore) -> None:
    async with beating(store) as worker:
        run = await started(store, "run", worker_id=worker.session.worker_id)
        await store.apply(
            run.key, RunEvent.REQUEST_CANCEL, Actor(WorkerId("somebody")), Given(action=CancelAction.INTERRUPT)
        )
        worker.blocks_the_loop_for(beats=10)
        await worker.hears(messages.Heard)
        assert len([one for one in worker.posted if isinstance(one, messages.Heard)]) < 10


@rule("O10", "O19")
async def test_a_cancel_that_is_not_heeded_is_heard_again(store: SqlRunStore) -> None:
    async with beating(store) as worker:
        run = await started(store, "run", worker_id=worker.session.worker_id)
        somebody, interrupt = Actor(WorkerId("somebody")), Given(action=CancelAction.INTERRUPT)
        await store.apply(run.key, RunEvent.REQUEST_CANCEL, somebody, interrupt)
        for _ in range(3):
            worker.posted.clear()
            await worker.hears(messages.Heard)


@rule("F18", "F41")
async def test_a_store_whose_connections_all_wait_for_a_lock_does_not_stop_the_beats(postgres_dsn: str) -> None:
    async with store_at(postgres_dsn) as store, beating(store) as worker:
        run = await started(store, "run", worker_id=worker.session.worker_id)
        other = await asyncpg.connect(postgres_dsn)
        async with other.transaction():
            await other.execute("SELECT 1 FROM dr_runs FOR UPDATE")
            settle = RunEvent.SETTLE_SUCCESS
            by = Actor(worker.session.worker_id, epoch=run.epoch)
            stuck = [asyncio.create_task(store.apply(run.key, settle, by)) for _ in range(20)]
            await worker.beats(3)
            assert worker.session.trusted()
            assert not any(task.done() for task in stuck)
        await asyncio.gather(*stuck)
        await other.close()


@rule("O10", "O11", "F42")
async def test_a_blocked_main_loop_does_not_stop_the_beats(store: SqlRunStore) -> None:
    async with beating(store) as worker:
        worker.blocks_the_loop_for(beats=5)
        assert worker.session.trusted()


@rule("O11")
async def test_a_wedged_main_loop_is_noticed_while_it_is_wedged(
    store: SqlRunStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with beating(store, max_stall=0.4) as worker:
        worker.blocks_the_loop_until(lambda: any(isinstance(one, LoopStalled) for one in worker.events))
        assert "blocks_the_loop_until" in caplog.text, "the stacks say where"
        await until(lambda: any(isinstance(one, LoopRecovered) for one in worker.events))
        await worker.beats(1)
        assert worker.session.trusted()


@rule("O10")
async def test_a_beat_wanted_from_any_thread_is_sent_at_once(store: SqlRunStore) -> None:
    async with beating(store, ManualClock()) as worker:
        await asyncio.to_thread(worker.heartbeat.beat_now)
        await worker.beats(1)
        assert (await store.sessions())[0].beat == 1


@rule("O12")
async def test_the_end_of_trust_reaches_the_main_loop(store: SqlRunStore) -> None:
    clock = ManualClock()
    async with beating(store, clock) as worker:
        worker.faults.always(failing(), Verb.RENEW, Verb.CONNECT)
        clock.jump(0.95)
        assert not worker.session.trusted(), "before any message"
        await worker.hears(messages.TrustEnded)
        worker.faults.mend()
        worker.heartbeat.beat_now()
        await worker.hears(messages.TrustRegained)
        assert worker.session.trusted()


@rule("O33")
async def test_signals_travel_and_the_mode_says_how(store: SqlRunStore, dsn: str) -> None:
    async with beating(store) as worker:
        await store.send(Signal.WORK, None)
        await worker.hears(messages.WorkWanted)
        expected = SignalMode.NOTIFY if dsn.startswith("postgres") else SignalMode.DATA_VERSION
        assert worker.heartbeat.mode is expected


async def test_what_is_asked_of_a_heartbeat_that_was_never_started_is_answered() -> None:
    worker = Worker(store_at("sqlite:///:memory:"), ManualClock())
    heartbeat = worker.heartbeat
    assert (heartbeat.beats, heartbeat.failures, heartbeat.lateness) == (0, 0, 0.0)
    assert (heartbeat.mode, heartbeat.last_confirmed_at) == (SignalMode.POLLING, None)
    heartbeat.beat_now()
    await heartbeat.stop(1)


# --- Stop -----------------------------------------------------------------------------------------------------------


@rule("O35")
async def test_a_stopped_heartbeat_has_closed_its_session_and_leaves_no_thread(store: SqlRunStore) -> None:
    async with beating(store, ManualClock()) as worker:
        pass
    (row,) = await store.sessions()
    assert (row.state, row.proven) == (SessionState.DEAD, True)
    assert threads() == []
    await worker.heartbeat.stop(1)
    worker.heartbeat.beat_now()


@rule("O35")
async def test_several_may_stop_it_and_one_may_give_up(store: SqlRunStore) -> None:
    async with beating(store, ManualClock()) as worker:
        gate = Gate()
        worker.faults.once(Verb.CLOSE_SESSION, gate.before)
        stops = [asyncio.create_task(worker.heartbeat.stop(10)) for _ in range(3)]
        await gate.reached()
        stops[0].cancel()
        gate.open()
        await asyncio.wait(stops)
        assert [stop.cancelled() for stop in stops] == [True, False, False]
        assert await worker.states() == [SessionState.DEAD]


@rule("O35")
async def test_a_stop_is_bounded_when_the_store_is_silent(store: SqlRunStore) -> None:
    clock = ManualClock()
    async with beating(store, clock) as worker:
        gate = Gate()
        worker.faults.once(Verb.CLOSE_SESSION, gate.before)
        stop = asyncio.create_task(worker.heartbeat.stop(4))
        await gate.reached()
        await clock.until_sleeping(2)
        clock.jump(1)
        await stop
    assert threads() == []
    assert await worker.states() == [SessionState.LIVE]


async def test_a_main_loop_that_is_gone_takes_the_heartbeat_and_its_session_along(sqlite_dsn: str) -> None:
    def begin_in_a_loop_that_ends() -> SqlRunStore:
        async def begin() -> SqlRunStore:
            store = store_at(sqlite_dsn)
            await store.open()
            await Worker(store, SystemClock()).heartbeat.start()
            return store

        return asyncio.run(begin())

    store = await asyncio.to_thread(begin_in_a_loop_that_ends)
    for thread in threads():
        await asyncio.to_thread(thread.join, SOON)
    assert threads() == []
    look = store_at(sqlite_dsn)
    await look.open()
    assert [one.proven for one in await look.sessions()] == [True]
    await look.close()
    assert store is not None


# --- Processes ------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, sys
from deerflow_runs import RunsConfig, store_at
from deerflow_runs.clock import SystemClock
from deerflow_runs.manager.heartbeat import Heartbeat
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import Session, WorkerId

store, config, clock = store_at(sys.argv[1]), RunsConfig.for_tests(), SystemClock()
session = WorkerSession(Session(WorkerId(""), host="host"), config, clock)
heartbeat = Heartbeat(session, store.session_line, config, clock, lambda message: None, lambda event: None)
"""


def run(program: str, dsn: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", PROGRAM + program, dsn]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_heartbeat_made_before_a_fork_fails_at_once_in_the_child(sqlite_dsn: str) -> None:
    done = run(
        """
if os.fork() == 0:
    asyncio.run(heartbeat.start())
else:
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
""",
        sqlite_dsn,
    )
    assert done.returncode == 1
    assert "make a new one after the fork" in done.stderr
    assert "UsageError" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_child_can_neither_use_nor_end_the_heartbeat_of_its_parent(sqlite_dsn: str) -> None:
    done = run(
        """
async def main():
    await store.open()
    await heartbeat.start()
    child = os.fork()
    if child == 0:
        for verb in (heartbeat.beat_now, lambda: heartbeat.stop(1).send(None)):
            try:
                verb()
            except Exception as error:
                print(type(error).__name__, flush=True)
        sys.stdout.flush()
        import atexit
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    print([one.state.value for one in await store.sessions()], session.trusted())
    await heartbeat.stop(5)
    print([one.state.value for one in await store.sessions()])
    await store.close()

asyncio.run(main())
""",
        sqlite_dsn,
    )
    assert done.stdout.splitlines() == ["UsageError", "UsageError", "['live'] True", "['dead']"], done.stderr
    assert done.returncode == 0


@rule("O35")
def test_a_program_that_forgets_to_stop_ends_in_silence_and_closes_its_session(sqlite_dsn: str) -> None:
    done = run(
        """
async def main():
    await store.open()
    await heartbeat.start()
    await store.close()

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
""",
        sqlite_dsn,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr

    async def look() -> list[bool]:
        store = store_at(sqlite_dsn)
        await store.open()
        found = [one.proven for one in await store.sessions()]
        await store.close()
        return found

    assert asyncio.run(look()) == [True]
