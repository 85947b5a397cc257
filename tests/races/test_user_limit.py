"""Newcomers of one user on many threads: no order of their statements, and no number of them, gets past the limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from deerflow_runs.model import Micros, RunId, RunStatus, Session, Strategy, ThreadId
from deerflow_runs.protocol.admission import DenyUser, Newcomer
from deerflow_runs.protocol.decision import Actor, Applied
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import arrivals
from deerflow_runs.store.base import Admitted
from deerflow_runs.store.connections import PostgresUnits
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from deerflow_runs.store.writer import SqliteUnits
from tests.races.stepping import ONCE
from tests.races.support import HOUR, ME, THREAD, Rows, World, admit, apply, due, running
from tests.rules import rule

LIMIT: Final[dict[str, Any]] = {"user_id": "ann", "max_active_per_user": 1}
THE_FIRST: Final = running("first", "first", user_id="ann")


def active(rows: Rows) -> list[str]:
    """Ann's active runs."""
    return sorted(run.run_id for run in rows.values() if run.active and run.user_id == "ann")


# --- In every order of the statements -------------------------------------------------------------------------------


@rule("I19")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("strategy", Strategy)
async def test_of_two_newcomers_of_a_user_one_is_let_in_in_whatever_order_they_come(
    world: World, strategy: Strategy
) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (winner,) = [answer for answer in answers if isinstance(answer, Admitted)]
        assert [answer for answer in answers if isinstance(answer, DenyUser)] == [DenyUser(1, 1)]
        assert active(rows) == [winner.run.run_id]

    newcomers = [admit("one", strategy, "t1", **LIMIT), admit("two", Strategy.REJECT, "t2", **LIMIT)]
    await world.every_order([], newcomers, verdict)


@rule("I19")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_newcomer_locks_its_user_until_it_is_committed(world: World) -> None:
    held_open = Newcomer(run_id=RunId("one"), thread_id=ThreadId("t1"), worker_id=ME, **LIMIT)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        let_in = [answers[0] is not None, isinstance(answers[1], Admitted)]
        assert sorted(let_in) == [False, True], answers
        assert len(active(rows)) == 1

    verbs = [lambda player: player.transaction(arrivals.enter, held_open), admit("two", Strategy.REJECT, "t2", **LIMIT)]
    await world.every_order([], verbs, verdict)


@rule("I19", "O7")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_newcomer_and_the_end_of_its_user_s_last_run_never_wait_in_a_ring(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        admitted = isinstance(answers[1], Admitted)
        assert admitted or isinstance(answers[1], DenyUser)
        assert active(rows) == (["new"] if admitted else [])

    for strategy in (Strategy.REJECT, Strategy.INTERRUPT):
        newcomer = admit("new", strategy, "t2", **LIMIT)
        await world.every_order([THE_FIRST], [apply(THE_FIRST, RunEvent.SETTLE_SUCCESS), newcomer], verdict)


@rule("I19", "O7")
@pytest.mark.asyncio(loop_scope="module")
async def test_users_and_threads_of_the_same_names_never_wait_in_a_ring(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert [type(answer) for answer in answers] == [Admitted, Admitted], answers
        assert all(run.active for run in rows.values())

    newcomers = [
        admit("one", Strategy.INTERRUPT, "ben", **LIMIT),
        admit("two", Strategy.INTERRUPT, "ann", **LIMIT | {"user_id": "ben"}),
    ]
    await world.every_order([], newcomers, verdict)


@rule("I19", "O2", "O3")
@pytest.mark.asyncio(loop_scope="module")
async def test_newcomers_of_a_user_that_meet_on_a_thread_and_elsewhere_never_wait_in_a_ring(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        # Who displaces a run that holds the thread has waited for its turn, if only for a moment.
        has_waited = rows["due"].superseded_by == "here"
        assert len(active(rows)) <= 1 + has_waited, answers

    verbs = [
        admit("here", Strategy.INTERRUPT, THREAD, **LIMIT),
        admit("there", Strategy.REJECT, "t2", **LIMIT),
        admit("free", Strategy.ENQUEUE, THREAD, user_id="ben"),
    ]
    await world.every_order([due("due", user_id="ben")], verbs, verdict)


# --- Many at once ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def stores(dsn: str) -> AsyncIterator[Sequence[SqlRunStore]]:
    """Four stores on one fresh database, as four processes would have; none repeats anything: a ring is an error."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(SqlRunStore(_units(dsn))) for _ in range(4)]
        await opened[0].open_session(Session(ME, lease=HOUR))
        yield opened


def _units(dsn: str) -> Units:
    database = parse_dsn(dsn)
    if isinstance(database, Postgres):
        return PostgresUnits(database, connections=5, policy=ONCE)
    return SqliteUnits(database, policy=ONCE)


async def _asks(store: SqlRunStore, run_id: str, thread_id: str, **given: Any) -> Any:
    asked: dict[str, Any] = {"user_id": "ann", "max_active_per_user": 3} | given
    return await store.admit(Newcomer(run_id=RunId(run_id), thread_id=ThreadId(thread_id), worker_id=ME, **asked))


@rule("I19")
@pytest.mark.parametrize("strategies", [[Strategy.REJECT], list(Strategy)], ids=["reject", "all"])
async def test_of_twenty_newcomers_of_a_user_at_once_exactly_three_are_let_in(
    stores: Sequence[SqlRunStore], strategies: Sequence[Strategy]
) -> None:
    for number in range(5):
        asked = [
            _asks(stores[n % 4], f"r{number}-{n}", f"t{number}-{n}", strategy=strategies[n % len(strategies)])
            for n in range(20)
        ]
        answers = await asyncio.gather(*asked)
        assert Counter(map(type, answers)) == {Admitted: 3, DenyUser: 17}
        owned = await stores[0].owned(ME)
        assert len(owned) == 3
        for run in owned:
            ended = await stores[0].apply(run.key, RunEvent.SETTLE_ERROR, Actor(ME, run.epoch))
            assert isinstance(ended, Applied)


@rule("I19", "O3", "O7")
async def test_newcomers_that_displace_each_other_under_a_limit_never_wait_in_a_ring(
    stores: Sequence[SqlRunStore],
) -> None:
    async def lives(number: int) -> None:
        store = stores[number % 4]
        for turn in range(8):
            strategy = (Strategy.INTERRUPT, Strategy.ENQUEUE, Strategy.REJECT)[(number + turn) % 3]
            delay = Micros(1 if strategy is Strategy.ENQUEUE and turn % 2 else 0)
            await _asks(store, f"r{number}-{turn}", f"t{(number + turn) % 3}", strategy=strategy, delay=delay)
            for run in (await store.owned(ME))[:2]:
                cancelled = run.cancel_action is not None
                event = RunEvent.SETTLE_CANCELLED if cancelled else RunEvent.SETTLE_ERROR
                await store.apply(run.key, event, Actor(ME, run.epoch))

    await asyncio.gather(*(lives(number) for number in range(8)))
    for thread in ("t0", "t1", "t2"):
        active = await stores[0].active(ThreadId(thread))
        assert active is None or active.status in (RunStatus.PENDING, RunStatus.RUNNING)
