"""What the heartbeat does all day, told second by second: beats, outages, replacement, signals, the main loop."""

from __future__ import annotations

import threading

import pytest

from deerflow_runs import observe as events
from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.manager import messages
from deerflow_runs.model import SessionState
from deerflow_runs.protocol.trust import Standing
from deerflow_runs.store.signals import Signal, SignalMode
from deerflow_runs.testing.flaky_line import Verb, failing, losing
from tests.manager.beating import DEADLINE, Beating
from tests.rules import rule

# --- Beats ----------------------------------------------------------------------------------------------------------


@rule("O9", "I11")
async def test_a_worker_that_beats_stays_trusted_for_ever() -> None:
    async with Beating(step=0.5).living() as worker:
        await worker.passes(300)
        assert worker.pulse.beats == 120
        assert (await worker.row()).beat == 120
        assert worker.told(messages.TrustEnded) == []
        assert worker.deadline() == 300 + DEADLINE


@rule("O10", "F46")
@pytest.mark.parametrize(("unit", "interval"), [(0.0, 2.25), (0.25, 2.375), (0.5, 2.5), (1.0, 2.75)])
async def test_a_beat_comes_up_to_a_tenth_early_or_late(unit: float, interval: float) -> None:
    async with Beating(unit=unit).living() as worker:
        await worker.until(interval - 0.001)
        assert worker.pulse.beats == 0
        await worker.until(interval)
        assert worker.pulse.beats == 1


@rule("F46")
async def test_the_time_a_beat_takes_does_not_delay_the_next() -> None:
    async with Beating().living() as worker:
        gate = worker.gate()
        worker.faults.once(Verb.RENEW, gate.after)
        await worker.until(4)
        gate.open()
        await worker.until(5)
        assert worker.pulse.beats == 2


@rule("O9")
async def test_trust_counts_from_the_sending_of_a_beat() -> None:
    async with Beating().living() as worker:
        gate = worker.gate()
        worker.faults.once(Verb.RENEW, gate.after)
        await worker.until(4.5)
        gate.open()
        await worker.settles()
        assert worker.pulse.beats == 1
        assert worker.deadline() == 2.5 + DEADLINE


@rule("O9", "O12")
async def test_an_answer_that_comes_after_its_own_deadline_restores_no_trust() -> None:
    async with Beating().living() as worker:
        gate = worker.gate()
        worker.faults.always(worker.gate().before, Verb.RENEW)
        worker.faults.once(Verb.RENEW, gate.after)
        await worker.until(2.5)
        gate.open()
        await worker.freezes(20)
        assert worker.deadline() == DEADLINE
        assert not worker.session.trusted()
        assert len(worker.told(messages.TrustEnded)) == 1


@rule("O10", "F41")
async def test_one_beat_is_in_flight_however_long_the_store_is_silent() -> None:
    async with Beating().living() as worker:
        worker.faults.always(worker.gate().before, Verb.RENEW)
        await worker.passes(120)
        assert worker.faults.count(Verb.RENEW) > 10
        assert worker.faults.most_at_once == 1


@rule("O10", "F41")
async def test_a_connection_gone_silent_costs_no_trust() -> None:
    async with Beating().living() as worker:
        await worker.until(5)
        worker.faults.once(Verb.RENEW, worker.gate().before)
        await worker.until(30)
        assert worker.told(messages.TrustEnded) == []
        assert len(worker.told(events.BeatFailed)) == 1
        assert worker.faults.count(Verb.CONNECT) == 2


@rule("O10")
async def test_a_beat_is_waited_for_until_half_of_the_trust_is_gone_at_most() -> None:
    async with Beating(lease=5, beat=1).living() as worker:  # 4.5 s of trust, 3.5 s when the beat is sent
        worker.faults.once(Verb.RENEW, worker.gate().before)
        await worker.until(2.7)
        assert worker.told(events.BeatFailed) == []
        await worker.until(2.8)
        assert len(worker.told(events.BeatFailed)) == 1


@rule("O10")
async def test_the_cost_of_a_beat_is_the_same_for_one_run_and_for_a_thousand() -> None:
    async def asked(runs: int) -> list[Verb]:
        async with Beating().living() as worker:
            for number in range(runs):
                await worker.owns(f"run-{number}")
            await worker.passes(25)
            assert worker.posted == []
            return [verb for verb in worker.faults.asked if verb is not Verb.WAIT]

    one = await asked(1)
    assert one.count(Verb.RENEW) == 10
    assert await asked(1_000) == one


@rule("O35")
async def test_a_worker_that_drains_goes_on_beating_and_says_so() -> None:
    async with Beating().living() as worker:
        worker.session.drain()
        await worker.passes(20)
        assert (await worker.row()).state is SessionState.DRAINING
        assert worker.session.trusted()


