"""What statements read when nearly nothing is open, much has ended, and an old snapshot keeps every dead index entry.

That is where the planner likes a partial index best and the index is worst (feasibility.md, P2). Row and page counts
are exact; times are not looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import asyncpg
import pytest
from sqlalchemy import Connection, NullPool, event, func, insert, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from deerflow_runs.model import Micros, OnOrphan, Run, RunId, Session, SessionState, Strategy, WorkerId
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store import arrivals, endings, events, fence, reads, sessions, together
from deerflow_runs.store.base import Settlement
from deerflow_runs.store.clauses import Shape
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dialect import POSTGRES, SQLITE, Dialect
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.schema import runs, workers
from deerflow_runs.store.units import Unit, open_units
from deerflow_runs.testing.contract.subject import run_row, session_row
from deerflow_runs.testing.postgres import PostgresServer
from tests.races.support import ME, OTHER, PAST, THREAD, ended, queued, running, vacant
from tests.rules import rule

HISTORY: Final = 100_000
DYING: Final = 6_000
"""So many were active and ended while the old snapshot was open, and as many waited; half of them on one thread."""

PRIMARY: Final = "pk_dr_runs"
LEFT: Final = WorkerId("host:left")

PEOPLE: Final = (
    Session(ME, expires_at=Micros(10**18)),
    Session(OTHER, expires_at=Micros(10**18)),
    Session(LEFT, SessionState.DEAD, dead_at=Micros(1), proven=True),
)
OPEN: Final = (
    running("running", queue_behind=True),
    queued("waits"),
    vacant("vacant", "vacant"),
    queued("homeless", "vacant", home_worker_id=LEFT),
    running("orphan", "orphan", owner_worker_id=LEFT),
    running("failing", "failing", owner_worker_id=LEFT, on_orphan=OnOrphan.FAIL),
)


# --- The database ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(postgres_cluster: PostgresServer, postgres_template: str) -> Iterator[str]:
    """A database as described above; the old snapshot is held until the module is over."""
    name = f"{postgres_template}_{secrets.token_hex(4)}"
    dsn = postgres_cluster.create_database(name, template=postgres_template)
    with asyncio.Runner() as runner:
        runner.run(_do(dsn, _long_ago))
        old = runner.run(_old_snapshot(dsn))
        runner.run(_do(dsn, _since_then))
        yield dsn
        runner.run(old.close())
    postgres_cluster.drop_database(name)


async def _do(dsn: str, unit: Unit[None]) -> None:
    units = open_units(parse_dsn(dsn), connections=1)
    await units.open()
    await units.transaction(unit)
    await units.close()


async def _old_snapshot(dsn: str) -> asyncpg.Connection[Any]:
    connection = await asyncpg.connect(dsn)
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await connection.execute("SELECT count(*) FROM dr_runs WHERE active")
    return connection


def _long_ago(connection: Connection) -> None:
    connection.execute(insert(workers), [session_row(session) for session in PEOPLE])
    connection.execute(insert(runs), run_row(ended("past", "past")))
    _copy(connection, HISTORY, "old", "success")


def _since_then(connection: Connection) -> None:
    _copy(connection, DYING, "waited", "queued")
    connection.exec_driver_sql("UPDATE dr_runs SET status = 'interrupted', settled_at = 1 WHERE status = 'queued'")
    for half in ("thread", "elsewhere"):
        connection.exec_driver_sql(
            "DO $$ BEGIN FOR n IN 1 .. " + str(DYING // 2) + " LOOP UPDATE dr_runs SET status = 'running', "
            f"thread_id = '{half}', settled_at = NULL, cancel_requested_at = 1 WHERE run_id = 'old-' || n; "
            "UPDATE dr_runs SET status = 'success', settled_at = n WHERE run_id = 'old-' || n; END LOOP; END $$"
        )
    rows = [run_row(run) | {"seq": number} for number, run in enumerate(OPEN)]
    connection.execute(insert(runs), rows)
    connection.exec_driver_sql("ANALYZE dr_runs")


def _copy(connection: Connection, number: int, name: str, status: str) -> None:
    given = {
        "run_id": f"'{name}-' || n",
        "thread_id": f"CASE WHEN n % 2 = 0 THEN '{THREAD}' ELSE '{name}-' || n END",
        "status": f"'{status}'",
        "seq": "1000 + n",
        "created_at": "n",
        "settled_at": "NULL" if status == "queued" else "n",
    }
    names = [column.name for column in runs.c if column.name != "active"]
    chosen = ", ".join(given.get(name, f"r.{name}") for name in names)
    source = f"dr_runs AS r, generate_series(1, {number}) AS n WHERE r.run_id = 'past'"
    connection.execute(text(f"INSERT INTO dr_runs ({', '.join(names)}) SELECT {chosen} FROM {source}"))


# --- Looking at plans -----------------------------------------------------------------------------------------------

Node = Mapping[str, Any]


class Plan:
    """One statement's plan, carried out or only made."""

    def __init__(self, statement: str, root: Node) -> None:
        self.statement = statement
        self.root = root

    def nodes(self) -> Iterator[Node]:
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.get("Plans", [])

    def rows(self, *tables: str) -> int:
        """Rows of the tables that were looked at, kept or not; dead index entries are not among them."""
        counted = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        scans = [node for node in self.nodes() if node.get("Relation Name") in tables and "Scan" in node["Node Type"]]
        return int(sum(node["Actual Loops"] * node.get(name, 0) for node in scans for name in counted))

    def sequential(self) -> set[str]:
        return {node["Relation Name"] for node in self.nodes() if node["Node Type"] == "Seq Scan"}

    def found_by(self) -> list[str]:
        """By which index the runs are found that the statement is about; its other looks have names of their own."""
        return [node.get("Index Name", node["Node Type"]) for node in self._finding()]

    def pages_to_find(self) -> int:
        """How many pages that took."""
        return sum(node["Shared Hit Blocks"] + node["Shared Read Blocks"] for node in self._finding())

    def _finding(self) -> list[Node]:
        return [node for node in self.nodes() if node.get("Alias") == "dr_runs" and node["Node Type"] != "ModifyTable"]


