"""Pasts that keep every invariant, and pasts that break one; each function's name says what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from deerflow_runs.model import CancelAction, Micros, OperationKind, RunId, RunStatus, SessionState, ThreadId, WorkerId
from deerflow_runs.testing import Expected
from tests.history.past import ME, OTHER, Past

Told = Callable[[Past], None]
INTERRUPT: dict[str, Any] = {"cancel_action": CancelAction.INTERRUPT, "cancel_requested_at": Micros(50)}
ROLLBACK: dict[str, Any] = {"cancel_action": CancelAction.ROLLBACK, "cancel_requested_at": Micros(50)}
ACTIVE = {"status": RunStatus.PENDING}
A_KEY: dict[str, Any] = {"idempotency_key": "key", "scope": "scope"}


def running(past: Past, name: str = "run", **given: Any) -> None:
    """A run that runs."""
    past.comes(name, **given)
    past.starts(name)


# --- What may happen ------------------------------------------------------------------------------------------------


def one_after_the_other(past: Past) -> None:
    running(past)
    past.writes("one")
    past.waits("next", due_at=Micros(5), created_at=Micros(5))
    with past.together():
        past.ends()
        past.becomes("next", **ACTIVE)
    past.claims("next", OTHER)
    past.starts("next", turn=2)
    past.writes("one", "next")
    past.ends("next")


def taken_over(past: Past) -> None:
    running(past)
    past.writes("one")
    past.dies(ME)
    past.is_resumed()
    past.claims(by=OTHER)
    past.starts()
    past.writes("two")
    past.ends()
    past.goes()


def taken_back(past: Past) -> None:
    running(past)
    past.dies(ME)
    past.becomes(owner_worker_id=OTHER, raised=1)
    past.ends()


def failed_over(past: Past) -> None:
    running(past)
    past.dies(ME)
    past.ends(status=RunStatus.ERROR, settled_by=OTHER, raised=1)


def rolled_back(past: Past) -> None:
    running(past)
    past.becomes(**ROLLBACK)
    past.becomes(status=RunStatus.PENDING, owner_worker_id=OTHER, raised=1)
    past.ends(status=RunStatus.INTERRUPTED)


def given_up(past: Past) -> None:
    running(past)
    past.becomes(**ROLLBACK)
    past.becomes(status=RunStatus.PENDING, raised=1, attempt=4)
    past.ends(status=RunStatus.ERROR, stop_reason="rollback_failed")


def delayed(past: Past) -> None:
    past.waits("later", due_at=Micros(900))
    past.comes("run")
    past.starts()
    past.ends()
    past.becomes("later", **ACTIVE)
    past.claims("later")
    past.starts("later", turn=2)
    past.ends("later")


def drained(past: Past) -> None:
    running(past)
    past.turns(ME, state=SessionState.DRAINING)
    past.is_resumed(attempts=0)
    past.dies(ME, proven=True)
    past.claims(by=OTHER)
    past.starts()
    past.ends()


def reserved(past: Past) -> None:
    past.comes("lock", kind=OperationKind.DELETE)
    past.goes("lock")
    past.dies(ME)
    past.forgets(ME)


def forgiven(past: Past) -> None:
    running(past, max_attempts=2)
    for epoch in (1, 5, 9):
        past.is_resumed()
        past.claims()
        past.starts()
        past.becomes(progress_epoch=epoch + 2)
        past.is_resumed(attempt=1)
        past.claims()
        past.starts()
    past.ends()


def keyed(past: Past) -> None:
    running(past, **A_KEY)
    past.ends()
    past.goes()
    past.comes("other", **A_KEY)
    past.starts("other", turn=2)
    past.ends("other")


HONEST: Final[list[Told]] = [
    one_after_the_other,
    taken_over,
    taken_back,
    failed_over,
    rolled_back,
    given_up,
    delayed,
    drained,
    reserved,
    forgiven,
    keyed,
]
# --- What may not ---------------------------------------------------------------------------------------------------


def two_are_active(past: Past) -> None:
    running(past)
    past.comes("other")


def promoted_too_early(past: Past) -> None:
    running(past)
    past.waits("next")
    past.becomes("next", **ACTIVE)


def written_after_a_grant(past: Past) -> None:
    running(past)
    past.is_resumed()
    past.claims(by=OTHER)
    past.writes("one", epoch=1)


def written_after_the_end(past: Past) -> None:
    running(past)
    past.ends()
    past.writes("one")


def written_while_nobody_holds_it(past: Past) -> None:
    running(past)
    past.is_resumed()
    past.writes("one", epoch=1)


def written_after_a_removal(past: Past) -> None:
    running(past)
    past.ends()
    past.writes("one")
    past.goes()


def progress_of_an_old_epoch(past: Past) -> None:
    running(past)
    past.is_resumed()
    past.claims(by=OTHER)
    past.becomes(progress_epoch=1)


def written_by_an_earlier_turn(past: Past) -> None:
    running(past)
    past.ends()
    past.comes("next")
    past.starts("next", turn=2)
    past.writes("one", "next")
    past.writes("one")


def written_under_a_turn_of_ones_own(past: Past) -> None:
    running(past)
    past.writes("one", turn=9)


def turns_go_back(past: Past) -> None:
    running(past)
    past.ends()
    past.comes("next")
    past.starts("next", turn=0)


def turn_changes(past: Past) -> None:
    running(past)
    past.becomes(turn=3)


def epoch_falls(past: Past) -> None:
    running(past, epoch=4)
    past.becomes(raised=-1)


def epoch_jumps(past: Past) -> None:
    running(past)
    past.becomes(raised=2)


def changes_hands(past: Past) -> None:
    running(past)
    past.becomes(owner_worker_id=OTHER)


def claimed_without_an_epoch(past: Past) -> None:
    running(past)
    past.is_resumed()
    past.becomes(owner_worker_id=OTHER)


def stops_within_an_epoch(past: Past) -> None:
    running(past)
    past.becomes(**ACTIVE)


def runs_without_a_turn(past: Past) -> None:
    past.comes()
    past.becomes(status=RunStatus.RUNNING)


def epoch_is_granted_again(past: Past) -> None:
    running(past)
    past.becomes(raised=1)
    past.becomes(raised=-1, owner_worker_id=OTHER)


def lives_again(past: Past) -> None:
    running(past)
    past.ends()
    past.becomes(status=RunStatus.RUNNING)


def end_is_written_over(past: Past) -> None:
    running(past)
    past.ends()
    past.becomes(error="another")


def comes_ended(past: Past) -> None:
    running(past)
    past.comes("other", status=RunStatus.SUCCESS)


def ends_without_a_receipt(past: Past) -> None:
    running(past)
    past.becomes(status=RunStatus.SUCCESS, settled_by=ME)


def receipt_without_an_end(past: Past) -> None:
    running(past)
    past.files()


def succeeds_over_a_cancel(past: Past) -> None:
    running(past)
    past.becomes(**INTERRUPT)
    past.ends()


def fails_over_a_cancel(past: Past) -> None:
    running(past)
    past.becomes(**INTERRUPT)
    past.ends(status=RunStatus.ERROR)


def second_cancel_wins(past: Past) -> None:
    running(past)
    past.becomes(**INTERRUPT)
    past.becomes(**ROLLBACK)


def cancel_is_forgotten(past: Past) -> None:
    running(past)
    past.becomes(**INTERRUPT)
    past.becomes(cancel_action=None)


def waits_on_an_idle_thread(past: Past) -> None:
    running(past)
    past.waits("next")
    past.ends()
    past.becomes("next", **ACTIVE)


def never_ends(past: Past) -> None:
    running(past)


def delayed_is_never_promoted(past: Past) -> None:
    running(past)
    past.ends()
    past.waits("later", due_at=Micros(900))


def resumed_too_often(past: Past) -> None:
    running(past)
    for _ in range(3):
        past.is_resumed()
        past.claims()
        past.starts()


def resumed_too_often_unnoticed(past: Past) -> None:
    running(past)
    for number in range(3):
        dead = WorkerId(f"host:{number}")
        past.opens(dead)
        past.is_resumed(attempts=0)
        past.claims(by=dead)
        past.starts()
        past.dies(dead)
    past.is_resumed(attempts=0)


def healthy_dies(past: Past) -> None:
    running(past)
    past.dies(OTHER)


def taken_from_the_living(past: Past) -> None:
    running(past)
    past.becomes(status=RunStatus.PENDING, owner_worker_id=OTHER, raised=1)


def ended_by_another(past: Past) -> None:
    running(past)
    past.ends(status=RunStatus.ERROR, settled_by=OTHER, raised=1)


def healthy_loses_an_attempt(past: Past) -> None:
    running(past)
    past.is_resumed()


def dead_beats(past: Past) -> None:
    running(past)
    past.dies(OTHER)
    past.turns(OTHER, beat=7)


def dead_lives(past: Past) -> None:
    running(past)
    past.dies(OTHER, proven=True)
    past.turns(OTHER, state=SessionState.LIVE)


def id_is_used_again(past: Past) -> None:
    running(past)
    past.dies(OTHER)
    past.forgets(OTHER)
    past.opens(OTHER)


def living_is_forgotten(past: Past) -> None:
    running(past)
    past.forgets(OTHER)


def key_comes_twice(past: Past) -> None:
    running(past, **A_KEY)
    past.ends()
    past.comes("other", **A_KEY)


def started_twice(past: Past) -> None:
    running(past)
    past.becomes(**ACTIVE)
    past.starts()


def vanishes(past: Past) -> None:
    running(past)
    past.goes()


def ends_unrestored(past: Past) -> None:
    running(past)
    past.becomes(**ROLLBACK)
    past.ends(status=RunStatus.INTERRUPTED)


def forced_while_vacant(past: Past) -> None:
    running(past)
    past.is_resumed()
    past.becomes(**ROLLBACK)
    past.ends(status=RunStatus.INTERRUPTED, raised=1)


def rollback_is_given_up_early(past: Past) -> None:
    running(past)
    past.becomes(**ROLLBACK)
    past.becomes(status=RunStatus.PENDING, raised=1)
    past.ends(status=RunStatus.ERROR, stop_reason="rollback_failed")


def later_one_is_promoted(past: Past) -> None:
    running(past)
    past.waits("first")
    past.waits("second")
    with past.together():
        past.ends()
        past.becomes("second", **ACTIVE)


def delayed_one_loses_its_place(past: Past) -> None:
    running(past)
    past.waits("late", due_at=Micros(20))
    past.waits("first", due_at=Micros(30), created_at=Micros(30))
    with past.together():
        past.ends()
        past.becomes("first", **ACTIVE, updated_at=Micros(30))


def newcomer_starts_before_one_that_waits(past: Past) -> None:
    past.waits("first")
    past.comes("second")
    past.starts("second")


def drain_costs_an_attempt(past: Past) -> None:
    running(past)
    past.turns(ME, state=SessionState.DRAINING)
    past.is_resumed()


def recorded_twice(past: Past) -> None:
    running(past)
    past.writes("one")
    past.writes("one")


def recorded_twice_under_two_epochs(past: Past) -> None:
    running(past)
    past.writes("one")
    past.is_resumed()
    past.claims(by=OTHER)
    past.starts()
    past.writes("one")


def a_user_has_two(past: Past) -> None:
    running(past, user_id="someone")
    past.comes("other", thread_id=ThreadId("elsewhere"), user_id="someone")


BROKEN: Final[list[tuple[str, Told, Expected]]] = [
    ("I1", two_are_active, Expected()),
    ("I1", promoted_too_early, Expected()),
    ("I2", written_after_a_grant, Expected()),
    ("I2", written_after_the_end, Expected()),
    ("I2", written_while_nobody_holds_it, Expected()),
    ("I2", written_after_a_removal, Expected()),
    ("I2", progress_of_an_old_epoch, Expected()),
    ("I3", written_by_an_earlier_turn, Expected(without=["I2"])),
    ("I3", written_under_a_turn_of_ones_own, Expected()),
    ("I3", turns_go_back, Expected()),
    ("I3", turn_changes, Expected()),
    ("I3", runs_without_a_turn, Expected()),
    ("I4", stops_within_an_epoch, Expected()),
    ("I4", epoch_falls, Expected()),
    ("I4", epoch_jumps, Expected()),
    ("I4", changes_hands, Expected(without=["I10"])),
    ("I4", claimed_without_an_epoch, Expected()),
    ("I4", epoch_is_granted_again, Expected(without=["I10"])),
    ("I5", lives_again, Expected(without=["I14"])),
    ("I5", end_is_written_over, Expected()),
    ("I5", comes_ended, Expected()),
    ("I5", ends_without_a_receipt, Expected()),
    ("I5", receipt_without_an_end, Expected()),
    ("I6", succeeds_over_a_cancel, Expected()),
    ("I6", fails_over_a_cancel, Expected()),
    ("I6", second_cancel_wins, Expected()),
    ("I6", cancel_is_forgotten, Expected()),
    ("I7", waits_on_an_idle_thread, Expected()),
    ("I8", never_ends, Expected(quiet=True)),
    ("I8", delayed_is_never_promoted, Expected(quiet=True)),
    ("I9", resumed_too_often, Expected()),
    ("I9", resumed_too_often_unnoticed, Expected()),
    ("I10", healthy_dies, Expected(healthy=[OTHER])),
    ("I10", taken_from_the_living, Expected()),
    ("I10", ended_by_another, Expected()),
    ("I10", healthy_loses_an_attempt, Expected(healthy=[ME])),
    ("I12", dead_beats, Expected()),
    ("I12", dead_lives, Expected()),
    ("I12", id_is_used_again, Expected()),
    ("I12", living_is_forgotten, Expected()),
    ("I13", healthy_dies, Expected(healthy=[OTHER], outage=True)),
    ("I14", key_comes_twice, Expected()),
    ("I14", started_twice, Expected(without=["I4"])),
    ("I14", never_ends, Expected(answers={"key": [RunId("run"), RunId("other")]})),
    ("I15", vanishes, Expected()),
    ("I15", never_ends, Expected(acknowledged=[RunId("lost")])),
    ("I16", ends_unrestored, Expected()),
    ("I16", forced_while_vacant, Expected()),
    ("I16", rollback_is_given_up_early, Expected()),
    ("I17", later_one_is_promoted, Expected()),
    ("I17", delayed_one_loses_its_place, Expected()),
    ("I17", newcomer_starts_before_one_that_waits, Expected(without=["I7"])),
    ("I18", drain_costs_an_attempt, Expected()),
    ("I19", never_ends, Expected(max_running=0)),
    ("I19", waits_on_an_idle_thread, Expected(max_queued=0, without=["I7"])),
    ("I19", a_user_has_two, Expected(max_active_per_user=1)),
    ("I20", recorded_twice, Expected()),
    ("I20", recorded_twice_under_two_epochs, Expected()),
]
