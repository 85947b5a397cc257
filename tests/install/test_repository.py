"""What a newcomer meets before any code of ours: the lock and the one command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = (ROOT / "requirements.lock").read_text().splitlines()


def test_every_line_of_the_lock_pins_one_version_and_names_no_address() -> None:
    assert [line for line in LOCKED if not re.fullmatch(r"[\w.-]+==[\w.+!-]+( ; [^/:@]+)?", line)] == []


def test_everything_the_project_asks_for_is_locked() -> None:
    asked = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    names = {re.split(r"[\[<>=;~! ]", requirement)[0] for requirement in asked} - {PROJECT["name"]}
    assert names - {line.split("==")[0] for line in LOCKED} == set()


def test_help_explains_every_verb_on_a_machine_without_an_environment() -> None:
    told = _dev("-I", str(ROOT / "dev.py"), "--help")
    verbs = re.findall(r"^    (\w+)  +\w+", told, re.MULTILINE)
    assert {"demo", "test", "lint", "spec", "mutants"} <= set(verbs)


@pytest.mark.parametrize("verb", ["lint", "env"])
def test_a_verb_that_takes_no_arguments_refuses_them(verb: str) -> None:
    with pytest.raises(AssertionError, match=f"{verb} takes no arguments: --quick"):
        _dev(str(ROOT / "dev.py"), verb, "--quick")


def _dev(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
