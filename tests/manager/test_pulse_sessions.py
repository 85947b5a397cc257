"""How the heartbeat begins, replaces a session that is not live, and ends (O13, O35)."""

from __future__ import annotations

import pytest

from deerflow_runs import observe as events
from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.manager import messages
from deerflow_runs.model import SessionState
from deerflow_runs.testing.flaky_line import Verb, failing, losing
from tests.manager.beating import DEADLINE, Beating
from tests.rules import rule

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


@rule("O35", "I11")
async def test_trust_is_over_before_the_store_is_asked_to_close_the_session() -> None:
    async with Beating().living() as worker:
        worker.faults.once(Verb.CLOSE_SESSION, worker.gate().before)
        worker.pulse.stop(8)
        await worker.settles()
        assert (await worker.row()).state is SessionState.LIVE
        assert not worker.session.trusted()


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
        await worker.ends(seconds=4)
        assert worker.at <= 3 + 4
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
