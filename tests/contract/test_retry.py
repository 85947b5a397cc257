"""What the errors of real drivers mean, and how the one retry loop acts on it."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy import exc as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from deerflow_runs.errors import InvalidConfig, InvalidValue, StoreUnavailable
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.failures import driver_error, error_code
from deerflow_runs.store.retry import ErrorKind, RetryPolicy, classify, retrying, retrying_in_thread
from deerflow_runs.testing import PostgresCluster, PostgresServer
from tests.rules import rule

TRANSIENT, UNKNOWN, UNIQUE, PERMANENT = (
    ErrorKind.TRANSIENT,
    ErrorKind.UNKNOWN_OUTCOME,
    ErrorKind.UNIQUE_VIOLATION,
    ErrorKind.PERMANENT,
)


# --- The loop


class Script:
    """An attempt that raises the errors it was given, one after the other, then answers; and a sleep that is noted."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.slept: list[float] = []

    def sync(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"

    async def attempt(self) -> str:
        return self.sync()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def run(self, policy: RetryPolicy, chance: float = 1.0) -> str:
        return await retrying(policy, self.attempt, sleep=self.sleep, chance=lambda: chance)

    def run_in_thread(self, policy: RetryPolicy, chance: float = 1.0) -> str:
        return retrying_in_thread(policy, self.sync, sleep=self.slept.append, chance=lambda: chance)


def postgres_error(sqlstate: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": sqlstate, "M": "zqx"})


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("zqx")
    error.sqlite_errorcode = code
    return error


def wrapped(error: Exception) -> sa.DBAPIError:
    """As SQLAlchemy would raise it, with the parameters of the statement."""
    try:
        raise sa.DBAPIError("insert into t values (:secret)", {"secret": "zqx"}, error) from error
    except sa.DBAPIError as raised:
        return raised


async def test_an_answer_comes_without_waiting() -> None:
    script = Script()
    assert await script.run(RetryPolicy()) == "answer"
    assert (script.calls, script.slept) == (1, [])


async def test_waits_double_up_to_the_maximum_with_full_jitter() -> None:
    for chance in (1.0, 0.5, 0.0):
        script = Script(*(postgres_error("40001") for _ in range(7)))
        policy = RetryPolicy(max_attempts=8, initial=0.05, maximum=1.0, factor=2)
        assert await script.run(policy, chance) == "answer"
        assert script.slept == [chance * wait for wait in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0)]


def test_a_thousandth_wait_is_the_maximum() -> None:
    assert RetryPolicy(factor=10).wait(1000, 1.0) == 1.0


@pytest.mark.parametrize(
    "wrong", [{"max_attempts": 0}, {"initial": 2.0}, {"initial": -1.0}, {"factor": 0.5}, {"factor": 1e9}]
)
def test_a_policy_that_cannot_wait_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        RetryPolicy(**wrong)


async def test_after_the_last_attempt_nobody_waits_and_the_store_is_unavailable() -> None:
    script = Script(*(wrapped(postgres_error("40P01")) for _ in range(5)))
    with pytest.raises(StoreUnavailable) as caught:
        await script.run(RetryPolicy())
    assert (script.calls, len(script.slept)) == (5, 4)
    assert str(caught.value) == (
        "no answer from the store after 5 attempts, the last error was 40P01: nothing was stored"
    )
    assert isinstance(caught.value.__cause__, asyncpg.DeadlockDetectedError)


@rule("O8")
async def test_one_lost_reply_leaves_the_outcome_unknown() -> None:
    script = Script(ConnectionResetError(), postgres_error("40001"))
    with pytest.raises(StoreUnavailable, match=r"40001: it may have been stored; repeat it with the same ids"):
        await script.run(RetryPolicy(max_attempts=2))


async def test_nothing_of_the_statement_is_shown_when_the_store_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        await Script(wrapped(sqlite_error(sqlite3.SQLITE_BUSY))).run(RetryPolicy(max_attempts=1))
    printed = "".join(traceback.format_exception(caught.value))
    assert "insert into" not in printed
    assert "secret" not in printed
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "error",
    [wrapped(postgres_error("23505")), wrapped(postgres_error("42601")), KeyError("a"), InvalidValue("a", "b")],
    ids=error_code,
)
async def test_an_answer_and_a_mistake_pass_unchanged(error: Exception) -> None:
    script = Script(error)
    with pytest.raises(type(error)) as caught:
        await script.run(RetryPolicy())
    assert caught.value is error
    assert script.calls == 1


