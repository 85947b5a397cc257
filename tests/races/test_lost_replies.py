"""Every write is safe to repeat (O8): whatever reply of a verb gets lost, its repeat finds the truth.

And it changes nothing more: one receipt, one delivery, one epoch, one displacement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from typing import Final

import pytest

from deerflow_runs.store.connections import PostgresUnits
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.retry import RetryPolicy
from deerflow_runs.store.sql import SqlRunStore
from tests.races.cases import CASES, Case, kept, set_scene
from tests.races.support import World
from tests.rules import rule
from tests.support.proxy import RoundTripProxy

pytestmark = pytest.mark.asyncio(loop_scope="module")

AGAIN: Final = RetryPolicy(max_attempts=3, initial=0.0, maximum=0.0)


@pytest.mark.parametrize("name", CASES)
@rule("O8", "I4", "I5", "I14")
async def test_a_verb_that_is_repeated_with_the_same_ids_changes_nothing_more(world: World, name: str) -> None:
    case = CASES[name]
    store = SqlRunStore(world.units)
    await set_scene(world, case)
    first = await case.verb(store)
    assert case.fits(first, await world.rows()), first
    once = await kept(world)
    again = await case.verb(store)
    assert case.fits(again, await world.rows()), again
    assert await kept(world) == once


@pytest.mark.parametrize("name", CASES)
@rule("O8", "I4", "I5", "I14")
async def test_whichever_reply_is_lost_the_verb_finds_the_truth(postgres_world: World, name: str) -> None:
    """The connection breaks instead of each reply in turn, the one to COMMIT too; the store itself asks again."""
    world, case = postgres_world, CASES[name]
    async for store, proxy in _through_a_proxy(world.dsn):
        await _carried_out(world, case, store)
        before = proxy.turns
        once = await _carried_out(world, case, store)
        for number in range(1, proxy.turns - before + 1):
            await set_scene(world, case)
            proxy.lose_reply(number)
            answer = await case.verb(store)
            assert case.fits(answer, await world.rows()), f"reply {number}: {answer}"
            assert await kept(world) == once, f"reply {number}"
            await _carried_out(world, case, store)  # the new connection prepares its statements


async def _carried_out(world: World, case: Case, store: SqlRunStore) -> Hashable:
    await set_scene(world, case)
    assert case.fits(await case.verb(store), await world.rows())
    return await kept(world)


async def _through_a_proxy(dsn: str) -> AsyncIterator[tuple[SqlRunStore, RoundTripProxy]]:
    async with RoundTripProxy() as proxy:
        database = parse_dsn(proxy.dsn(dsn))
        assert isinstance(database, Postgres)
        async with SqlRunStore(PostgresUnits(database, connections=1, policy=AGAIN)) as store:
            yield store, proxy
