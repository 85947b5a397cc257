"""The contract's part about worker sessions: they open once, beat while they live, die once (O10, O24, I12)."""

from __future__ import annotations

from typing import Final

from deerflow_runs.errors import UsageError
from deerflow_runs.model import CancelAction, Micros, Session, SessionState, WorkerId
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import NotLive, Renewed
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import HOUR, INSTANT, ME, OTHER, Stage

SESSIONS: Final = Checks()

NOW: Final = Micros(0)


async def beats(stage: Stage, worker_id: WorkerId = ME, *, hinted: bool = True) -> Renewed:
    """A session's beat that is accepted."""
    renewed = await stage.store.renew(worker_id, hinted=hinted)
    assert isinstance(renewed, Renewed), renewed
    return renewed


async def state(stage: Stage, worker_id: WorkerId = ME) -> tuple[SessionState, bool]:
    """A session's state, and whether its death is a fact."""
    session = await stage.session(worker_id)
    return (session.state, session.proven)


# --- Opening --------------------------------------------------------------------------------------------------------


@SESSIONS("O9", "O10")
async def a_session_begins_live_with_a_lease_from_now_and_is_listed_as_it_was_opened(stage: Stage) -> None:
    told = Session(
        ME,
        lease=HOUR,
        beat_interval=Micros(7),
        hinted=True,
        host="host",
        boot_id="boot",
        pid=42,
        version="1.2",
        labels={"zone": "b", "a": "ß"},
        capabilities=frozenset({"executor:agent", "gpu"}),
    )
    before = await stage.store.now()
    opened = await stage.store.open_session(told)
    assert (opened.state, opened.beat, opened.dead_at, opened.proven) == (SessionState.LIVE, 0, None, False)
    assert before + HOUR <= opened.expires_at <= await stage.store.now() + HOUR
    assert before <= opened.started_at
    for name in ("worker_id", "lease", "beat_interval", "hinted", "host", "boot_id", "pid", "version", "labels"):
        assert getattr(opened, name) == getattr(told, name), name
    assert opened.capabilities == told.capabilities
    await stage.passes(INSTANT)
    await stage.opens(OTHER)
    assert [one.worker_id for one in await stage.store.sessions()] == [ME, OTHER]
    assert (await stage.store.sessions())[0] == opened


@SESSIONS("O8", "I12")
async def opening_a_live_session_again_answers_the_one_that_is_there(stage: Stage) -> None:
    await stage.opens(ME)
    await beats(stage)
    kept = await stage.session(ME)
    again = await stage.store.open_session(Session(ME, lease=Micros(1), host="another"))
    assert again == kept == await stage.session(ME)


