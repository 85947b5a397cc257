"""Who may be declared dead (O24–O27): the rules one by one, then whole histories that must not fool a judge.

The histories are those of the models ``Judge`` and ``Young``: one worker that lives throughout, one judge, at most
one outage and one step of the store's clock. A judge whose limits are too small is caught by the same search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from deerflow_runs.model import Micros, Session, SessionState, WorkerId, micros
from deerflow_runs.protocol.judge import How, Judge, Limits, Look, Sign, Verdict, hint, proof
from deerflow_runs.protocol.trust import BEATS_PER_TRUST, BootSeconds, Terms, Trust
from tests.rules import rule

ME, OTHER = WorkerId("judge:1"), WorkerId("worker:1")
TERMS = Terms(lease=15.0, margin=1.5, beat=2.5, max_suspend=300.0, max_stall=120.0)
LIMITS = Limits(grace=5.0)


def at(seconds: float) -> BootSeconds:
    return BootSeconds(1000.0 + seconds)


def session(*, beat: int = 7, expires: float = 0.0, worker_id: WorkerId = OTHER) -> Session:
    return Session(worker_id, beat=beat, expires_at=micros(5000.0 + expires), hinted=True, boot_id="boot-1")


def look(*sessions: Session, seconds: float, takes: float = 0.0, store: float = 1e6, sign: Sign = Sign.NONE) -> Look:
    """A look answered at ``seconds``; ``store`` is the store's clock beside ``expires`` of a session."""
    signs = {seen.worker_id: sign for seen in sessions}
    return Look(sessions, at(seconds - takes), at(seconds), micros(5000.0 + store), signs)


def opened(seconds: float = 0.0) -> Judge:
    return Judge.opened(ME, TERMS, LIMITS, sent_at=at(seconds), answered_at=at(seconds))


def beating(judge: Judge, *, since: float, until: float) -> Judge:
    """The judge after beats of its own, all confirmed at once."""
    for tenth in range(round(since * 10), round(until * 10) + 1, 25):
        judge = judge.beat_confirmed(sent_at=at(tenth / 10), answered_at=at(tenth / 10))
    return judge


def judged(judge: Judge, *looks: Look, since: float = 2.5) -> tuple[Verdict, ...]:
    """The verdicts after the last of ``looks``, while the judge's own beats go well."""
    for one in looks:
        judge = beating(judge, since=since, until=one.asked_at - at(0)).looked(one)
    return judge.verdicts(looks[-1])


# ---- the slow path (O24) -------------------------------------------------------------------------------------------


@rule("O24")
def test_a_session_expired_and_silent_for_its_lease_is_declared_dead() -> None:
    verdicts = judged(opened(), look(session(), seconds=0), look(session(), seconds=15))
    assert verdicts == (Verdict(OTHER, 7, How.EXPIRY, micros(5)),)


@rule("O24")
@pytest.mark.parametrize(("store", "dead"), [(5.0, False), (5.1, True)])
def test_a_session_is_left_alone_until_the_grace_after_its_expiry_has_passed(store: float, dead: bool) -> None:
    first, second = look(session(), seconds=0), look(session(), seconds=20, store=store)
    assert bool(judged(opened(), first, second)) is dead


@rule("O24")
@pytest.mark.parametrize(("seconds", "dead"), [(14.9, False), (15.0, True)])
def test_one_beat_must_be_seen_for_a_whole_lease(seconds: float, dead: bool) -> None:
    assert bool(judged(opened(), look(session(), seconds=0), look(session(), seconds=seconds))) is dead


@rule("O24")
def test_a_single_look_never_suffices() -> None:
    assert judged(opened(), look(session(), seconds=500)) == ()


@rule("O24")
def test_a_look_lasts_from_the_first_answer_to_the_last_question() -> None:
    first = look(session(), seconds=2, takes=2)
    assert judged(opened(), first, look(session(), seconds=18, takes=2)) == ()
    assert judged(opened(), first, look(session(), seconds=19, takes=2)) != ()


