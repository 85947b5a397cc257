"""The glossary explains every word of the house, once, and shows the two sentences that decide everything."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")

WORDS = """
thread, run, operation, reservation, admission, strategy, incumbent, newcomer, queued, vacant, promote, claim, seize,
owed, force, turn, worker session, owner, epoch, lease, beat, trust, deadline, margin, grace, suspended, fenced,
lingering, displace, orphan, judge, take over, take back, give back, hand over, defer, resume, poison, cancel request,
signal, settle, outcome, refusal, receipt, drain
"""
GLOSSARY = [" ".join(word.split()) for word in WORDS.split(",")]


def entries() -> dict[str, str]:
    return dict(re.findall(r"^\*\*([a-z ]+)\*\* ((?:.+\n)+)", PAGE, re.MULTILINE))


@pytest.mark.parametrize("word", GLOSSARY)
def test_every_word_has_one_entry_that_explains_it(word: str) -> None:
    assert len(re.findall(rf"^\*\*{word}\*\* ", PAGE, re.MULTILINE)) == 1
    assert len(entries()[word]) > 50


def test_no_word_is_explained_that_the_house_does_not_use() -> None:
    assert sorted(entries()) == sorted(GLOSSARY)


def test_it_begins_with_the_two_sentences_that_decide_everything() -> None:
    told = " ".join(PAGE.split())
    assert told.startswith(
        "# Concepts **Leases give liveness, epochs give safety.** No safety property may depend on a clock: a wrong "
        "clock, a pause or a partition may only cause a run to be taken over too early (cost: repeated work) or too "
        "late (cost: waiting), never two writers."
    )
