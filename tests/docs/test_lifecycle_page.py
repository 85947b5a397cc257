"""The generated page of a run's life shows the whole table, and its picture draws what the table says."""

from __future__ import annotations

import re

import pytest

from deerflow_runs.docs import PAGES
from deerflow_runs.model import TERMINAL
from deerflow_runs.protocol.lifecycle import Effect, Guard, Refusal, RunEvent
from tests.docs.pages import ROOT

PAGE = PAGES["lifecycle.md"]()
EDGES = re.findall(r"^    (\S+) --> (\S+) : (.*)$", PAGE, re.MULTILINE)


def test_the_page_in_the_docs_is_the_one_that_the_code_writes() -> None:
    assert (ROOT / "docs" / "lifecycle.md").read_text(encoding="utf-8") == PAGE


def test_it_reads_the_same_every_time() -> None:
    assert PAGES["lifecycle.md"]() == PAGE


@pytest.mark.parametrize("event", RunEvent)
def test_every_event_has_its_row(event: RunEvent) -> None:
    assert PAGE.count(f"| **{event}** |") == 1


def test_every_guard_effect_and_answer_is_named() -> None:
    words = [*Guard, *Effect, *(f"`{refusal}`" for refusal in Refusal)]
    assert [word for word in words if str(word) not in PAGE] == []


def test_nothing_is_drawn_that_leaves_an_ended_run_but_its_removal() -> None:
    leaving = {(source, target, label) for source, target, label in EDGES if source in TERMINAL}
    assert leaving == {(status.value, "[*]", "remove") for status in TERMINAL}


def test_the_picture_shows_the_ways_of_a_run() -> None:
    drawn = {(source, target): label for source, target, label in EDGES}
    assert drawn["queued", "vacant"] == "promote"
    assert drawn["held", "running"] == "start"
    assert drawn["vacant", "held"] == "claim / seize"
    assert drawn["running", "success"] == "settle success"
    assert ("queued", "running") not in drawn
    assert ("queued", "held") not in drawn
