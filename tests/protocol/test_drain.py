"""How a worker leaves: the budget, the order, and what becomes of its runs (O35, O23)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    SessionState,
    StopReason,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Applied, Facts, decide
from deerflow_runs.protocol.drain import GRACE_SHARE, LEAST, ORDER, SHARES, DrainPlan, Parting, Step, parting
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.trust import BootSeconds
from tests.rules import rule

ME, OTHER = WorkerId("a:1"), WorkerId("b:2")


def at(seconds: float) -> BootSeconds:
    return BootSeconds(1000.0 + seconds)


PLAN = DrainPlan.begun(at=at(0), budget=20.0)

# ---- one budget (O35) ----------------------------------------------------------------------------------------------


@rule("O35")
def test_runs_come_first_and_beats_stop_last() -> None:
    assert ORDER == (Step.RUNS, Step.EVENT_LOG, Step.SAVERS, Step.POOLS, Step.SESSION)


@rule("O35")
def test_the_shares_make_up_the_whole_budget() -> None:
    assert sum(SHARES.values()) == pytest.approx(1.0)
    assert PLAN.ends == pytest.approx(at(20))


@rule("O35")
def test_runs_may_stop_between_steps_for_the_grace_and_leave_the_later_steps_their_time() -> None:
    assert PLAN.grace_ends == pytest.approx(at(10))
    assert PLAN.deadline_for(Step.RUNS) == pytest.approx(at(15))
    assert SHARES[Step.RUNS] > GRACE_SHARE


@rule("O35")
def test_what_a_step_leaves_over_the_later_ones_may_use() -> None:
    assert PLAN.allowed(Step.EVENT_LOG, at(1)) == pytest.approx(16.0)


SIGNALS = st.lists(st.floats(0, 30), max_size=6).map(sorted)


def signalled(budget: float, signals: list[float]) -> list[DrainPlan]:
    plans = [DrainPlan.begun(at=at(0), budget=budget)]
    for second in signals:
        plans.append(plans[-1].signalled_again(at(second)))
    return plans


@rule("O35")
@given(budget=st.floats(0, 60), signals=SIGNALS)
def test_no_signal_ever_changes_the_order_of_the_steps(budget: float, signals: list[float]) -> None:
    for plan in signalled(budget, signals):
        deadlines = [plan.deadline_for(step) for step in ORDER]
        assert plan.grace_ends <= deadlines[0]
        assert all(earlier <= later for earlier, later in pairwise(deadlines))


@rule("O35")
@given(budget=st.floats(0, 60), signals=SIGNALS, step=st.sampled_from(ORDER))
def test_no_signal_ever_lengthens_a_step(budget: float, signals: list[float], step: Step) -> None:
    for before, after in pairwise(signalled(budget, signals)):
        assert after.deadline_for(step) <= before.deadline_for(step)
        assert after.grace_ends <= before.grace_ends


@rule("O35")
@given(budget=st.floats(0, 60), signals=SIGNALS, step=st.sampled_from(ORDER), now=st.floats(0, 100))
def test_every_step_is_given_time_however_late_it_is(
    budget: float, signals: list[float], step: Step, now: float
) -> None:
    assert signalled(budget, signals)[-1].allowed(step, at(now)) >= LEAST


@rule("O35")
def test_a_second_signal_ends_the_grace_and_halves_what_is_left() -> None:
    hurried = PLAN.signalled_again(at(4))
    assert hurried.grace_ends == at(4)
    assert hurried.ends == pytest.approx(at(12))
    assert hurried.deadline_for(Step.RUNS) == pytest.approx(at(10))


@rule("O35")
def test_a_signal_after_the_end_changes_nothing_but_brings_no_step_back() -> None:
    assert PLAN.signalled_again(at(25)).deadlines == PLAN.deadlines


# ---- the runs (O35, O23, I18) --------------------------------------------------------------------------------------


def run(**fields: Any) -> Run:
    standard: dict[str, Any] = {"status": RunStatus.RUNNING, "owner_worker_id": ME, "epoch": 5, "turn": 1}
    return Run(RunId("r"), ThreadId("t"), **standard | fields)


RESUMES, FAILS = {"on_orphan": OnOrphan.RESUME}, {"on_orphan": OnOrphan.FAIL}
VACANT = {"status": RunStatus.PENDING, "owner_worker_id": None, "home_worker_id": ME}
QUEUED = VACANT | {"status": RunStatus.QUEUED, "turn": None}


@rule("O35", "O23", "I18")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (RESUMES, Parting.HAND_OVER),
        (RESUMES | {"status": RunStatus.PENDING}, Parting.HAND_OVER),
        (FAILS, Parting.END_SHUTDOWN),
        (FAILS | {"status": RunStatus.PENDING}, Parting.END_SHUTDOWN),
        (FAILS | VACANT, Parting.END_WAITING),
        (FAILS | QUEUED, Parting.END_WAITING),
        (RESUMES | VACANT, Parting.STAY),
        (RESUMES | QUEUED, Parting.STAY),
        (FAILS | VACANT | {"home_worker_id": None}, Parting.STAY),
        (FAILS | QUEUED | {"home_worker_id": OTHER}, Parting.STAY),
        (FAILS | {"owner_worker_id": OTHER, "home_worker_id": ME}, Parting.STAY),
        (RESUMES | {"status": RunStatus.SUCCESS}, Parting.KEEP),
        ({"kind": OperationKind.DELETE}, Parting.RELEASE),
        (RESUMES | {"cancel_action": CancelAction.INTERRUPT}, Parting.SETTLE_CANCELLED),
        (RESUMES | {"cancel_action": CancelAction.ROLLBACK}, Parting.RESTORE),
        (FAILS | {"cancel_action": CancelAction.ROLLBACK, "turn": None}, Parting.SETTLE_CANCELLED),
        (RESUMES | VACANT | {"cancel_action": CancelAction.INTERRUPT}, Parting.END_WAITING),
        (RESUMES | VACANT | {"cancel_action": CancelAction.ROLLBACK}, Parting.RESTORE),
    ],
)
def test_what_becomes_of_a_run_when_its_worker_leaves(fields: Mapping[str, Any], expected: Parting) -> None:
    assert parting(run(**fields), me=ME) is expected


EVENTS = {
    Parting.HAND_OVER: RunEvent.HAND_OVER,
    Parting.END_SHUTDOWN: RunEvent.SETTLE_CANCELLED,
    Parting.END_WAITING: RunEvent.END_WAITING,
    Parting.SETTLE_CANCELLED: RunEvent.SETTLE_CANCELLED,
    Parting.RESTORE: RunEvent.SEIZE,
    Parting.RELEASE: RunEvent.RELEASE,
}

RUNS = st.builds(
    run,
    status=st.sampled_from(RunStatus),
    kind=st.sampled_from([OperationKind.RUN, OperationKind.ARTIFACT_WRITE]),
    owner_worker_id=st.sampled_from([ME, None, OTHER]),
    home_worker_id=st.sampled_from([ME, None, OTHER]),
    on_orphan=st.sampled_from(OnOrphan),
    cancel_action=st.sampled_from([None, *CancelAction]),
    turn=st.sampled_from([None, 1]),
)


def possible(operation: Run) -> bool:
    """No row is queued and owned or cancelled, running without an owner or a turn, or a reservation without owner."""
    if operation.status is RunStatus.QUEUED:
        return operation.owner_worker_id is None and operation.cancel_action is None and not operation.reservation
    started = operation.owner_worker_id is not None and operation.turn is not None
    return (operation.status is not RunStatus.RUNNING or started) and (
        not operation.reservation or operation.owner_worker_id is not None
    )


@rule("O35", "O23")
@given(operation=RUNS.filter(possible))
def test_the_table_allows_a_draining_worker_what_parting_asks_of_it(operation: Run) -> None:
    event = EVENTS.get(parting(operation, me=ME))
    if event is not None:
        facts = Facts(now=Micros(10**9), actor=SessionState.DRAINING)
        assert isinstance(decide(operation, event, Actor(ME, epoch=5), facts), Applied)


@rule("I18", "O35")
def test_a_hand_over_costs_no_attempt() -> None:
    facts = Facts(now=Micros(10**9), actor=SessionState.DRAINING)
    handed = decide(run(attempt=3, **RESUMES), RunEvent.HAND_OVER, Actor(ME, epoch=5), facts)
    assert isinstance(handed, Applied)
    assert handed.run.attempt == 3


@rule("O23")
def test_a_run_that_waits_here_ends_with_shutdown_and_not_as_the_users_cancel() -> None:
    facts = Facts(now=Micros(10**9), actor=SessionState.DRAINING)
    ended = decide(run(**FAILS | VACANT), RunEvent.END_WAITING, Actor(ME, epoch=5), facts)
    assert isinstance(ended, Applied)
    assert ended.run.stop_reason == StopReason.SHUTDOWN
