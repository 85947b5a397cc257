"""The judge of recorded histories, tested with histories made by hand: each invariant broken, and none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deerflow_runs.model import Micros, RunId, SessionState
from deerflow_runs.testing import Expected, History, HistoryBroken, StepLogged, check_history
from deerflow_runs.testing.invariants import INVARIANTS
from deerflow_runs.testing.recorded import RunChanged
from tests.history.past import ME, OTHER, Past
from tests.history.stories import BROKEN, HONEST, Told, epoch_falls, one_after_the_other, running
from tests.rules import rule

QUIET = Expected(quiet=True, healthy=[OTHER], max_running=1, max_queued=1, max_active_per_user=1)


@pytest.mark.parametrize("told", HONEST)
def test_a_history_that_keeps_every_invariant_is_believed(told: Told) -> None:
    past = Past()
    told(past)
    report = check_history(past.history(), expected=QUIET)
    report.require()
    assert report.grants > 0


def test_a_history_without_a_grant_proves_nothing() -> None:
    past = Past()
    past.waits("later", due_at=Micros(900))
    assert check_history(past.history()).broken == {"grants"}


@rule(*INVARIANTS)
@pytest.mark.parametrize(
    ("invariant", "told", "expected"), BROKEN, ids=[f"{invariant} {told.__name__}" for invariant, told, _ in BROKEN]
)
def test_a_history_that_breaks_one_invariant_is_faulted_for_that_one(
    invariant: str, told: Told, expected: Expected
) -> None:
    past = Past()
    told(past)
    report = check_history(past.history(), expected=expected)
    assert report.broken == {invariant}, str(report)
    with pytest.raises(HistoryBroken, match=f"{invariant}:"):
        report.require()


# --- What executors log ---------------------------------------------------------------------------------------------


def logged(*, asked: int | None = None, started: int | None = None, epoch: int = 1, step: str = "two") -> StepLogged:
    """A step of the run, begun at some time."""
    times = {name: None if at is None else Micros(at) for name, at in (("asked_at", asked), ("started_at", started))}
    return StepLogged(run_id=RunId("run"), epoch=epoch, step=step, **times)


def beating(past: Past) -> None:
    """A run whose owner's lease is over from 200 to 300, and for good from 400 on."""
    running(past)
    past.writes("one")
    past.turns(ME, at=100, beat=1, expires_at=Micros(200))
    past.turns(ME, at=300, beat=2, expires_at=Micros(900))
    past.turns(ME, at=400, state=SessionState.DEAD)


@rule("I11")
@pytest.mark.parametrize(
    ("asked", "started", "trusted"),
    [
        (150, 160, True),
        (190, 250, True),  # asked while it was trusted: the process may have been stopped before it looked at its watch
        (210, 290, False),
        (250, 310, True),  # waited until trust was back
        (350, 350, True),
        (410, 500, False),
        (None, 250, True),  # nothing can be said
    ],
)
def test_a_step_that_lies_in_a_gap_between_two_leases_began_without_trust(
    asked: int | None, started: int, trusted: bool
) -> None:
    past = Past()
    beating(past)
    report = check_history(past.history(), expected=Expected(steps=[logged(asked=asked, started=started)]))
    assert report.broken == (set() if trusted else {"I11"})


@rule("I11")
def test_a_step_under_an_epoch_that_nobody_held_began_without_trust() -> None:
    past = Past()
    beating(past)
    assert check_history(past.history(), expected=Expected(steps=[logged(epoch=9)])).broken == {"I11"}


@rule("I20")
@pytest.mark.parametrize(("epoch", "broken"), [(1, set()), (2, {"I20"})])
def test_a_step_that_was_recorded_may_not_begin_again_under_a_later_epoch(epoch: int, broken: set[str]) -> None:
    past = Past()
    beating(past)
    past.becomes(raised=1)
    assert check_history(past.history(), expected=Expected(steps=[logged(step="one", epoch=epoch)])).broken == broken


# --- What the report says -------------------------------------------------------------------------------------------


def test_a_report_names_the_invariant_the_run_and_the_changes_that_show_it() -> None:
    past = Past()
    epoch_falls(past)
    (violation,) = check_history(past.history()).violations
    (change,) = violation.changes
    assert isinstance(change, RunChanged)
    after = change.run
    assert str(violation).splitlines() == [
        "I4: run run: fell from epoch 4 to 3",
        f"    #5 {replace(after, epoch=4)} -> {after}",
    ]


def test_a_report_says_which_invariants_the_test_told_too_little_for() -> None:
    past = Past()
    running(past)
    assert sorted(check_history(past.history()).not_judged) == ["I10", "I11", "I13", "I15", "I19", "I8"]
    told = Expected(
        quiet=True,
        may_remain=[RunId("run")],
        healthy=[ME],
        acknowledged=[RunId("run")],
        max_running=1,
        steps=[logged(asked=5, started=6)],
        without=["I3"],
    )
    report = check_history(past.history(), expected=told)
    assert not report.violations
    assert sorted(report.not_judged) == ["I13", "I3"]


def test_every_invariant_has_a_history_that_breaks_it() -> None:
    assert {invariant for invariant, _, _ in BROKEN} | {"I11"} == set(INVARIANTS)


# --- The order of commits -------------------------------------------------------------------------------------------


def test_transactions_stand_in_the_order_of_their_last_changes() -> None:
    past = Past()
    running(past)
    session, other, came, started = past.history().changes
    held = [replace(session, transaction=1), replace(other, transaction=2), replace(came, transaction=1)]
    history = History.of([replace(started, transaction=3), *held])
    assert [[change.number for change in one] for one in history.transactions] == [[2], [1, 3], [4]]


def test_an_ending_counts_as_one_transaction_where_the_database_does_not_tell() -> None:
    past = Past()
    one_after_the_other(past)
    untold = History.of([replace(change, transaction=None) for change in past.history().changes])
    check_history(untold).require()
    assert [[change.number for change in one] for one in untold.transactions if len(one) > 1] == [[7, 8, 9], [13, 14]]
