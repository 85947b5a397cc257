"""What each verb costs, counted exactly: round trips on PostgreSQL, commits on SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from deerflow_runs import store_at
from deerflow_runs.model import OnOrphan, Session, SessionState, ThreadId, Usage, WorkerId
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Renewed, Settlement
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.writer import SqliteUnits
from tests.contract.lives import ME, OTHER, admitted, happened, started
from tests.rules import rule
from tests.support.proxy import RoundTripProxy

FIRST = WorkerId("host:first")
FULL = Given(usage=Usage(total_tokens=5), checkpoint="c-1", model_name="small")


class Costs:
    """A store whose verbs are counted, warmed up so that nothing is prepared while it counts."""

    def __init__(self, store: SqlRunStore, count: Callable[[], int]) -> None:
        self.store = store
        self._count = count
        self._lives = 0

    async def of(self, verb: Awaitable[Any]) -> int:
        """Round trips or commits of one call."""
        before = self._count()
        await verb
        return self._count() - before

    def fresh(self) -> str:
        """A name no run or thread has yet."""
        self._lives += 1
        return f"n{self._lives}"


@pytest.fixture(params=["sqlite", "postgres"])
async def costs(request: pytest.FixtureRequest) -> AsyncIterator[Costs]:
    dsn: str = request.getfixturevalue(f"{request.param}_dsn")
    if request.param == "sqlite":
        database = parse_dsn(dsn)
        assert isinstance(database, Sqlite)
        units = SqliteUnits(database)
        async with SqlRunStore(units) as store:
            yield Costs(store, lambda: units.stats().commits)
        return
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(dsn), connections=1) as store:
        yield Costs(store, lambda: proxy.turns)


async def life(costs: Costs, **given: Any) -> list[int]:
    """Admit, start, settle: what each of them cost."""
    name = costs.fresh()
    admission = await costs.of(admitted(costs.store, name, name, **given))
    run = await costs.store.active(ThreadId(name))
    assert run is not None
    start = await costs.of(happened(costs.store, run, RunEvent.START))
    return [admission, start, await costs.of(happened(costs.store, run, RunEvent.SETTLE_SUCCESS, FULL))]


@rule("O1", "O7", "F58")
async def test_a_run_lives_on_three_round_trips_or_commits(costs: Costs) -> None:
    await costs.store.open_session(Session(ME))
    await life(costs)
    assert await life(costs) == [1, 1, 1]


@rule("I19", "O1")
async def test_the_limit_of_a_user_costs_a_transaction_and_only_whoever_sets_it(
    costs: Costs, request: pytest.FixtureRequest
) -> None:
    await costs.store.open_session(Session(ME))
    limited: dict[str, Any] = {"user_id": "ann", "max_active_per_user": 9}
    for given in ({}, limited):
        await life(costs, **given)
    assert await life(costs, user_id="ann") == [1, 1, 1]
    of_a_transaction = {"sqlite": 1, "postgres": 4}[request.node.callspec.params["costs"]]
    assert await life(costs, **limited) == [of_a_transaction, 1, 1]


@rule("O10", "F40")
@pytest.mark.parametrize("runs", [0, 200])
async def test_a_beat_costs_one_however_many_runs_its_session_owns(runs: int, costs: Costs) -> None:
    await costs.store.open_session(Session(ME))
    for _ in range(runs):
        name = costs.fresh()
        await admitted(costs.store, name, name)
    assert isinstance(await costs.store.renew(ME), Renewed)
    assert await costs.of(costs.store.renew(ME, state=SessionState.LIVE)) == 1


@rule("O19", "O30", "O31")
@pytest.mark.parametrize("event", [RunEvent.REQUEST_CANCEL, RunEvent.PROGRESS, RunEvent.HAND_OVER])
async def test_an_event_of_a_running_run_costs_one(event: RunEvent, costs: Costs) -> None:
    await costs.store.open_session(Session(ME))
    for measured in (False, True):
        name = costs.fresh()
        run = await started(costs.store, name, name)
        cost = await costs.of(happened(costs.store, run, event))
        assert not measured or cost == 1


@rule("O31")
async def test_a_claim_costs_one(costs: Costs) -> None:
    await costs.store.open_session(Session(ME))
    for measured in (False, True):
        name = costs.fresh()
        await admitted(costs.store, name, name, take=False)
        cost = await costs.of(costs.store.claim(Actor(ME), 1))
        assert not measured or cost == 1


@rule("O26", "O7")
@pytest.mark.parametrize("policy", OnOrphan)
async def test_five_hundred_orphans_are_recovered_in_ten_statements(policy: OnOrphan, postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(postgres_dsn), connections=1) as store:
        for worker in (FIRST, ME, OTHER):
            await store.open_session(Session(worker))
        await admitted(store, "warm", "warm", worker_id=FIRST, on_orphan=policy)
        for number in range(500):
            await admitted(store, f"r{number}", f"t{number}", on_orphan=policy)
        await store.close_session(FIRST)
        assert (await store.take_over(Actor(OTHER), Given(), 500)).total == 1
        await store.close_session(ME)
        before = proxy.turns
        assert (await store.take_over(Actor(OTHER), Given(), 500)).total == 500
        assert proxy.turns - before <= 10


@rule("O7")
async def test_settling_many_at_once_costs_a_few_statements_not_one_each(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy, store_at(proxy.dsn(postgres_dsn), connections=2) as store:
        await store.open_session(Session(ME))
        runs = [await started(store, f"r{number}", f"t{number}") for number in range(100)]
        settlements = [Settlement(run.key, RunEvent.SETTLE_SUCCESS, Actor(ME, run.epoch)) for run in runs]
        before = proxy.turns
        await store.settle_many(settlements)
        assert proxy.turns - before <= 12
