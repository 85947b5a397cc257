"""Statements that must not depend on how PostgreSQL carries them out: nested loops are forced, where ``IN`` with a
locking subquery runs it again for every row and changes more rows than its limit (T15)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import quote

import pytest

from deerflow_runs.model import CancelAction, Micros, OnOrphan
from deerflow_runs.protocol.decision import Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Settlement
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import open_units
from tests.races.support import DEAD, ME, OTHER, PAST, World, due, ended, opened, queued, running, the_active, vacant
from tests.rules import rule

NESTED: Final = " ".join(
    f"-c enable_{way}=off"
    for way in ("hashjoin", "mergejoin", "hashagg", "sort", "material", "memoize", "bitmapscan", "indexscan")
)


@pytest.fixture
async def nested(postgres_dsn: str) -> AsyncIterator[World]:
    """A world whose store only ever gets nested loops over whole tables."""
    units = open_units(parse_dsn(f"{postgres_dsn}?options={quote(NESTED)}"), connections=2)
    await units.open()
    async with opened(postgres_dsn, units, 0) as world:
        yield world
    await units.close()


def stores(world: World) -> SqlRunStore:
    return SqlRunStore(world.units)


def changed(world_before: dict[str, Any], world_after: dict[str, Any]) -> set[str]:
    """Whose epoch or status is another now."""
    return {
        name
        for name, run in world_after.items()
        if (run.epoch, run.status) != (world_before[name].epoch, world_before[name].status)
    }


@rule("O31", "I19", "T15")
async def test_a_claim_takes_no_more_than_it_asked_for(nested: World) -> None:
    await nested.set(*(vacant(f"r{n}", f"t{n}") for n in range(10)))
    before = await nested.rows()
    assert len(await stores(nested).claim(Actor(OTHER), 3)) == 3
    assert len(changed(before, await nested.rows())) == 3


@pytest.mark.parametrize("event", [RunEvent.TAKE_OVER_FAIL, RunEvent.TAKE_OVER_RESUME, RunEvent.FORCE])
@rule("O26", "T15")
async def test_a_sweep_changes_no_more_than_it_asked_for(nested: World, event: RunEvent) -> None:
    cancel = CancelAction.INTERRUPT if event is RunEvent.FORCE else None
    policy = OnOrphan.FAIL if event is RunEvent.TAKE_OVER_FAIL else OnOrphan.RESUME
    orphans = [
        running(f"r{n}", f"t{n}", owner_worker_id=DEAD, on_orphan=policy, cancel_action=cancel) for n in range(9)
    ]
    await nested.set(*orphans)
    before = await nested.rows()
    store = stores(nested)
    if event is RunEvent.FORCE:
        assert len(await store.force(Actor(OTHER), Given(), 2)) == 2
    else:
        assert (await store.take_over(Actor(OTHER), Given(), 2)).total == 2
    assert len(changed(before, await nested.rows())) == 2


@rule("O7", "I1", "I17", "T15")
async def test_one_end_promotes_one_head(nested: World) -> None:
    held = running("held", queue_behind=True)
    await nested.set(held, *(queued(f"r{n}") for n in range(9)))
    assert isinstance(await stores(nested).apply(held.key, RunEvent.SETTLE_SUCCESS, Actor(ME, 1)), Applied)
    rows = await nested.rows()
    assert the_active(rows) == "r0"
    assert sum(run.active for run in rows.values()) == 1


@rule("O7", "I1", "T15")
async def test_a_sweep_promotes_one_head_a_thread_and_no_more_threads_than_asked_for(nested: World) -> None:
    await nested.set(*(due(f"{thread}-{n}", thread) for thread in ("a", "b", "c") for n in range(3)))
    promoted = await stores(nested).promote(2)
    assert [run.run_id for run in promoted] == ["a-0", "b-0"]
    assert sum(run.active for run in (await nested.rows()).values()) == 2


@rule("O7", "T15")
async def test_settles_that_go_together_end_exactly_theirs(nested: World) -> None:
    runs = [running(f"r{n}", f"t{n}") for n in range(9)]
    await nested.set(*runs)
    asked = [Settlement(run.key, RunEvent.SETTLE_SUCCESS, Actor(ME, 1)) for run in runs[:4]]
    assert all(isinstance(answer, Applied) for answer in await stores(nested).settle_many(asked))
    ended = {name for name, run in (await nested.rows()).items() if run.terminal}
    assert ended == {"r0", "r1", "r2", "r3"}


@rule("O28", "T15")
async def test_a_purge_removes_no_more_than_it_asked_for(nested: World) -> None:
    await nested.set(*(ended(f"r{n}", f"t{n}") for n in range(9)))
    assert await stores(nested).purge(before=Micros(PAST + 1), limit=4) == 4
    assert len(await nested.rows()) == 5