async def test_a_cancellation_is_never_swallowed() -> None:
    script = Script(postgres_error("40001"), asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await script.run(RetryPolicy())
    assert script.calls == 2


async def test_a_cancellation_while_waiting_ends_the_loop() -> None:
    waiting = asyncio.Event()
    script = Script(*(postgres_error("40001") for _ in range(5)))

    async def sleep(_: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(retrying(RetryPolicy(), script.attempt, sleep=sleep))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == 1


@rule("O34")
def test_a_thread_repeats_in_the_same_way() -> None:
    script = Script(*(sqlite_error(sqlite3.SQLITE_BUSY) for _ in range(3)))
    assert script.run_in_thread(RetryPolicy(initial=0.0002, maximum=0.0004)) == "answer"
    assert script.slept == [0.0002, 0.0004, 0.0004]
    with pytest.raises(StoreUnavailable, match="SQLITE_BUSY"):
        Script(*busy_for_ever()).run_in_thread(RetryPolicy(max_attempts=2))


def busy_for_ever() -> list[sqlite3.Error]:
    found = []
    for _ in range(2):
        found.append(sqlite_error(sqlite3.SQLITE_BUSY))
        found[-1].sqlite_errorname = "SQLITE_BUSY"
    return found


# --- Codes


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        *((state, TRANSIENT) for state in ("40001", "40P01", "55P03", "57014", "57P03", "25006", "25P03", "25P04")),
        *((state, TRANSIENT) for state in ("08001", "08004", "53000", "53100", "53200", "53300", "53400")),
        *((state, UNKNOWN) for state in ("08000", "08003", "08006", "08007", "08P01", "40003", "57P01", "57P02")),
        *((state, UNKNOWN) for state in ("57P05", "58030")),
        ("23505", UNIQUE),
        *((state, PERMANENT) for state in ("23503", "23502", "23P01", "42601", "42P01", "28P01", "3D000", "22P02")),
        *((state, PERMANENT) for state in ("25P02", "40002", "57P04", "58P01", "XX000", "XX001", "XX002", "ZZ999")),
    ],
)
def test_a_sqlstate_means_the_same_bare_and_wrapped(state: str, kind: ErrorKind) -> None:
    error = postgres_error(state)
    assert classify(error) is classify(wrapped(error)) is kind
    assert error_code(wrapped(error)) == state


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, TRANSIENT) for name in ("BUSY", "BUSY_RECOVERY", "BUSY_SNAPSHOT", "BUSY_TIMEOUT", "LOCKED")),
        *((name, TRANSIENT) for name in ("LOCKED_SHAREDCACHE", "FULL", "NOMEM", "PROTOCOL", "SCHEMA", "INTERRUPT")),
        *((name, TRANSIENT) for name in ("CANTOPEN", "CANTOPEN_ISDIR")),
        *((name, UNKNOWN) for name in ("IOERR", "IOERR_FSYNC", "IOERR_SHORT_READ")),
        *((name, UNIQUE) for name in ("CONSTRAINT_UNIQUE", "CONSTRAINT_PRIMARYKEY", "CONSTRAINT_ROWID")),
        *((name, PERMANENT) for name in ("CONSTRAINT_NOTNULL", "CONSTRAINT_CHECK", "CONSTRAINT", "ERROR", "MISUSE")),
        *((name, PERMANENT) for name in ("CORRUPT", "CORRUPT_INDEX", "NOTADB", "READONLY", "IOERR_DATA", "TOOBIG")),
    ],
)
def test_a_result_code_of_sqlite_means_the_same_bare_and_wrapped(name: str, kind: ErrorKind) -> None:
    error = sqlite_error(getattr(sqlite3, f"SQLITE_{name}"))
    assert classify(error) is classify(wrapped(error)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(), UNKNOWN),
        (TimeoutError(), UNKNOWN),
        (ssl.SSLError(), UNKNOWN),
        (ssl.SSLCertVerificationError(), PERMANENT),
        (asyncpg.InterfaceError("a"), UNKNOWN),
        (asyncpg.DataError("a"), PERMANENT),
        (asyncpg.ClientConfigurationError("a"), PERMANENT),
        (asyncpg.TargetServerAttributeNotMatched("a"), TRANSIENT),
        (asyncpg.InternalClientError("a"), UNKNOWN),
        (sa.TimeoutError(), TRANSIENT),
        (sa.PendingRollbackError(), TRANSIENT),
        (sa.DBAPIError("select 1", None, sqlite3.Error(), connection_invalidated=True), UNKNOWN),
        (sa.DBAPIError("select 1", None, sqlite3.Error()), PERMANENT),
        (sa.ResourceClosedError(), PERMANENT),
        (sqlite3.ProgrammingError(), PERMANENT),
        (StoreUnavailable(), PERMANENT),
        (asyncio.CancelledError(), PERMANENT),
        (RuntimeError("database is locked, deadlock detected, 40001"), PERMANENT),
    ],
)
def test_an_error_without_a_code_is_known_by_its_type_and_never_by_its_text(
    error: BaseException, kind: ErrorKind
) -> None:
    assert classify(error) is kind


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("a"), OSError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is UNKNOWN


