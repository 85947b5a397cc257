"""What the heartbeat hears between its beats, and its watch over the main loop (O11, O19, O33)."""

from __future__ import annotations

import threading

import pytest

from deerflow_runs import observe as events
from deerflow_runs.manager import messages
from deerflow_runs.store.signals import Signal, SignalMode
from deerflow_runs.testing.flaky_line import Verb, failing, losing
from tests.manager.beating import Beating
from tests.rules import rule

# --- Cancels and signals --------------------------------------------------------------------------------------------


@rule("O10", "O19")
async def test_a_recorded_cancel_is_heard_with_every_beat_until_it_was_heeded() -> None:
    async with Beating().living() as worker:
        run = await worker.owns("run")
        await worker.somebody_cancels(run)
        await worker.until(7.5)
        heard = worker.told(messages.Heard)
        assert len(heard) == 3
        assert [request.key for one in heard for request in one.requests] == [run.key] * 3


@rule("O10", "O19")
async def test_a_lost_answer_loses_no_cancel() -> None:
    async with Beating().living() as worker:
        await worker.somebody_cancels(await worker.owns("run"))
        worker.faults.once(Verb.RENEW, losing)
        await worker.until(2.6)
        assert worker.told(messages.Heard) == []
        await worker.until(3)
        assert len(worker.told(messages.Heard)) == 1


@rule("O19", "O33")
async def test_a_signalled_cancel_is_heard_at_once_and_without_a_beat() -> None:
    async with Beating().living() as worker:
        run = await worker.owns("run")
        await worker.until(1)
        await worker.somebody_cancels(run)
        await worker.lines.send(Signal.CANCEL, worker.session.worker_id)
        await worker.settles()
        (heard,) = worker.told(messages.Heard)
        assert [request.key for request in heard.requests] == [run.key]
        assert worker.pulse.beats == 0


@rule("O33")
async def test_work_and_drain_are_passed_on() -> None:
    async with Beating().living() as worker:
        await worker.lines.send(Signal.WORK)
        await worker.settles()
        await worker.lines.send(Signal.DRAIN, worker.session.worker_id)
        await worker.settles()
        assert worker.posted == [messages.WorkWanted(), messages.DrainWanted()]


@rule("O33")
async def test_signals_move_no_beat() -> None:
    async with Beating().living() as worker:
        for _ in range(40):
            await worker.lines.send(Signal.WORK)
            await worker.passes(0.25)
        assert worker.pulse.beats == 4
        assert len(worker.told(messages.WorkWanted)) == 40


@rule("O33")
async def test_a_hint_without_anything_behind_it_is_not_told() -> None:
    async with Beating().living() as worker:
        await worker.lines.send(Signal.CANCEL, worker.session.worker_id)
        await worker.settles()
        assert worker.faults.count(Verb.REQUESTS) == 1
        assert worker.posted == []


@rule("O33")
async def test_a_new_session_hears_signals_under_its_own_id() -> None:
    async with Beating().living() as worker:
        before = worker.session.worker_id
        await worker.is_declared_dead()
        await worker.until(3)
        worker.posted.clear()
        await worker.lines.send(Signal.DRAIN, before)
        await worker.lines.send(Signal.DRAIN, worker.session.worker_id)
        await worker.settles()
        assert worker.posted == [messages.DrainWanted()]


@rule("O33")
async def test_signals_are_tried_at_the_start_after_a_reconnection_and_now_and_then() -> None:
    worker = Beating()
    worker.faults.mode = SignalMode.NOTIFY
    async with worker.living():
        assert worker.faults.count(Verb.PROBE) == 1
        await worker.until(24.9)
        assert worker.faults.count(Verb.PROBE) == 1
        await worker.until(25)
        assert worker.faults.count(Verb.PROBE) == 2
        worker.faults.once(Verb.RENEW, failing())
        await worker.until(30)
        assert worker.faults.count(Verb.PROBE) == 3


@rule("O33")
async def test_a_change_of_the_way_of_signals_is_told() -> None:
    worker = Beating()
    worker.faults.mode = SignalMode.NOTIFY
    async with worker.living():
        await worker.until(30)
        worker.faults.mode = SignalMode.POLLING
        await worker.until(60)
        assert [one.mode for one in worker.told(events.SignalModeChanged)] == ["notify", "polling"]
        assert worker.pulse.mode is SignalMode.POLLING
        probes = worker.faults.count(Verb.PROBE)
        await worker.until(90)
        assert worker.faults.count(Verb.PROBE) > probes, "they may arrive again"


# --- The main loop --------------------------------------------------------------------------------------------------


@rule("O11")
async def test_a_wedged_main_loop_is_not_renewed_for() -> None:
    async with Beating(max_stall=10).living() as worker:
        worker.answering = False
        await worker.until(14)
        beats = worker.pulse.beats
        assert [one.seconds for one in worker.told(events.LoopStalled)] == [10.0]
        await worker.until(60)
        assert worker.pulse.beats == beats
        assert len(worker.told(events.LoopStalled)) == 1
        assert len(worker.told(messages.TrustEnded)) == 1


@rule("O11")
async def test_beats_go_on_as_soon_as_the_main_loop_answers() -> None:
    async with Beating(max_stall=10).living() as worker:
        worker.answering = False
        await worker.until(61)
        worker.loop_answers()
        await worker.settles()
        assert worker.session.trusted()
        assert len(worker.told(events.LoopRecovered)) == 1


@rule("O11", "F18")
async def test_a_main_loop_that_is_silent_for_less_than_it_may_costs_nothing() -> None:
    async with Beating(max_stall=10).living() as worker:
        for _ in range(5):
            worker.answering = False
            await worker.passes(9)
            worker.loop_answers()
            await worker.passes(3)
        assert worker.told(events.LoopStalled) == []
        assert worker.told(messages.TrustEnded) == []


@rule("O11")
async def test_one_ping_is_in_flight() -> None:
    async with Beating().living() as worker:
        worker.answering = False
        await worker.until(100)
        assert worker.pings == 1


@rule("O11")
async def test_a_heartbeat_that_was_late_itself_blames_nobody() -> None:
    async with Beating(max_stall=10).living() as worker:
        worker.answering = False
        await worker.until(3)
        await worker.freezes(60)
        await worker.passes(5)
        assert worker.told(events.LoopStalled) == []
        assert worker.pulse.lateness == pytest.approx(58)


@rule("O11")
async def test_the_stacks_of_a_stall_show_code_and_no_values(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def function_of_another_thread() -> None:
        secret = "value-of-a-local".upper()
        over.wait()
        assert secret

    other = threading.Thread(target=function_of_another_thread)
    other.start()
    async with Beating(max_stall=10).living() as worker:
        worker.answering = False
        await worker.until(15)
    over.set()
    other.join()
    (logged,) = [one.message for one in caplog.records if "stacks" in one.message]
    assert "function_of_another_thread" in logged
    assert "over.wait()" in logged
    assert "VALUE-OF-A-LOCAL" not in logged
