"""Brings a database to the revision this version needs, and refuses one that it cannot use.

``upgrade`` changes tables, ``check`` only looks; both work on SQLite and PostgreSQL, from any thread. What a revision
changes stands in ``migrations/``; no statement about runs lives here.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, assert_never, final

import sqlalchemy
from sqlalchemy import Connection, NullPool, column, create_engine, event, inspect, select, table, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from deerflow_runs.errors import InvalidDsn, SchemaMismatch, StoreUnavailable
from deerflow_runs.store.database import Database, DatabaseKind, Postgres, Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate_lock import Patience, postgres_lock, sqlite_lock

if TYPE_CHECKING:
    from alembic.config import Config

READER: Final = 1
"""What this version can read: a newer schema says in ``dr_meta.min_reader`` from which reader on it may be used."""

WAIT: Final = 300.0
"""Seconds to wait for another upgrade of the same database."""

SetUp = Callable[[str], None]
"""Further set-up of the same database (a checkpoint saver's), given the address; must be safe to repeat."""

_T = TypeVar("_T")


def upgrade(dsn: str, *, revision: str = "head", wait: float = WAIT, also: Sequence[SetUp] = ()) -> None:
    """Bring the database to ``revision``, then carry out ``also``, under one lock over all processes.

    Safe to repeat, also after it was interrupted or killed. A database of a newer version is left as it is, or refused
    with ``SchemaMismatch`` if this version cannot read it. ``StoreUnavailable`` after ``wait`` seconds without lock.
    """
    _upgrade(dsn, revision, also, Patience(wait))


async def upgrade_async(dsn: str, *, revision: str = "head", wait: float = WAIT, also: Sequence[SetUp] = ()) -> None:
    """``upgrade`` in a thread. Cancelling ends the wait for the lock; an upgrade that has begun is finished first."""
    patience = Patience(wait)
    task = asyncio.create_task(asyncio.to_thread(_upgrade, dsn, revision, also, patience), name="deerflow-runs-upgrade")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        patience.given_up.set()
        await asyncio.wait({task})
        task.exception()
        raise


def upgrade_connection(connection: Connection, *, revision: str = "head") -> None:
    """``upgrade`` for a database that only this connection sees (SQLite in memory). No transaction may be open."""
    found = _look(connection, None)
    connection.rollback()
    _refuse_unreadable(found, None)
    if revision == "head" and found.revision is not None and found.revision >= head():
        return
    from alembic import command

    command.upgrade(_config(connection=connection), revision)


def current(dsn: str) -> str | None:
    """The revision at which the database stands, None when it has none of our tables. Changes and creates nothing."""
    return _found(parse_dsn(dsn)).revision


def head() -> str:
    """The revision this version needs. Revisions are numbered, so their files say it without loading Alembic."""
    return max(file.name[:4] for file in (migrations() / "versions").glob("[0-9]*.py"))


def check(dsn: str) -> None:
    """Raise ``SchemaMismatch``, with the command to run, unless this version can use the database. Changes nothing."""
    database = parse_dsn(dsn)
    _judge(_found(database), database)


def check_connection(connection: Connection, database: Database) -> None:
    """``check`` on an open connection to ``database``; reads in the transaction that is open, or in a new one."""
    _judge(_look(connection, _schema(database)), database)


def offline_sql(kind: DatabaseKind) -> str:
    """The whole upgrade of an empty database as SQL, for people who may not let a program change their tables."""
    from alembic import command

    sql = io.StringIO()
    dialect = {DatabaseKind.SQLITE: "sqlite", DatabaseKind.POSTGRES: "postgresql+asyncpg"}[kind]
    command.upgrade(_config(output=sql, dialect=dialect), "head", sql=True)
    return sql.getvalue()


def migrations() -> Path:
    """The folder of the migrations: inside the package when it was installed, beside ``src`` in a checkout."""
    here = Path(__file__)
    for folder in (here.parents[1] / "migrations", here.parents[3] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError("the migrations of deerflow_runs are not installed beside it; install the package again")


# --- The verdict ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class _Found:
    """What a database says about itself: its revision, and the oldest reader that may use it."""

    revision: str | None
    min_reader: int


def _judge(found: _Found, database: Database) -> None:
    _refuse_unreadable(found, database)
    needed = head()
    if found.revision is None:
        raise SchemaMismatch(f"{database}: no tables of deerflow_runs here; {_remedy(database)}")
    if found.revision < needed:
        raise SchemaMismatch(
            f"{database}: the tables stand at {found.revision}, this version needs {needed}; {_remedy(database)}"
        )


def _refuse_unreadable(found: _Found, database: Database | None) -> None:
    if found.min_reader > READER:
        raise SchemaMismatch(
            f"{database or 'this database'}: revision {found.revision} is newer than this version of deerflow_runs "
            f"(it needs reader {found.min_reader}, this is reader {READER}); install the newer version here"
        )


def _remedy(database: Database) -> str:
    command = f"python -m deerflow_runs.store.migrate {shlex.quote(database.display())}"
    hidden = " (add the password and the options that are not shown here)" if isinstance(database, Postgres) else ""
    return f"run: {command}{hidden}"


_VERSION: Final = "dr_alembic_version"


def _look(connection: Connection, schema: str | None) -> _Found:
    tables = inspect(connection)
    if not tables.has_table(_VERSION, schema=schema):
        return _Found(None, 0)
    revision = connection.scalar(select(column("version_num")).select_from(table(_VERSION, schema=schema)))
    if revision is None or not tables.has_table("dr_meta", schema=schema):
        return _Found(revision, 0)
    meta = table("dr_meta", column("name"), column("number"), schema=schema)
    min_reader = connection.scalar(select(meta.c.number).where(meta.c.name == "min_reader"))
    return _Found(revision, min_reader or 0)


def _found(database: Database) -> _Found:
    match database:
        case Sqlite(path=path):
            if path is None or not path.exists():  # opening it would create it
                return _Found(None, 0)
            with _sqlite(database, begin="BEGIN") as connection:
                return _look(connection, None)
        case Postgres():
            return _in_own_loop(lambda: _found_on_postgres(database))
        case _:
            assert_never(database)


async def _found_on_postgres(database: Postgres) -> _Found:
    async with _postgres(database) as connection:
        return await connection.run_sync(_look, database.schema)


def _schema(database: Database) -> str | None:
    return database.schema if isinstance(database, Postgres) else None


# --- The upgrade ----------------------------------------------------------------------------------------------------


def _upgrade(dsn: str, revision: str, also: Sequence[SetUp], patience: Patience) -> None:
    database = parse_dsn(dsn)
    match database:
        case Sqlite():
            _upgrade_sqlite(database, dsn, revision, also, patience)
        case Postgres():
            _in_own_loop(lambda: _upgrade_postgres(database, dsn, revision, also, patience))
        case _:
            assert_never(database)


def _upgrade_sqlite(database: Sqlite, dsn: str, revision: str, also: Sequence[SetUp], patience: Patience) -> None:
    if database.path is None:
        raise InvalidDsn("a database in memory is gone before anybody could use it; name a file")
    with sqlite_lock(database.path, patience):
        with _sqlite(database, begin="BEGIN IMMEDIATE") as connection:
            _keep_a_log(connection)
            upgrade_connection(connection, revision=revision)
        for set_up in also:
            set_up(dsn)


async def _upgrade_postgres(
    database: Postgres, dsn: str, revision: str, also: Sequence[SetUp], patience: Patience
) -> None:
    session = database.session()
    if session is None:
        raise InvalidDsn("an upgrade needs a session, which a transaction pooler does not keep; add direct_url=")
    async with _postgres(session) as connection, postgres_lock(connection, patience):
        await _arrange_session(connection, database.schema)
        await connection.run_sync(lambda sync: upgrade_connection(sync, revision=revision))
        for set_up in also:
            await asyncio.to_thread(set_up, dsn)


async def _arrange_session(connection: AsyncConnection, schema: str | None) -> None:
    """The lock's session may not be cut off while an index is built; what names no schema goes into ours."""
    for setting in ("statement_timeout", "lock_timeout", "idle_session_timeout"):
        await connection.execute(text(f"SET {setting} = 0"))
    if schema is not None:
        known = await connection.scalar(text("SELECT 1 FROM pg_namespace WHERE nspname = :schema"), {"schema": schema})
        if not known:
            await connection.execute(sqlalchemy.schema.CreateSchema(schema))
        await connection.execute(
            text("SELECT set_config('search_path', quote_ident(:schema), false)"), {"schema": schema}
        )
    await connection.commit()


def _config(**attributes: Any) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=attributes.pop("output", None), attributes=attributes)
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    return config


# --- Connections ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _sqlite(database: Sqlite, *, begin: str) -> Iterator[Connection]:
    """A connection that says itself when a transaction begins: Python's own way leaves tables outside of it."""
    engine = create_engine(database.sqlalchemy_url(), connect_args={"timeout": 30.0}, poolclass=NullPool)
    event.listen(engine, "connect", _no_implicit_begin)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    with engine.connect() as connection:
        yield connection


def _no_implicit_begin(connection: Any, _record: object) -> None:
    connection.isolation_level = None


def _keep_a_log(connection: Connection) -> None:
    """Write-ahead logging is a property of the file, and cannot be changed inside a transaction (O34)."""
    connection.connection.execute("PRAGMA journal_mode = WAL").close()


@contextlib.asynccontextmanager
async def _postgres(database: Postgres) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(database.sqlalchemy_url(), connect_args=database.connect_args(), poolclass=NullPool)
    try:
        connection = await engine.connect()
    except (OSError, sqlalchemy.exc.DBAPIError) as error:
        raise StoreUnavailable(f"cannot connect to {database}: {error}") from error
    try:
        yield connection
    finally:
        await connection.close()


def _in_own_loop(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run ``work`` in a thread of its own: the caller's thread may be running an event loop."""

    async def run() -> _T:
        return await work()

    with ThreadPoolExecutor(1, thread_name_prefix="deerflow-runs-migrate") as pool:
        return pool.submit(lambda: asyncio.run(run())).result()
