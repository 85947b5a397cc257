"""What a sweep asks costs nothing for runs that have ended: on SQLite by its plans, on PostgreSQL by the rows read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
from sqlalchemy import Connection, event

from deerflow_runs.model import Micros, OnOrphan, Session, WorkerId
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import endings, sessions
from deerflow_runs.store.dialect import POSTGRES, SQLITE, Dialect
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from tests.contract.lives import ME, OTHER, ended, names, started
from tests.contract.plans import add_history, plans
from tests.rules import rule

BY: Final = Actor(ME, previous=OTHER)
FEW: Final = 10

Question = Callable[[Connection, Dialect], Any]


def changed(what: RunEvent) -> Question:
    return lambda connection, dialect: endings.change_batch(connection, dialect, what, BY, NOTHING_GIVEN, FEW)


def ending(what: RunEvent) -> Question:
    return lambda connection, dialect: endings.end_batch(connection, dialect, what, BY, NOTHING_GIVEN, FEW)


QUESTIONS: Final[dict[str, Question]] = {
    "is there anything to take over": lambda connection, dialect: endings.possible(
        connection, dialect, endings.TAKE_OVERS, BY, NOTHING_GIVEN
    ),
    "fail orphans": ending(RunEvent.TAKE_OVER_FAIL),
    "release orphans": ending(RunEvent.TAKE_OVER_RELEASE),
    "resume orphans": changed(RunEvent.TAKE_OVER_RESUME),
    "force": ending(RunEvent.FORCE),
    "fail what waits": ending(RunEvent.TAKE_OVER_FAIL_WAITING),
    "free what waits": changed(RunEvent.TAKE_OVER_RESUME_WAITING),
    "re-home": changed(RunEvent.RE_HOME),
    "end what waits": ending(RunEvent.END_WAITING),
    "hand over": changed(RunEvent.HAND_OVER),
    "claim": changed(RunEvent.CLAIM),
    "bury strangers": sessions.bury_strangers,
    "forget the dead": lambda connection, dialect: sessions.forget_dead(connection, dialect, Micros(0)),
}


async def populated(dsn: str) -> Units:
    """A store in which one run has ended and one runs whose session is dead."""
    units = open_units(parse_dsn(dsn))
    await units.open()
    store = SqlRunStore(units)
    for worker_id in (ME, OTHER):
        await store.open_session(Session(worker_id))
    await ended(store, "thread", "thread")
    await started(store, "orphan", "other thread", worker_id=OTHER)
    await store.close_session(OTHER)
    return units


@pytest.fixture
async def sqlite(sqlite_dsn: str) -> AsyncIterator[Units]:
    units = await populated(sqlite_dsn)
    yield units
    await units.close()


@rule("O26", "F50")
@pytest.mark.parametrize("question", QUESTIONS)
async def test_no_sweep_reads_the_whole_table_of_runs_on_sqlite(question: str, sqlite: Units) -> None:
    steps = await sqlite.transaction(lambda connection: _steps(connection, QUESTIONS[question]))
    scans = [step for step in steps if step.startswith("SCAN dr_runs")]
    assert not [step for step in scans if "dr_runs_" not in step.removeprefix("SCAN dr_runs") or "autoindex" in step]


def _steps(connection: Connection, question: Question) -> list[str]:
    seen: list[tuple[str, Any]] = []

    def see(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        seen.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", see)
    question(connection, SQLITE)
    event.remove(connection, "before_cursor_execute", see)
    explained = (connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", given) for sql, given in seen)
    return [row[3] for rows in explained for row in rows]


@rule("O26", "F50")
async def test_no_sweep_reads_the_whole_table_of_runs_on_postgres(postgres_dsn: str) -> None:
    units = await populated(postgres_dsn)
    await units.once(lambda connection: add_history(connection, "thread"))
    await units.close()
    for name, question in QUESTIONS.items():
        for plan in await plans(postgres_dsn, lambda connection, ask=question: ask(connection, POSTGRES)):  # type: ignore[misc]
            assert plan.rows_read("dr_runs") <= FEW, name


@rule("O26")
async def test_a_sweep_recovers_the_oldest_whatever_the_runs_are_called(dsn: str) -> None:
    units = await populated(dsn)
    store = SqlRunStore(units)
    third = WorkerId("host:third")
    await store.open_session(Session(third))
    for run_id in ("zz", "aa"):
        await started(store, run_id, f"of {run_id}", worker_id=third, on_orphan=OnOrphan.RESUME)
    await store.close_session(third)
    assert names((await store.take_over(BY, NOTHING_GIVEN, 1)).resumed) == ["zz"]
    await units.close()
