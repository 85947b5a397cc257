"""``docs/cases.md`` says what the markers of the tests say, and no case is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import cases
from tests.docs.cases import Case
from tests.docs.pages import ROOT

KINDS, CITED = cases.cases(), cases.citations()


def test_the_page_is_written_from_the_cases_and_the_markers_of_the_tests() -> None:
    stale = cases.page() != (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    assert not stale, "write it anew with: python3 dev.py docs"


def test_every_case_is_shown_by_a_test_or_says_what_it_waits_for() -> None:
    assert cases.unexplained(KINDS, CITED) == []


def test_what_a_case_waits_for_is_a_part_that_is_not_built() -> None:
    assert {case.needs for kind in KINDS.values() for case in kind} <= {"", "streams", "HTTP", "LangGraph"}


def test_every_public_report_has_its_source_and_every_flaw_its_weight() -> None:
    assert [case.name for case in KINDS["reports"] if not re.search(r"(#|PR )\d+", case.source)] == []
    assert [case.name for case in KINDS["flaws"] if case.weight not in ("H", "M", "L")] == []
    assert [case.name for case in KINDS["flaws"]] == [f"F{number:02}" for number in range(1, 68)]


def test_no_test_names_a_report_or_a_flaw_that_is_none() -> None:
    known = {case.name for kind in KINDS.values() for case in kind}
    assert sorted(name for name in CITED if re.fullmatch(r"F\d\d|P\d\d\d", name) and name not in known) == []


def test_markers_are_found_wherever_a_test_may_have_them(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text('pytestmark = rule("P1")\n\n@rule("P2", "F3")\ndef test_it(): ...\n')
    (tmp_path / "test_two.py").write_text('class TestIt:\n    @rule("P2")\n    def test_it(self): ...\n# rule("P4")\n')
    found = {name: [path.name for path in paths] for name, paths in cases.citations(tmp_path).items()}
    assert found == {"P1": ["test_one.py"], "P2": ["test_one.py", "test_two.py"], "F3": ["test_one.py"]}


@pytest.mark.parametrize(("needs", "forgotten"), [("", ["P1"]), ("HTTP", [])])
def test_a_case_without_a_test_is_forgotten_unless_it_waits(needs: str, forgotten: list[str]) -> None:
    assert cases.unexplained({"reports": [Case("P1", "it hurts", "somewhere #1", needs=needs)]}, {}) == forgotten
