"""A mutation that no longer fits its file proves nothing, and nobody would notice before the next long run."""

from __future__ import annotations

import pytest

from deerflow_runs.protocol.lifecycle import TRANSITIONS
from tests.mutants import ROOT, Job, Outcome, Result, choose, judge, main, mutated
from tests.mutations import DropGuard, Mutation, all_mutations

MUTATIONS = all_mutations()


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if isinstance(m, Mutation)], ids=lambda m: m.name)
def test_a_mutation_changes_exactly_one_place(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text(encoding="utf-8")
    assert mutated(mutation, text) != text


def test_the_tests_that_mutations_name_are_there() -> None:
    files = {test.split("::")[0] for mutation in MUTATIONS for test in mutation.tests}
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_every_guard_of_the_table_is_dropped_once() -> None:
    dropped = sorted((m.event, m.guard) for m in MUTATIONS if isinstance(m, DropGuard))
    assert dropped == sorted((event.value, guard.value) for event, rule in TRANSITIONS.items() for guard in rule.guards)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (11, Outcome.KILLED),
        (None, Outcome.KILLED),
        (10, Outcome.SURVIVED),
        (1, Outcome.BROKEN),  # the session did not even start
        (12, Outcome.BROKEN),  # nothing could be collected
        (15, Outcome.BROKEN),
        (99, Outcome.BROKEN),
        (-11, Outcome.BROKEN),
    ],
)
def test_only_a_red_test_kills(code: int | None, outcome: Outcome) -> None:
    assert judge(Result(Job(("tests",)), code, 0.0)) is outcome


def test_a_name_that_fits_nothing_runs_nothing() -> None:
    assert main(["no mutation has this name"]) == 2


def test_the_quick_ones_are_those_of_the_protocol() -> None:
    quick = choose(MUTATIONS, [], quick=True)
    assert set(MUTATIONS) > set(quick) > {mutation for mutation in MUTATIONS if isinstance(mutation, DropGuard)}