async def test_a_beat_that_somebody_wants_now_does_not_wait_for_its_time() -> None:
    async with Beating().living() as worker:
        await worker.until(1)
        worker.pulse.beat_now()
        await worker.settles()
        assert worker.pulse.beats == 1
        assert worker.deadline() == 1 + DEADLINE


@rule("O9", "F42")
async def test_a_step_of_the_wall_clock_costs_nothing() -> None:
    async with Beating().living() as worker:
        for step in (31, -120, 3_600):
            worker.clock.step_wall(step)
            await worker.passes(10)
        assert worker.told(messages.TrustEnded) == []
        assert worker.pulse.beats == 12


# --- Outages --------------------------------------------------------------------------------------------------------


@rule("O10")
async def test_failed_beats_are_repeated_ever_more_slowly_up_to_two_seconds() -> None:
    async with Beating().living() as worker:
        await worker.until(2.4)
        worker.faults.always(failing())
        moments = [2.5, 2.7, 3.1, 3.9, 5.5, 7.5, 9.5, 11.5]
        failures = []
        for moment in moments:
            await worker.until(moment - 0.001)
            before = len(worker.told(events.BeatFailed))
            await worker.until(moment)
            failures.append(len(worker.told(events.BeatFailed)) - before)
        assert failures == [1] * len(moments)
        assert worker.pulse.failures == len(moments)


@rule("O10", "I13")
async def test_after_an_outage_of_an_hour_the_same_session_goes_on() -> None:
    async with Beating(step=2, max_suspend=7_200).living() as worker:
        before = worker.session.worker_id
        worker.faults.always(failing())
        await worker.passes(3_600)
        worker.faults.mend()
        await worker.passes(3)
        assert worker.session.worker_id == before
        assert worker.session.trusted()
        assert worker.pulse.failures == 0
        assert len(worker.told(messages.TrustEnded)) == len(worker.told(messages.TrustRegained)) == 1


@rule("O19", "O32")
async def test_a_new_connection_is_told_and_what_was_missed_is_read_at_once() -> None:
    async with Beating().living() as worker:
        run = await worker.owns("run")
        worker.faults.once(Verb.RENEW, failing())
        await worker.until(2.6)
        assert worker.posted == []
        await worker.somebody_cancels(run)
        await worker.until(2.7)
        assert [type(one) for one in worker.posted] == [messages.Reconnected, messages.Heard]


@rule("O10")
async def test_a_connection_that_breaks_between_two_beats_is_replaced_before_the_next() -> None:
    async with Beating().living() as worker:
        worker.faults.once(Verb.WAIT, failing())
        await worker.until(2.5)
        assert (worker.pulse.beats, worker.pulse.failures) == (1, 1)
        await worker.until(2.7)
        assert len(worker.told(messages.Reconnected)) == 1
        assert (worker.pulse.beats, worker.pulse.failures) == (2, 0)


@rule("O10")
@pytest.mark.parametrize("verb", [Verb.RENEW, Verb.CONNECT, Verb.WAIT])
async def test_an_error_that_nobody_expected_does_not_end_the_beats(verb: Verb) -> None:
    async with Beating().living() as worker:
        await worker.until(5)
        worker.faults.once(verb, failing(KeyError("a defect")))
        worker.faults.once(Verb.RENEW, failing())
        await worker.until(20)
        assert worker.session.trusted()
        assert worker.pulse.failures == 0


@rule("O10")
async def test_a_line_that_does_not_obey_is_left_behind() -> None:
    async with Beating().living() as worker:
        worker.faults.once(Verb.RENEW, worker.gate(deaf=True).before)
        await worker.until(20)
        assert worker.session.trusted()
        assert len(worker.made) == 2
        assert worker.told(messages.TrustEnded) == []


@rule("O8", "O10")
async def test_a_lost_answer_counts_as_none() -> None:
    async with Beating().living() as worker:
        worker.faults.once(Verb.RENEW, losing)
        await worker.until(2.6)
        assert worker.deadline() == DEADLINE
        assert (await worker.row()).beat == 1
        await worker.until(4)
        assert (await worker.row()).beat == 2
        assert worker.session.session.beat == 2


@rule("O24")
async def test_a_worker_whose_beat_failed_judges_nobody() -> None:
    async with Beating().living() as worker:
        assert worker.session.judge.steady_since is not None
        worker.faults.once(Verb.RENEW, failing())
        await worker.until(2.5)
        assert worker.session.judge.steady_since is None


# --- The end of trust -----------------------------------------------------------------------------------------------