async def test_a_timeout_is_not_hidden_by_the_cancellation_that_carried_it() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    assert classify(caught.value) is UNKNOWN
    assert driver_error(caught.value) is caught.value


# --- SQLite's own errors


def raised_by(work: Callable[[], object]) -> Exception:
    try:
        work()
    except Exception as error:  # noqa: BLE001 (whatever is raised is what the test looks at)
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "t.db", isolation_level=None, timeout=0)) as opened:
        opened.execute("create table t (a integer primary key, b text unique not null)")
        opened.execute("insert into t values (1, 'x'), (2, 'y')")
        yield opened


def other(connection: sqlite3.Connection) -> sqlite3.Connection:
    _, _, path = connection.execute("pragma database_list").fetchone()
    return sqlite3.connect(path, isolation_level=None, timeout=0)


def test_a_locked_file_is_transient(connection: sqlite3.Connection) -> None:
    connection.execute("begin immediate")
    with closing(other(connection)) as second:
        error = raised_by(lambda: second.execute("begin immediate"))
    assert (classify(error), error_code(error)) == (TRANSIENT, "SQLITE_BUSY")


def test_an_old_snapshot_is_transient(connection: sqlite3.Connection) -> None:
    connection.execute("pragma journal_mode = wal")
    with closing(other(connection)) as second:
        second.execute("begin")
        second.execute("select * from t").fetchall()
        connection.execute("insert into t values (3, 'z')")
        error = raised_by(lambda: second.execute("insert into t values (4, 'w')"))
    assert (classify(error), error_code(error)) == (TRANSIENT, "SQLITE_BUSY_SNAPSHOT")


def test_a_table_in_use_is_transient(connection: sqlite3.Connection) -> None:
    reading = connection.execute("select * from t")
    reading.fetchone()
    error = raised_by(lambda: connection.execute("drop table t"))
    reading.close()
    assert (classify(error), error_code(error)) == (TRANSIENT, "SQLITE_LOCKED")


def test_an_interrupted_statement_is_transient(connection: sqlite3.Connection) -> None:
    connection.set_progress_handler(lambda: 1, 1)
    assert classify(raised_by(lambda: connection.execute("select * from t").fetchall())) is TRANSIENT


def test_a_full_disk_is_transient(connection: sqlite3.Connection) -> None:
    connection.execute("pragma max_page_count = 3")
    error = raised_by(lambda: connection.execute("insert into t values (3, ?)", ("x" * 100_000,)))
    assert (classify(error), error_code(error)) == (TRANSIENT, "SQLITE_FULL")


def test_a_file_that_cannot_be_opened_is_transient(tmp_path: Path) -> None:
    error = raised_by(lambda: sqlite3.connect(tmp_path / "no" / "t.db"))
    assert (classify(error), error_code(error)) == (TRANSIENT, "SQLITE_CANTOPEN")


@rule("B010", "B011")
def test_the_unique_index_and_the_primary_key_are_told_from_other_constraints(connection: sqlite3.Connection) -> None:
    for values, kind in (("3, 'x'", UNIQUE), ("1, 'z'", UNIQUE), ("3, null", PERMANENT)):
        assert classify(raised_by(lambda: connection.execute(f"insert into t values ({values})"))) is kind  # noqa: B023