@SESSIONS("I12")
async def an_id_that_has_died_is_never_used_again(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.dies(ME)
    await stage.opens(OTHER)
    await stage.is_believed_dead(OTHER)
    for worker_id in (ME, OTHER):
        try:
            await stage.opens(worker_id)
        except UsageError:
            continue
        raise AssertionError(f"{worker_id} lives again")
    assert {one.state for one in await stage.store.sessions()} == {SessionState.DEAD}


@SESSIONS("O9")
async def a_session_without_a_lease_or_a_name_is_a_mistake(stage: Stage) -> None:
    for wrong in (Session(ME, lease=NOW), Session(ME, beat_interval=NOW), Session(WorkerId(""))):
        try:
            await stage.store.open_session(wrong)
        except UsageError:
            continue
        raise AssertionError(f"{wrong} was opened")
    assert await stage.store.sessions() == ()


# --- Beating --------------------------------------------------------------------------------------------------------


@SESSIONS("O10", "O27")
async def a_beat_counts_moves_the_lease_and_says_whether_the_hint_is_held(stage: Stage) -> None:
    await stage.opens(ME)
    opened = await stage.session(ME)
    for number, hinted in enumerate((False, True, False), start=1):
        await stage.passes(INSTANT)
        renewed = await beats(stage, hinted=hinted)
        session = await stage.session(ME)
        assert (renewed.beat, renewed.state, renewed.requests) == (number, SessionState.LIVE, ())
        assert (session.beat, session.hinted, session.expires_at) == (number, hinted, renewed.expires_at)
        assert session.expires_at > opened.expires_at


@SESSIONS("I12", "O13")
async def the_dead_and_the_unknown_never_beat(stage: Stage) -> None:
    assert await stage.store.renew(ME) == NotLive()
    await stage.opens(ME)
    await stage.dies(ME)
    await stage.opens(OTHER)
    await stage.is_believed_dead(OTHER)
    before = await stage.store.sessions()
    for worker_id in (ME, OTHER):
        for wanted in (SessionState.LIVE, SessionState.DRAINING):
            assert await stage.store.renew(worker_id, state=wanted) == NotLive()
    assert await stage.store.sessions() == before


@SESSIONS("O35")
async def a_session_that_drains_goes_on_draining_and_beating(stage: Stage) -> None:
    await stage.opens(ME)
    first = await stage.store.renew(ME, state=SessionState.DRAINING)
    late = await stage.store.renew(ME, state=SessionState.LIVE)
    assert isinstance(first, Renewed)
    assert isinstance(late, Renewed)
    assert (first.state, late.state, late.beat) == (SessionState.DRAINING, SessionState.DRAINING, 2)


@SESSIONS("O10", "O19", "B106")
async def a_beat_tells_of_every_cancel_on_the_session_s_own_active_runs_as_often_as_it_is_asked(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.opens(OTHER)
    running = await stage.starts("running", "1")
    await stage.is_cancelled(running, CancelAction.ROLLBACK)
    await stage.is_cancelled(await stage.arrives("pending", "2"))
    await stage.is_cancelled(await stage.starts("others", "3", worker_id=OTHER))
    await stage.is_cancelled(await stage.arrives("vacant", "4", take=False))
    await stage.starts("untouched", "5")
    ended = await stage.starts("ended", "6")
    await stage.is_cancelled(ended)
    await stage.ends(ended)
    for _ in range(2):
        told = {(one.key.run_id, one.epoch, one.action) for one in (await beats(stage)).requests}
        assert told == {("running", 1, CancelAction.ROLLBACK), ("pending", 1, CancelAction.INTERRUPT)}
    await stage.happens(RunEvent.SEIZE, running)
    assert {one.epoch for one in (await beats(stage)).requests if one.key.run_id == "running"} == {2}


# --- Dying ----------------------------------------------------------------------------------------------------------


@SESSIONS("O35", "O8")
async def a_session_that_closes_is_dead_as_a_fact_and_may_say_so_twice(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.dies(ME)
    died = await stage.session(ME)
    assert (died.state, died.proven) == (SessionState.DEAD, True)
    assert died.dead_at is not None
    await stage.dies(ME)
    assert await stage.session(ME) == died
    assert not await stage.store.close_session(OTHER), "there is no such session"


@SESSIONS("O24", "O26")
async def a_session_that_was_believed_dead_does_not_prove_it_by_closing(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.is_believed_dead(ME)
    died = await stage.session(ME)
    assert not await stage.store.close_session(ME)
    assert await stage.session(ME) == died
    assert not died.proven


@SESSIONS("O24", "I10")
async def a_verdict_counts_only_for_the_beat_that_was_seen(stage: Stage) -> None:
    for number, how in enumerate(How):
        worker_id = await stage.opens(WorkerId(f"host:{number}"), lease=INSTANT)
        await beats(stage, worker_id)
        await stage.passes(INSTANT)
        for beat in (0, 2):
            assert not await stage.store.declare_dead(Verdict(worker_id, beat, how, NOW))
        assert await state(stage, worker_id) == (SessionState.LIVE, False)
        await stage.passes(INSTANT)
        assert await stage.store.declare_dead(Verdict(worker_id, 1, how, NOW)), how
        assert await state(stage, worker_id) == (SessionState.DEAD, how is How.PROOF)


@SESSIONS("O24")
async def a_verdict_by_time_needs_an_expired_lease_and_its_grace(stage: Stage) -> None:
    await stage.opens(ME, lease=HOUR)
    await stage.opens(OTHER, lease=INSTANT)
    await stage.passes(Micros(2))
    assert not await stage.store.declare_dead(Verdict(ME, 0, How.EXPIRY, NOW))
    assert not await stage.store.declare_dead(Verdict(OTHER, 0, How.EXPIRY, HOUR))
    assert await stage.store.declare_dead(Verdict(OTHER, 0, How.EXPIRY, NOW))
    assert [await state(stage, one) for one in (ME, OTHER)] == [
        (SessionState.LIVE, False),
        (SessionState.DEAD, False),
    ]


@SESSIONS("O27")
async def a_verdict_by_hint_needs_a_session_that_said_it_held_it(stage: Stage) -> None:
    await stage.opens(ME)
    await beats(stage, hinted=False)
    assert not await stage.store.declare_dead(Verdict(ME, 1, How.HINT, NOW))
    await beats(stage, hinted=True)
    assert await stage.store.declare_dead(Verdict(ME, 2, How.HINT, NOW))


@SESSIONS("O24", "I12")
async def a_session_dies_once_and_its_first_death_stands(stage: Stage) -> None:
    await stage.opens(ME, lease=INSTANT)
    await stage.store.renew(ME, hinted=True, state=SessionState.DRAINING)
    await stage.passes(INSTANT)
    await stage.is_believed_dead(ME)
    died = await stage.session(ME)
    for how in How:
        assert not await stage.store.declare_dead(Verdict(ME, 1, how, NOW))
        assert not await stage.store.declare_dead(Verdict(OTHER, 0, how, NOW)), "there is no such session"
    assert await stage.session(ME) == died
