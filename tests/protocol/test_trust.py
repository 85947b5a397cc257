"""Trust, beats and the watch over the main loop (O9–O13)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from deerflow_runs.protocol.trust import (
    BEATS_PER_TRUST,
    BootSeconds,
    Standing,
    Terms,
    Trust,
    Watch,
    beat_timeout,
    next_beat,
)
from tests.rules import rule

TERMS = Terms(lease=15.0, margin=1.5, beat=2.5, max_suspend=300.0, max_stall=120.0)


def at(seconds: float) -> BootSeconds:
    return BootSeconds(1000.0 + seconds)


OPENED = Trust.opened(TERMS, sent_at=at(0))

# ---- the deadline (O9) ---------------------------------------------------------------------------------------------


@rule("O9", "I11")
def test_trust_ends_a_margin_before_the_lease_counted_from_the_sending() -> None:
    assert OPENED.trusted(at(13.4))
    assert not OPENED.trusted(at(13.5))


@rule("O9")
def test_a_slow_answer_buys_no_more_trust_than_a_fast_one() -> None:
    fast = OPENED.renewed(sent_at=at(2), now=at(2.01))
    slow = OPENED.renewed(sent_at=at(2), now=at(9))
    assert fast == slow
    assert not fast.trusted(at(15.5))


@rule("O9", "O12")
def test_a_late_yes_restores_trust_only_while_its_own_deadline_is_ahead() -> None:
    suspended_at = at(14)
    restored = OPENED.renewed(sent_at=at(10), now=suspended_at)
    assert restored.trusted(suspended_at)
    assert not restored.trusted(at(23.5))


@rule("O9", "O12")
def test_a_yes_that_comes_when_its_own_deadline_has_passed_changes_nothing() -> None:
    assert OPENED.renewed(sent_at=at(10), now=at(23.5)) == OPENED


@rule("O9")
def test_an_older_renewal_takes_nothing_from_a_newer_one() -> None:
    newer = OPENED.renewed(sent_at=at(5), now=at(5.1))
    assert newer.renewed(sent_at=at(3), now=at(5.2)) == newer


@dataclass(frozen=True)
class Beat:
    """Seconds, in true time: a pause before sending, the way to the store, the way back. ``lost``: no answer came."""

    pause: float
    there: float
    back: float
    lost: bool


def way() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.1, 1.0, 3.0, 7.0, 12.0, 14.9])


BEATS = st.lists(st.builds(Beat, pause=way(), there=way(), back=way(), lost=st.booleans()), max_size=8)


def longest_overdraft(
    beats: list[Beat], *, terms: Terms = TERMS, rate: float = 1.0, counted_from_answer: bool = False
) -> float:
    """How long at worst a worker went on trusting a lease that had run out at the store (model ``Lease``).

    Somebody takes the session over at the very instant of expiry. ``rate`` is how fast the worker's clock runs.
    """
    now, expires, worst = 0.0, terms.lease, 0.0
    trust = Trust.opened(terms, sent_at=BootSeconds(0.0))
    for beat in beats:
        sent = now + beat.pause
        executed, now = sent + beat.there, sent + beat.there + beat.back
        if executed >= expires:
            break
        expires = executed + terms.lease
        if not beat.lost:
            local = BootSeconds((now if counted_from_answer else sent) * rate)
            trust = trust.renewed(sent_at=local, now=BootSeconds(now * rate))
        worst = max(worst, trust.ends / rate - expires)
    return worst


@rule("O9", "I10")
@given(beats=BEATS, rate=st.floats(0.9, 1.1))
def test_a_worker_never_trusts_a_lease_that_has_run_out(beats: list[Beat], rate: float) -> None:
    assert longest_overdraft(beats, rate=rate) <= 1e-9


@rule("O9", "I10")
def test_counted_from_the_answer_trust_would_outlive_the_lease() -> None:
    assert find(BEATS, lambda beats: longest_overdraft(beats, counted_from_answer=True) > 1.0)


@rule("O9", "I10")
def test_without_the_margin_a_slow_clock_would_outlive_the_lease() -> None:
    bare = replace(TERMS, margin=0.0)
    assert find(BEATS, lambda beats: longest_overdraft(beats, terms=bare, rate=0.9) > 1.0)


# ---- suspended, aborted, refused (O12, O13) ------------------------------------------------------------------------


@rule("O12")
@pytest.mark.parametrize(
    ("seconds", "standing"),
    [(13.4, Standing.TRUSTED), (13.5, Standing.SUSPENDED), (313.4, Standing.SUSPENDED), (313.5, Standing.ABORT)],
)
def test_a_session_is_suspended_at_its_deadline_and_aborts_after_max_suspend(
    seconds: float, standing: Standing
) -> None:
    assert OPENED.standing(at(seconds)) is standing


@rule("O12")
def test_without_max_suspend_runs_are_aborted_at_the_deadline() -> None:
    impatient = Trust.opened(replace(TERMS, max_suspend=0.0), sent_at=at(0))
    assert impatient.standing(at(13.4)) is Standing.TRUSTED
    assert impatient.standing(at(13.5)) is Standing.ABORT


@rule("O12")
def test_answers_that_are_always_too_late_do_not_put_the_abort_off() -> None:
    trust = OPENED
    for second in range(14, 313, 14):
        trust = trust.renewed(sent_at=at(second - 14), now=at(second))
    assert trust.standing(at(313.5)) is Standing.ABORT


@rule("O13")
def test_not_live_ends_trust_at_once() -> None:
    refused = OPENED.not_live(at(3))
    assert refused.standing(at(3)) is Standing.SUSPENDED
    assert refused.standing(at(303)) is Standing.ABORT


@rule("O13", "I12")
def test_no_answer_brings_a_refused_session_back() -> None:
    refused = OPENED.not_live(at(3))
    assert refused.renewed(sent_at=at(2.9), now=at(3.1)) == refused
    assert refused.renewed(sent_at=at(4), now=at(4.1)) == refused


@rule("O13", "O12")
def test_a_refusal_after_the_deadline_does_not_make_the_suspension_younger() -> None:
    assert OPENED.not_live(at(200)).standing(at(313.5)) is Standing.ABORT


@rule("I11", "O9")
@given(beats=BEATS, probe=st.floats(0, 100))
def test_trust_always_rests_on_one_accepted_renewal_that_is_young_enough(beats: list[Beat], probe: float) -> None:
    trust, now, sent = OPENED, 0.0, [0.0]
    for beat in beats:
        started, now = now + beat.pause, now + beat.pause + beat.there + beat.back
        if not beat.lost:
            sent.append(started)
            trust = trust.renewed(sent_at=at(started), now=at(now))
    if probe >= now and trust.trusted(at(probe)):
        assert any(at(probe) < at(started) + TERMS.lease - TERMS.margin for started in sent)


# ---- beats (O10) ---------------------------------------------------------------------------------------------------


@rule("O10")
@given(unit=st.floats(0, 1, exclude_max=True))
def test_a_beat_comes_within_a_tenth_of_its_interval(unit: float) -> None:
    assert 0.9 * 2.5 <= next_beat(TERMS, failures=0, unit=unit) < 1.1 * 2.5 + 1e-9


@rule("O10")
def test_the_jitter_reaches_both_ends() -> None:
    assert next_beat(TERMS, failures=0, unit=0.0) == pytest.approx(2.25)
    assert next_beat(TERMS, failures=0, unit=0.999999) == pytest.approx(2.75, abs=1e-3)


@rule("O10")
def test_failed_beats_are_repeated_after_a_fifth_of_a_second_doubling_to_two() -> None:
    pauses = [next_beat(TERMS, failures=failures, unit=0.5) for failures in (1, 2, 3, 4, 5, 6, 5000)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])


@rule("O10")
@given(failures=st.integers(1, 50), beat=st.floats(0.05, 60))
def test_a_failed_beat_is_never_repeated_later_than_an_ordinary_one(failures: int, beat: float) -> None:
    assert next_beat(replace(TERMS, beat=beat), failures=failures, unit=0.5) <= beat


@rule("O10")
@given(elapsed=st.floats(0, 13.49))
def test_a_beat_is_given_up_while_trust_remains(elapsed: float) -> None:
    now = at(elapsed)
    assert 0 < beat_timeout(OPENED, now) < OPENED.remaining(now)


@rule("O10")
def test_a_beat_without_trust_is_given_up_after_two_beats() -> None:
    assert beat_timeout(OPENED, at(400)) == pytest.approx(5.0)


@rule("O9", "O10")
@given(lateness=st.floats(0, 1), beat=st.floats(0.01, 10))
def test_one_silent_beat_leaves_time_for_another(lateness: float, beat: float) -> None:
    lease = BEATS_PER_TRUST * beat / 0.9
    trust = Trust.opened(replace(TERMS, lease=lease, margin=lease / 10, beat=beat), sent_at=at(0))
    sent = BootSeconds(at(0) + next_beat(trust.terms, failures=0, unit=lateness))
    given_up = BootSeconds(sent + beat_timeout(trust, sent))
    again = BootSeconds(given_up + next_beat(trust.terms, failures=1, unit=lateness))
    assert trust.remaining(again) > beat / 10


# ---- the main loop (O11) -------------------------------------------------------------------------------------------

PINGED = Watch(TERMS).reading(due=at(0), now=at(0)).watch


@rule("O11")
def test_only_one_ping_is_in_flight() -> None:
    assert Watch(TERMS).reading(due=at(0), now=at(0)).ping
    assert not PINGED.reading(due=at(2.5), now=at(2.5)).ping
    assert PINGED.answered().reading(due=at(5), now=at(5)).ping


@rule("O11")
def test_renewing_stops_when_the_loop_has_not_answered_for_max_stall() -> None:
    assert PINGED.reading(due=at(119.9), now=at(119.9)).renew
    assert not PINGED.reading(due=at(120), now=at(120)).renew


@rule("O11")
def test_stacks_are_dumped_once_for_every_stall() -> None:
    first = PINGED.reading(due=at(120), now=at(120))
    second = first.watch.reading(due=at(122.5), now=at(122.5))
    assert (first.dump, second.dump) == (True, False)
    again = second.watch.answered().reading(due=at(125), now=at(125)).watch
    assert again.reading(due=at(245), now=at(245)).dump


@rule("O11")
def test_renewing_resumes_when_the_loop_answers() -> None:
    stalled = PINGED.reading(due=at(120), now=at(120)).watch
    assert not stalled.reading(due=at(122.5), now=at(122.5)).renew
    assert stalled.answered().reading(due=at(122.5), now=at(122.5)).renew


@rule("O11")
def test_a_reading_of_a_late_heartbeat_is_discarded_and_the_measuring_starts_again() -> None:
    slept = PINGED.reading(due=at(2.5), now=at(600))
    assert slept.renew
    assert slept.watch.reading(due=at(719), now=at(719)).renew
    assert not slept.watch.reading(due=at(720), now=at(720)).renew


@rule("O11")
def test_a_late_heartbeat_does_not_absolve_a_loop_known_to_be_wedged() -> None:
    stalled = PINGED.reading(due=at(120), now=at(120)).watch
    late = stalled.reading(due=at(122.5), now=at(600))
    assert (late.renew, late.dump) == (False, False)


@rule("O11")
@settings(max_examples=50)
@given(lateness=st.floats(0, 2.4))
def test_a_slightly_late_reading_counts(lateness: float) -> None:
    now = at(125 + lateness)
    assert not PINGED.reading(due=BootSeconds(now - lateness), now=now).renew