@rule("O24")
def test_a_new_beat_starts_the_look_again() -> None:
    looks = [look(session(beat=beat), seconds=seconds) for beat, seconds in [(7, 0), (8, 10), (8, 24.9)]]
    assert judged(opened(), *looks) == ()


@rule("O24")
def test_a_beat_that_went_back_starts_the_look_again() -> None:
    assert judged(opened(), look(session(beat=7), seconds=0), look(session(beat=3), seconds=15)) == ()


@rule("O24")
def test_a_session_with_a_longer_lease_is_looked_at_for_its_own_lease() -> None:
    patient = replace(session(), lease=micros(60))
    first = look(patient, seconds=0)
    assert judged(opened(), first, look(patient, seconds=59)) == ()
    assert judged(opened(), first, look(patient, seconds=60)) != ()


@rule("O24")
def test_a_session_with_a_shorter_lease_is_looked_at_for_the_lease_of_the_judge() -> None:
    hasty = replace(session(), lease=micros(5))
    assert judged(opened(), look(hasty, seconds=0), look(hasty, seconds=14.9)) == ()


@rule("O24")
def test_draining_sessions_are_judged_and_dead_ones_are_not() -> None:
    for state, count in [(SessionState.DRAINING, 1), (SessionState.DEAD, 0)]:
        seen = replace(session(), state=state)
        assert len(judged(opened(), look(seen, seconds=0), look(seen, seconds=15))) == count


@rule("O24")
@pytest.mark.parametrize("sign", Sign)
def test_a_judge_never_judges_itself(sign: Sign) -> None:
    me = session(worker_id=ME)
    assert judged(opened(), look(me, seconds=0, sign=sign), look(me, seconds=100, sign=sign)) == ()


@rule("O24")
def test_what_is_no_longer_seen_is_forgotten() -> None:
    judge = opened().looked(look(session(), seconds=0)).looked(look(seconds=5))
    assert judged(judge, look(session(), seconds=20)) == ()


# ---- a healthy judge (O24 (c), O25) --------------------------------------------------------------------------------


def after_outage(*, back: float, asks: float) -> tuple[Verdict, ...]:
    """An old judge that saw the session before an outage, whose beats failed, and that asks again."""
    judge = beating(opened(-100), since=-97.5, until=0).looked(look(session(), seconds=0)).beat_failed()
    return judged(judge, look(session(), seconds=asks), since=back)


@rule("O24", "I13")
def test_after_an_outage_a_judge_waits_for_a_lease_and_the_grace() -> None:
    assert after_outage(back=50, asks=69.9) == ()
    assert after_outage(back=50, asks=70) != ()


@rule("O24", "I13")
def test_while_its_own_beats_fail_a_judge_judges_nobody() -> None:
    judge = opened().looked(look(session(), seconds=0)).beat_failed()
    last = look(session(), seconds=30)
    assert judge.looked(last).verdicts(last) == ()


@rule("O24", "I13")
def test_a_judge_that_slept_waits_although_no_beat_of_its_own_failed() -> None:
    judge = opened().looked(look(session(), seconds=0))
    last = look(session(), seconds=30)
    assert judge.looked(last).verdicts(last) == ()
    awake = judge.beat_confirmed(sent_at=at(30), answered_at=at(30))
    assert awake.looked(last).verdicts(last) == ()
    assert judged(awake, look(session(), seconds=50), since=32.5) != ()


@rule("O24", "I13")
def test_a_slow_answer_counts_as_a_gap() -> None:
    judge = opened().beat_confirmed(sent_at=at(2.5), answered_at=at(5.1))
    assert judged(judge, look(session(), seconds=5), look(session(), seconds=20), since=5) == ()


@rule("O25")
def test_a_young_judge_whose_beats_never_failed_need_not_wait() -> None:
    assert judged(opened(), look(session(), seconds=0), look(session(), seconds=15)) != ()


@rule("O25")
def test_a_young_judge_whose_beat_failed_waits_like_an_old_one() -> None:
    judge = opened().beat_failed()
    assert judged(judge, look(session(), seconds=3), look(session(), seconds=20)) == ()


