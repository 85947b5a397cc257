"""A database that cannot be used is refused with what to do; one that can is not, whoever made it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from sqlalchemy import Connection

from deerflow_runs.errors import SchemaMismatch
from deerflow_runs.store.database import DatabaseKind
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate import check, check_connection, current, head, main, offline_sql, upgrade
from tests.migrations.databases import ask, do, on


def refusal(dsn: str) -> str:
    with pytest.raises(SchemaMismatch) as error:
        check(dsn)
    return str(error.value)


@pytest.fixture
def carry_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], str]:
    """Does what a refusal says, as a person would, with the password in the environment; answers what was printed."""

    def run(message: str, dsn: str) -> str:
        said = re.search(r"run: python -m deerflow_runs.store.migrate (.*?)(?: \(add .*\))?$", message)
        assert said is not None
        monkeypatch.setenv("PGPASSWORD", urlsplit(dsn).password or "")
        assert main(shlex.split(said[1])) == 0
        return capsys.readouterr().out

    return run


def test_an_empty_database_is_refused_with_a_command_that_helps(
    empty: str, carry_out: Callable[[str, str], str]
) -> None:
    message = refusal(empty)
    assert "no tables" in message
    assert carry_out(message, empty).endswith(f": empty -> {head()}\n")
    check(empty)


def test_a_database_that_is_behind_is_refused_with_a_command_that_helps(
    empty: str, carry_out: Callable[[str, str], str]
) -> None:
    upgrade(empty, revision="0001")
    message = refusal(empty)
    assert f"stand at 0001, this version needs {head()}" in message
    assert carry_out(message, empty).endswith(f": 0001 -> {head()}\n")
    check(empty)


def test_a_check_of_an_open_connection_gives_the_same_answers(empty: str) -> None:
    database = parse_dsn(empty)

    def refused(connection: Connection) -> None:
        with pytest.raises(SchemaMismatch, match="no tables"):
            check_connection(connection, database)

    on(empty, refused)
    upgrade(empty)
    on(empty, lambda connection: check_connection(connection, database))


def test_a_check_of_an_open_connection_looks_into_the_schema_of_the_address(empty_postgres: str) -> None:
    own = f"{empty_postgres}?schema=own_one"
    upgrade(own)
    on(empty_postgres, lambda connection: check_connection(connection, parse_dsn(own)))
    assert "no tables" in refusal(empty_postgres)


def test_no_refusal_holds_the_password(empty_postgres: str) -> None:
    password = urlsplit(empty_postgres).password
    messages = [refusal(empty_postgres)]
    upgrade(empty_postgres, revision="0001")
    messages.append(refusal(empty_postgres))
    do(empty_postgres, "UPDATE dr_meta SET number = 99 WHERE name = 'min_reader'")
    messages.append(refusal(empty_postgres))
    assert not [message for message in messages if password and password in message]


# --- Releases side by side: expand, then contract -------------------------------------------------------------------


def expanded(dsn: str) -> None:
    """As a later version leaves it: one more revision, one more column that may be empty."""
    upgrade(dsn)
    do(dsn, "ALTER TABLE dr_runs ADD COLUMN colour VARCHAR(64)")
    do(dsn, "UPDATE dr_alembic_version SET version_num = '9999'")


def test_an_older_worker_goes_on_beside_a_newer_schema_that_it_can_read(empty: str) -> None:
    expanded(empty)
    check(empty)
    upgrade(empty)
    assert current(empty) == "9999"


def test_a_schema_that_needs_a_newer_reader_is_refused_and_left_alone(empty: str) -> None:
    expanded(empty)
    do(empty, "UPDATE dr_meta SET number = 2 WHERE name = 'min_reader'")
    message = refusal(empty)
    assert "newer version" in message
    assert "reader 2, this version is reader 1" in message
    done: list[str] = []
    with pytest.raises(SchemaMismatch, match="newer version"):
        upgrade(empty, also=[done.append])
    assert done == []
    assert ask(empty, "SELECT number FROM dr_meta WHERE name = 'min_reader'") == [(2,)]


# --- As a program ---------------------------------------------------------------------------------------------------


def test_the_program_says_from_where_to_where_without_the_password(
    empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([empty]) == 0
    assert main([empty]) == 0
    name = parse_dsn(empty).display()
    assert capsys.readouterr().out == f"{name}: empty -> {head()}\n{name}: {head()} -> {head()}\n"


def test_the_program_refuses_in_one_line(empty: str, capsys: pytest.CaptureFixture[str]) -> None:
    expanded(empty)
    do(empty, "UPDATE dr_meta SET number = 2 WHERE name = 'min_reader'")
    assert main([empty]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("kind", DatabaseKind)
def test_the_program_prints_the_sql(kind: DatabaseKind, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sql", kind]) == 0
    assert capsys.readouterr().out == offline_sql(kind)


def test_the_program_explains_itself_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-m", "deerflow_runs.store.migrate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Safe to" in done.stdout
    assert done.stderr == ""
