"""What an upgrade promises its caller, from whatever state, thread, loop and address it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest
from sqlalchemy import Connection, Engine, StaticPool, create_engine, event, inspect

from deerflow_runs.errors import InvalidDsn, StoreUnavailable, UsageError
from deerflow_runs.store.database import DatabaseKind
from deerflow_runs.store.migrate import check, current, head, offline_sql, upgrade, upgrade_async, upgrade_connection
from deerflow_runs.store.migrate_connect import begin_nothing_unasked
from deerflow_runs.store.schema import metadata
from tests.migrations.databases import add_run, ask, do, indexes, is_sqlite
from tests.rules import rule

# --- From every state -----------------------------------------------------------------------------------------------


def test_an_empty_database_reaches_the_head(empty: str) -> None:
    upgrade(empty)
    assert current(empty) == head()
    check(empty)


@rule("P106")
def test_a_database_one_revision_behind_keeps_its_rows(empty: str) -> None:
    upgrade(empty, revision="0001")
    assert current(empty) == "0001"
    add_run(empty, "r", metadata={"kept": True})
    row = "SELECT run_id, thread_id, status, epoch, metadata, updated_at FROM dr_runs"
    before = ask(empty, row)
    upgrade(empty)
    assert current(empty) == head()
    assert ask(empty, row) == before


@rule("B253")
def test_an_upgrade_of_an_upgraded_database_changes_nothing(empty: str) -> None:
    upgrade(empty)
    do(empty, "UPDATE dr_meta SET number = 7 WHERE name = 'payload_version'")
    before = indexes(empty)
    upgrade(empty)
    upgrade(empty, revision="0001")
    assert current(empty) == head()
    assert indexes(empty) == before
    assert ask(empty, "SELECT number FROM dr_meta WHERE name = 'payload_version'") == [(7,)]


def test_a_revision_that_does_not_exist_is_refused_by_name_of_those_that_do(empty: str) -> None:
    with pytest.raises(UsageError, match="head, 0001, 0002"):
        upgrade(empty, revision="0000")
    assert current(empty) is None


def test_asking_for_the_revision_creates_no_file(tmp_path: Path) -> None:
    assert current(str(tmp_path / "none.db")) is None
    assert list(tmp_path.iterdir()) == []


# --- In memory ------------------------------------------------------------------------------------------------------


def test_a_database_in_memory_is_refused_by_address() -> None:
    with pytest.raises(InvalidDsn, match="name a file"):
        upgrade(":memory:")


@pytest.fixture
def memory() -> Iterator[Engine]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    event.listen(engine, "connect", begin_nothing_unasked)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    yield engine
    engine.dispose()


def test_a_database_in_memory_is_upgraded_on_its_connection(memory: Engine) -> None:
    with memory.connect() as connection:
        upgrade_connection(connection)
        upgrade_connection(connection)
    with memory.connect() as connection:
        assert set(metadata.tables) < set(inspect(connection).get_table_names())


# --- From every thread and loop -------------------------------------------------------------------------------------


async def test_an_upgrade_may_be_called_where_a_loop_runs(empty: str) -> None:
    upgrade(empty)
    assert current(empty) == head()


async def test_an_upgrade_may_be_awaited(empty: str) -> None:
    await upgrade_async(empty)
    assert current(empty) == head()


def test_two_databases_are_upgraded_at_once_in_one_process(tmp_path: Path) -> None:
    first, second = (f"sqlite:///{tmp_path / name}" for name in ("first.db", "second.db"))
    in_the_middle, over = threading.Event(), threading.Event()

    def let_the_second_overtake(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "CREATE TABLE dr_threads" in statement and not in_the_middle.is_set():
            in_the_middle.set()
            over.wait(1)

    def upgrade_second() -> None:
        assert in_the_middle.wait(60)
        upgrade(second)
        over.set()

    with listening(let_the_second_overtake), ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(upgrade, first), pool.submit(upgrade_second)):
            done.result()
    assert (current(first), current(second)) == (head(), head())


@contextlib.contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """Every statement of this process is shown to ``listener`` before it is sent."""
    event.listen(Engine, "before_cursor_execute", listener)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", listener)


class Held:
    """A set-up that says when it began and lasts until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let_go = threading.Event()
        self.ended = False

    def __call__(self, _dsn: str) -> None:
        self.began.set()
        assert self.let_go.wait(60)
        self.ended = True


