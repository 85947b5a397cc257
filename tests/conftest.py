"""Databases for every test: one server and one migrated template a session, one clone a test; and the closing lines.

With xdist the controlling process starts the server and tells the workers its address, so it outlives each of them.
Tests always migrate; there is no other way to make tables here.
"""

from __future__ import annotations

import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest

from deerflow_runs.testing.postgres import NoPostgres, PostgresCluster, PostgresServer, open_server
from tests.programs import skipped_for_programs

hypothesis.settings.register_profile("house", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("house")

_RULE = re.compile(r"[OIBFPT]\d+")
_TOLD = pytest.StashKey[Mapping[str, str]]()


# --- Postgres -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_cluster(request: pytest.FixtureRequest) -> PostgresServer:
    """The server of this test session, shared by all workers: make databases on it, but leave it running."""
    return PostgresServer(_server(request.config)["dsn"])


@pytest.fixture(scope="session")
def postgres_template(request: pytest.FixtureRequest, postgres_cluster: PostgresServer) -> str:
    """The name of a migrated database without connections, to be cloned."""
    return postgres_cluster.ensure_template(_server(request.config)["prefix"] + "_template", _upgrade())


@pytest.fixture
def postgres_dsn(postgres_cluster: PostgresServer, postgres_template: str) -> Iterator[str]:
    """A fresh, migrated database of this test alone."""
    yield from _clone(postgres_cluster, postgres_template)


@pytest.fixture(scope="session")
def emptied_postgres_dsn(postgres_cluster: PostgresServer, postgres_template: str) -> Iterator[str]:
    """One database for many short tests, each of which finds it empty: a clone for each would cost more than they."""
    yield from _clone(postgres_cluster, postgres_template)


def _clone(cluster: PostgresServer, template: str) -> Iterator[str]:
    name = f"{template.removesuffix('_template')}_{secrets.token_hex(6)}"
    yield cluster.create_database(name, template=template)
    cluster.drop_database(name)


@pytest.fixture
def private_postgres() -> Iterator[PostgresCluster]:
    """A server of this test alone, which may be killed and restarted. Takes half a second."""
    with PostgresCluster() as cluster:
        yield cluster


# --- SQLite ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated file without open connections, to be copied."""
    path = tmp_path_factory.mktemp("sqlite-template") / "runs.db"
    _upgrade()(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:  # everything into the one file that is copied
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path


@pytest.fixture
def sqlite_dsn(tmp_path: Path, sqlite_template: Path) -> str:
    """A fresh, migrated database file of this test alone."""
    path = tmp_path / "runs.db"
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgres"])
def dsn(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database: the test runs once on each kind."""
    return cast("str", request.getfixturevalue(f"{request.param}_dsn"))


def _upgrade() -> Callable[[str], None]:
    from deerflow_runs.store.migrate import upgrade  # alembic is loaded by the tests that want a database

    return upgrade


# --- One session over several processes -----------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist, before it starts, which server the session uses."""
    node.workerinput["postgres"] = _server_or_error(node.config)


def _server(config: pytest.Config) -> Mapping[str, str]:
    """``dsn`` of the session's server and the ``prefix`` of all databases it makes there. Without a server: fails."""
    told = config.workerinput["postgres"] if hasattr(config, "workerinput") else _server_or_error(config)
    if "error" in told:
        pytest.fail(told["error"], pytrace=False)
    return told


def _server_or_error(config: pytest.Config) -> Mapping[str, str]:
    if _TOLD not in config.stash:
        config.stash[_TOLD] = _open(config)
    return config.stash[_TOLD]


def _open(config: pytest.Config) -> Mapping[str, str]:
    until_the_end = ExitStack()
    config.add_cleanup(until_the_end.close)
    prefix = f"dfr_{secrets.token_hex(4)}"
    try:
        server = until_the_end.enter_context(open_server())
    except NoPostgres as error:
        return {"error": str(error)}
    if not isinstance(server, PostgresCluster):
        until_the_end.callback(_drop_databases, server, prefix)
    return {"dsn": server.dsn(), "prefix": prefix}


def _drop_databases(server: PostgresServer, prefix: str) -> None:
    for (name,) in server.execute("SELECT datname FROM pg_database"):
        if name.startswith(prefix):
            server.drop_database(name)


# --- What is checked and said about the whole run -------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A citation that names no rule fails its test. (Raised while collecting, xdist would swallow the message.)"""
    for marker in item.iter_markers("rule"):
        if not marker.args or not all(_RULE.fullmatch(name) for name in marker.args):
            pytest.fail(f"@rule{marker.args} names no rule ({_RULE.pattern})", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped because a helper program is missing, by name."""
    missing = skipped_for_programs(str(report.longrepr) for report in terminalreporter.getreports("skipped"))
    if missing:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()))
        terminalreporter.write_line(f"{missing.total()} tests skipped because a helper program is missing: {names}")
