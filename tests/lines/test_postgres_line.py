"""The session line of PostgreSQL: one connection, what it costs, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from deerflow_runs import store_at
from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import CancelAction, Micros, Session, WorkerId
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.judge import How, Sign, Verdict
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import RunStore, SessionLine
from deerflow_runs.store.connections import Limits, PostgresUnits
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.forks import DESCRIPTORS
from deerflow_runs.store.line_postgres import PostgresLines
from deerflow_runs.store.migrate import upgrade
from deerflow_runs.store.signals import Signal, SignalMode
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.postgres import PostgresServer
from tests.contract.lives import started
from tests.lines.support import (
    LIVE,
    ME,
    OTHER,
    SOON,
    beat,
    beating,
    connected,
    ending,
    holds,
    mode,
    sign_of,
    until_sign,
)
from tests.rules import rule
from tests.support.proxy import RoundTripProxy
from tests.support.units import no_complaints, other_tasks

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'deerflow_runs session'"


@pytest.fixture
async def store(postgres_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_at(postgres_dsn) as opened:
        yield opened


@asynccontextmanager
async def behind_proxy(dsn: str) -> AsyncIterator[tuple[RunStore, SessionLine, RoundTripProxy]]:
    """A line through a proxy, and the store beside it, which has a way of its own."""
    async with RoundTripProxy() as proxy, store_at(dsn) as store, store_at(proxy.dsn(dsn)) as through:
        async with beating(through) as line:
            yield store, line, proxy
        proxy.release()


# --- What it costs --------------------------------------------------------------------------------------------------


@rule("O10")
@pytest.mark.parametrize("runs", [0, 100])
async def test_a_beat_is_one_round_trip_however_many_runs_the_session_owns(runs: int, postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (store, line, proxy):
        for number in range(runs):
            run = await started(store, f"r{number}", f"t{number}")
            await store.apply(run.key, RunEvent.REQUEST_CANCEL, Actor(OTHER), Given(action=CancelAction.INTERRUPT))
        await beat(line)
        await line.requests(ME)  # prepared
        before = proxy.turns
        assert len((await beat(line)).requests) == runs
        assert proxy.turns - before == 1
        assert len(await line.requests(ME)) == runs
        assert proxy.turns - before == 2


@rule("O27", "O33")
async def test_a_signal_and_a_look_at_all_hints_are_one_round_trip_each(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(postgres_dsn), connections=1) as store:
        for number in range(50):
            await store.open_session(Session(WorkerId(f"host:{number}"), hinted=True))
        sessions = await store.sessions()
        costs = []
        for _ in range(2):  # prepared by the first
            before = proxy.turns
            await store.send(Signal.WORK)
            assert len(await store.signs(sessions)) == 50
            costs.append(proxy.turns - before)
        assert costs[1] == 2


async def test_a_line_has_one_connection_with_a_name_of_its_own(
    store: RunStore, postgres_cluster: PostgresServer, postgres_dsn: str
) -> None:
    here = f"{SESSIONS} AND datname = '{postgres_dsn.rpartition('/')[2]}'"
    async with beating(store) as line:
        await beat(line)
        assert len(postgres_cluster.execute(here)) == 1


# --- Hints ----------------------------------------------------------------------------------------------------------


@rule("O27")
async def test_a_lock_that_its_session_held_is_a_hint_when_it_is_free_and_never_a_proof(store: RunStore) -> None:
    async with beating(store) as line:
        assert holds(line)
        assert await sign_of(store) is Sign.NONE
    assert not holds(line)
    await until_sign(store, Sign.HINT)


@rule("O27")
async def test_a_lock_that_its_session_never_held_says_nothing_when_it_is_free(store: RunStore) -> None:
    await store.open_session(Session(ME, hinted=False))
    assert await store.signs(await store.sessions()) == {}


async def test_nothing_is_asked_about_the_dead(store: RunStore) -> None:
    async with beating(store) as line:
        assert await line.close_session(ME)
    await store.open_session(Session(OTHER, hinted=True))
    await until_sign(store, Sign.HINT, OTHER)
    assert (await store.signs(await store.sessions())).keys() == {OTHER}


@rule("O27")
async def test_a_hint_lets_a_judge_declare_dead_only_who_has_not_beaten_since(store: RunStore) -> None:
    async with beating(store) as line:
        seen = await beat(line)
        late = await beat(line)
    await until_sign(store, Sign.HINT)
    assert not await store.declare_dead(Verdict(ME, seen.beat, How.HINT, Micros(0)))
    assert await store.declare_dead(Verdict(ME, late.beat, How.HINT, Micros(0)))


@rule("O27")
async def test_a_hint_that_somebody_else_held_is_taken_by_a_later_probe(store: RunStore) -> None:
    first = store.session_line()
    await first.connect(ME)
    async with connected(store) as line:
        assert not holds(line)
        await first.close()
        async with asyncio.timeout(SOON):
            while not holds(line):
                assert await line.probe()


@rule("O27")
async def test_a_connection_that_a_forked_child_may_have_is_not_kept(postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (_, line, proxy):
        proxy.hold()
        connecting = asyncio.create_task(line.connect(ME))
        await asyncio.sleep(0)
        DESCRIPTORS.forking()  # as the system tells before and after a fork, here without one
        DESCRIPTORS.forked()
        proxy.release()
        await ending(connecting)
        assert holds(line)


# --- Losing it ------------------------------------------------------------------------------------------------------


@rule("O10", "O27")
async def test_a_connection_that_the_server_ends_ends_the_wait_and_the_hint_and_is_made_anew(
    store: RunStore, postgres_cluster: PostgresServer, postgres_dsn: str
) -> None:
    name = postgres_dsn.rpartition("/")[2]
    async with beating(store) as line:
        wait = asyncio.create_task(line.wait(60))
        await asyncio.to_thread(
            postgres_cluster.execute,
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid IN ({SESSIONS})",
        )
        with pytest.raises(StoreUnavailable):
            await ending(wait)
        assert not holds(line)
        assert mode(line) is SignalMode.POLLING
        for question in (line.renew(ME, state=LIVE), line.requests(ME), line.probe(), line.wait(0)):
            with pytest.raises(StoreUnavailable):
                await question
        await line.connect(ME)
        assert holds(line)
        assert await line.probe()
        assert mode(line) is SignalMode.NOTIFY
        assert (await beat(line)).beat == 1
        assert await sign_of(store) is Sign.NONE


@rule("O27")
async def test_connecting_again_takes_the_hint_back_from_the_connection_before(store: RunStore) -> None:
    async with beating(store) as line:
        for _ in range(10):
            await line.connect(ME)
            assert holds(line)


async def test_a_reply_that_is_lost_is_no_answer_and_the_beat_may_be_repeated(postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (_, line, proxy):
        await beat(line)
        proxy.lose_reply(1)
        with pytest.raises(StoreUnavailable):
            await line.renew(ME, state=LIVE)
        await line.connect(ME)
        assert (await beat(line)).beat == 3  # the lost one was counted


async def test_a_session_whose_opening_got_no_reply_is_opened_by_the_repetition(postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (store, line, proxy):
        await line.connect(OTHER)
        proxy.lose_reply(2)  # the statement is prepared, then executed
        with pytest.raises(StoreUnavailable):
            await line.open_session(Session(OTHER))
        await line.connect(OTHER)
        await line.open_session(Session(OTHER))
        assert {session.worker_id for session in await store.sessions()} == {ME, OTHER}


@rule("O14")
async def test_a_row_that_stays_locked_is_no_answer_and_costs_neither_connection_nor_hint(postgres_dsn: str) -> None:
    database = parse_dsn(postgres_dsn)
    assert isinstance(database, Postgres)
    units = PostgresUnits(database)
    hasty = SqlRunStore(units, lines=PostgresLines(database, units, limits=Limits(lock=0.05)))
    async with hasty as store, beating(store) as line:
        async with units_holding(database):
            with pytest.raises(StoreUnavailable):
                await line.renew(ME, state=LIVE)
            assert holds(line)
        assert (await beat(line)).beat == 1


# --- A network that swallows everything -----------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["renew", "requests", "open_session", "close_session", "connect"])
async def test_a_question_that_gets_no_answer_ends_as_soon_as_it_is_given_up(question: str, postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (_, line, proxy):
        await beat(line)
        proxy.hold()
        ways: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "renew": lambda: line.renew(ME, state=LIVE),
            "requests": lambda: line.requests(ME),
            "open_session": lambda: line.open_session(Session(OTHER)),
            "close_session": lambda: line.close_session(ME),
            "connect": lambda: line.connect(ME),
        }
        asked = asyncio.ensure_future(ways[question]())
        for _ in range(20):
            await asyncio.sleep(0)
        with no_complaints():
            asked.cancel()
            async with asyncio.timeout(5):
                await asyncio.wait({asked})
        assert asked.cancelled()
        assert not holds(line)
        assert not {name for name in other_tasks() if "session" in name}
        proxy.release()
        await line.connect(ME)
        await beat(line)


async def test_waiting_and_closing_take_no_notice_of_a_network_that_swallows_everything(postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (_, line, proxy):
        proxy.hold()
        async with asyncio.timeout(5):
            assert await line.wait(0.01) == frozenset()
            await line.close()
        assert not holds(line)


@rule("O33")
async def test_a_probe_that_gets_no_answer_breaks_the_line_off(postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (_, line, proxy):
        proxy.hold()
        with pytest.raises(StoreUnavailable):
            await ending(line.probe())
        assert not holds(line)
        with pytest.raises(StoreUnavailable):
            await line.wait(0)


# --- Signals --------------------------------------------------------------------------------------------------------


@rule("O33")
async def test_a_line_polls_until_it_has_heard_itself_and_again_when_it_hears_nothing(postgres_dsn: str) -> None:
    async with behind_proxy(postgres_dsn) as (_, line, proxy):
        await line.connect(ME)
        assert mode(line) is SignalMode.POLLING
        assert await line.probe()
        assert mode(line) is SignalMode.NOTIFY
        proxy.mute()
        assert not await line.probe()
        assert mode(line) is SignalMode.POLLING
        assert not holds(line)
        assert (await beat(line)).beat == 1


@rule("O33")
async def test_a_signal_never_raises_and_is_given_up_on_a_network_that_swallows_everything(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy:
        store = store_at(proxy.dsn(postgres_dsn))
        await store.send(Signal.WORK)  # not open yet
        await store.open()
        proxy.hold()
        await ending(store.send(Signal.WORK))
        proxy.release()
        await store.close()
        await store.send(Signal.WORK)


async def test_signals_stay_within_one_set_of_tables_however_it_is_addressed(postgres_dsn: str) -> None:
    await asyncio.to_thread(upgrade, postgres_dsn + "?schema=elsewhere")
    async with (
        store_at(postgres_dsn) as plain,
        store_at(postgres_dsn + "?schema=public") as public,
        store_at(postgres_dsn + "?schema=elsewhere") as elsewhere,
        beating(plain) as line,
        beating(elsewhere) as other,
    ):
        await elsewhere.send(Signal.WORK)
        assert await ending(other.wait(60)) == {Signal.WORK}
        await public.send(Signal.CANCEL)
        assert await ending(line.wait(60)) == {Signal.CANCEL}
        assert await other.wait(0) == frozenset()


# --- Helpers --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def units_holding(database: Postgres) -> AsyncIterator[None]:
    """Meanwhile somebody holds the rows of all sessions."""
    arguments: dict[str, Any] = database.asyncpg_arguments()
    connection = await asyncpg.connect(**arguments)
    try:
        async with connection.transaction():
            await connection.execute("SELECT 1 FROM dr_workers FOR UPDATE")
            yield
    finally:
        await connection.close()
