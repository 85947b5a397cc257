"""The models of ``spec/``: their page claims no more than they are asked, and the runner knows right from wrong.

Whether every model answers as it must is for ``dev.py spec`` to find out; only two of the smallest are run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deerflow_runs.protocol.lifecycle import RunEvent
from spec import run as runner
from spec.run import BROKEN, HERE, OVER, PASSES, Configuration, Result, configurations
from tests.programs import require_program
from tests.rules import rule

CASES = configurations()
MUTATIONS = [case for case in CASES.values() if not case.good]
PAGE = (HERE / "README.md").read_text(encoding="utf-8")
ARRIVALS = {"admit", "admit behind"}


def asked(case: Configuration) -> set[str]:
    return {*case.invariants, *case.properties} | ({case.deadlock} if case.deadlock else set())


def number(name: str) -> str:
    """The invariant that a property is a part of: I16 for I16Gone."""
    found = re.match(r"I\d+", name)
    return found.group() if found else ""


def rows(title: str) -> Iterator[list[str]]:
    """The cells of the table under a heading of the page, without its head."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def claimed() -> dict[str, set[str]]:
    """The invariants that the page claims, by model; "I1–I9" counts for all between."""
    found: dict[str, set[str]] = {}
    for model, *_, text in rows("The models"):
        names = found.setdefault(model.strip("`"), set())
        for first, last in re.findall(r"I(\d+)(?:–I(\d+))?", text):
            names.update(f"I{n}" for n in range(int(first), int(last or first) + 1))
    return found


@rule(*(f"I{n}" for n in range(1, 19)))
def test_every_invariant_the_page_claims_is_asked_of_that_model() -> None:
    for model, names in claimed().items():
        good = [case for case in CASES.values() if case.model == model and case.good]
        assert names == {number(name) for case in good for name in asked(case)} - {""}, model


def test_the_page_claims_the_first_eighteen_invariants() -> None:
    assert set().union(*claimed().values()) == {f"I{n}" for n in range(1, 19)}


def test_every_claimed_invariant_is_violated_by_some_mutation() -> None:
    assert {number(case.must) for case in MUTATIONS} >= set().union(*claimed().values())


@pytest.mark.parametrize("case", MUTATIONS, ids=lambda case: case.name)
def test_a_mutation_names_the_rule_it_breaks_and_a_property_it_is_asked_for(case: Configuration) -> None:
    assert case.name.startswith("mut-")
    assert case.rules
    assert all(re.fullmatch(r"O\d+", name) for name in case.rules)
    assert case.must in asked(case)


@pytest.mark.parametrize("case", MUTATIONS, ids=lambda case: case.name)
def test_a_mutation_is_asked_for_one_temporal_property_at_most(case: Configuration) -> None:
    # TLC does not say which one failed.
    assert case.must not in {"I8", "I8Unable"} or case.properties == (case.must,)


def test_every_switch_of_a_model_is_turned_by_some_mutation() -> None:
    seen: dict[tuple[str, str], set[str]] = {}
    for case in CASES.values():
        for constant, value in case.constants.items():
            seen.setdefault((case.model, constant), set()).add(value)
    assert [key for key, values in seen.items() if values in ({"TRUE"}, {"FALSE"})] == []


def test_the_page_lists_every_configuration_as_it_is() -> None:
    listed = [[cell.strip("`") for cell in row] for row in rows("Configurations")]
    assert listed == [
        [case.name, case.model, case.must, " ".join(case.rules), f"{case.states:,}" if case.states else ""]
        for case in CASES.values()
    ]


def test_what_passes_has_recorded_how_many_states_it_has() -> None:
    assert [case.name for case in CASES.values() if case.good and case.states is None] == []


def test_every_event_of_the_table_is_an_action_of_a_model_or_left_out_with_a_reason() -> None:
    table = {row[0]: row for row in rows("The table and the models")}
    assert set(table) == ARRIVALS | {event.value for event in RunEvent}
    for event, actions, remark in table.values():
        assert remark if actions == "not modelled" else actions.startswith("`"), event


def test_every_action_the_page_names_is_defined_in_its_model() -> None:
    for _, actions, remark in rows("The table and the models"):
        for model, action in re.findall(r"`(\w+)\.(\w+)`", actions + remark):
            source = (HERE / f"{model}.tla").read_text(encoding="utf-8")
            assert re.search(rf"^{action}(?:\([\w, ]+\))? ==", source, re.MULTILINE), f"{model}.{action}"


def test_every_property_is_defined_in_its_model() -> None:
    for case in CASES.values():
        source = (HERE / f"{case.model}.tla").read_text(encoding="utf-8")
        for name in {*case.invariants, *case.properties, case.spec}:
            assert re.search(rf"^{name}\s+?== ", source, re.MULTILINE) or f"\n{name} ==" in source, (
                f"{case.name}: {name}"
            )


def checked(case: Configuration, limit: float = 60.0) -> Result:
    jar = runner.find_jar()
    assert jar is not None
    return runner.check(case, java=require_program("java"), jar=jar, limit=limit)


def test_a_good_configuration_passes_and_a_mutation_of_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    require_program("java")
    assert runner.main(["lease", "mut-trust-flag"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 0 failed"


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        (replace(CASES["mut-trust-flag"], must=PASSES), "I11"),
        (replace(CASES["lease"], must="I10"), PASSES),
        (replace(CASES["lease"], states=1), PASSES),
        (replace(CASES["lease"], invariants=("Missing",)), BROKEN),
    ],
    ids=["fails", "passes", "other states", "broken"],
)
def test_an_answer_that_is_not_as_it_must_be_is_called_wrong(case: Configuration, verdict: str) -> None:
    result = checked(case)
    assert result.verdict == verdict
    assert runner.line(case, result).startswith("WRONG")


def test_a_configuration_over_its_limit_is_wrong() -> None:
    result = checked(CASES["lease"], limit=0.001)
    assert result.verdict == OVER
    assert runner.line(CASES["lease"], result).startswith("WRONG")


@pytest.mark.parametrize(("ci", "status"), [("", 3), ("true", 1)])
def test_without_java_it_says_how_to_get_it(
    ci: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert runner.main(["lease"]) == status
    assert "install a Java runtime" in capsys.readouterr().err


def test_the_short_selection_has_all_mutations_and_something_that_passes_of_every_model() -> None:
    quick = runner.choose([], quick=True)
    assert {case.name for case in MUTATIONS} < {case.name for case in quick}
    assert {case.model for case in quick if case.good} == {case.model for case in CASES.values()}
