"""Every row of ownership.md §3, one by one: where it happens, what it changes, and each single thing that forbids it.

Written from the page. A guard that is missing from the table, or an effect that is, turns one of these red.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from deerflow_runs.model import ACTIVE, TERMINAL, Micros, OperationKind, Run, RunStatus, SessionState, Usage
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Facts, Refused, decide
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from tests.protocol.situations import (
    DRAINING,
    FAIL,
    GRACE,
    HAPPENS,
    HOLDER,
    INTERRUPT,
    LIVE,
    MAY_START_FROM,
    ME,
    NOW,
    OLD,
    OTHER,
    PENDING,
    PROVEN,
    QUEUED,
    RESUME,
    RIPE,
    ROLLBACK,
    RUNNING,
    SUCCESS,
    UNRIPE,
    E,
    Situation,
)
from tests.rules import rule

DELETE = OperationKind.DELETE


def differences(before: Run, after: Run) -> dict[str, Any]:
    names = [field.name for field in fields(Run) if field.name != "updated_at"]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def changes(event: RunEvent, situation: Situation) -> dict[str, Any]:
    decision = situation.decide(event)
    assert isinstance(decision, Applied), decision
    assert not decision.repeated
    assert decision.run.updated_at == NOW
    return differences(situation.run, decision.run)


def refusal(event: RunEvent, situation: Situation) -> Refusal:
    decision = situation.decide(event)
    assert isinstance(decision, Refused), decision
    assert decision.run == situation.run
    return decision.reason


# --- What happens ---------------------------------------------------------------------------------------------------


def test_every_event_has_a_situation_and_a_place_to_start_from() -> None:
    assert set(HAPPENS) == set(MAY_START_FROM) == set(RunEvent)


@rule("O4", "O15", "O19", "O28", "O30", "O31")
@pytest.mark.parametrize("event", RunEvent)
def test_an_event_changes_what_the_page_says_and_nothing_else(event: RunEvent) -> None:
    situation = HAPPENS[event]
    assert changes(event, situation) == situation.becomes


@rule("I5")
@pytest.mark.parametrize("event", RunEvent)
@pytest.mark.parametrize("status", RunStatus)
def test_an_event_starts_only_from_the_statuses_of_its_row(event: RunEvent, status: RunStatus) -> None:
    somewhere = HAPPENS[event].but(status=status, settled_by=OTHER, becomes={})
    decision = somewhere.decide(event)
    if status in MAY_START_FROM[event]:
        assert isinstance(decision, Applied) or decision.reason not in (Refusal.TERMINAL, Refusal.WRONG_STATUS)
    elif (event, status) == (E.START, RUNNING):
        assert decision == Applied(somewhere.run, repeated=True)
    else:
        assert decision == Refused(Refusal.TERMINAL if status in TERMINAL else Refusal.WRONG_STATUS, somewhere.run)


def refusal_or_none(event: RunEvent, situation: Situation) -> Refusal | None:
    decision = situation.decide(event)
    return decision.reason if isinstance(decision, Refused) else None


def test_nothing_happens_to_a_run_that_is_not_there() -> None:
    assert all(decide(None, event, HOLDER, Facts(NOW), NOTHING_GIVEN) == Refused(Refusal.UNKNOWN) for event in RunEvent)


# --- What forbids it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class No:
    """``event`` must not happen once ``change`` is made to the situation in which it does."""

    event: RunEvent
    because: str
    reason: Refusal
    change: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.event}-{self.because}"


def no(event: RunEvent, because: str, reason: Refusal, **change: Any) -> No:
    return No(event, because, reason, change)


def not_a_run(event: RunEvent) -> No:
    return no(event, "a reservation", Refusal.NOT_A_RUN, kind=DELETE)


def only_its_holder(event: RunEvent) -> list[No]:
    return [
        no(event, "another owner", Refusal.LOST, owner_worker_id=OTHER),
        no(event, "no owner", Refusal.LOST, owner_worker_id=None),
        no(event, "an older epoch of mine", Refusal.LOST, by={"epoch": 3}),
        no(event, "an epoch I do not have yet", Refusal.LOST, by={"epoch": 5}),
        no(event, "an epoch never told", Refusal.LOST, by={"epoch": None}),
    ]


def no_cancel(event: RunEvent) -> list[No]:
    return [
        no(event, "interrupt recorded", Refusal.CANCEL_RECORDED, cancel_action=INTERRUPT, cancel_requested_at=NOW),
        no(event, "rollback recorded", Refusal.CANCEL_RECORDED, cancel_action=ROLLBACK, cancel_requested_at=NOW),
    ]


def nothing_owed(event: RunEvent) -> No:
    owed = {"turn": 7, "cancel_action": ROLLBACK, "cancel_requested_at": NOW}
    return no(event, "rollback owed", Refusal.ROLLBACK_OWED, **owed)


def only_the_dead(event: RunEvent, whose: str) -> list[No]:
    return [
        no(event, f"{whose} lives", Refusal.HELD, facts={whose: LIVE}),
        no(event, f"{whose} drains", Refusal.HELD, facts={whose: DRAINING}),
        no(event, f"{whose} has no row", Refusal.HELD, facts={whose: None}),
    ]


NOS: list[No] = [
    # promote
    not_a_run(E.PROMOTE),
    no(E.PROMOTE, "not due yet", Refusal.TOO_EARLY, due_at=NOW + 1),
    no(E.PROMOTE, "another is first", Refusal.NOT_FIRST, facts={"first_due": False}),
    no(E.PROMOTE, "thread held", Refusal.THREAD_BUSY, facts={"thread_active": True}),
    # claim
    not_a_run(E.CLAIM),
    no(E.CLAIM, "another owner", Refusal.HELD, owner_worker_id=OTHER),
    no(E.CLAIM, "mine already", Refusal.HELD, owner_worker_id=ME),
    *no_cancel(E.CLAIM),
    no(E.CLAIM, "backing off", Refusal.TOO_EARLY, not_before=NOW + 1),
    no(E.CLAIM, "a capability missing", Refusal.NOT_CAPABLE, by={"capabilities": frozenset({"disk"})}),
    no(E.CLAIM, "at home elsewhere", Refusal.AT_HOME_ELSEWHERE, home_worker_id=OTHER),
    no(E.CLAIM, "I drain", Refusal.SESSION_NOT_LIVE, facts={"actor": SessionState.DRAINING}),
    no(E.CLAIM, "I am dead", Refusal.SESSION_NOT_LIVE, facts={"actor": SessionState.DEAD}),
    # start
    not_a_run(E.START),
    *only_its_holder(E.START),
    *no_cancel(E.START),
    # progress
    not_a_run(E.PROGRESS),
    *only_its_holder(E.PROGRESS),
    # settle
    *(not_a_run(event) for event in (E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED)),
    *only_its_holder(E.SETTLE_SUCCESS),
    *only_its_holder(E.SETTLE_ERROR),
    *only_its_holder(E.SETTLE_TIMEOUT),
    *only_its_holder(E.SETTLE_CANCELLED),
    *(nothing_owed(event) for event in (E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT)),
    no(E.SETTLE_CANCELLED, "rollback owed, running", Refusal.ROLLBACK_OWED, status=RUNNING),
    no(E.SETTLE_CANCELLED, "rollback owed, not restored", Refusal.ROLLBACK_OWED, given={"restored": False}),
    not_a_run(E.SETTLE_ROLLBACK_FAILED),
    *only_its_holder(E.SETTLE_ROLLBACK_FAILED),
    no(E.SETTLE_ROLLBACK_FAILED, "interrupt recorded", Refusal.NOTHING_OWED, cancel_action=INTERRUPT),
    no(E.SETTLE_ROLLBACK_FAILED, "never started", Refusal.NOTHING_OWED, turn=None),
    no(E.SETTLE_ROLLBACK_FAILED, "an attempt left", Refusal.TOO_EARLY, attempt=3),
    # cancel
    not_a_run(E.REQUEST_CANCEL),
    not_a_run(E.CANCEL_QUEUED),
    # force
    not_a_run(E.FORCE),
    no(E.FORCE, "no cancel", Refusal.NO_CANCEL, cancel_action=None, cancel_requested_at=None),
    no(E.FORCE, "rollback owed", Refusal.ROLLBACK_OWED, cancel_action=ROLLBACK),
    no(E.FORCE, "owner lives, grace not over", Refusal.HELD, facts={"owner": LIVE}),
    no(E.FORCE, "owner drains, grace not over", Refusal.HELD, facts={"owner": DRAINING}),
    # seize
    not_a_run(E.SEIZE),
    no(E.SEIZE, "no cancel", Refusal.NOTHING_OWED, cancel_action=None, cancel_requested_at=None),
    no(E.SEIZE, "interrupt recorded", Refusal.NOTHING_OWED, cancel_action=INTERRUPT),
    no(E.SEIZE, "never started", Refusal.NOTHING_OWED, turn=None),
    no(E.SEIZE, "owner lives, grace not over", Refusal.HELD, facts={"owner": LIVE}),
    no(E.SEIZE, "a capability missing", Refusal.NOT_CAPABLE, by={"capabilities": frozenset({"disk"})}),
    # take over
    not_a_run(E.TAKE_OVER_FAIL),
    *only_the_dead(E.TAKE_OVER_FAIL, "owner"),
    *no_cancel(E.TAKE_OVER_FAIL),
    no(E.TAKE_OVER_FAIL, "it is to be resumed", Refusal.OTHER_POLICY, on_orphan=RESUME),
    no(E.TAKE_OVER_FAIL, "death not proven for a lease", Refusal.TOO_EARLY, facts={"owner": UNRIPE}),
    not_a_run(E.TAKE_OVER_FAIL_WAITING),
    *only_the_dead(E.TAKE_OVER_FAIL_WAITING, "home"),
    no(E.TAKE_OVER_FAIL_WAITING, "owned", Refusal.HELD, status=PENDING, owner_worker_id=ME),
    no(
        E.TAKE_OVER_FAIL_WAITING,
        "interrupt recorded",
        Refusal.CANCEL_RECORDED,
        status=PENDING,
        cancel_action=INTERRUPT,
        cancel_requested_at=NOW,
    ),
    no(E.TAKE_OVER_FAIL_WAITING, "it is to be resumed", Refusal.OTHER_POLICY, on_orphan=RESUME),
    no(E.TAKE_OVER_FAIL_WAITING, "death not proven for a lease", Refusal.TOO_EARLY, facts={"home": UNRIPE}),
    not_a_run(E.TAKE_OVER_RESUME),
    *only_the_dead(E.TAKE_OVER_RESUME, "owner"),
    *no_cancel(E.TAKE_OVER_RESUME),
    no(E.TAKE_OVER_RESUME, "it is to fail", Refusal.OTHER_POLICY, on_orphan=FAIL),
    no(E.TAKE_OVER_RESUME, "attempts used up", Refusal.OTHER_POLICY, attempt=3),
    not_a_run(E.TAKE_OVER_RESUME_WAITING),
    *only_the_dead(E.TAKE_OVER_RESUME_WAITING, "home"),
    no(E.TAKE_OVER_RESUME_WAITING, "owned", Refusal.HELD, status=PENDING, owner_worker_id=ME),
    no(
        E.TAKE_OVER_RESUME_WAITING,
        "rollback recorded",
        Refusal.CANCEL_RECORDED,
        status=PENDING,
        cancel_action=ROLLBACK,
        cancel_requested_at=NOW,
    ),
    no(E.TAKE_OVER_RESUME_WAITING, "it is to fail", Refusal.OTHER_POLICY, on_orphan=FAIL),
    no(E.TAKE_OVER_RELEASE, "a run", Refusal.NOT_A_RESERVATION, kind=OperationKind.RUN),
    *only_the_dead(E.TAKE_OVER_RELEASE, "owner"),
    # take back
    no(E.TAKE_BACK, "another owner", Refusal.LOST, owner_worker_id=OTHER),
    no(E.TAKE_BACK, "no owner", Refusal.LOST, owner_worker_id=None),
    no(E.TAKE_BACK, "I was nobody before", Refusal.LOST, by={"previous": None}),
    no(E.TAKE_BACK, "neither was its owner", Refusal.LOST, by={"previous": None}, owner_worker_id=None),
    no(E.TAKE_BACK, "taken from me meanwhile", Refusal.LOST, epoch=5),
    no(E.TAKE_BACK, "an epoch I do not have yet", Refusal.LOST, epoch=3),
    # hand over, defer, give back
    *(not_a_run(event) for event in (E.HAND_OVER, E.DEFER, E.GIVE_BACK_FAIL, E.GIVE_BACK_RESUME)),
    *only_its_holder(E.HAND_OVER),
    *only_its_holder(E.DEFER),
    *only_its_holder(E.GIVE_BACK_FAIL),
    *only_its_holder(E.GIVE_BACK_RESUME),
    *no_cancel(E.HAND_OVER),
    *no_cancel(E.DEFER),
    *no_cancel(E.GIVE_BACK_FAIL),
    *no_cancel(E.GIVE_BACK_RESUME),
    no(E.DEFER, "a checkpoint of this epoch", Refusal.RECORDED, progress_epoch=4),
    no(E.DEFER, "nothing new is required", Refusal.NOTHING_NEW, required_capabilities=frozenset({"disk", "gpu"})),
    no(E.GIVE_BACK_FAIL, "it is to be resumed", Refusal.OTHER_POLICY, on_orphan=RESUME),
    no(E.GIVE_BACK_RESUME, "it is to fail", Refusal.OTHER_POLICY, on_orphan=FAIL),
    no(E.GIVE_BACK_RESUME, "attempts used up", Refusal.OTHER_POLICY, attempt=3),
    # re-home, end waiting
    not_a_run(E.RE_HOME),
    no(E.RE_HOME, "owned", Refusal.HELD, status=PENDING, owner_worker_id=OTHER),
    no(E.RE_HOME, "at home elsewhere", Refusal.AT_HOME_ELSEWHERE, home_worker_id=OTHER),
    no(E.RE_HOME, "no home", Refusal.AT_HOME_ELSEWHERE, home_worker_id=None),
    no(E.RE_HOME, "no home, and I was nobody", Refusal.AT_HOME_ELSEWHERE, home_worker_id=None, by={"previous": None}),
    not_a_run(E.END_WAITING),
    no(E.END_WAITING, "owned", Refusal.HELD, owner_worker_id=ME),
    no(E.END_WAITING, "at home elsewhere", Refusal.AT_HOME_ELSEWHERE, home_worker_id=OTHER),
    no(E.END_WAITING, "no home", Refusal.AT_HOME_ELSEWHERE, home_worker_id=None),
    no(E.END_WAITING, "I do not drain", Refusal.SESSION_NOT_DRAINING, facts={"actor": SessionState.LIVE}),
    no(E.END_WAITING, "I am dead", Refusal.SESSION_NOT_DRAINING, facts={"actor": SessionState.DEAD}),
    nothing_owed(E.END_WAITING),
    # release
    no(E.RELEASE, "a run", Refusal.NOT_A_RESERVATION, kind=OperationKind.RUN),
    *only_its_holder(E.RELEASE),
]


@rule("O2", "O4", "O13", "O14", "O22", "O23", "O26", "O30", "O31", "O35", "I2", "I6", "I16", "I17")
@pytest.mark.parametrize("case", NOS, ids=str)
def test_one_thing_the_page_forbids_is_enough_to_refuse(case: No) -> None:
    assert refusal(case.event, HAPPENS[case.event].but(**case.change)) is case.reason


def test_every_word_of_refusal_is_the_answer_to_something() -> None:
    elsewhere = {Refusal.UNKNOWN, Refusal.TERMINAL, Refusal.WRONG_STATUS}
    assert {case.reason for case in NOS} | elsewhere == set(Refusal)


# --- Alternatives inside one guard ----------------------------------------------------------------------------------


@rule("O4")
@pytest.mark.parametrize("event", [E.FORCE, E.SEIZE])
@pytest.mark.parametrize(
    ("requested", "granted", "allowed"),
    [
        (NOW - GRACE, NOW - GRACE, True),
        (NOW - GRACE + 1, NOW - GRACE, False),
        (NOW - GRACE, NOW - GRACE + 1, False),
        (NOW - GRACE, None, True),
        (NOW - GRACE + 1, None, False),
    ],
)
def test_the_grace_of_a_cancel_counts_from_the_later_of_request_and_grant(
    event: RunEvent, requested: int, granted: int | None, allowed: bool
) -> None:
    held = HAPPENS[event].but(facts={"owner": LIVE}, cancel_requested_at=requested, granted_at=granted)
    assert (refusal_or_none(event, held) is None) == allowed


@rule("O4")
@pytest.mark.parametrize("event", [E.FORCE, E.SEIZE])
def test_nobody_waits_for_the_grace_of_a_run_that_nobody_holds(event: RunEvent) -> None:
    vacant = HAPPENS[event].but(facts={"owner": None}, status=PENDING, owner_worker_id=None)
    assert changes(event, vacant)["epoch"] == 5


@rule("O4")
def test_its_owner_seizes_an_owed_run_at_once_and_nobody_else_does() -> None:
    held = HAPPENS[E.SEIZE].but(facts={"owner": LIVE}, owner_worker_id=ME)
    assert changes(E.SEIZE, held) == {
        "status": PENDING, "epoch": 5, "granted_at": NOW, "attempt": 1, "waits_for": None,
    }  # fmt: skip
    assert refusal(E.SEIZE, held.but(owner_worker_id=OTHER)) is Refusal.HELD


@rule("O26")
@pytest.mark.parametrize(("event", "whose"), [(E.TAKE_OVER_FAIL, "owner"), (E.TAKE_OVER_FAIL_WAITING, "home")])
def test_a_proven_death_is_final_at_once(event: RunEvent, whose: str) -> None:
    assert refusal_or_none(event, HAPPENS[event].but(facts={whose: PROVEN})) is None


@rule("O30", "O31")
@pytest.mark.parametrize("event", [E.CLAIM, E.SEIZE])
def test_what_asks_for_nothing_is_for_anybody(event: RunEvent) -> None:
    anybody = HAPPENS[event].but(
        by={"capabilities": frozenset()}, required_capabilities=frozenset(), home_worker_id=None
    )
    assert changes(event, anybody)["owner_worker_id"] == ME


@rule("O30")
def test_a_run_whose_attempts_are_used_up_fails_as_poison_although_it_could_be_resumed() -> None:
    orphan = HAPPENS[E.TAKE_OVER_FAIL].but(on_orphan=RESUME, attempt=3)
    assert changes(E.TAKE_OVER_FAIL, orphan)["stop_reason"] == "poison"
    given_back = HAPPENS[E.GIVE_BACK_FAIL].but(on_orphan=RESUME, attempt=3)
    assert changes(E.GIVE_BACK_FAIL, given_back)["stop_reason"] == "poison"


@rule("O30")
def test_a_checkpoint_of_the_epoch_that_ends_starts_the_attempts_anew() -> None:
    for event in (E.TAKE_OVER_RESUME, E.GIVE_BACK_RESUME):
        assert changes(event, HAPPENS[event].but(attempt=3, progress_epoch=4))["attempt"] == 1
        assert refusal(event, HAPPENS[event].but(attempt=3, progress_epoch=3)) is Refusal.OTHER_POLICY
    for event in (E.TAKE_OVER_FAIL, E.GIVE_BACK_FAIL):
        spared = HAPPENS[event].but(on_orphan=RESUME, attempt=3, progress_epoch=4)
        assert refusal(event, spared) is Refusal.OTHER_POLICY


@rule("O30")
def test_the_first_claim_is_the_first_attempt_and_a_later_claim_is_none() -> None:
    assert changes(E.CLAIM, HAPPENS[E.CLAIM].but(attempt=0))["attempt"] == 1
    assert "attempt" not in changes(E.CLAIM, HAPPENS[E.CLAIM].but(attempt=2))


@rule("O15", "I16")
def test_turn_and_base_are_those_of_the_first_start() -> None:
    known: dict[str, Any] = {"turn": 7, "base_known": True, "base_heads": {"": "c0"}, "started_at": NOW - 5}
    assert changes(E.START, HAPPENS[E.START].but(**known)) == {"status": RUNNING}


@rule("O30", "I20")
def test_progress_without_a_checkpoint_forgives_nothing_and_forgets_nothing() -> None:
    wrote = HAPPENS[E.PROGRESS].but(progress_epoch=3, last_checkpoint="c1", model_name="m", usage=Usage(total_tokens=5))
    only_time = Situation(wrote.run, wrote.by, wrote.facts)
    assert changes(E.PROGRESS, only_time) == {"progress_at": NOW}


@rule("B081")
@pytest.mark.parametrize("event", [E.SETTLE_SUCCESS, E.FORCE, E.TAKE_OVER_FAIL])
def test_an_ending_that_brings_no_usage_and_no_checkpoint_keeps_what_was_known(event: RunEvent) -> None:
    known = HAPPENS[event].but(
        usage=Usage(total_tokens=5), last_checkpoint="c1", given={"usage": Usage(), "checkpoint": None}
    )
    assert {"usage", "last_checkpoint"} & set(changes(event, known)) == set()


@rule("O35")
def test_a_run_that_never_had_a_home_gets_none_by_being_taken_back() -> None:
    assert "home_worker_id" not in changes(E.TAKE_BACK, HAPPENS[E.TAKE_BACK].but(home_worker_id=None))


@rule("O13")
def test_a_reservation_is_taken_back_like_a_run() -> None:
    held = HAPPENS[E.TAKE_BACK].but(kind=DELETE, status=PENDING, home_worker_id=None)
    assert changes(E.TAKE_BACK, held) == {"owner_worker_id": ME, "epoch": 5}


# --- Cancel against the end -----------------------------------------------------------------------------------------


@rule("O20", "I6")
@pytest.mark.parametrize("event", [E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED])
def test_a_recorded_interrupt_decides_how_a_run_ends(event: RunEvent) -> None:
    settled = HAPPENS[event].but(
        status=RUNNING, cancel_action=INTERRUPT, cancel_requested_at=NOW, given={"stop_reason": "loop"}
    )
    changed = changes(event, settled)
    assert (changed["status"], changed["stop_reason"]) == (RunStatus.INTERRUPTED, "interrupt")


@rule("O4", "O22")
def test_a_rollback_of_a_run_that_never_started_owes_nothing() -> None:
    early = HAPPENS[E.SETTLE_ERROR].but(status=PENDING, turn=None, cancel_action=ROLLBACK, cancel_requested_at=NOW)
    changed = changes(E.SETTLE_ERROR, early)
    assert (changed["status"], changed["stop_reason"]) == (RunStatus.INTERRUPTED, "rollback")
    unstarted = HAPPENS[E.FORCE].but(turn=None, cancel_action=ROLLBACK)
    assert changes(E.FORCE, unstarted)["stop_reason"] == "rollback"


@rule("O19", "I6")
def test_the_first_cancel_wins_and_a_second_changes_nothing() -> None:
    first: dict[str, Any] = {"cancel_action": INTERRUPT, "cancel_requested_at": Micros(NOW - 3)}
    assert changes(E.REQUEST_CANCEL, HAPPENS[E.REQUEST_CANCEL].but(**first)) == {}


@rule("O6", "O23")
def test_without_a_cancel_a_stopped_run_says_why_it_was_stopped() -> None:
    gone = HAPPENS[E.SETTLE_CANCELLED].but(
        status=RUNNING,
        cancel_action=None,
        cancel_requested_at=None,
        given={"restored": False, "stop_reason": "caller_gone"},
    )
    changed = changes(E.SETTLE_CANCELLED, gone)
    assert (changed["status"], changed["stop_reason"]) == (RunStatus.INTERRUPTED, "caller_gone")


@rule("O23", "O35")
def test_a_cancel_recorded_before_a_drain_keeps_its_word() -> None:
    waiting = HAPPENS[E.END_WAITING].but(cancel_action=INTERRUPT, cancel_requested_at=NOW)
    assert changes(E.END_WAITING, waiting)["stop_reason"] == "interrupt"


# --- Restores -------------------------------------------------------------------------------------------------------

RESTORING: dict[str, Any] = {"status": PENDING, "cancel_requested_at": NOW - 2, "granted_at": NOW - 1}


@rule("O4", "I9", "I16")
def test_a_restore_that_is_tried_again_is_counted_whoever_tries() -> None:
    by_another = HAPPENS[E.SEIZE].but(**RESTORING, attempt=2)
    assert changes(E.SEIZE, by_another)["attempt"] == 3
    mine = by_another.but(owner_worker_id=ME, by={"epoch": 4}, facts={"owner": LIVE})
    assert changes(E.SEIZE, mine)["attempt"] == 3


@rule("O8")
def test_a_seizure_asked_again_after_a_lost_reply_is_not_another_attempt() -> None:
    seized = HAPPENS[E.SEIZE].but(**RESTORING, attempt=2, owner_worker_id=ME, facts={"owner": LIVE})
    for known in (None, 3):
        assert changes(E.SEIZE, seized.but(by={"epoch": known})).get("attempt", 2) == 2


@rule("I16")
def test_a_claim_before_the_cancel_is_not_mistaken_for_a_seizure() -> None:
    claimed = HAPPENS[E.SEIZE].but(status=PENDING, attempt=3, granted_at=NOW - 3, cancel_requested_at=NOW - 2)
    assert changes(E.SEIZE, claimed)["attempt"] == 1


# --- Lost replies ---------------------------------------------------------------------------------------------------


def repeated(event: RunEvent, situation: Situation) -> bool:
    decision = situation.decide(event)
    if isinstance(decision, Refused):
        return False
    assert decision.run == situation.run, "a repetition changes nothing"
    return decision.repeated


@rule("O8")
def test_a_repeated_start_is_a_yes_only_for_the_epoch_that_runs() -> None:
    running = HAPPENS[E.START].but(status=RUNNING, turn=7)
    assert repeated(E.START, running)
    assert repeated(E.START, running.but(cancel_action=INTERRUPT, cancel_requested_at=NOW))
    assert not repeated(E.START, running.but(by={"epoch": 3}))
    assert not repeated(E.START, running.but(owner_worker_id=OTHER))
    assert not repeated(E.START, HAPPENS[E.START].but(status=SUCCESS, settled_by=ME))


@rule("O8", "I5")
@pytest.mark.parametrize(
    "event", [E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED, E.SETTLE_ROLLBACK_FAILED]
)
@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_a_repeated_settle_answers_what_the_row_says_if_i_ended_it_at_my_epoch(
    event: RunEvent, status: RunStatus
) -> None:
    over = HAPPENS[event].but(status=status, settled_by=ME)
    assert repeated(event, over)
    assert not repeated(event, over.but(settled_by=OTHER))
    assert not repeated(event, over.but(epoch=5))
    assert not repeated(event, over.but(by={"worker_id": OTHER}))


@rule("O8", "O13")
@pytest.mark.parametrize("status", sorted(ACTIVE))
def test_a_repeated_take_back_is_a_yes_at_my_next_epoch(status: RunStatus) -> None:
    back = HAPPENS[E.TAKE_BACK].but(status=status, owner_worker_id=ME, epoch=5)
    assert repeated(E.TAKE_BACK, back)
    assert not repeated(E.TAKE_BACK, back.but(epoch=6))
    assert not repeated(E.TAKE_BACK, back.but(epoch=4))
    assert not repeated(E.TAKE_BACK, back.but(owner_worker_id=OTHER))
    assert not repeated(E.TAKE_BACK, back.but(status=SUCCESS, settled_by=ME))


@rule("I4", "I16")
def test_a_seizure_by_my_new_session_is_not_mistaken_for_a_take_back() -> None:
    orphan = HAPPENS[E.TAKE_BACK].but(cancel_action=ROLLBACK, cancel_requested_at=NOW - GRACE)
    seized = orphan.decide(E.SEIZE)
    assert isinstance(seized, Applied)
    copy_that_ran = Situation(seized.run, Actor(ME, 4, previous=OLD), orphan.facts)
    assert refusal(E.TAKE_BACK, copy_that_ran) is Refusal.LOST


@rule("O8", "O13")
def test_a_repeated_re_homing_is_a_yes() -> None:
    homed = HAPPENS[E.RE_HOME].but(home_worker_id=ME)
    assert repeated(E.RE_HOME, homed)
    assert not repeated(E.RE_HOME, homed.but(home_worker_id=OTHER))
    assert not repeated(E.RE_HOME, homed.but(status=SUCCESS))


ONCE = sorted(set(RunEvent) - {E.TAKE_OVER_RELEASE, E.RELEASE, E.REMOVE})
"""Events after which the row is still there."""


@rule("O8")
@pytest.mark.parametrize("event", ONCE)
def test_what_happened_does_not_happen_twice(event: RunEvent) -> None:
    situation = HAPPENS[event]
    happened = situation.decide(event)
    assert isinstance(happened, Applied)
    homeless = happened.run.home_worker_id is None
    again = Situation(happened.run, situation.by, situation.facts, situation.given).but(
        facts={"home": None} if homeless else {}
    )
    decision = again.decide(event)
    if event in (E.PROGRESS, E.REQUEST_CANCEL, E.SEIZE):  # by their nature harmless to repeat
        assert isinstance(decision, Applied)
        assert set(differences(happened.run, decision.run)) <= {"epoch"}
    else:
        assert isinstance(decision, Refused) or decision.repeated
        assert decision.run == happened.run


# --- Who may wait where ---------------------------------------------------------------------------------------------


@rule("O31")
@pytest.mark.parametrize("event", [E.TAKE_OVER_FAIL_WAITING, E.TAKE_OVER_RESUME_WAITING, E.RE_HOME, E.END_WAITING])
@pytest.mark.parametrize("status", [QUEUED, PENDING])
def test_queued_and_vacant_runs_depend_on_their_home_alike(event: RunEvent, status: RunStatus) -> None:
    assert refusal_or_none(event, HAPPENS[event].but(status=status, owner_worker_id=None)) is None


@rule("O26")
def test_a_resume_does_not_wait_for_the_proof_of_a_death() -> None:
    for facts in (UNRIPE, RIPE, PROVEN):
        assert refusal_or_none(E.TAKE_OVER_RESUME, HAPPENS[E.TAKE_OVER_RESUME].but(facts={"owner": facts})) is None