async def test_an_upgrade_that_has_begun_is_finished_before_its_cancellation_is_told(empty: str) -> None:
    held = Held()
    task = asyncio.create_task(upgrade_async(empty, also=[held]))
    await asyncio.to_thread(held.began.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    held.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.ended
    assert current(empty) == head()


async def test_a_cancelled_upgrade_stops_waiting_for_the_lock(empty: str) -> None:
    held, done = Held(), list[str]()
    holder = asyncio.create_task(upgrade_async(empty, also=[held]))
    await asyncio.to_thread(held.began.wait, 60)
    waiter = asyncio.create_task(upgrade_async(empty, also=[done.append]))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    held.let_go.set()
    await holder
    assert done == []


# --- Under one lock -------------------------------------------------------------------------------------------------


def test_further_set_up_runs_after_the_upgrade_and_every_time(empty: str) -> None:
    seen: list[tuple[str, str | None]] = []
    for _ in range(2):
        upgrade(empty, also=[lambda dsn: seen.append((dsn, current(dsn)))])
    assert seen == [(empty, head())] * 2


def test_further_set_up_runs_under_the_lock_of_the_upgrade(empty: str) -> None:
    refused: list[str] = []

    def intrude(dsn: str) -> None:
        with pytest.raises(StoreUnavailable) as error:
            upgrade(dsn, wait=0)
        refused.append(str(error.value))

    upgrade(empty, also=[intrude])
    upgrade(empty, wait=0)
    assert len(refused) == 1
    holder = f"process {os.getpid()}) still holds" if is_sqlite(empty) else "server process"
    assert "another upgrade" in refused[0]
    assert holder in refused[0]


def test_a_set_up_that_fails_frees_the_lock_and_is_told(empty: str) -> None:
    def fail(dsn: str) -> None:
        raise LookupError(dsn)

    with pytest.raises(LookupError):
        upgrade(empty, also=[fail])
    upgrade(empty, wait=10)


def test_two_names_of_one_file_are_one_lock(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "runs.db")

    def intrude(_dsn: str) -> None:
        with pytest.raises(StoreUnavailable):
            upgrade(str(tmp_path / "runs.db"), wait=0)

    upgrade(tmp_path / "link.db", also=[intrude])


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidDsn, match="missing does not exist"):
        upgrade(str(tmp_path / "missing" / "runs.db"))


# --- Through every address of PostgreSQL ----------------------------------------------------------------------------


def test_a_pooler_is_bypassed_by_the_direct_address(empty_postgres: str) -> None:
    nobody = "postgresql://nobody@127.0.0.1:1/none?pooler=true"
    with pytest.raises(InvalidDsn, match="direct_url="):
        upgrade(nobody)
    upgrade(f"{nobody}&direct_url={quote(empty_postgres, safe='')}")
    assert current(empty_postgres) == head()


def test_a_check_goes_through_the_pooler_itself(empty_postgres: str) -> None:
    upgrade(empty_postgres)
    check(f"{empty_postgres}?pooler=true")


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    with pytest.raises(StoreUnavailable) as error:
        upgrade("postgresql://me:geheim@127.0.0.1:1/none")
    assert "me@127.0.0.1:1/none" in str(error.value)
    assert "geheim" not in str(error.value)


def test_a_schema_takes_the_tables_the_version_and_the_counters(empty_postgres: str) -> None:
    own = f"{empty_postgres}?schema=own_one"
    upgrade(own)
    check(own)
    assert current(own) == head()
    assert current(empty_postgres) is None
    kinds = "SELECT relname FROM pg_class WHERE relnamespace = CAST('{}' AS regnamespace) AND relkind IN ('r', 'S')"
    names = {name for (name,) in ask(empty_postgres, kinds.format("own_one"))}
    assert names == {*metadata.tables, "dr_alembic_version", "dr_seq", "dr_turn"}
    assert ask(empty_postgres, kinds.format("public")) == []


def test_two_schemas_of_one_database_are_upgraded_apart(empty_postgres: str) -> None:
    do(empty_postgres, "CREATE SCHEMA two")
    upgrade(empty_postgres)
    upgrade(f"{empty_postgres}?schema=two", revision="0001")
    assert current(empty_postgres) == head()
    assert current(f"{empty_postgres}?schema=two") == "0001"
    upgrade(f"{empty_postgres}?schema=two")
    index = "SELECT schemaname FROM pg_indexes WHERE indexname = 'uq_dr_runs_active_thread' ORDER BY 1"
    assert ask(empty_postgres, index) == [("public",), ("two",)]


def test_a_time_limit_of_the_server_does_not_cut_an_upgrade_off(empty_postgres: str) -> None:
    (name,) = ask(empty_postgres, "SELECT current_database()")[0]
    do(empty_postgres, f"ALTER DATABASE {name} SET statement_timeout = 1234")
    limits: list[str] = []

    def note(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("CREATE UNIQUE INDEX"):
            limits.extend(connection.exec_driver_sql("SHOW statement_timeout").scalars())

    with listening(note):
        upgrade(empty_postgres)
    assert limits == ["0", "0"]


# --- By hand --------------------------------------------------------------------------------------------------------


@rule("P106")
def test_the_sql_for_people_builds_the_same_database(empty: str, second_postgres: str) -> None:
    kind, by_hand = DatabaseKind.SQLITE, empty + ".by_hand"
    if not is_sqlite(empty):
        kind, by_hand = DatabaseKind.POSTGRES, second_postgres
    sql = offline_sql(kind)
    for table in metadata.tables:
        assert f"CREATE TABLE {table} (" in sql
    asyncio.run(_by_hand(by_hand, sql))
    upgrade(empty)
    check(by_hand)
    assert indexes(by_hand) == indexes(empty)


async def _by_hand(dsn: str, sql: str) -> None:
    """As a person's program sends it: on PostgreSQL one statement after the other, each for itself."""
    if is_sqlite(dsn):
        with contextlib.closing(sqlite3.connect(dsn.removeprefix("sqlite:///"))) as file:
            file.executescript(sql)
        return
    connection = await asyncpg.connect(dsn)
    for statement in filter(str.strip, sql.split(";\n")):
        await connection.execute(statement)
    await connection.close()
