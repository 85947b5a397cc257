"""A connection that dies between two statements leaves all of an end or nothing.

That is the run, its receipt, its deliveries, its thread's outcome and the promotion of the next one.
"""

from __future__ import annotations

from typing import Final

import pytest

from deerflow_runs.errors import StoreUnavailable
from tests.races.cases import CASES, Case, kept, set_scene
from tests.races.stepping import Player, PostgresSteps
from tests.races.support import World
from tests.rules import rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

WHOLE: Final = (
    "admit, enqueue, behind",
    "admit, interrupt",
    "admit, rollback",
    "settle",
    "settle, behind",
    "settle, error",
    "settle, cancelled",
    "settle, restored",
    "cancel queued",
    "force",
    "force, many",
    "release",
    "promote",
    "end waiting",
    "purge",
    "close session",
)
"""Verbs that write in one transaction, whatever they read before and after it."""


@pytest.mark.parametrize("name", WHOLE)
@rule("O7", "O8", "O28", "I5", "I7")
async def test_a_connection_that_dies_in_the_middle_leaves_all_or_nothing(postgres_world: World, name: str) -> None:
    world, case = postgres_world, CASES[name]
    player = world.players[0]
    await set_scene(world, case)
    nothing = await kept(world)
    await player.begin(lambda player: case.verb(player.store))
    await player.finish()
    everything = await kept(world)
    statements = 0
    while await _dies_after(world, player, case, statements):
        assert await kept(world) in (nothing, everything), f"after {statements} statements"
        assert case.fits(await case.verb(player.store), await world.rows())
        assert await kept(world) == everything, f"repeated after {statements} statements"
        statements += 1
    assert statements > 0


async def _dies_after(world: World, player: Player, case: Case, statements: int) -> bool:
    """Carry out so many statements of the verb, then cut its connection off; False: the verb has no more."""
    assert isinstance(player.stepped, PostgresSteps)
    assert world.observer is not None
    await set_scene(world, case)
    await player.begin(lambda player: case.verb(player.store))
    for _ in range(statements):
        await player.step()
    more = player.stands
    if more:
        await world.observer.terminate(player.stepped.pid)
        with pytest.raises(StoreUnavailable):
            await player.finish()
        await player.stepped.meet()
    else:
        await player.finish()
    return more
