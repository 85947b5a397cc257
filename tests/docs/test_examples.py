"""Every example runs on a machine with nothing but the library, and shows what it says it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, examples
from tests.rules import rule


def test_every_example_is_run_here() -> None:
    assert [example.name for example in examples()] == ["bot.py", "ownership_demo.py"]


def shown(example: str, folder: Path) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(180)
@rule("O19", "O26", "O27", "O29")
def test_two_processes_cancel_and_recover_each_other(tmp_path: Path) -> None:
    told = shown("ownership_demo.py", tmp_path)
    assert "cancelled: <Run run-red on red: interrupted" in told
    assert "<Run run-blue on blue: success" in told
    assert "epoch 3: 12 of 12" in told


@pytest.mark.timeout(180)
@rule("O5", "O28")
def test_a_bot_that_was_killed_before_it_could_answer_is_answered_for_once(tmp_path: Path) -> None:
    told = shown("bot.py", tmp_path)
    assert "got message-1 again" in told
    assert "is killed before it can send it" in told
    assert told.count('"answers": "message-1"') == 1
