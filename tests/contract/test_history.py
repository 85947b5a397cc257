"""What a thread's past adds up to, decided on values: hidden runs and tokens."""

from __future__ import annotations

import pytest

from deerflow_runs.model import RunId, RunStatus
from deerflow_runs.store.base import TokenTotals
from deerflow_runs.store.history import Attempt, Spending, add_up, hidden_runs
from tests.rules import rule

S = RunStatus
FAILURES = (S.ERROR, S.TIMEOUT, S.INTERRUPTED)
OPEN = (S.QUEUED, S.PENDING, S.RUNNING)


def regeneration(run_id: str, source: str, status: RunStatus) -> Attempt:
    return Attempt(RunId(run_id), RunId(source), False, status)


def edit(run_id: str, source: str, status: RunStatus) -> Attempt:
    return Attempt(RunId(run_id), RunId(source), True, status)


@rule("B188")
def test_a_successful_regeneration_hides_its_source() -> None:
    assert hidden_runs([regeneration("b", "a", S.SUCCESS)]) == {"a"}


@rule("B188")
@pytest.mark.parametrize("status", [*FAILURES, *OPEN])
def test_a_regeneration_that_has_not_succeeded_hides_nothing(status: RunStatus) -> None:
    assert hidden_runs([regeneration("b", "a", status)]) == frozenset()


@rule("B189")
@pytest.mark.parametrize("status", FAILURES)
def test_a_newer_failure_brings_the_source_of_an_older_success_back(status: RunStatus) -> None:
    assert hidden_runs([regeneration("c", "a", status), regeneration("b", "a", S.SUCCESS)]) == frozenset()


@rule("B189")
@pytest.mark.parametrize("status", OPEN)
def test_a_regeneration_under_way_leaves_its_source_as_the_last_one_left_it(status: RunStatus) -> None:
    assert hidden_runs([regeneration("c", "a", status), regeneration("b", "a", S.SUCCESS)]) == {"a"}
    assert hidden_runs([regeneration("c", "a", status), regeneration("b", "a", S.ERROR)]) == frozenset()


@rule("B190")
@pytest.mark.parametrize("status", [S.SUCCESS, *OPEN])
def test_an_edit_hides_its_source_from_its_beginning(status: RunStatus) -> None:
    assert hidden_runs([edit("b", "a", status)]) == {"a"}


@rule("B190")
@pytest.mark.parametrize("status", FAILURES)
def test_a_failed_edit_is_hidden_itself_and_shows_its_source_again(status: RunStatus) -> None:
    assert hidden_runs([edit("b", "a", status)]) == {"b"}
    assert hidden_runs([edit("c", "a", status), edit("b", "a", S.SUCCESS)]) == {"c"}
    assert hidden_runs([edit("c", "a", S.RUNNING), edit("b", "a", status)]) == {"a", "b"}


def test_chains_hide_all_but_their_end() -> None:
    chain = [regeneration("d", "c", S.SUCCESS), edit("c", "b", S.SUCCESS), regeneration("b", "a", S.SUCCESS)]
    assert hidden_runs(chain) == {"a", "b", "c"}


def test_sources_are_decided_apart_and_so_are_edits_and_regenerations() -> None:
    attempts = [regeneration("d", "x", S.ERROR), edit("c", "a", S.ERROR), regeneration("b", "a", S.SUCCESS)]
    assert hidden_runs(attempts) == {"a", "c"}


@pytest.mark.parametrize(
    "metadata",
    [{}, {"regenerate_from_run_id": None}, {"regenerate_from_run_id": ["a"]}, {"regenerate_from_run_id": "me"}],
)
def test_a_run_without_another_run_as_its_source_does_nothing_over(metadata: dict[str, object]) -> None:
    assert Attempt.of(RunId("me"), S.SUCCESS, metadata) is None


def test_an_edit_is_known_by_its_word_only() -> None:
    source = {"regenerate_from_run_id": "a"}
    kinds = [None, "edit", "Edit", True]
    attempts = [Attempt.of(RunId("b"), S.SUCCESS, source | {"replay_kind": kind}) for kind in kinds]
    assert [attempt is not None and attempt.edit for attempt in attempts] == [False, True, False, False]


# --- Tokens ---------------------------------------------------------------------------------------------------------


def spent(
    total: int, model: str | None = None, by_model: dict[str, object] | None = None, **by_caller: object
) -> Spending:
    return Spending(model, total, 0, total, by_model or {}, by_caller)


@rule("B199")
def test_a_thread_without_runs_has_used_nothing() -> None:
    assert add_up([]) == TokenTotals()


@rule("B197")
def test_a_run_of_several_models_counts_once_for_each_and_once_in_all() -> None:
    totals = add_up([spent(30, by_model={"m": 10, "n": 20}), spent(5, by_model={"m": 5})])
    assert (totals.runs, totals.total_tokens, totals.by_model) == (2, 35, {"m": 15, "n": 20})
    assert totals.runs_by_model == {"m": 2, "n": 1}


@rule("B197")
def test_tokens_are_split_by_who_used_them() -> None:
    assert add_up([spent(9, lead=4, middleware=5), spent(1, lead=1)]).by_caller == {"lead": 5, "middleware": 5}


@rule("B198")
def test_a_run_that_named_no_models_counts_under_its_own_or_as_unknown() -> None:
    totals = add_up([spent(3, "m"), spent(2), spent(0, "m"), spent(0)])
    assert (totals.runs, totals.by_model, totals.runs_by_model) == (4, {"m": 3, "unknown": 2}, {"m": 2, "unknown": 1})


def test_what_is_no_number_counts_nothing() -> None:
    totals = add_up([spent(1, by_model={"m": "12", "n": 2.0, "o": None, "p": True})])
    assert totals.by_model == {"m": 0, "n": 2, "o": 0, "p": 0}