@rule("O12")
async def test_the_end_of_trust_is_told_at_the_deadline_and_once() -> None:
    async with Beating().living() as worker:
        await worker.until(2.5)
        worker.faults.always(worker.gate().before, Verb.RENEW, Verb.CONNECT)
        await worker.until(2.5 + DEADLINE - 0.001)
        assert worker.told(messages.TrustEnded) == []
        await worker.until(2.5 + DEADLINE)
        assert len(worker.told(messages.TrustEnded)) == 1
        assert len(worker.told(events.TrustEnded)) == 1
        await worker.passes(100)
        assert len(worker.told(messages.TrustEnded)) == 1


@rule("O12")
async def test_trust_that_is_back_says_for_how_long_it_was_away() -> None:
    async with Beating().living() as worker:
        worker.faults.always(failing())
        await worker.until(100)
        worker.faults.mend()
        await worker.until(110)
        (regained,) = worker.told(messages.TrustRegained)
        assert 100 - DEADLINE <= regained.suspended_for <= 102 + 0.1 - DEADLINE
        assert [one.suspended_for for one in worker.told(events.TrustRegained)] == [regained.suspended_for]


@rule("O12")
async def test_every_end_of_trust_is_told() -> None:
    async with Beating().living() as worker:
        for _ in range(3):
            worker.faults.always(failing())
            await worker.passes(20)
            worker.faults.mend()
            await worker.passes(20)
        kinds = [type(one) for one in worker.posted if not isinstance(one, messages.Reconnected)]
        assert kinds == [messages.TrustEnded, messages.TrustRegained] * 3


@rule("O12")
async def test_an_outage_longer_than_a_worker_may_be_suspended_is_no_end_of_the_heartbeat() -> None:
    async with Beating(max_suspend=0).living() as worker:
        worker.faults.always(failing())
        await worker.until(DEADLINE)
        assert worker.session.standing() is Standing.ABORT
        worker.faults.mend()
        await worker.passes(3)
        assert worker.session.standing() is Standing.TRUSTED


# --- Not live -------------------------------------------------------------------------------------------------------


@rule("O13", "I12")
async def test_a_session_that_is_not_live_is_replaced_by_one_with_another_id() -> None:
    async with Beating().living() as worker:
        before = worker.session.worker_id
        await worker.is_declared_dead()
        await worker.until(2.5)
        assert worker.session.worker_id != before
        assert worker.session.trusted()
        assert not worker.session.trusted(before)
        assert await worker.states() == [SessionState.DEAD, SessionState.LIVE]
        told = [type(one) for one in worker.posted]
        assert told == [
            messages.TrustEnded,
            messages.SessionReplaced,
            messages.TrustRegained,
            messages.Reconnected,
        ]
        assert worker.told(messages.SessionReplaced) == [messages.SessionReplaced(before)]
        (event,) = worker.told(events.SessionReplaced)
        assert (event.worker_id, event.previous) == (worker.session.worker_id, before)


@rule("I12")
async def test_a_dead_session_never_beats() -> None:
    async with Beating().living() as worker:
        await worker.until(5)
        before = worker.session.worker_id
        await worker.is_declared_dead()
        dead = await worker.row(before)
        await worker.until(60)
        assert await worker.row(before) == dead


@rule("O13")
async def test_a_replacement_that_meets_an_outage_is_tried_until_it_stands() -> None:
    async with Beating().living() as worker:
        before = worker.session.worker_id
        await worker.is_declared_dead()
        worker.faults.once(Verb.CONNECT, failing(), times=3)
        worker.faults.once(Verb.OPEN_SESSION, failing(), times=2)
        await worker.until(30)
        assert worker.session.trusted()
        assert worker.told(messages.SessionReplaced) == [messages.SessionReplaced(before)]
        assert await worker.states() == [SessionState.DEAD, SessionState.LIVE]


@rule("O8", "O9", "O13")
async def test_trust_in_a_session_whose_opening_was_repeated_counts_from_the_first_request() -> None:
    async with Beating().living() as worker:
        await worker.is_declared_dead()
        worker.faults.once(Verb.OPEN_SESSION, losing)
        worker.faults.always(worker.gate().before, Verb.RENEW)
        worker.faults.once(Verb.RENEW, lambda ask: ask())
        await worker.until(4)
        assert len(worker.told(messages.SessionReplaced)) == 1
        assert worker.deadline() == 2.5 + DEADLINE
        assert await worker.states() == [SessionState.DEAD, SessionState.LIVE]


