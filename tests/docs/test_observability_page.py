"""The generated page of events shows every class that can be observed, with every field and its unit."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from deerflow_runs import Event, observe
from deerflow_runs.config import RunsConfig
from deerflow_runs.docs import PAGES
from deerflow_runs.model import RunStatus, StopReason, Strategy
from deerflow_runs.observe import About, EventOfRun
from tests.docs.pages import ROOT

PAGE = PAGES["observability.md"]()
ROWS = dict(re.findall(r"^\| (?:▸ )?`([A-Z]\w+)` \| (.*) \|$", PAGE, re.MULTILINE))


def descendants(event: type[Event]) -> set[type[Event]]:
    return {event}.union(*(descendants(child) for child in event.__subclasses__()))


# By name: a dataclass with slots is built twice, and its first form may still be known as a subclass.
EVENTS = sorted({event.__name__ for event in descendants(Event)} - {"Event", "EventOfRun"})
each_event = pytest.mark.parametrize("event", [getattr(observe, name) for name in EVENTS], ids=EVENTS)


def test_the_page_in_the_docs_is_the_one_that_the_code_writes() -> None:
    assert (ROOT / "docs" / "observability.md").read_text(encoding="utf-8") == PAGE


def test_every_event_can_be_imported_from_one_place_and_has_its_row() -> None:
    assert set(EVENTS) <= set(observe.__all__)
    assert sorted(ROWS) == EVENTS


@each_event
def test_a_row_tells_when_and_at_which_level(event: type[Event]) -> None:
    level, when, _ = ROWS[event.__name__].split(" | ")
    assert level == logging.getLevelName(event.level).lower()
    assert " ".join((event.__doc__ or "").split()) == when
    assert "(self" not in when


@each_event
def test_every_field_is_told_in_the_row_or_among_the_common_ones(event: type[Event]) -> None:
    _, _, cell = ROWS[event.__name__].split(" | ")
    common = {field.name for field in fields(EventOfRun)}
    own = {field.name for field in fields(event)} - common
    assert set(re.findall(r"(?:^|· )(?:\*\*)?`(\w+)`", cell)) == own
    assert all(f"\n| `{name}` | " in PAGE for name in common)


@each_event
def test_a_field_named_without_a_word_is_explained_among_the_common_ones(event: type[Event]) -> None:
    _, _, cell = ROWS[event.__name__].split(" | ")
    bare = [part.strip("*`") for part in cell.split(" · ") if ":" not in part and part != "–"]
    assert [name for name in bare if f"\n| `{name}` | " not in PAGE] == []


@each_event
def test_every_number_has_a_unit(event: type[Event]) -> None:
    hints, plain = get_type_hints(event, include_extras=True), get_type_hints(event)
    about = {field.name: hints[field.name].__metadata__[0] for field in fields(event)}
    assert all(isinstance(told, About) and told.text for told in about.values())
    assert [name for name, told in about.items() if (plain[name] in (int, float)) != bool(told.unit)] == []


@each_event
def test_every_name_in_a_row_is_a_setting_a_stored_word_or_another_event(event: type[Event]) -> None:
    when = ROWS[event.__name__].split(" | ")[1]
    words = {*RunStatus, *Strategy, *StopReason, "polling", "shutdown()"}
    assert set(re.findall(r"`([^`]+)`", when)) <= {*RunsConfig.model_fields, *words, *EVENTS}