def test_a_damaged_file_is_permanent(connection: sqlite3.Connection, tmp_path: Path) -> None:
    connection.execute("begin")
    connection.executemany("insert into t (b) values (?)", [(f"{n}" * 100,) for n in range(1000)])
    connection.execute("commit")
    content = bytearray((tmp_path / "t.db").read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    (tmp_path / "damaged.db").write_bytes(content)
    with closing(sqlite3.connect(tmp_path / "damaged.db")) as damaged:
        error = raised_by(lambda: damaged.execute("select sum(length(b)) from t").fetchall())
    assert (classify(error), error_code(error)) == (PERMANENT, "SQLITE_CORRUPT")
    (tmp_path / "letter.db").write_text("Dear database, " * 1000)
    with closing(sqlite3.connect(tmp_path / "letter.db")) as letter:
        assert classify(raised_by(lambda: letter.execute("select * from t"))) is PERMANENT


def test_mistakes_and_read_only_files_are_permanent(connection: sqlite3.Connection, tmp_path: Path) -> None:
    assert classify(raised_by(lambda: connection.execute("select * from nowhere"))) is PERMANENT
    assert classify(raised_by(lambda: connection.execute("insert into t values (?, ?)", (3, object())))) is PERMANENT
    with closing(sqlite3.connect(f"file:{tmp_path}/t.db?mode=ro", uri=True)) as reader:
        assert classify(raised_by(lambda: reader.execute("delete from t"))) is PERMANENT


def test_sqlalchemy_s_wrapper_hides_no_code_of_sqlite(connection: sqlite3.Connection, tmp_path: Path) -> None:
    engine = create_engine(parse_dsn(tmp_path / "t.db").sqlalchemy_url(), connect_args={"timeout": 0})
    connection.execute("begin immediate")
    with engine.connect() as second:
        error = raised_by(lambda: second.execute(text("insert into t values (:a, :b)"), {"a": 9, "b": "zqx"}))
    engine.dispose()
    assert isinstance(error, sa.DBAPIError)
    assert (classify(error), error_code(error)) == (TRANSIENT, "SQLITE_BUSY")
    assert isinstance(driver_error(error), sqlite3.OperationalError)


# --- Postgres's own errors


async def error_of(work: Awaitable[object]) -> Exception:
    try:
        await work
    except Exception as error:  # noqa: BLE001 (whatever is raised is what the test looks at)
        return error
    raise AssertionError("nothing was raised")


@asynccontextmanager
async def engine_on(dsn: str) -> AsyncIterator[AsyncEngine]:
    database = parse_dsn(dsn)
    assert isinstance(database, Postgres)
    engine = create_async_engine(database.sqlalchemy_url(), connect_args=database.connect_args())
    yield engine
    await engine.dispose()


@pytest.fixture(scope="module")
def scratch_dsn(postgres_cluster: PostgresServer) -> Iterator[str]:
    name = f"dfr_retry_{secrets.token_hex(6)}"
    yield postgres_cluster.create_database(name)
    postgres_cluster.drop_database(name)


@pytest.fixture
async def engine(scratch_dsn: str) -> AsyncIterator[AsyncEngine]:
    async with engine_on(scratch_dsn) as opened:
        async with opened.begin() as connection:
            await connection.execute(text("drop table if exists t"))
            await connection.execute(text("create table t (a int primary key, b text unique not null)"))
            await connection.execute(text("insert into t values (1, 'x'), (2, 'y')"))
        yield opened


async def run(connection: AsyncConnection, *statements: str) -> None:
    for statement in statements:
        await connection.execute(text(statement))


@pytest.mark.parametrize(
    ("statements", "code", "kind"),
    [
        (["insert into t values (3, 'x')"], "23505", UNIQUE),
        (["insert into t values (1, 'z')"], "23505", UNIQUE),
        (["insert into t values (3, null)"], "23502", PERMANENT),
        (["select * from nowhere"], "42P01", PERMANENT),
        (["selec"], "42601", PERMANENT),
        (["select 1 / 0"], "22012", PERMANENT),
        (["set local statement_timeout = 20", "select pg_sleep(60)"], "57014", TRANSIENT),
        (["set transaction read only", "delete from t"], "25006", TRANSIENT),
        (["do $$ begin raise 'zqx' using errcode = '40001'; end $$"], "40001", TRANSIENT),
    ],
)
async def test_a_real_error_of_postgres_is_known_by_its_code(
    engine: AsyncEngine, statements: list[str], code: str, kind: ErrorKind
) -> None:
    async with engine.connect() as connection:
        error = await error_of(run(connection, *statements))
    assert isinstance(error, sa.DBAPIError)
    assert (error_code(error), classify(error)) == (code, kind)
    assert isinstance(driver_error(error), asyncpg.PostgresError)


async def test_two_serializable_writers_end_as_transient(engine: AsyncEngine) -> None:
    serializable = engine.execution_options(isolation_level="SERIALIZABLE")
    async with serializable.connect() as first, serializable.connect() as second:
        for connection in (first, second):
            await run(connection, "select sum(a) from t")
        await run(first, "insert into t values (3, 'z')")
        await run(second, "insert into t values (4, 'w')")
        await first.commit()
        error = await error_of(second.commit())
    assert (error_code(error), classify(error)) == ("40001", TRANSIENT)


async def test_a_deadlock_is_transient(engine: AsyncEngine) -> None:
    async with engine.connect() as first, engine.connect() as second:
        await run(first, "set local deadlock_timeout = '10ms'", "update t set b = 'a' where a = 1")
        await run(second, "set local deadlock_timeout = '10ms'", "update t set b = 'b' where a = 2")
        crossing = (
            run_and_commit(first, "update t set b = 'a2' where a = 2"),
            run_and_commit(second, "update t set b = 'b1' where a = 1"),
        )
        (error,) = [answer for answer in await asyncio.gather(*crossing, return_exceptions=True) if answer]
    assert isinstance(error, Exception)
    assert (error_code(error), classify(error)) == ("40P01", TRANSIENT)


async def run_and_commit(connection: AsyncConnection, statement: str) -> None:
    await run(connection, statement)
    await connection.commit()


async def test_a_lock_that_is_not_waited_for_is_transient(engine: AsyncEngine) -> None:
    async with engine.connect() as first, engine.connect() as second:
        await run(first, "update t set b = 'a' where a = 1")
        error = await error_of(run(second, "select * from t where a = 1 for update nowait"))
    assert (error_code(error), classify(error)) == ("55P03", TRANSIENT)


async def test_a_terminated_backend_leaves_the_outcome_unknown(engine: AsyncEngine) -> None:
    async with engine.connect() as first, engine.connect() as second:
        pid = await first.scalar(text("select pg_backend_pid()"))
        sleeping = asyncio.create_task(error_of(run(first, "select pg_sleep(600)")))
        await run(second, "set local statement_timeout = '60s'", BUSY_BACKEND.format(pid=pid))
        error = await sleeping
        after = await error_of(run(first, "select 1"))
        await first.rollback()
        await run(first, "select 1")
    assert classify(error) is UNKNOWN
    assert error_code(error) in {"57P01", "08003"}, "the server's word, or the driver's when it saw the end first"
    assert classify(after) is TRANSIENT


BUSY_BACKEND = """
do $$ begin
  while not exists (select from pg_stat_activity where pid = {pid} and wait_event = 'PgSleep')
  loop perform pg_sleep(0.001), pg_stat_clear_snapshot(); end loop;
  perform pg_terminate_backend({pid});
end $$
"""


async def test_a_plan_that_a_migration_made_stale_is_transient(engine: AsyncEngine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with autocommit.connect() as first, autocommit.connect() as second:
        await run(first, "select * from t")
        await run(second, "alter table t add column c int")
        error = await error_of(run(first, "select * from t"))
        assert (error_code(error), classify(error)) == ("0A000", TRANSIENT)
        await run(first, "select * from t")


async def test_a_value_the_driver_cannot_send_is_permanent(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        error = await error_of(connection.execute(text("select cast(:a as int)"), {"a": "zqx"}))
    assert classify(error) is PERMANENT


async def test_a_server_that_lets_nobody_in_is_told_from_wrong_settings(postgres_cluster: PostgresServer) -> None:
    database = parse_dsn(postgres_cluster.dsn("nowhere_at_all"))
    assert isinstance(database, Postgres)
    error = await error_of(asyncpg.connect(**database.asyncpg_arguments()))
    assert (error_code(error), classify(error)) == ("3D000", PERMANENT)
    live = parse_dsn(postgres_cluster.dsn())
    assert isinstance(live, Postgres)
    standby = live.asyncpg_arguments() | {"target_session_attrs": "standby"}
    assert classify(await error_of(asyncpg.connect(**standby))) is TRANSIENT


async def test_a_connection_closed_by_us_leaves_the_outcome_unknown(postgres_cluster: PostgresServer) -> None:
    connection = await asyncpg.connect(postgres_cluster.dsn())
    await connection.close()
    assert classify(await error_of(connection.fetchval("select 1"))) is UNKNOWN


async def test_a_killed_server_leaves_the_outcome_unknown_until_it_is_back(private_postgres: PostgresCluster) -> None:
    async with engine_on(private_postgres.dsn()) as engine:
        async with engine.connect() as connection:
            await run(connection, "select 1")
            private_postgres.kill()
            assert classify(await error_of(run(connection, "select 1"))) is UNKNOWN
        assert classify(await error_of(ask(engine))) is UNKNOWN

        async def back(_: float) -> None:
            private_postgres.start()

        assert await retrying(RetryPolicy(), lambda: ask(engine), sleep=back) == 1


async def ask(engine: AsyncEngine) -> Any:
    async with engine.connect() as connection:
        return await connection.scalar(text("select 1"))
