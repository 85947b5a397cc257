"""``docs/performance.md`` says what the committed results say, and nobody has to be believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.figures import FIGURES
from bench.page import page
from bench.results import RESULTS, Line, Measured, Record, Sense, Target, line, saved
from deerflow_runs.docs import CHECKOUT

MEASURED = sorted(path.stem for path in RESULTS.glob("*.json"))

RECORD = Record(
    name="beat",
    quick=False,
    seed=1,
    commit="c0ffee",
    machine={"processors": 2, "processor": "Abacus", "memory_gib": 1, "system": "Parchment 1"},
    versions={"deerflow_runs": "0", "python": "3", "sqlite": "3", "postgres": "15"},
    load=(0.5, 1.5),
    measured=Measured((line("a beat", [1.0, 2.0, 9.0], "ms", Target(2.0)),), ("Told once.",)),
)


def records() -> list[Record]:
    return [record for name in MEASURED if (record := saved(name)) is not None]


def shown(measured: Measured) -> str:
    record = replace(RECORD, measured=measured)
    return page({"beat": record}.get)


def test_the_page_is_written_from_the_committed_results() -> None:
    assert page() == (CHECKOUT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_every_figure_has_a_committed_result_that_was_measured_with_patience() -> None:
    assert set(MEASURED) == set(FIGURES)
    assert [(record.name, record.quick) for record in records()] == [(name, False) for name in MEASURED]


def test_a_committed_result_reads_back_as_it_was_kept() -> None:
    for record in records():
        assert json.loads(record.text()) == json.loads((RESULTS / f"{record.name}.json").read_text(encoding="utf-8"))


def test_a_result_keeps_everything_it_knows(tmp_path: Path) -> None:
    (tmp_path / "beat.json").write_text(RECORD.text(), encoding="utf-8")
    assert saved("beat", tmp_path) == RECORD


def test_a_result_stands_with_its_span_its_target_and_its_verdict() -> None:
    assert "| a beat | 2 ms | 1 to 9 of 3 | ≤ 2 ms | met |" in shown(RECORD.measured)


def test_what_was_missed_is_said_first() -> None:
    text = shown(Measured((line("a beat", 3.0, "ms", Target(2.0)),)))
    assert "Of 1 targets 0 are met." in text
    assert "- [What a heartbeat costs](#what-a-heartbeat-costs): a beat, 3 ms" in text
    assert "| a beat | 3 ms | – | ≤ 2 ms | **missed** |" in text


def test_a_figure_without_a_result_says_so() -> None:
    assert page(lambda _: None).count("Not measured yet.") == len(FIGURES)


@pytest.mark.parametrize(
    ("target", "rounds", "met"),
    [
        (Target(2.0), [1.0, 2.0, 9.0], True),
        (Target(2.0, worst=True), [1.0, 2.0, 9.0], False),
        (Target(9.0, worst=True), [1.0, 2.0, 9.0], True),
        (Target(2.0, Sense.AT_LEAST), [1.0, 2.0, 9.0], True),
        (Target(2.0, Sense.AT_LEAST, worst=True), [1.0, 2.0, 9.0], False),
        (Target(2.0, Sense.EXACTLY), [2.0, 2.0], True),
        (Target(2.0, Sense.EXACTLY), [1.0, 2.0, 9.0], False),
        (None, [1.0], None),
    ],
)
def test_a_target_is_met_by_the_middle_round_or_by_the_worst_or_by_all(
    target: Target | None, rounds: list[float], met: bool | None
) -> None:
    found: Line = line("x", rounds, "", target)
    assert found.met is met
