"""What must be true of every decision about a run, whatever the row, the asker and the moment.

None of these reads the table to find its answer: each says in its own words what ownership.md promises.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from deerflow_runs.model import (
    ACTIVE,
    TERMINAL,
    CancelAction,
    Micros,
    OnOrphan,
    RunId,
    RunStatus,
    Session,
    SessionState,
    ThreadId,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Applied, Decision, Given, Refused, SessionFacts
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.testing.world import World
from tests.protocol.looks import any_looks, happened, looks, worker
from tests.protocol.situations import LEASE, ME, NOW, E, Situation
from tests.rules import rule

many = settings(max_examples=600)

LIVE = SessionFacts(SessionState.LIVE, lease=LEASE)
LONG_DEAD = SessionFacts(SessionState.DEAD, proven=True, lease=LEASE)


def is_holder(look: Situation) -> bool:
    """Owner and epoch, never one of them alone (O14)."""
    return look.run.owner_worker_id == look.by.worker_id and look.run.epoch == look.by.epoch


# --- The function itself --------------------------------------------------------------------------------------------


@many
@given(any_looks())
def test_every_question_has_an_answer_and_no_question_changes_anything(look: Situation) -> None:
    before = deepcopy(look)
    first = [look.decide(event) for event in RunEvent]
    assert all(isinstance(decision, Applied | Refused) for decision in first)
    assert look == before
    assert [look.decide(event) for event in RunEvent] == first


@many
@given(any_looks())
def test_a_refusal_hands_back_the_row_as_it_was(look: Situation) -> None:
    refused = [decision for decision in map(look.decide, RunEvent) if isinstance(decision, Refused)]
    assert all(decision.run == look.run for decision in refused)


# --- Status ---------------------------------------------------------------------------------------------------------


@rule("I5")
@many
@given(any_looks(statuses=TERMINAL))
def test_nothing_leaves_a_terminal_status(look: Situation) -> None:
    for event, after, repeated in happened(look):
        assert event is E.REMOVE or repeated
        assert replace(after, updated_at=look.run.updated_at) == look.run


STEPS = {
    RunStatus.QUEUED: {RunStatus.PENDING, RunStatus.INTERRUPTED, RunStatus.ERROR},
    RunStatus.PENDING: {RunStatus.RUNNING, RunStatus.INTERRUPTED, RunStatus.ERROR},
    RunStatus.RUNNING: {RunStatus.PENDING, *TERMINAL},
}


@rule("I5", "O23")
@many
@given(looks())
def test_a_status_moves_only_along_the_life_of_a_run(look: Situation) -> None:
    for _, after, _ in happened(look):
        assert after.status is look.run.status or after.status in STEPS[look.run.status]


@rule("I17")
@many
@given(looks(statuses=[RunStatus.QUEUED]))
def test_a_queued_run_becomes_active_only_as_the_first_of_a_free_thread_and_as_nobodys(look: Situation) -> None:
    for _, after, _ in happened(look):
        if after.active:
            assert look.facts.first_due
            assert not look.facts.thread_active
            assert look.run.due_at <= NOW
            assert after.vacant


# --- Epochs and owners ----------------------------------------------------------------------------------------------


@rule("I4")
@many
@given(any_looks())
def test_an_epoch_never_falls_and_never_skips(look: Situation) -> None:
    assert all(look.run.epoch <= after.epoch <= look.run.epoch + 1 for _, after, _ in happened(look))


@rule("I2", "I4")
@many
@given(looks())
def test_whoever_loses_a_run_is_fenced_and_whoever_gets_it_has_an_epoch_of_his_own(look: Situation) -> None:
    for event, after, repeated in happened(look):
        if after.owner_worker_id != look.run.owner_worker_id:
            assert after.epoch == look.run.epoch + 1, event
        if after.granted_at != look.run.granted_at:
            assert after.epoch == look.run.epoch + 1, event
        ended_for_him = look.run.active and after.terminal and not is_holder(look)
        if ended_for_him and not repeated:
            assert after.epoch == look.run.epoch + 1, event


@rule("I2")
@many
@given(looks())
def test_asking_for_a_cancel_and_promoting_leave_the_epoch_alone(look: Situation) -> None:
    for event, after, _ in happened(look):
        if event in (E.REQUEST_CANCEL, E.PROMOTE, E.CANCEL_QUEUED, E.START, E.PROGRESS):
            assert after.epoch == look.run.epoch


@rule("O14", "O20", "I2")
@many
@given(looks())
def test_a_stranger_can_do_nothing_to_a_healthy_run_but_ask_for_its_cancel(look: Situation) -> None:
    healthy = look.but(facts={"owner": LIVE}, by={"previous": None}, cancel_action=None, cancel_requested_at=None)
    if not healthy.run.active or healthy.run.owner_worker_id is None or is_holder(healthy):
        return
    assert {event for event, _, repeated in happened(healthy) if not repeated} <= {E.REQUEST_CANCEL}


@rule("O14", "F02", "F03", "F04")
@many
@given(looks())
def test_only_its_holder_starts_writes_settles_hands_over_or_gives_back(look: Situation) -> None:
    his = {
        E.START, E.PROGRESS, E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED,
        E.SETTLE_ROLLBACK_FAILED, E.HAND_OVER, E.DEFER, E.GIVE_BACK_FAIL, E.GIVE_BACK_RESUME, E.RELEASE,
    }  # fmt: skip
    for event, _, repeated in happened(look):
        assert event not in his or is_holder(look) or repeated


@rule("O31", "I12")
@many
@given(looks())
def test_a_run_is_claimed_only_by_a_live_session_that_can_run_it_and_that_its_home_allows(look: Situation) -> None:
    for event, after, _ in happened(look):
        if event is E.CLAIM:
            assert look.run.vacant
            assert look.run.not_before <= NOW
            assert look.facts.actor is SessionState.LIVE
            assert look.run.required_capabilities <= look.by.capabilities
            assert look.run.home_worker_id in (None, look.by.worker_id)
            assert after.owner_worker_id == look.by.worker_id


@rule("O15")
@many
@given(looks())
def test_turn_and_base_are_recorded_once(look: Situation) -> None:
    for event, after, _ in happened(look):
        if look.run.turn is not None:
            assert (after.turn, after.base_heads) == (look.run.turn, look.run.base_heads)
        elif after.turn is not None:
            assert event is E.START
            assert after.base_known


# --- Cancel ---------------------------------------------------------------------------------------------------------


@rule("O19", "O20", "I6", "F12", "F13")
@many
@given(looks(statuses=ACTIVE, cancels=tuple(CancelAction)))
def test_a_recorded_cancel_stays_and_never_ends_as_success(look: Situation) -> None:
    for _, after, _ in happened(look):
        recorded = (after.cancel_action, after.cancel_requested_at)
        assert recorded == (look.run.cancel_action, look.run.cancel_requested_at)
        if not look.run.terminal and after.terminal:
            failed = (after.status, after.stop_reason) == (RunStatus.ERROR, "rollback_failed")
            asked = (after.status, after.stop_reason) == (RunStatus.INTERRUPTED, look.run.cancel_action)
            assert asked or failed


@rule("O22", "I6")
@many
@given(looks(statuses=ACTIVE, cancels=tuple(CancelAction)))
def test_a_cancelled_run_is_neither_started_nor_offered_to_anybody_again(look: Situation) -> None:
    for event, after, _ in happened(look):
        assert after.status is not RunStatus.RUNNING or look.run.status is RunStatus.RUNNING, event
        assert not after.vacant or look.run.vacant, event


@rule("O19", "B093", "B105")
@many
@given(looks())
def test_any_run_that_is_not_over_can_be_cancelled_by_anybody_in_one_way(look: Situation) -> None:
    ways = {event for event, _, repeated in happened(look) if not repeated} & {E.REQUEST_CANCEL, E.CANCEL_QUEUED}
    assert len(ways) == (0 if look.run.terminal or look.run.reservation else 1)


@rule("O4", "I16", "F04", "F05")
@many
@given(looks(statuses=ACTIVE, cancels=[CancelAction.ROLLBACK]))
def test_nothing_ends_while_a_rollback_is_owed_but_by_a_holder_who_stopped_first(look: Situation) -> None:
    for event, after, _ in happened(look):
        if look.run.rollback_owed and after.terminal:
            assert is_holder(look)
            assert look.run.status is RunStatus.PENDING
            gave_up = after.stop_reason == "rollback_failed" and look.run.attempt > look.run.max_attempts
            restored = event is E.SETTLE_CANCELLED and after.stop_reason == "rollback" and look.given.restored
            assert gave_up or restored


# --- Reservations ---------------------------------------------------------------------------------------------------


@rule("O22", "B047", "B050", "B058")
@many
@given(looks())
def test_a_reservation_and_a_run_are_never_each_others_concern(look: Situation) -> None:
    events = {event for event, _, _ in happened(look)}
    if look.run.reservation:
        assert events <= {E.TAKE_BACK, E.RELEASE, E.TAKE_OVER_RELEASE}
    else:
        assert not events & {E.RELEASE, E.TAKE_OVER_RELEASE}


# --- Lost replies ---------------------------------------------------------------------------------------------------

REPEATABLE = {
    E.START, E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED, E.SETTLE_ROLLBACK_FAILED,
    E.RE_HOME,
}  # fmt: skip


@rule("O8", "F06", "F07")
@many
@given(looks())
def test_the_same_request_again_is_answered_yes_with_the_same_row(look: Situation) -> None:
    for event, after, _ in happened(look):
        if event in REPEATABLE:
            assert replace(look, run=after).decide(event) == Applied(after, repeated=True)


@rule("O8", "O13")
@many
@given(looks())
def test_a_take_back_asked_again_is_a_yes_unless_the_run_is_being_restored(look: Situation) -> None:
    for event, after, repeated in happened(look):
        if event is E.TAKE_BACK and not repeated:
            again = replace(look, run=after).decide(event)
            assert again == Applied(after, repeated=True) or (after.rollback_owed and isinstance(again, Refused))


@rule("O8")
@many
@given(looks())
def test_a_repetition_is_only_ever_answered_to_whoever_did_it(look: Situation) -> None:
    for event, after, repeated in happened(look):
        if repeated:
            assert event in REPEATABLE | {E.TAKE_BACK, E.CANCEL_QUEUED, E.FORCE, E.GIVE_BACK_FAIL}
            did_it = after.settled_by if after.terminal else after.owner_worker_id
            assert did_it == look.by.worker_id or (event is E.RE_HOME and after.home_worker_id == look.by.worker_id)


# --- Recovery -------------------------------------------------------------------------------------------------------


def all_others_dead(look: Situation) -> Situation:
    """The same row once everybody but me has been dead for long and every wait is over."""
    run = replace(look.run, due_at=Micros(NOW - 1), not_before=Micros(NOW - 1))
    mine = run.owner_worker_id == ME
    by = Actor(ME, run.epoch if mine else None, frozenset({"gpu", "disk"}))
    facts = replace(
        look.facts,
        now=Micros(NOW + 10 * LEASE),
        actor=SessionState.LIVE,
        owner=None if run.owner_worker_id is None else LIVE if mine else LONG_DEAD,
        home=None if run.home_worker_id is None else LIVE if run.home_worker_id == ME else LONG_DEAD,
        thread_active=False,
        first_due=True,
    )
    return Situation(run, by, facts, look.given)


SWEEP = {
    E.PROMOTE, E.CLAIM, E.FORCE, E.SEIZE, E.TAKE_OVER_FAIL, E.TAKE_OVER_FAIL_WAITING, E.TAKE_OVER_RESUME,
    E.TAKE_OVER_RESUME_WAITING, E.TAKE_OVER_RELEASE,
}  # fmt: skip
HOLDING = {
    E.START, E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED, E.SETTLE_ROLLBACK_FAILED, E.SEIZE,
    E.RELEASE, E.GIVE_BACK_FAIL, E.GIVE_BACK_RESUME,
}  # fmt: skip


@rule("I8", "O26", "O31")
@many
@given(looks())
def test_no_row_is_a_dead_end_for_the_last_worker_alive(look: Situation) -> None:
    left = all_others_dead(look)
    if left.run.terminal:
        return
    events = {event for event, _, _ in happened(left)}
    assert events & (HOLDING if left.run.owner_worker_id == ME else SWEEP), left.run


@rule("O26", "O29", "O31")
@many
@given(looks())
def test_a_sweep_never_has_to_choose_what_to_do_with_an_orphan(look: Situation) -> None:
    left = all_others_dead(look)
    if left.run.owner_worker_id not in (None, ME):
        due = {event for event, _, repeated in happened(left) if not repeated} & SWEEP
        assert len(due) == (0 if left.run.terminal else 1)


@rule("O12")
@many
@given(looks())
def test_its_holder_can_always_give_back_in_one_way_unless_a_cancel_says_otherwise(look: Situation) -> None:
    run = look.run
    if is_holder(look) and run.active and run.owner_worker_id is not None and not run.reservation:
        ways = {event for event, _, _ in happened(look)} & {E.GIVE_BACK_FAIL, E.GIVE_BACK_RESUME}
        assert len(ways) == (run.cancel_action is None)


@rule("O26")
@many
@given(looks())
def test_a_death_that_nobody_proved_ends_no_run_within_a_lease(look: Situation) -> None:
    fresh = SessionFacts(SessionState.DEAD, dead_at=Micros(NOW - LEASE + 1), lease=LEASE)
    owner = fresh if look.run.owner_worker_id else None
    home = fresh if look.run.home_worker_id else None
    judged = look.but(facts={"owner": owner, "home": home}, cancel_action=None, cancel_requested_at=None)
    by_somebody_else = not is_holder(judged) and judged.facts.actor is SessionState.LIVE
    if by_somebody_else and judged.run.active:
        assert not any(after.terminal for _, after, _ in happened(judged))


@rule("O30", "I9")
@many
@given(looks())
def test_an_attempt_is_counted_by_one_and_forgiven_only_for_a_checkpoint(look: Situation) -> None:
    for event, after, repeated in happened(look):
        wrote = look.run.progress_epoch == look.run.epoch
        allowed = {look.run.attempt}
        if event in (E.TAKE_OVER_RESUME, E.GIVE_BACK_RESUME):
            allowed = {1} if wrote else {look.run.attempt + 1}
            assert after.attempt <= after.max_attempts
        elif event in (E.HAND_OVER, E.TAKE_BACK):
            allowed = {1} if wrote and not repeated else {look.run.attempt}
        elif event is E.CLAIM:
            allowed = {max(1, look.run.attempt)}
        elif event is E.SEIZE:
            allowed = {1, look.run.attempt, look.run.attempt + 1}
        assert after.attempt in allowed, event


# --- Histories ------------------------------------------------------------------------------------------------------

RUN, THREAD = RunId("run"), ThreadId("thread")
ACTS = (E.CLAIM, E.START, E.SETTLE_ERROR, E.GIVE_BACK_RESUME, E.GIVE_BACK_FAIL, E.TAKE_OVER_RESUME, E.TAKE_OVER_FAIL)


class Country:
    """Workers that come, run, write now and then, and die; what they were granted since the last checkpoint."""

    def __init__(self, max_attempts: int) -> None:
        self.world = World(now=NOW)
        self.living = 0
        self.grants = 0
        self._next_session()
        self.world.admit(
            Newcomer(
                run_id=RUN,
                thread_id=THREAD,
                worker_id=worker(0),
                take=False,
                on_orphan=OnOrphan.RESUME,
                max_attempts=max_attempts,
            )
        )

    def act(self, event: RunEvent) -> None:
        run = self.world.runs[RUN]
        by = Actor(worker(self.living), run.epoch)
        decision = self.world.apply(RUN, event, by, Given(checkpoint="c" if event is E.PROGRESS else None))
        if isinstance(decision, Applied):
            self._count(event)

    def die(self) -> None:
        self.world.close_session(worker(self.living))
        self.living += 1
        self._next_session()

    def _count(self, event: RunEvent) -> None:
        if event is E.CLAIM:
            self.grants += 1
        elif event is E.PROGRESS:
            self.grants = 0

    def _next_session(self) -> None:
        self.world.open_session(Session(worker(self.living), lease=LEASE))


@rule("I9", "O30")
@settings(max_examples=200)
@given(
    st.integers(1, 3),
    st.lists(st.sampled_from(["die", "die", E.PROGRESS, *ACTS, *ACTS]), min_size=20, max_size=60),
)
def test_a_run_that_makes_no_progress_is_granted_at_most_so_many_times(
    max_attempts: int, history: list[RunEvent | str]
) -> None:
    country = Country(max_attempts)
    for step in history:
        if isinstance(step, RunEvent):
            country.act(step)
        else:
            country.die()
        assert country.grants <= max_attempts


@rule("I9", "O30")
def test_a_run_that_kills_every_worker_ends_as_poison_and_frees_its_thread() -> None:
    country = Country(max_attempts=3)
    for _ in range(3):
        country.act(E.CLAIM)
        country.act(E.START)
        country.die()
        country.act(E.TAKE_OVER_RESUME)
    country.act(E.TAKE_OVER_FAIL)
    ended = country.world.runs[RUN]
    assert (country.grants, ended.status, ended.stop_reason) == (3, RunStatus.ERROR, "poison")
    assert country.world.active(THREAD) is None


@rule("O4", "I8", "I16")
def test_a_restore_that_always_fails_ends_as_rollback_failed_also_on_a_lone_worker() -> None:
    world = World(now=NOW)
    world.open_session(Session(ME, lease=LEASE))
    world.admit(Newcomer(run_id=RUN, thread_id=THREAD, worker_id=ME, max_attempts=3))
    world.apply(RUN, E.START, Actor(ME, 1))
    world.apply(RUN, E.REQUEST_CANCEL, Actor(ME), Given(action=CancelAction.ROLLBACK))
    tries = 0
    while not world.runs[RUN].terminal:
        tries += 1
        holder = Actor(ME, world.runs[RUN].epoch)
        assert isinstance(world.apply(RUN, E.SEIZE, holder), Applied)
        give_up: Decision = world.apply(RUN, E.SETTLE_ROLLBACK_FAILED, Actor(ME, world.runs[RUN].epoch))
        assert isinstance(give_up, Applied) == (tries == 4), "three restores are tried, then no more"
    assert world.runs[RUN].stop_reason == "rollback_failed"