@rule("I12")
async def test_a_replacement_that_died_before_it_was_heard_of_is_replaced_too() -> None:
    async with Beating().living() as worker:
        await worker.is_declared_dead()
        worker.faults.once(Verb.OPEN_SESSION, losing)
        await worker.until(2.5)
        stillborn = next(one for one in await worker.store.sessions() if one.state is SessionState.LIVE)
        await worker.stage.dies(stillborn.worker_id)
        await worker.until(10)
        assert worker.session.trusted()
        assert worker.session.worker_id != stillborn.worker_id
        assert await worker.states() == [SessionState.DEAD, SessionState.DEAD, SessionState.LIVE]


@rule("O25")
async def test_a_new_session_is_a_new_judge() -> None:
    async with Beating().living() as worker:
        await worker.is_declared_dead()
        await worker.until(2.5)
        assert worker.session.judge.me == worker.session.worker_id
        assert worker.session.judge.steady_since is not None
        assert worker.session.judge.unbroken


@rule("I10", "I12")
async def test_a_process_that_stood_still_for_too_long_comes_back_as_somebody_else() -> None:
    async with Beating().living() as worker:
        await worker.until(5)
        before = worker.session.worker_id
        await worker.is_declared_dead()
        worker.clock.jump(60)
        assert not worker.session.trusted(), "before anything was asked"
        await worker.passes(3)
        assert worker.session.trusted()
        assert worker.session.worker_id != before


@rule("O35")
async def test_a_session_that_replaces_a_draining_one_drains() -> None:
    async with Beating().living() as worker:
        worker.session.drain()
        await worker.is_declared_dead()
        await worker.until(10)
        assert (await worker.row()).state is SessionState.DRAINING


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


# --- Begin and end --------------------------------------------------------------------------------------------------


async def test_an_opening_tells_of_the_session_and_of_how_signals_travel() -> None:
    async with Beating().living() as worker:
        assert [type(one) for one in worker.events] == [events.SessionOpened, events.SignalModeChanged]
        assert worker.posted == []
        row = await worker.row()
        assert (row.host, row.lease) == ("host", 15_000_000)
        assert row.capabilities == {"gpu"}


async def test_an_opening_that_fails_says_what_the_store_says_and_leaves_nothing() -> None:
    worker = Beating()
    worker.faults.always(failing(StoreUnavailable("no such server")), Verb.CONNECT)
    with pytest.raises(StoreUnavailable, match="no such server"):
        await worker.begins()
    assert await worker.store.sessions() == ()
    assert worker.ended


@rule("O8")
async def test_an_opening_whose_answer_was_lost_leaves_no_live_session() -> None:
    worker = Beating()
    worker.faults.once(Verb.OPEN_SESSION, losing)
    with pytest.raises(StoreUnavailable):
        await worker.begins()
    assert await worker.states() == [SessionState.DEAD]


@rule("O35")
async def test_a_session_that_ends_is_dead_and_proven() -> None:
    async with Beating().living() as worker:
        await worker.until(5)
        await worker.ends()
        row = await worker.row()
        assert (row.state, row.proven) == (SessionState.DEAD, True)
        assert len(worker.told(events.SessionClosed)) == 1
        assert worker.faults.asked[-1] is Verb.CLOSE


@rule("O35")
async def test_the_beat_in_flight_is_waited_for_at_the_end() -> None:
    async with Beating().living() as worker:
        gate = worker.gate()
        worker.faults.once(Verb.RENEW, gate.before)
        await worker.until(2.5)
        worker.pulse.stop(8)
        await worker.passes(1)
        gate.open()
        await worker.passes(0)
        assert worker.ended
        assert worker.faults.count(Verb.CONNECT) == 1
        assert (await worker.row()).proven


@rule("O35")
async def test_an_end_is_bounded_when_the_store_is_silent() -> None:
    async with Beating().living() as worker:
        worker.faults.always(worker.gate().before, Verb.RENEW, Verb.CONNECT, Verb.CLOSE_SESSION, Verb.CLOSE)
        await worker.until(3)
        await worker.ends(seconds=8)
        assert worker.at <= 3 + 8
        assert (await worker.row()).state is SessionState.LIVE, "it will expire"
        assert worker.told(events.SessionClosed) == []


@rule("O13")
async def test_an_end_between_two_sessions_leaves_neither_alive() -> None:
    async with Beating().living() as worker:
        await worker.is_declared_dead()
        worker.faults.once(Verb.OPEN_SESSION, losing)
        await worker.until(2.5)
        await worker.ends()
        assert await worker.states() == [SessionState.DEAD, SessionState.DEAD]


async def test_an_id_that_cannot_be_opened_is_the_callers_to_hear_of() -> None:
    worker = Beating()
    worker.faults.once(Verb.OPEN_SESSION, failing(UsageError("labels: too large")))
    with pytest.raises(UsageError, match="too large"):
        await worker.begins()
