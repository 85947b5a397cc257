"""Beats, outages and the end of trust, told second by second (O9, O10, O12)."""

from __future__ import annotations

import pytest

from deerflow_runs import observe as events
from deerflow_runs.manager import messages
from deerflow_runs.model import SessionState
from deerflow_runs.protocol.trust import Standing
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


@rule("O10", "F40")
async def test_the_cost_of_a_beat_is_the_same_for_one_run_and_for_a_thousand() -> None:
    async def asked(runs: int) -> list[str]:
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
