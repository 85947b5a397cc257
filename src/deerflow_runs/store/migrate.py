"""Brings a database to the revision this version needs, and refuses one that it cannot use.

``upgrade`` changes tables, ``check`` only looks; both work on SQLite and PostgreSQL and from any thread. What a
revision changes stands in ``migrations/``. As a program: ``python -m deerflow_runs.store.migrate --help``.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, assert_never, final

from sqlalchemy import Connection, column, inspect, select, table

from deerflow_runs.errors import DeerflowRunsError, InvalidDsn, SchemaMismatch, UsageError
from deerflow_runs.store.database import Database, DatabaseKind, Postgres, Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate_connect import (
    arrange_session,
    in_own_loop,
    keep_a_log,
    postgres_connection,
    sqlite_connection,
)
from deerflow_runs.store.migrate_lock import Patience, postgres_lock, sqlite_lock
from deerflow_runs.store.sqlite_file import require_usable

if TYPE_CHECKING:
    from alembic.config import Config

READER: Final = 1
"""What this version can read: a schema says in ``dr_meta.min_reader`` from which reader on it may be used."""

WAIT: Final = 300.0
"""Seconds to wait for another upgrade of the same database."""

HEAD: Final = "head"
"""The newest revision this version knows."""

Address = str | os.PathLike[str]
"""As ``parse_dsn`` takes it."""

SetUp = Callable[[str], None]
"""Further set-up of the same database (a checkpoint saver's), given its address; must be safe to repeat."""


def upgrade(dsn: Address, *, revision: str = HEAD, wait: float = WAIT, also: Sequence[SetUp] = ()) -> None:
    """Bring the database to ``revision``, then carry out ``also``, under one lock over all processes.

    Safe to repeat, also after it was interrupted or killed. A database of a newer version is left as it is, or refused
    with ``SchemaMismatch`` if this version cannot read it. ``StoreUnavailable`` after ``wait`` seconds without lock.
    """
    _upgrade(parse_dsn(dsn), os.fspath(dsn), revision, also, Patience(wait))


async def upgrade_async(dsn: Address, *, revision: str = HEAD, wait: float = WAIT, also: Sequence[SetUp] = ()) -> None:
    """``upgrade`` in a thread. Cancelling ends the wait for the lock; an upgrade that has begun is finished first."""
    patience = Patience(wait)
    work = asyncio.to_thread(_upgrade, parse_dsn(dsn), os.fspath(dsn), revision, also, patience)
    task = asyncio.create_task(work, name="deerflow-runs-upgrade")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        patience.given_up.set()
        await asyncio.wait({task})
        task.exception()  # looked at: the caller is told of the cancellation instead
        raise


def upgrade_connection(connection: Connection, *, revision: str = HEAD) -> None:
    """``upgrade`` without a lock, for a database only this connection sees (SQLite in memory).

    No transaction may be open, and those that begin must begin in the database too (``migrate_connect``).
    """
    target = _target(revision)
    found = _look(connection, schema=None)
    connection.rollback()
    _refuse_unreadable(found, "this database")
    if found.revision is None or found.revision < target:
        _run_alembic(target, connection=connection)


def current(dsn: Address) -> str | None:
    """The revision at which the database stands; None when it has none of our tables. Changes and creates nothing."""
    return _found(parse_dsn(dsn)).revision


def head() -> str:
    """The revision this version needs."""
    return _revisions()[-1]


def check(dsn: Address) -> None:
    """Raise ``SchemaMismatch``, with the command to run, unless this version can use the database. Changes nothing."""
    database = parse_dsn(dsn)
    _judge(_found(database), database)


def check_connection(connection: Connection, database: Database) -> None:
    """``check`` on an open connection to ``database``, in the transaction that is open or in a new one."""
    _judge(_look(connection, schema=_schema(database)), database)


def offline_sql(kind: DatabaseKind) -> str:
    """The whole upgrade of an empty database as SQL, for people who may not let a program change their tables."""
    sql = io.StringIO()
    dialect = {DatabaseKind.SQLITE: "sqlite", DatabaseKind.POSTGRES: "postgresql+asyncpg"}[kind]
    _run_alembic(head(), output=sql, dialect=dialect)
    return sql.getvalue()


def migrations() -> Path:
    """The folder of the migrations: inside the package when it was installed, beside ``src`` in a checkout."""
    here = Path(__file__)
    for folder in (here.parents[1] / "migrations", here.parents[3] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError("the migrations of deerflow_runs are missing; install the package again")


# --- The verdict ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class _Found:
    """What a database says about itself: its revision, and the oldest reader that may use it."""

    revision: str | None = None
    min_reader: int = 0


def _judge(found: _Found, database: Database) -> None:
    _refuse_unreadable(found, database.display())
    needed = head()
    if found.revision is None:
        raise SchemaMismatch(f"{database}: no tables of deerflow_runs here; {_remedy(database)}")
    if found.revision < needed:
        raise SchemaMismatch(
            f"{database}: the tables stand at {found.revision}, this version needs {needed}; {_remedy(database)}"
        )


def _refuse_unreadable(found: _Found, name: str) -> None:
    if found.min_reader > READER:
        raise SchemaMismatch(
            f"{name}: the tables (revision {found.revision}) belong to a newer version of deerflow_runs and ask for "
            f"reader {found.min_reader}, this version is reader {READER}; install the newer version here"
        )


def _remedy(database: Database) -> str:
    hidden = " (add what is hidden here: the password, options)" if isinstance(database, Postgres) else ""
    return f"run: python -m deerflow_runs.store.migrate {shlex.quote(database.display())}{hidden}"


_VERSION: Final = "dr_alembic_version"


def _look(connection: Connection, *, schema: str | None) -> _Found:
    tables = inspect(connection)
    if not tables.has_table(_VERSION, schema=schema):
        return _Found()
    revision = connection.scalar(select(column("version_num")).select_from(table(_VERSION, schema=schema)))
    if revision is None:  # broken off before the first revision
        return _Found()
    meta = table("dr_meta", column("name"), column("number"), schema=schema)
    min_reader = connection.scalar(select(meta.c.number).where(meta.c.name == "min_reader"))
    return _Found(revision, min_reader or 0)


def _found(database: Database) -> _Found:
    match database:
        case Sqlite():
            return _found_on_sqlite(database)
        case Postgres():
            return in_own_loop(lambda: _found_on_postgres(database))
        case _:
            assert_never(database)


def _found_on_sqlite(database: Sqlite) -> _Found:
    if database.path is None or not database.path.exists():  # connecting would create it
        return _Found()
    with sqlite_connection(database, begin="BEGIN") as connection:
        return _look(connection, schema=None)


async def _found_on_postgres(database: Postgres) -> _Found:
    async with postgres_connection(database) as connection:
        return await connection.run_sync(lambda sync: _look(sync, schema=database.schema))


def _schema(database: Database) -> str | None:
    return database.schema if isinstance(database, Postgres) else None


# --- The upgrade ----------------------------------------------------------------------------------------------------


def _upgrade(database: Database, dsn: str, revision: str, also: Sequence[SetUp], patience: Patience) -> None:
    match database:
        case Sqlite():
            _upgrade_sqlite(database, dsn, revision, also, patience)
        case Postgres():
            in_own_loop(lambda: _upgrade_postgres(database, dsn, revision, also, patience))
        case _:
            assert_never(database)


def _upgrade_sqlite(database: Sqlite, dsn: str, revision: str, also: Sequence[SetUp], patience: Patience) -> None:
    if database.path is None:
        raise InvalidDsn("a database in memory is gone before anybody could use it; name a file")
    require_usable(database.path)
    with sqlite_lock(database.path, patience):
        with sqlite_connection(database, begin="BEGIN IMMEDIATE") as connection:
            keep_a_log(connection)
            upgrade_connection(connection, revision=revision)
        for set_up in also:
            set_up(dsn)


async def _upgrade_postgres(
    database: Postgres, dsn: str, revision: str, also: Sequence[SetUp], patience: Patience
) -> None:
    session = database.session()
    if session is None:
        raise InvalidDsn("an upgrade needs a session, which a transaction pooler does not keep; add direct_url=")
    async with postgres_connection(session) as connection:
        await postgres_lock(connection, patience)
        await arrange_session(connection, session.schema)
        await connection.run_sync(lambda sync: upgrade_connection(sync, revision=revision))
        for set_up in also:
            await asyncio.to_thread(set_up, dsn)


def _target(revision: str) -> str:
    known = _revisions()
    if revision not in {HEAD, *known}:
        raise UsageError(f"no such revision; there are {HEAD}, {', '.join(known)}")
    return known[-1] if revision == HEAD else revision


def _revisions() -> list[str]:
    """Numbered, so that the names of the files say which there are and which is newer, without loading Alembic."""
    return sorted(file.name[:4] for file in (migrations() / "versions").glob("[0-9][0-9][0-9][0-9]_*.py"))


_ALEMBIC: Final = threading.Lock()
"""Alembic keeps the migration that runs in global variables: one at a time in a process, whatever the database."""


def _run_alembic(target: str, **attributes: Any) -> None:
    from alembic import command

    with _ALEMBIC:
        command.upgrade(_config(attributes), target, sql="output" in attributes)


def _config(attributes: dict[str, Any]) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=attributes.get("output"), attributes=attributes)
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    return config


# --- As a program ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deerflow_runs.store.migrate",
        description="Bring a database of deerflow_runs to the tables this version needs. Safe to repeat.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "dsn", nargs="?", help="a path, sqlite:///... or postgresql://... (PGPASSWORD may hold the password)"
    )
    what.add_argument("--sql", choices=[*DatabaseKind], help="only print the SQL for an empty database of this kind")
    parser.add_argument("--wait", type=float, default=WAIT, help="seconds to wait for another upgrade (%(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        sys.stdout.write(offline_sql(DatabaseKind(chosen.sql)) if chosen.sql else _report(chosen.dsn, chosen.wait))
    except DeerflowRunsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _report(dsn: str, wait: float) -> str:
    before = current(dsn)
    upgrade(dsn, wait=wait)
    return f"{parse_dsn(dsn)}: {before or 'empty'} -> {current(dsn)}\n"


if __name__ == "__main__":
    sys.exit(main())
