"""A worker that has no room, or less than none, takes nothing."""

from __future__ import annotations

import pytest

from deerflow_runs.model import Micros, OnOrphan, Session
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor
from deerflow_runs.store.sql import SqlRunStore
from tests.contract.conftest import store, units  # noqa: F401 - fixtures
from tests.contract.lives import ME, OTHER, admitted, delayed, ended, started
from tests.rules import rule


@rule("I19")
@pytest.mark.parametrize("limit", [0, -1])
async def test_nothing_is_taken_by_who_has_no_room(limit: int, store: SqlRunStore) -> None:  # noqa: F811
    for worker_id in (ME, OTHER):
        await store.open_session(Session(worker_id))
    await admitted(store, "vacant", "t1", take=False)
    await started(store, "orphan", "t2", worker_id=OTHER, on_orphan=OnOrphan.RESUME)
    await ended(store, "ended", "t3")
    await started(store, "mine", "t4", on_orphan=OnOrphan.RESUME)
    await delayed(store, "due", "t5", delay=Micros(1))
    await store.close_session(OTHER)
    assert await store.claim(Actor(ME), limit) == ()
    assert await store.hand_over(Actor(ME), limit) == ()
    assert (await store.take_over(Actor(ME), NOTHING_GIVEN, limit)).total == 0
    assert await store.promote(limit) == ()
    assert await store.purge(before=await store.now(), limit=limit) == 0
