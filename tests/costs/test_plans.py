"""What PostgreSQL reads for each statement, with a long history and few active runs (P2: costs must not grow)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Final

import asyncpg
import pytest
from sqlalchemy import Connection, text

from deerflow_runs.model import OnOrphan, RunId, Session, SessionState, ThreadId, WorkerId
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import TRANSITIONS, Into, RunEvent
from deerflow_runs.store import arrivals, endings, events, sessions
from deerflow_runs.store.dialect import POSTGRES
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate import upgrade_async
from deerflow_runs.store.schema import runs
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import open_units
from deerflow_runs.testing.postgres import PostgresCluster, PostgresServer
from tests.contract.lives import ME, OTHER, admitted, ended, started, waiting
from tests.contract.plans import Plan, plans
from tests.rules import rule

ENDED: Final = 100_000
PRIMARY: Final = "pk_dr_runs"
Unit = Callable[[Connection], Any]


@pytest.fixture(scope="module")
def history_dsn(postgres_cluster: PostgresServer, postgres_template: str) -> Any:
    """A database with 100,000 ended runs, half of them on one thread, and a handful that are open."""
    name = f"{postgres_template.removesuffix('_template')}_{secrets.token_hex(6)}"
    dsn = postgres_cluster.create_database(name, template=postgres_template)
    asyncio.run(_fill(dsn))
    yield dsn
    postgres_cluster.drop_database(name)


async def _fill(dsn: str) -> None:
    units = open_units(parse_dsn(dsn))
    await units.open()
    store = SqlRunStore(units)
    for worker in (ME, OTHER, WorkerId("host:dead")):
        await store.open_session(Session(worker))
    past = await ended(store, "past", "long")
    await units.once(lambda connection: _copy(connection, past.run_id))
    await started(store, "running", "long")
    await waiting(store, "waits", "long")
    await admitted(store, "vacant", "vacant", take=False, on_orphan=OnOrphan.RESUME)
    await admitted(store, "orphan", "orphan", worker_id=WorkerId("host:dead"), on_orphan=OnOrphan.RESUME)
    await store.close_session(WorkerId("host:dead"))
    await units.once(lambda connection: connection.exec_driver_sql("ANALYZE dr_runs").close())
    await units.close()


def _copy(connection: Connection, run_id: str) -> None:
    names = [c.name for c in runs.c if c.name not in {"run_id", "thread_id", "active", "created_at", "settled_at"}]
    sql = (
        f"INSERT INTO dr_runs (run_id, thread_id, created_at, settled_at, {', '.join(names)})"
        f" SELECT 'old-' || n, CASE WHEN n % 2 = 0 THEN 'long' ELSE 'past-' || n END, r.created_at - n,"
        f" r.settled_at - n, {', '.join('r.' + name for name in names)}"
        f" FROM dr_runs AS r, generate_series(1, {ENDED}) AS n WHERE r.run_id = :run"
    )
    connection.execute(text(sql), {"run": run_id})


def _no_history(found: list[Plan]) -> None:
    for plan in found:
        assert "dr_runs" not in plan.sequential(), plan.root
        assert plan.rows_read("dr_runs") <= 50, plan.root


BY_KEY = [event for event in RunEvent if event is not RunEvent.PROMOTE]


@rule("O14", "T8")
@pytest.mark.parametrize("event", BY_KEY)
async def test_a_guard_by_key_goes_through_the_primary_key(event: RunEvent, history_dsn: str) -> None:
    run = await _row(history_dsn, "running")
    actor = Actor(ME, run.epoch - 1, frozenset(), OTHER)  # a stale asker: guarded, explained, and nothing changes

    def unit(connection: Connection) -> object:
        if TRANSITIONS[event].ends or TRANSITIONS[event].target is Into.GONE:
            return endings.end_locked(connection, POSTGRES, run.key, event, actor, Given())
        return events.attempt(connection, POSTGRES, run.key, event, actor, Given())

    found = await plans(history_dsn, unit)
    changing = [plan for plan in found if plan.root.get("Relation Name") == "dr_runs" or plan.rows_read("dr_runs")]
    assert changing
    assert any(PRIMARY in plan.indexes() for plan in found)
    _no_history(found)


async def _row(dsn: str, run_id: str) -> Any:
    units = open_units(parse_dsn(dsn))
    await units.open()
    try:
        rows = await SqlRunStore(units).owned(ME)
        return next(run for run in rows if run.run_id == run_id)
    finally:
        await units.close()


MANY: Final[dict[str, Unit]] = {
    "claim": lambda c: endings.change_batch(c, POSTGRES, RunEvent.CLAIM, Actor(WorkerId("nobody")), Given(), 10),
    "possible": lambda c: endings.possible(c, POSTGRES, endings.TAKE_OVERS, Actor(ME), Given()),
    "force": lambda c: endings.end_batch(c, POSTGRES, RunEvent.FORCE, Actor(ME), Given(), 10),
    "take over: fail": lambda c: endings.end_batch(c, POSTGRES, RunEvent.TAKE_OVER_FAIL, Actor(ME), Given(), 10),
    "fail, waiting": lambda c: endings.end_batch(c, POSTGRES, RunEvent.TAKE_OVER_FAIL_WAITING, Actor(ME), Given(), 10),
    "re-home": lambda c: endings.change_batch(c, POSTGRES, RunEvent.RE_HOME, Actor(ME), Given(), 10),
    "hand over": lambda c: endings.change_batch(c, POSTGRES, RunEvent.HAND_OVER, Actor(OTHER), Given(), 10),
    "promote": lambda c: endings.promote_under_lock(c, POSTGRES, ["long", "vacant"]),
    "beat": lambda c: sessions.renew(c, POSTGRES, ME, hinted=False, state=SessionState.LIVE),
    "strangers": lambda c: sessions.bury_strangers(c, POSTGRES),
}


@rule("O26", "O31", "O10", "T15")
@pytest.mark.parametrize("name", MANY)
async def test_a_sweep_reads_what_is_open_and_never_what_has_ended(name: str, history_dsn: str) -> None:
    _no_history(await plans(history_dsn, MANY[name]))


@rule("O1", "O5")
async def test_an_admission_reads_no_ended_run_of_its_thread(history_dsn: str) -> None:
    newcomer = Newcomer(
        run_id=RunId("new"), thread_id=ThreadId("long"), worker_id=ME, idempotency_key="key", payload_digest="d"
    )
    _no_history(await plans(history_dsn, lambda connection: arrivals.enter(connection, POSTGRES, newcomer)))
    _no_history(await plans(history_dsn, lambda connection: arrivals.look_at_thread(connection, POSTGRES, newcomer)))


@rule("O10", "F48")
async def test_a_thousand_beats_are_heap_only() -> None:
    # The server's own ANALYZE, of whatever table, holds a snapshot, and what it may still see cannot be pruned.
    with PostgresCluster(settings={"autovacuum": "off"}) as undisturbed:
        dsn = undisturbed.create_database("beats")
        await upgrade_async(dsn)
        units = open_units(parse_dsn(dsn))
        await units.open()
        store = SqlRunStore(units)
        await store.open_session(Session(ME))
        for _ in range(1000):
            await store.renew(ME)
        await units.close()
        connection = await asyncpg.connect(dsn)
        changed, heap_only = await _updates(connection)
        await connection.close()
    assert (changed, heap_only) == (1000, 1000)


async def _updates(connection: asyncpg.Connection[Any]) -> tuple[int, int]:
    """The server's own counters; what a closed connection counted may arrive a moment later."""
    changed = heap_only = 0
    for _ in range(2000):
        row = await connection.fetchrow(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'dr_workers'"
        )
        assert row is not None
        changed, heap_only = row
        if changed >= 1000:
            break
        await connection.execute("SELECT pg_stat_clear_snapshot()")
    return changed, heap_only