@rule("O25")
def test_a_new_judge_remembers_nothing_of_an_earlier_life() -> None:
    opened().looked(look(session(), seconds=0))
    assert judged(opened(14), look(session(), seconds=15), since=16.5) == ()


# ---- signs of the kernel (O27) -------------------------------------------------------------------------------------


def fast(seconds: float, sign: Sign) -> tuple[Verdict, ...]:
    alive = session(expires=100)
    return judged(opened(), look(alive, seconds=0, store=0), look(alive, seconds=seconds, store=seconds, sign=sign))


@rule("O27")
def test_a_free_lock_and_two_silent_beats_replace_expiry_and_the_long_look() -> None:
    assert fast(4.9, Sign.HINT) == ()
    assert fast(5.0, Sign.HINT) == (Verdict(OTHER, 7, How.HINT, micros(5)),)


@rule("O27")
def test_a_judge_knows_when_a_session_whose_lock_is_free_will_have_been_silent_for_long_enough() -> None:
    first, later = look(session(), seconds=0), look(session(), seconds=2, sign=Sign.HINT)
    judge = opened().looked(first).looked(later)
    assert judge.ripens(later) == at(5)
    assert judge.ripens(look(session(), seconds=2)) is None
    assert judge.ripens(look(session(), seconds=6, sign=Sign.HINT)) is None
    assert judge.looked(look(session(beat=8), seconds=3)).ripens(later) == at(8)


@rule("O26")
def test_a_judge_knows_when_a_death_without_proof_is_old_enough_to_end_runs_for_good() -> None:
    dead = replace(session(), state=SessionState.DEAD, dead_at=micros(5010.0), lease=micros(15))
    assert opened().ripens(look(dead, seconds=100, store=12)) == at(113)
    assert opened().ripens(look(dead, seconds=100, store=26)) is None
    assert opened().ripens(look(replace(dead, proven=True), seconds=100, store=12)) is None


@rule("O27")
def test_without_a_hint_two_silent_beats_prove_nothing() -> None:
    assert fast(5.0, Sign.NONE) == ()


@rule("O27", "O24")
def test_a_hint_needs_a_healthy_judge() -> None:
    judge = opened().beat_failed().looked(look(session(expires=100), seconds=0, store=0))
    assert judged(judge, look(session(expires=100), seconds=19, store=19, sign=Sign.HINT)) == ()


@rule("O27")
def test_expiry_is_the_ground_where_both_would_do() -> None:
    verdicts = judged(opened(), look(session(), seconds=0), look(session(), seconds=15, sign=Sign.HINT))
    assert [verdict.how for verdict in verdicts] == [How.EXPIRY]


@rule("O27")
def test_proof_needs_neither_time_nor_health() -> None:
    only = look(session(expires=100), seconds=0, store=0, sign=Sign.PROOF)
    assert opened().beat_failed().looked(only).verdicts(only) == (Verdict(OTHER, 7, How.PROOF, micros(5)),)


@rule("O27")
@pytest.mark.parametrize(
    ("free", "hinted", "sign"),
    [(True, True, Sign.HINT), (True, False, Sign.NONE), (False, True, Sign.NONE), (None, True, Sign.NONE)],
)
def test_an_advisory_lock_is_a_hint_only_if_its_session_held_it(free: bool | None, hinted: bool, sign: Sign) -> None:
    assert hint(replace(session(), hinted=hinted), free=free) is sign


@rule("O27")
@pytest.mark.parametrize(
    ("free", "hinted", "boot_id", "sign"),
    [
        (True, True, "boot-1", Sign.PROOF),
        (True, False, "boot-1", Sign.NONE),
        (False, True, "boot-1", Sign.NONE),
        (None, True, "boot-1", Sign.NONE),
        (None, False, "boot-2", Sign.PROOF),
        (False, True, "", Sign.NONE),
    ],
)
def test_a_free_file_lock_or_another_boot_proves_death(
    free: bool | None, hinted: bool, boot_id: str, sign: Sign
) -> None:
    assert proof(replace(session(), hinted=hinted), free=free, boot_id=boot_id) is sign


