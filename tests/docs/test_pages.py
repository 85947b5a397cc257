"""Every block of code in README and docs/ works, every command in them exists, every link leads somewhere.

The Python of a page may use the environment variable ``DATABASE_URL``: a migrated Postgres of that page alone. Files it
makes land in a temporary directory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, broken_links, name, pages

each_page = pytest.mark.parametrize("page", pages(), ids=name)

NOT_CODE = {"mermaid", "text"}
CHECKED = {"json", "python", "sh", "sql", "toml"}


@each_page
def test_every_block_says_what_it_is_and_is_checked_here(page: Path) -> None:
    unknown = [block for block in blocks(page) if block.language not in NOT_CODE | CHECKED]
    assert [f"{name(page)}:{block.line}: {block.language or 'no language'}" for block in unknown] == []


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@each_page
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if of(page, "python"):
        run_page = ["-m", "tests.docs.run_page", str(page)]
        _run_python(run_page, tmp_path, DATABASE_URL=request.getfixturevalue("postgres_dsn"), PYTHONPATH=str(ROOT))


@each_page
def test_the_sql_of_a_page_is_understood_by_postgres(page: Path, request: pytest.FixtureRequest) -> None:
    if of(page, "sql"):
        server, dsn = request.getfixturevalue("postgres_cluster"), request.getfixturevalue("postgres_dsn")
        for block in of(page, "sql"):
            for statement in filter(str.strip, block.code.split(";")):
                server.execute(statement, database=dsn.rsplit("/", 1)[1])


@each_page
def test_the_json_and_toml_of_a_page_can_be_read(page: Path) -> None:
    for block in of(page, "json"):
        json.loads(block.code)
    for block in of(page, "toml"):
        tomllib.loads(block.code)


@each_page
def test_every_command_on_a_page_exists(page: Path) -> None:
    for block in of(page, "sh"):
        for command in _commands(block):
            assert _exists(command), f"{name(page)}, below line {block.line}: {shlex.join(command)}"


def of(page: Path, language: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == language]


def _run_python(arguments: list[str], folder: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _commands(block: Block) -> Iterator[list[str]]:
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable for this command only
            del words[0]
        if words:
            yield words


def _exists(command: list[str]) -> bool:
    """Whether the command can be given. One that this function does not know cannot be on a page."""
    match command:
        case ["python3", "dev.py", verb, *_]:
            return _helps(str(ROOT / "dev.py"), verb)
        case ["python3" | "python", "-m", module, *_] if module.startswith("deerflow_runs."):
            return _helps("-m", module)
        case ["pip", "install", requirement]:
            extras = set(re.findall(r"[\w-]+", requirement.removeprefix("deerflow-runs")))
            return requirement.startswith("deerflow-runs") and extras <= _extras()
        case ["git", "clone", *_] | ["cd", _] | ["export", _]:
            return True
        case [path]:
            return os.access(ROOT / path, os.X_OK)
        case _:
            return False


def _helps(*arguments: str) -> bool:
    command = [sys.executable, *arguments, "--help"]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])
