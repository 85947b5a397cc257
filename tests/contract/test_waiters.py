"""Runs that wait as workers look at them, on both databases: what has been vacant for long, and what has ended."""

from __future__ import annotations

from functools import partial

from deerflow_runs.model import Micros, RunId
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import waiters
from deerflow_runs.store.dialect import POSTGRES
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from tests.contract.lives import HOUR, admitted, delayed, ended, executed, happened, names, reserved, started, waiting
from tests.contract.plans import add_history, plans
from tests.rules import rule

NOW = Micros(0)


@rule("O31")
async def test_only_what_waits_for_a_worker_is_unclaimed(store: SqlRunStore) -> None:
    await started(store, "running", "a")
    await waiting(store, "queued", "a")
    await delayed(store, "later", "b")
    await reserved(store, "hold", "c")
    await ended(store, "past", "d")
    await admitted(store, "vacant", "e", take=False)
    cancelled = await admitted(store, "cancelled", "f", take=False)
    await happened(store, cancelled, RunEvent.REQUEST_CANCEL)
    assert names(await store.unclaimed(NOW, limit=10)) == ["vacant"]


@rule("O31", "O30")
async def test_a_run_is_unclaimed_since_it_could_have_been_claimed(store: SqlRunStore, units: Units) -> None:
    for name in ("fresh", "old", "backing-off"):
        await admitted(store, name, name, take=False)
    await executed(units, "UPDATE dr_runs SET not_before = not_before - 7200000000 WHERE run_id = 'old'")
    await executed(units, "UPDATE dr_runs SET not_before = not_before + 7200000000 WHERE run_id = 'backing-off'")
    assert names(await store.unclaimed(HOUR, limit=10)) == ["old"]
    assert names(await store.unclaimed(NOW, limit=10)) == ["old", "fresh"]


@rule("O31")
async def test_unclaimed_runs_are_read_part_by_part(store: SqlRunStore, units: Units) -> None:
    for number in range(5):
        await admitted(store, f"r{number}", f"t{number}", take=False)
    await executed(units, "UPDATE dr_runs SET not_before = 5 WHERE run_id <> 'r4'")
    first = await store.unclaimed(NOW, limit=2)
    second = await store.unclaimed(NOW, limit=2, after=first[-1])
    third = await store.unclaimed(NOW, limit=2, after=second[-1])
    assert [names(part) for part in (first, second, third)] == [["r0", "r1"], ["r2", "r3"], ["r4"]]


@rule("P105")
async def test_an_unreadable_run_hides_no_other(store: SqlRunStore, units: Units) -> None:
    for name in ("a", "b"):
        await admitted(store, name, name, take=False)
    await executed(units, "UPDATE dr_runs SET metadata = '{' WHERE run_id = 'a'")
    assert names(await store.unclaimed(NOW, limit=10)) == ["b"]


@rule("O28")
async def test_of_many_runs_it_is_known_which_have_ended_and_which_are_not_there(store: SqlRunStore) -> None:
    await ended(store, "past", "a")
    await started(store, "running", "b")
    await waiting(store, "queued", "b")
    await reserved(store, "hold", "c")
    asked = [RunId(name) for name in ("past", "running", "queued", "hold", "never", "past")]
    assert await store.have_ended(asked) == {"past": True, "running": False, "queued": False}
    assert await store.have_ended([RunId(f"n{number}") for number in range(2500)]) == {}
    assert await store.have_ended([]) == {}


@rule("F50")
async def test_neither_question_looks_at_runs_it_does_not_answer(postgres_dsn: str) -> None:
    async with store_at(postgres_dsn) as store:
        await ended(store, "past", deliveries={"webhook": {"url": "x"}})
        await store.units.transaction(lambda connection: add_history(connection, "past"))
        vacant = await admitted(store, "vacant", "v", take=False)
    ids = [RunId("past"), RunId("vacant"), RunId("never")]
    for after in (None, vacant):
        (plan,) = await plans(
            postgres_dsn, partial(waiters.unclaimed, dialect=POSTGRES, waited_for=NOW, limit=10, after=after)
        )
        assert plan.rows_read("dr_runs") <= 1
        assert plan.indexes() == {"ix_dr_runs_vacant"}
    (plan,) = await plans(postgres_dsn, partial(waiters.have_ended, dialect=POSTGRES, run_ids=ids))
    assert plan.rows_read("dr_runs") <= len(ids)