@rule("O27")
def test_a_session_without_a_boot_id_is_not_taken_for_another_boot() -> None:
    assert proof(replace(session(), boot_id=""), free=None, boot_id="boot-1") is Sign.NONE


# ---- whole histories: a worker that lives (I13) --------------------------------------------------------------------

LEASE, BEAT, GRACE, END = 12, 2, 3, 70
"""In ticks of one second. A live worker beats at least every ``BEAT`` ticks while it can reach the store."""

TICK_TERMS = Terms(lease=LEASE, margin=LEASE / 10, beat=BEAT, max_suspend=300.0, max_stall=120.0)
ENOUGH = Limits(grace=GRACE)


@dataclass(frozen=True)
class History:
    """What happens to one worker that lives, and to one judge. Spans are (first tick, ticks).

    ``outage``: nobody reaches the store. ``breaks``: it also drops all connections, hence all hints, and a judge
    learns of it when it is awake. ``step``: the store's clock jumps so many ticks at that tick. ``nap``: the judge is
    stopped. ``reopens``: a new judge begins.
    """

    outage: tuple[int, int]
    breaks: bool
    step: tuple[int, int]
    nap: tuple[int, int]
    opens: int
    reopens: int
    paces: tuple[int, ...]
    judge_first: tuple[bool, ...]
    slow_look: int

    def up(self, tick: int) -> bool:
        return not self.outage[0] <= tick < sum(self.outage)

    def awake(self, tick: int) -> bool:
        return not self.nap[0] <= tick < sum(self.nap)

    def offset(self, tick: int) -> int:
        return self.step[1] if tick >= self.step[0] else 0


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Histories in which things happen close together more often than chance would have it."""
    outage = draw(st.tuples(st.integers(1, 40), st.one_of(st.integers(0, 30), st.integers(1, 2 * BEAT))))
    around = st.integers(-1, 3).map(lambda ticks: sum(outage) + ticks)
    beside = st.integers(-1, 1).map(lambda ticks: (max(1, outage[0] + ticks), max(0, outage[1] - ticks)))
    return History(
        outage=outage,
        breaks=draw(st.booleans()),
        step=(draw(st.integers(1, 60)), draw(st.sampled_from([0, -20, 5, 20, 40]))),
        nap=draw(st.one_of(beside, st.tuples(st.integers(1, 40), st.integers(0, 20)))),
        opens=draw(st.integers(0, 20)),
        reopens=draw(st.one_of(around, st.integers(10, END))),
        paces=draw(st.lists(st.integers(1, BEAT), min_size=1, max_size=5).map(tuple)),
        judge_first=draw(st.lists(st.booleans(), min_size=1, max_size=4).map(tuple)),
        slow_look=draw(st.integers(0, 1)),
    )


class World:
    """One history, tick by tick: a worker, a judge, and a store that carries verdicts out by compare-and-set."""

    def __init__(self, history: History, limits: Limits, terms: Terms) -> None:
        self.history, self.limits, self.terms = history, limits, terms
        self.tick, self.beats = 0, 0
        lease = micros(terms.lease)
        self.row = Session(OTHER, lease=lease, beat_interval=micros(terms.beat), expires_at=lease, hinted=True)
        self.owes_since, self.contact = 0, 0
        self.judge: Judge | None = None
        self.asked: tuple[int, Session, Micros] | None = None

    def kills(self) -> bool:
        """Whether the judge ever has the live worker declared dead."""
        while self.tick < END and self.row.state is not SessionState.DEAD:
            self.advance()
        return self.row.state is SessionState.DEAD

    def advance(self) -> None:
        parts = [self.worker, self.judging]
        if self.history.judge_first[self.tick % len(self.history.judge_first)]:
            parts.reverse()
        self.weather()
        for part in parts:
            part()
        self.tick += 1

    def weather(self) -> None:
        if not self.history.up(self.tick):
            self.owes_since = self.tick + 1
            if self.history.breaks:
                self.row = replace(self.row, hinted=False)

    def worker(self) -> None:
        pace = self.history.paces[self.beats % len(self.history.paces)]
        if self.history.up(self.tick) and self.tick - self.owes_since >= pace:
            self.beats, self.owes_since = self.beats + 1, self.tick
            self.row = replace(self.row, beat=self.beats, expires_at=self.expiry(), hinted=True)

    def judging(self) -> None:
        if self.tick in (self.history.opens, self.history.reopens) and self.history.up(self.tick):
            self.judge = Judge.opened(ME, self.terms, self.limits, sent_at=self.now(), answered_at=self.now())
            self.asked, self.contact = None, self.tick
        if self.judge is None or not self.history.awake(self.tick):
            return
        if not self.history.up(self.tick):
            self.judge, self.asked = self.judge.beat_failed(), None
            return
        if self.history.breaks and not all(map(self.history.up, range(self.contact, self.tick))):
            self.judge = self.judge.beat_failed()
        if self.tick % BEAT == 0:
            self.judge = self.judge.beat_confirmed(sent_at=self.now(), answered_at=self.now())
        self.contact = self.tick
        self.look()

    def look(self) -> None:
        """A slow look is sent, carried out at once, and answered a tick later."""
        if self.asked is None:
            self.asked = (self.tick, self.row, micros(self.store()))
        asked, row, store_now = self.asked
        if self.judge is None or self.tick - asked < self.history.slow_look:
            return
        self.asked = None
        free = None if row.hinted else True
        signs = {OTHER: Sign.HINT if free else Sign.NONE}
        seen = Look((row,), BootSeconds(float(asked)), self.now(), store_now, signs)
        self.judge = self.judge.looked(seen)
        for verdict in self.judge.verdicts(seen):
            self.carry_out(verdict)

    def carry_out(self, verdict: Verdict) -> None:
        expired = self.row.expires_at < micros(self.store()) - verdict.grace
        asks = {How.EXPIRY: expired, How.HINT: not self.row.hinted, How.PROOF: True}
        if self.row.beat == verdict.beat and asks[verdict.how]:
            self.row = replace(self.row, state=SessionState.DEAD)

    def now(self) -> BootSeconds:
        return BootSeconds(float(self.tick))

    def store(self) -> int:
        return self.tick + self.history.offset(self.tick)

    def expiry(self) -> Micros:
        return micros(self.store() + self.terms.lease)


def kills_a_live_worker(history: History, limits: Limits, terms: Terms = TICK_TERMS) -> bool:
    return World(history, limits, terms).kills()


THOROUGH = settings(max_examples=600)
SEARCH = settings(max_examples=10_000, phases=[Phase.generate])


@rule("I13", "O24", "O25", "O27")
@THOROUGH
@given(history=histories())
def test_no_outage_and_no_clock_step_kills_a_live_worker(history: History) -> None:
    assert not kills_a_live_worker(history, ENOUGH)


@rule("I13", "O24", "O25", "O27")
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(replace(ENOUGH, look=0.0, steady=0.0), id="expiry only"),
        pytest.param(replace(ENOUGH, look=0.0), id="expiry and health"),
        pytest.param(replace(ENOUGH, steady=0.0), id="expiry and looks"),
        pytest.param(replace(ENOUGH, look=0.15), id="a look no longer than a beat"),
        pytest.param(replace(ENOUGH, short_look=1.0), id="a short look of one beat"),
        pytest.param(replace(ENOUGH, gap=1000.0), id="a judge that does not notice its own nap"),
    ],
)
def test_a_judge_that_is_not_sure_enough_kills_a_live_worker(limits: Limits) -> None:
    caught = find(histories(), lambda history: kills_a_live_worker(history, limits), settings=SEARCH)
    assert not kills_a_live_worker(caught, ENOUGH)


@rule("I13", "O9")
def test_a_lease_too_short_for_its_beats_would_fool_the_surest_judge() -> None:
    """An outage too short to be noticed, between two beats of a worker that are as far apart as they may be."""
    unnoticed = History(
        outage=(1, 3),
        breaks=False,
        step=(2, 40),
        nap=(1, 3),
        opens=0,
        reopens=END,
        paces=(BEAT,),
        judge_first=(True,),
        slow_look=0,
    )
    short = replace(TICK_TERMS, lease=3.0 * BEAT, margin=0.3 * BEAT)
    assert short.lease < BEATS_PER_TRUST * BEAT
    assert kills_a_live_worker(unnoticed, ENOUGH, short)
    assert not kills_a_live_worker(unnoticed, ENOUGH, TICK_TERMS)


# ---- whole histories: a worker that trusts itself (I10) ------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """Ticks before sending, on the way to the store and on the way back. ``lost``: the answer never comes."""

    pause: int
    there: int
    back: int
    lost: bool


def beats() -> st.SearchStrategy[list[Beat]]:
    ticks = st.integers(0, 14)
    return st.lists(st.builds(Beat, ticks, ticks, ticks, st.booleans()), max_size=6)


def dies_while_trusting(schedule: list[Beat], limits: Limits, terms: Terms, rate: float) -> bool:
    """Whether a healthy judge has the worker declared dead while that worker trusts itself.

    ``rate`` is how fast the worker's clock runs; the store's clock makes no step, and nothing but the worker's own
    way to the store is ever slow or broken.
    """
    trust = Trust.opened(terms, sent_at=BootSeconds(0.0))
    judge = Judge.opened(ME, terms, limits, sent_at=BootSeconds(0.0), answered_at=BootSeconds(0.0))
    row = Session(OTHER, lease=micros(terms.lease), expires_at=micros(terms.lease))
    for tick, sent_at, executes, answers in timeline(schedule):
        now, local = BootSeconds(float(tick)), BootSeconds(tick * rate)
        if executes and row.state is SessionState.LIVE:
            row = replace(row, beat=row.beat + 1, expires_at=micros(tick + terms.lease))
        if answers and row.state is SessionState.LIVE:
            trust = trust.renewed(sent_at=BootSeconds(sent_at * rate), now=local)
        judge = judge.beat_confirmed(sent_at=now, answered_at=now)
        seen = Look((row,), now, now, micros(tick))
        judge = judge.looked(seen)
        if judge.verdicts(seen):
            row = replace(row, state=SessionState.DEAD)
        if row.state is SessionState.DEAD and trust.trusted(local):
            return True
    return False


def timeline(schedule: list[Beat]) -> Iterator[tuple[int, int, bool, bool]]:
    """For every tick: when the beat in flight was sent, and whether it is carried out or answered now."""
    tick = 0
    for beat in [*schedule, Beat(60, 0, 0, True)]:
        sent_at = tick + beat.pause
        executed_at = sent_at + beat.there
        answered_at = executed_at + beat.back
        for now in range(tick, answered_at + 1):
            yield now, sent_at, now == executed_at, now == answered_at and not beat.lost
        tick = answered_at + 1


@rule("I10", "O24", "O9")
@settings(max_examples=500)
@given(schedule=beats(), rate=st.floats(0.9, 1.1), grace=st.sampled_from([0.0, 3.0]))
def test_no_healthy_judge_declares_a_worker_dead_that_trusts_itself(
    schedule: list[Beat], rate: float, grace: float
) -> None:
    assert not dies_while_trusting(schedule, Limits(grace=grace), TICK_TERMS, rate)


@rule("I10", "O24", "O9")
@pytest.mark.parametrize(
    ("limits", "margin", "rate"),
    [
        pytest.param(replace(ENOUGH, grace=-LEASE, look=0.2), 1.2, 1.0, id="expiry not awaited"),
        pytest.param(Limits(grace=0.0, look=0.2), 0.0, 0.8, id="no margin, no grace, and a slow clock"),
    ],
)
def test_a_judge_that_does_not_wait_for_expiry_kills_a_trusting_worker(
    limits: Limits, margin: float, rate: float
) -> None:
    terms = replace(TICK_TERMS, margin=margin)
    assert find(beats(), lambda schedule: dies_while_trusting(schedule, limits, terms, rate)) is not None