async def plans(dsn: str, unit: Unit[Any]) -> list[Plan]:
    """The unit's statements, explained where they stood; everything is rolled back."""
    database = parse_dsn(dsn)
    assert isinstance(database, Postgres)
    engine = create_async_engine(database.sqlalchemy_url(), connect_args=database.connect_args(), poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(_explained, unit)
    finally:
        await engine.dispose()


def _explained(connection: Connection, unit: Unit[Any]) -> list[Plan]:
    found: list[Plan] = []

    def explain(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith(("EXPLAIN", "SAVEPOINT", "ROLLBACK", "SELECT pg_advisory")):
            return
        with connection.begin_nested() as savepoint:
            how = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
            (told,) = connection.exec_driver_sql(how + statement, parameters).scalar_one()
            found.append(Plan(statement, told["Plan"]))
            savepoint.rollback()

    event.listen(connection, "before_cursor_execute", explain)
    unit(connection)
    event.remove(connection, "before_cursor_execute", explain)
    connection.rollback()
    return found


async def generic(dsn: str, plans: Sequence[Plan]) -> list[Plan]:
    """The plans PostgreSQL makes once it has seen a statement often enough to plan it without the values."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    found = []
    for plan in plans:
        places = max((int(number) for number in re.findall(r"\$(\d+)", plan.statement)), default=0)
        values = f"({', '.join(['NULL'] * places)})" if places else ""
        await connection.execute(f"PREPARE q AS {plan.statement}")
        (told,) = await connection.fetchrow(f"EXPLAIN (FORMAT JSON) EXECUTE q{values}") or ("[]",)
        await connection.execute("DEALLOCATE q")
        found.append(Plan(plan.statement, json.loads(told)[0]["Plan"]))
    await connection.close()
    return found


# --- By key ---------------------------------------------------------------------------------------------------------

E = RunEvent
BY_KEY: Final = "dr_runs.run_id = $"
SUBJECT: Final[Mapping[RunEvent, Run]] = {
    **dict.fromkeys(RunEvent, OPEN[0]),
    **dict.fromkeys((RunEvent.PROMOTE, RunEvent.CANCEL_QUEUED, RunEvent.RE_HOME, RunEvent.END_WAITING), OPEN[1]),
    **dict.fromkeys((RunEvent.CLAIM, RunEvent.TAKE_OVER_FAIL_WAITING, RunEvent.TAKE_OVER_RESUME_WAITING), OPEN[2]),
    RunEvent.REMOVE: ended("old-3", "old-3"),
}


def by_key(event: RunEvent, dialect: Dialect) -> Unit[Any]:
    run = SUBJECT[event]
    actor = Actor(ME, run.epoch, previous=LEFT)

    def unit(connection: Connection) -> None:
        if TRANSITIONS[event].ends or event in {RunEvent.PROMOTE, RunEvent.REMOVE}:
            endings.end_locked(connection, dialect, run.key, event, actor, Given())
        else:
            events.attempt(connection, dialect, run.key, event, actor, Given())
        if endings.optimistic(event) and dialect.writes_in_ctes:
            endings.end_optimistically(connection, dialect, run.key, event, actor, Given())

    return unit


@pytest.mark.parametrize("event", RunEvent)
@rule("O7", "O14")
async def test_a_guard_by_key_goes_by_the_primary_key_however_often_it_was_planned(
    crowded: str, event: RunEvent
) -> None:
    found = [plan for plan in await plans(crowded, by_key(event, POSTGRES)) if BY_KEY in plan.statement]
    assert found
    for plan in (*found, *await generic(crowded, found)):
        assert plan.found_by() == [PRIMARY], plan.statement
    for plan in found:
        assert plan.pages_to_find() <= 20, plan.statement


@rule("O14")
async def test_the_fence_goes_by_the_primary_key(crowded: str) -> None:
    text_form = re.sub(r"%\(\w+\)s", "'1'", fence.held_sql())

    def unit(connection: Connection) -> None:
        fence.holds(connection, POSTGRES, OPEN[0].key, 1)
        connection.exec_driver_sql(text_form)

    found = await plans(crowded, unit)
    for plan in (*found, *await generic(crowded, found)):
        assert plan.found_by() == [PRIMARY], plan.statement


@rule("O7", "O14")
async def test_runs_that_settle_or_start_together_go_by_the_primary_key(crowded: str) -> None:
    asked = [Settlement(run.key, RunEvent.SETTLE_SUCCESS, Actor(ME, run.epoch)) for run in OPEN]
    for together_event in together.TOGETHER:
        found = await plans(
            crowded,
            partial(together.apply_together, dialect=POSTGRES, event=together_event, shape=Shape(), asked=asked),
        )
        for plan in (*found, *await generic(crowded, found)):
            assert set(plan.found_by()) == {PRIMARY}, plan.statement
            assert "dr_runs" not in plan.sequential()


# --- Many -----------------------------------------------------------------------------------------------------------


NEWCOMER: Final = Newcomer(
    run_id=RunId("new"), thread_id=THREAD, worker_id=ME, strategy=Strategy.INTERRUPT, idempotency_key="key"
)


def batch(event: RunEvent) -> Callable[[Connection, Dialect], Any]:
    how = endings.end_batch if TRANSITIONS[event].ends else endings.change_batch
    return lambda c, d: how(c, d, event, Actor(ME, previous=LEFT), Given(), 10)


SWEEPS: Final[Mapping[str, Callable[[Connection, Dialect], Any]]] = {
    event.value: batch(event)
    for event in (*endings.TAKE_OVERS, *endings.LEAVING, E.CLAIM, E.FORCE, E.RE_HOME, E.END_WAITING)
} | {
    "what a sweep could do": lambda c, d: endings.possible(c, d, endings.TAKE_OVERS, Actor(ME), Given()),
    "idle threads": lambda c, d: reads.idle_threads_with_due_runs(c, d, 10),
    "promote": lambda c, d: endings.promote_under_lock(c, d, [THREAD, "vacant", "orphan"]),
    "next due": reads.next_due,
    "seizable": lambda c, d: reads.seizable(c, d, Actor(ME), Given(), 10),
    "renew": lambda c, d: sessions.renew(c, d, ME, hinted=False, state=SessionState.LIVE),
    "strangers": sessions.bury_strangers,
    "forget": lambda c, d: sessions.forget_dead(c, d, Micros(0)),
    "purge": lambda c, d: endings.purge(c, d, Micros(PAST), 10),
    "enter": lambda c, d: arrivals.enter(c, d, replace(NEWCOMER, strategy=Strategy.REJECT)),
    "wait behind": lambda c, d: arrivals.wait_behind(c, d, replace(NEWCOMER, strategy=Strategy.ENQUEUE), Given()),
    "interrupt": lambda c, d: arrivals.admit_locked(c, d, NEWCOMER, Given()),
}


def _asking(ask: Callable[[Connection, Dialect], Any], dialect: Dialect, connection: Connection) -> Any:
    return ask(connection, dialect)


@pytest.mark.parametrize("name", SWEEPS)
@rule("O1", "O7", "O10", "O26", "O31")
async def test_what_is_open_is_found_without_reading_what_has_ended(crowded: str, name: str) -> None:
    found = await plans(crowded, partial(_asking, SWEEPS[name], POSTGRES))
    assert found
    for plan in found:
        assert plan.rows("dr_runs") <= 40, plan.statement
    for plan in (*found, *await generic(crowded, found)):
        assert "dr_runs" not in plan.sequential(), plan.statement


# --- SQLite ---------------------------------------------------------------------------------------------------------


async def told(dsn: str, unit: Unit[Any]) -> list[tuple[str, list[str]]]:
    """What SQLite says about each statement of the unit."""
    found: list[tuple[str, list[str]]] = []

    def explain(connection: Connection, _: Any, statement: str, parameters: Any, *__: Any) -> None:
        if not statement.startswith("EXPLAIN"):
            rows = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters).all()
            found.append((statement, [row[3] for row in rows]))

    def explaining(connection: Connection) -> None:
        event.listen(connection, "before_cursor_execute", explain)
        try:
            unit(connection)
        finally:
            event.remove(connection, "before_cursor_execute", explain)
        raise Enough

    units = open_units(parse_dsn(dsn))
    await units.open()
    await units.once(_seed_once)
    with contextlib.suppress(Enough):
        await units.transaction(explaining)
    await units.close()
    return found


class Enough(Exception):
    """Everything was explained; nothing is to be kept."""


def _seed_once(connection: Connection) -> None:
    if connection.scalar(select(func.count()).select_from(runs)):
        return
    connection.execute(insert(workers), [session_row(session) for session in PEOPLE])
    connection.execute(insert(runs), [run_row(run) for run in OPEN])


@rule("O1", "O7", "O10", "O26", "O31")
async def test_sqlite_finds_what_is_open_by_the_small_indexes(sqlite_dsn: str) -> None:
    for name, ask in SWEEPS.items():
        for statement, details in await told(sqlite_dsn, partial(_asking, ask, SQLITE)):
            looks = [detail for detail in details if re.match(r"(SCAN|SEARCH) (dr_runs|other|waiting|held)\b", detail)]
            assert all(" USING " in look for look in looks), (name, statement, details)
            assert not any("ix_dr_runs_thread" in look for look in looks), (name, statement, details)


@rule("O7", "O14")
async def test_sqlite_finds_a_run_by_its_key(sqlite_dsn: str) -> None:
    for asked in RunEvent:
        for statement, details in await told(sqlite_dsn, by_key(asked, SQLITE)):
            if re.search(r"WHERE dr_runs.run_id = \?", statement):
                assert "SEARCH dr_runs USING INDEX sqlite_autoindex_dr_runs_1 (run_id=?)" in details, statement
