"""A worker's session as every thread sees it: trust, judgement, id, state (O9, O12, O13, O24, O25)."""

from __future__ import annotations

from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.session import WorkerSession, new_worker_id
from deerflow_runs.model import Micros, Session, SessionState, WorkerId
from deerflow_runs.protocol.judge import Look, Sign
from deerflow_runs.protocol.trust import BootSeconds, Standing
from deerflow_runs.store.base import Renewed
from deerflow_runs.testing.clock import ManualClock
from tests.rules import rule

START = 1_000.0
RENEWED = Renewed(beat=1, expires_at=Micros(5), state=SessionState.LIVE)
TEMPLATE = Session(WorkerId(""), host="here", pid=7, capabilities=frozenset({"gpu"}))


def at(seconds: float) -> BootSeconds:
    """So long after the session was asked for."""
    return BootSeconds(START + seconds)


def closed() -> tuple[WorkerSession, ManualClock]:
    clock = ManualClock(boot_time=START)
    return WorkerSession(TEMPLATE, RunsConfig(), clock), clock


def opened(*, answered: float = 0.0) -> tuple[WorkerSession, ManualClock]:
    """Asked for at 0 s; with the default lease it is trusted until 13.5 s."""
    session, clock = closed()
    session.opened(session.session, sent_at=at(0), answered_at=at(answered))
    return session, clock


# --- Trust ----------------------------------------------------------------------------------------------------------


@rule("I11")
def test_a_session_that_was_never_opened_is_not_trusted() -> None:
    session, _ = closed()
    assert not session.trusted()
    assert session.standing() is Standing.SUSPENDED


@rule("O9", "I11")
def test_trust_ends_by_itself_when_the_time_has_come() -> None:
    session, clock = opened()
    clock.jump(13.4)
    assert session.trusted()
    clock.jump(0.1)
    assert not session.trusted(), "nobody had to tell it"
    assert session.standing() is Standing.SUSPENDED
    clock.jump(300)
    assert session.standing() is Standing.ABORT


@rule("O9")
def test_a_slow_answer_buys_no_more_trust_than_a_fast_one() -> None:
    fast, _ = opened(answered=0.001)
    slow, _ = opened(answered=9)
    assert fast.trust == slow.trust


@rule("O9", "O12")
def test_a_late_renewal_does_not_bring_trust_back() -> None:
    session, clock = opened()
    clock.jump(20)
    session.confirmed(RENEWED, sent_at=at(5), answered_at=at(20))
    assert not session.trusted()
    session.confirmed(RENEWED, sent_at=at(19), answered_at=at(20))
    assert session.trusted()


@rule("O9", "F42")
def test_the_wall_clock_has_no_say_in_trust() -> None:
    session, clock = opened()
    clock.step_wall(3_600)
    assert session.trusted()
    clock.step_wall(-7_200)
    clock.jump(13.5)
    assert not session.trusted()


def test_an_accepted_beat_is_seen_in_the_row() -> None:
    session, _ = opened()
    session.confirmed(RENEWED, sent_at=at(1), answered_at=at(2))
    assert (session.session.beat, session.session.expires_at) == (1, 5)


@rule("O10")
def test_a_failed_beat_takes_no_trust() -> None:
    session, _ = opened()
    before = session.trust
    session.failed()
    assert session.trust == before


# --- One session after the other ------------------------------------------------------------------------------------


@rule("O13", "I12")
def test_a_refused_session_is_never_trusted_again() -> None:
    session, clock = opened()
    session.refused()
    assert not session.trusted()
    session.confirmed(RENEWED, sent_at=at(1), answered_at=at(1))
    assert not session.trusted()
    clock.jump(300)
    assert session.standing() is Standing.ABORT


@rule("O13", "I12")
def test_a_new_session_has_an_id_of_its_own_and_all_else_in_common() -> None:
    session, _ = opened()
    ids = {session.worker_id, *(session.fresh().worker_id for _ in range(100))}
    assert len(ids) == 101
    assert session.fresh().capabilities == TEMPLATE.capabilities
    assert session.fresh().host == TEMPLATE.host


@rule("O9", "O13")
def test_trust_in_a_new_session_says_nothing_about_what_the_old_one_owned() -> None:
    session, _ = opened()
    old = session.worker_id
    assert session.trusted(old)
    session.refused()
    session.opened(session.fresh(), sent_at=at(1), answered_at=at(1))
    assert session.trusted()
    assert session.trusted(session.worker_id)
    assert not session.trusted(old)


@rule("O9", "O10")
def test_lease_and_beat_are_those_of_the_configuration() -> None:
    session, _ = closed()
    assert (session.session.lease, session.session.beat_interval) == (15_000_000, 2_500_000)


@rule("I12")
def test_a_worker_id_names_its_host_and_fits_its_column() -> None:
    assert new_worker_id("web-1").startswith("web-1:")
    assert len(new_worker_id("h" * 1_000)) <= 255


@rule("O35")
def test_a_session_that_drains_does_so_for_good() -> None:
    session, _ = opened()
    assert session.state == "live"
    session.drain()
    assert session.state == "draining"
    session.opened(session.fresh(), sent_at=at(1), answered_at=at(1))
    assert session.state == "draining"


# --- Judgement ------------------------------------------------------------------------------------------------------

DEAD_LOOKING = Session(WorkerId("other"), beat=3, expires_at=Micros(0), hinted=True)


def look(asked: float) -> Look:
    return Look((DEAD_LOOKING,), asked_at=at(asked), answered_at=at(asked), store_now=Micros(10**9))


def beat_until(session: WorkerSession, seconds: int) -> None:
    for second in range(seconds + 1):
        session.confirmed(RENEWED, sent_at=at(second), answered_at=at(second))


@rule("O24")
def test_two_looks_a_lease_apart_condemn_a_silent_session() -> None:
    session, _ = opened()
    assert session.judge_looked(look(0)) == ()
    beat_until(session, 15)
    assert [verdict.worker_id for verdict in session.judge_looked(look(15))] == ["other"]


@rule("O24")
def test_a_judge_whose_own_beat_failed_condemns_nobody() -> None:
    session, _ = opened()
    session.judge_looked(look(0))
    beat_until(session, 15)
    session.failed()
    assert session.judge_looked(look(15)) == ()


@rule("O25")
def test_a_new_session_judges_by_nothing_that_was_seen_before_it() -> None:
    session, _ = opened()
    session.judge_looked(look(0))
    session.opened(session.fresh(), sent_at=at(10), answered_at=at(11))
    proof = Look((DEAD_LOOKING,), at(10.5), at(12), Micros(10**9), {DEAD_LOOKING.worker_id: Sign.PROOF})
    assert session.judge_looked(proof) == (), "this look was the judge's before"
    for second in range(11, 17):
        session.confirmed(RENEWED, sent_at=at(second), answered_at=at(second))
    assert session.judge_looked(look(16)) == ()
