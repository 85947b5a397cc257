"""What becomes of orphans, who may run what, and the pace of resuming (O29–O32)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    ThreadId,
    WorkerId,
    micros,
)
from deerflow_runs.protocol.decision import Actor, Applied, Facts, SessionFacts, decide
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.recovery import (
    Recovery,
    ResumeBudget,
    WaitsFor,
    backoff,
    can_run,
    next_attempt,
    next_sweep,
    seizers_attempt,
    sweep_phase,
    used_up,
    verdict,
    why_waiting,
)
from deerflow_runs.protocol.trust import BootSeconds
from tests.rules import rule

ME, DEAD, OTHER = WorkerId("a:1"), WorkerId("b:2"), WorkerId("c:3")
ROLLBACK, INTERRUPT = CancelAction.ROLLBACK, CancelAction.INTERRUPT


def run(**fields: Any) -> Run:
    standard: dict[str, Any] = {"status": RunStatus.RUNNING, "owner_worker_id": DEAD, "epoch": 5, "attempt": 1}
    return Run(RunId("r"), ThreadId("t"), **standard | fields)


# ---- attempts (O30) ------------------------------------------------------------------------------------------------


@rule("O30")
def test_an_epoch_without_a_checkpoint_costs_an_attempt() -> None:
    assert next_attempt(run(attempt=2, progress_epoch=4)) == 3
    assert next_attempt(run(attempt=2, progress_epoch=None)) == 3


@rule("O30")
def test_an_epoch_that_wrote_a_checkpoint_starts_the_count_again() -> None:
    assert next_attempt(run(attempt=3, progress_epoch=5)) == 1


@rule("O30", "I9")
def test_the_last_attempt_is_used_up_by_an_epoch_without_progress() -> None:
    assert not used_up(run(attempt=2, max_attempts=3))
    assert used_up(run(attempt=3, max_attempts=3))
    assert not used_up(run(attempt=3, max_attempts=3, progress_epoch=5))


@rule("I9", "O30")
@given(progress=st.lists(st.booleans(), max_size=40), cap=st.integers(1, 5))
def test_a_run_is_never_granted_more_often_without_progress_than_the_cap(progress: list[bool], cap: int) -> None:
    orphan, fruitless = run(max_attempts=cap), 1
    for progressed in progress:
        orphan = replace(orphan, progress_epoch=orphan.epoch if progressed else orphan.progress_epoch)
        fruitless = 0 if progressed else fruitless
        if used_up(orphan):
            break
        orphan = replace(orphan, epoch=orphan.epoch + 1, attempt=next_attempt(orphan))
        fruitless += 1
        assert fruitless <= cap
    else:
        assert fruitless <= cap


@rule("O30", "I9")
@given(cap=st.integers(1, 5))
def test_a_run_that_kills_its_workers_gets_all_its_attempts_and_no_more(cap: int) -> None:
    orphan, grants = run(max_attempts=cap), 1
    while not used_up(orphan):
        orphan, grants = replace(orphan, epoch=orphan.epoch + 1, attempt=next_attempt(orphan)), grants + 1
    assert grants == cap


def owed(**fields: Any) -> Run:
    standard: dict[str, Any] = {"turn": 1, "cancel_action": ROLLBACK, "cancel_requested_at": Micros(50)}
    return run(**standard | {"granted_at": Micros(10)} | fields)


def seized(orphan: Run, by: WorkerId, now: int, *, epoch: int | None = None) -> Run:
    attempt = seizers_attempt(orphan, by=by, epoch=epoch)
    grant: dict[str, Any] = {"status": RunStatus.PENDING, "owner_worker_id": by, "granted_at": Micros(now)}
    return replace(orphan, attempt=attempt, epoch=orphan.epoch + 1, **grant)


@rule("O30", "O4", "I16")
@pytest.mark.parametrize(
    "orphan",
    [
        pytest.param(owed(attempt=3), id="running"),
        pytest.param(owed(attempt=3, status=RunStatus.PENDING, owner_worker_id=None), id="vacant"),
        pytest.param(owed(attempt=3, status=RunStatus.PENDING), id="claimed, not yet started"),
    ],
)
def test_a_rollback_of_a_run_on_its_last_attempt_is_tried_as_often_as_any_other(orphan: Run) -> None:
    tries = 0
    for second in range(60, 70):
        orphan = seized(orphan, WorkerId(f"seizer:{second}"), second)
        if orphan.attempt > orphan.max_attempts:
            break
        tries += 1
    assert tries == orphan.max_attempts


@rule("O30", "O4", "I8")
def test_every_further_restore_is_counted_whoever_tries_it() -> None:
    once = seized(owed(), ME, 60)
    assert seized(once, OTHER, 61).attempt == once.attempt + 1
    assert seized(once, ME, 61, epoch=once.epoch).attempt == once.attempt + 1


@rule("O8", "O30")
def test_a_seizure_repeated_after_a_lost_reply_is_not_another_attempt() -> None:
    once = seized(owed(), ME, 60)
    assert seized(once, ME, 61, epoch=once.epoch - 1).attempt == once.attempt


# ---- backoff (O30) -------------------------------------------------------------------------------------------------


@rule("O30")
@given(attempt=st.integers(0, 10_000), unit=st.floats(0, 1, exclude_max=True))
def test_backoff_stays_within_its_bounds(attempt: int, unit: float) -> None:
    pause = backoff(attempt, unit=unit, minimum=micros(1), maximum=micros(60))
    assert micros(1) <= pause <= micros(60)


@rule("O30")
@pytest.mark.parametrize(("attempt", "ceiling"), [(1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (99, 60)])
def test_the_ceiling_of_backoff_doubles_up_to_the_maximum(attempt: int, ceiling: float) -> None:
    assert backoff(attempt, unit=1.0, minimum=micros(1), maximum=micros(60)) == micros(ceiling)


@rule("O30")
@pytest.mark.parametrize(("unit", "seconds"), [(0.0, 1.0), (0.5, 4.5), (1.0, 8.0)])
def test_jitter_spreads_over_everything_from_minimum_to_ceiling(unit: float, seconds: float) -> None:
    assert backoff(3, unit=unit, minimum=micros(1), maximum=micros(60)) == micros(seconds)


# ---- the verdict (O29, O31, O26) -----------------------------------------------------------------------------------


@rule("O29", "O30", "O31", "O4")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"on_orphan": OnOrphan.FAIL}, Recovery.FAIL),
        ({"on_orphan": OnOrphan.RESUME}, Recovery.RESUME),
        ({"on_orphan": OnOrphan.RESUME, "attempt": 3}, Recovery.POISON),
        ({"on_orphan": OnOrphan.RESUME, "attempt": 3, "progress_epoch": 5}, Recovery.RESUME),
        ({"cancel_action": INTERRUPT, "turn": 1}, Recovery.FORCE),
        ({"cancel_action": ROLLBACK, "turn": 1}, Recovery.SEIZE),
        ({"cancel_action": ROLLBACK, "turn": None, "status": RunStatus.PENDING}, Recovery.FORCE),
        ({"cancel_action": ROLLBACK, "turn": 1, "on_orphan": OnOrphan.RESUME, "attempt": 9}, Recovery.SEIZE),
        ({"kind": OperationKind.CHECKPOINT_WRITE}, Recovery.RELEASE),
        ({"status": RunStatus.SUCCESS}, Recovery.NOTHING),
    ],
)
def test_the_verdict_over_an_orphan(fields: Mapping[str, Any], expected: Recovery) -> None:
    assert verdict(run(**fields)) is expected


@rule("O31", "O29")
@pytest.mark.parametrize(
    ("status", "home", "policy", "expected"),
    [
        (RunStatus.QUEUED, DEAD, OnOrphan.FAIL, Recovery.FAIL),
        (RunStatus.PENDING, DEAD, OnOrphan.FAIL, Recovery.FAIL),
        (RunStatus.QUEUED, DEAD, OnOrphan.RESUME, Recovery.FREE_OF_HOME),
        (RunStatus.PENDING, DEAD, OnOrphan.RESUME, Recovery.FREE_OF_HOME),
        (RunStatus.PENDING, None, OnOrphan.FAIL, Recovery.NOTHING),
    ],
)
def test_what_waits_at_a_dead_home_follows_its_policy(
    status: RunStatus, home: WorkerId | None, policy: OnOrphan, expected: Recovery
) -> None:
    waiting = run(status=status, owner_worker_id=None, home_worker_id=home, on_orphan=policy, attempt=3)
    assert verdict(waiting) is expected


@rule("O26")
def test_only_what_ends_a_run_by_a_verdict_waits_for_it_to_ripen() -> None:
    assert {fate for fate in Recovery if fate.final} == {Recovery.FAIL, Recovery.POISON}


RUNS = st.builds(
    run,
    status=st.sampled_from(RunStatus),
    kind=st.sampled_from([OperationKind.RUN, OperationKind.DELETE]),
    owner_worker_id=st.sampled_from([DEAD, None]),
    home_worker_id=st.sampled_from([DEAD, None]),
    on_orphan=st.sampled_from(OnOrphan),
    attempt=st.integers(0, 4),
    progress_epoch=st.sampled_from([None, 4, 5]),
    cancel_action=st.sampled_from([None, *CancelAction]),
    turn=st.sampled_from([None, 1]),
)

EVENTS = {
    Recovery.FAIL: {RunEvent.TAKE_OVER_FAIL, RunEvent.TAKE_OVER_FAIL_WAITING},
    Recovery.POISON: {RunEvent.TAKE_OVER_FAIL},
    Recovery.RESUME: {RunEvent.TAKE_OVER_RESUME},
    Recovery.FREE_OF_HOME: {RunEvent.TAKE_OVER_RESUME_WAITING},
    Recovery.SEIZE: {RunEvent.SEIZE},
    Recovery.FORCE: {RunEvent.FORCE},
    Recovery.RELEASE: {RunEvent.TAKE_OVER_RELEASE},
    Recovery.NOTHING: set[RunEvent](),
}


@rule("O29", "O31", "O4", "O28")
@given(orphan=RUNS)
def test_the_verdict_is_the_one_event_the_table_allows_to_a_rescuer(orphan: Run) -> None:
    assume(orphan.status is not RunStatus.QUEUED or orphan.owner_worker_id is None)
    assume(orphan.status is not RunStatus.RUNNING or orphan.owner_worker_id is not None)
    assume(not orphan.reservation or (orphan.owner_worker_id and orphan.status is not RunStatus.QUEUED))
    assume(orphan.status is not RunStatus.QUEUED or orphan.cancel_action is None)
    dead = SessionFacts(SessionState.DEAD, proven=True)
    facts = Facts(
        now=Micros(10**9),
        owner=dead if orphan.owner_worker_id else None,
        home=dead if orphan.home_worker_id else None,
    )
    rescue = set[RunEvent]().union(*EVENTS.values())
    allowed = {event for event in rescue if isinstance(decide(orphan, event, Actor(ME), facts), Applied)}
    fate = verdict(orphan)
    assert allowed <= EVENTS[fate]
    assert bool(allowed) is (fate is not Recovery.NOTHING)


# ---- who may run what (O31) ----------------------------------------------------------------------------------------


@rule("O31")
@pytest.mark.parametrize(
    ("home", "required", "offered", "able"),
    [
        (None, set(), set(), True),
        (None, {"executor:agent"}, {"executor:agent", "gpu"}, True),
        (None, {"executor:agent", "gpu"}, {"executor:agent"}, False),
        (ME, set(), set(), True),
        (OTHER, set(), {"gpu"}, False),
    ],
)
def test_a_worker_takes_only_what_it_can_run(
    home: WorkerId | None, required: set[str], offered: set[str], able: bool
) -> None:
    wanted = run(home_worker_id=home, required_capabilities=frozenset(required))
    assert can_run(wanted, me=ME, capabilities=frozenset(offered)) is able


def worker(worker_id: WorkerId, *capabilities: str, state: SessionState = SessionState.LIVE) -> Session:
    return Session(worker_id, state=state, capabilities=frozenset(capabilities))


def vacant(*required: str, **fields: Any) -> Run:
    return run(status=RunStatus.PENDING, owner_worker_id=None, required_capabilities=frozenset(required), **fields)


@rule("O31")
def test_a_run_that_some_live_worker_can_take_waits_for_nothing() -> None:
    sessions = [worker(OTHER), worker(ME, "gpu", "executor:agent")]
    assert why_waiting(vacant("gpu"), sessions, me=ME, now=Micros(7)) is None


@rule("O31")
def test_a_run_that_nobody_can_take_says_what_the_best_placed_worker_lacks() -> None:
    sessions = [worker(ME, "b"), worker(OTHER, "b", "c"), worker(DEAD, "a", "b", "c", state=SessionState.DEAD)]
    reason = why_waiting(vacant("a", "b", "c"), sessions, me=ME, now=Micros(7))
    assert reason == WaitsFor(("a",), "no live worker has a", Micros(7), Micros(7), ME)


@rule("O31", "O35")
def test_a_draining_worker_is_nobody_to_wait_for() -> None:
    reason = why_waiting(vacant("a"), [worker(ME, "a", state=SessionState.DRAINING)], me=ME, now=Micros(7))
    assert reason is not None
    assert reason.message == "no worker is live"


@rule("O31")
def test_a_run_whose_home_is_gone_says_so() -> None:
    reason = why_waiting(vacant(home_worker_id=OTHER), [worker(ME)], me=ME, now=Micros(7))
    assert reason is not None
    assert reason.message == f"its home session {OTHER} is not live"


@rule("O31")
def test_since_when_a_run_waits_survives_looking_again_but_not_another_reason() -> None:
    first = why_waiting(vacant("a"), [worker(ME)], me=ME, now=Micros(7))
    assert first is not None
    again = why_waiting(vacant("a", waits_for=first.as_json()), [worker(ME)], me=OTHER, now=Micros(9))
    assert again == replace(first, checked_at=Micros(9), checked_by=OTHER)
    other = why_waiting(vacant("a", "b", waits_for=first.as_json()), [worker(ME)], me=ME, now=Micros(9))
    assert other is not None
    assert other.since == 9


# ---- pace (O32) ----------------------------------------------------------------------------------------------------


def at(seconds: float) -> BootSeconds:
    return BootSeconds(1000.0 + seconds)


@rule("O32")
def test_nothing_is_resumed_at_the_moment_of_a_reconnect() -> None:
    saved = ResumeBudget.empty(rate=5.0, burst=20, at=at(0))
    assert saved.available(at(100)) == 20
    assert saved.reconnected(at(100)).available(at(100)) == 0


@rule("O32")
@given(times=st.lists(st.floats(0, 10), min_size=1, max_size=30).map(sorted))
def test_after_a_reconnect_no_more_is_resumed_than_the_rate_allows(times: list[float]) -> None:
    budget, resumed = ResumeBudget.empty(rate=5.0, burst=20, at=at(-50)).reconnected(at(0)), 0
    for time in times:
        count = budget.available(at(time))
        budget, resumed = budget.spent(count, at(time)), resumed + count
        assert resumed <= 5.0 * time + 1e-6


@rule("O32")
def test_the_budget_fills_at_its_rate_up_to_its_burst() -> None:
    budget = ResumeBudget.empty(rate=5.0, burst=20, at=at(0))
    assert [budget.available(at(second)) for second in (0, 1, 2, 4, 9)] == [0, 5, 10, 20, 20]


@rule("O32")
def test_the_first_sweep_is_spread_over_one_interval_by_the_worker_id() -> None:
    phases = [sweep_phase(WorkerId(f"host:{number}"), 2.0) for number in range(1000)]
    assert all(0 <= phase < 2.0 for phase in phases)
    for quarter in range(4):
        assert 150 < sum(quarter * 0.5 <= phase < (quarter + 1) * 0.5 for phase in phases) < 350


@rule("O32")
def test_the_phase_is_the_same_in_every_process() -> None:
    assert sweep_phase(WorkerId("host:1"), 2.0) == pytest.approx(0.125087, abs=1e-6)


@rule("O32")
def test_sweeps_carry_a_fifth_of_jitter() -> None:
    assert next_sweep(2.0, unit=0.0) == pytest.approx(1.6)
    assert next_sweep(2.0, unit=0.999999) == pytest.approx(2.4, abs=1e-3)


@rule("I7", "O32")
def test_a_delayed_run_that_comes_due_sooner_brings_the_sweep_forward() -> None:
    assert next_sweep(2.0, unit=0.5, until_due=0.3) == pytest.approx(0.3)
    assert next_sweep(2.0, unit=0.5, until_due=-5.0) == 0.0
    assert next_sweep(2.0, unit=0.5, until_due=50.0) == pytest.approx(2.0)
