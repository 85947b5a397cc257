"""Who may enter a thread: every strategy against everything that can stand on it, as ownership.md §4 says.

First the plans, one look at a thread at a time; then what has happened on a world after the plan was carried out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deerflow_runs.errors import UsageError
from deerflow_runs.model import (
    CancelAction,
    Micros,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import (
    Clash,
    ClearFirst,
    Deny,
    DenyFull,
    DenyUser,
    Displace,
    Enter,
    Newcomer,
    Plan,
    PromoteFirst,
    Reuse,
    ThreadView,
    Wait,
    plan_admission,
)
from deerflow_runs.protocol.decision import Actor, Facts, Given, SessionFacts
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.testing.world import Admitted, World
from tests.protocol.situations import (
    FAIL,
    GRACE,
    INTERRUPT,
    LEASE,
    LIVE,
    ME,
    NOW,
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
    row,
)
from tests.rules import rule

REJECT, ENQUEUE = Strategy.REJECT, Strategy.ENQUEUE
STRATEGIES = tuple(Strategy)
GIVEN = Given(cancel_grace=GRACE)


def asking(strategy: Strategy = REJECT, **more: Any) -> Newcomer:
    fields: dict[str, Any] = {"run_id": RunId("new"), "thread_id": ThreadId("thread"), "worker_id": ME}
    return Newcomer(strategy=strategy, **(fields | more))


def view(active: Run | None = None, *queued: Run, owner: SessionFacts | None = LIVE, **more: Any) -> ThreadView:
    home = more.pop("home", None)
    return ThreadView(facts=Facts(NOW, owner=owner, home=home), active=active, queued=queued, **more)


def held(**fields: Any) -> Run:
    usual: dict[str, Any] = {"status": RUNNING, "owner_worker_id": OTHER, "turn": 7}
    return row(**(usual | fields))


def waits(name: str, due_at: int = NOW) -> Run:
    fields: dict[str, Any] = {"owner_worker_id": None, "epoch": 0, "attempt": 0, "granted_at": None}
    return replace(row(QUEUED, **fields, due_at=due_at, created_at=NOW - GRACE), run_id=RunId(name))


def plans(look: ThreadView) -> dict[Strategy, Plan]:
    return {strategy: plan_admission(asking(strategy), look, GIVEN) for strategy in STRATEGIES}


# --- What stands on the thread --------------------------------------------------------------------------------------

FREE = {strategy: Enter() for strategy in (REJECT, ENQUEUE)} | {
    Strategy.INTERRUPT: Displace(INTERRUPT, None, ()),
    Strategy.ROLLBACK: Displace(ROLLBACK, None, ()),
}


@rule("O1", "O2", "O3")
def test_an_idle_thread_is_open_to_everybody() -> None:
    assert plans(view(owner=None)) == FREE


RUN_IN_THE_WAY: dict[str, tuple[Run, SessionFacts | None]] = {
    "running": (held(), LIVE),
    "vacant": (held(status=PENDING, owner_worker_id=None), None),
    "cancelled, within its grace": (held(cancel_action=INTERRUPT, cancel_requested_at=NOW), LIVE),
    "an orphan to be resumed": (held(on_orphan=RESUME), RIPE),
    "an orphan to fail, its owner's death not proven": (held(on_orphan=FAIL), UNRIPE),
    "an orphan with a rollback owed": (held(cancel_action=ROLLBACK, cancel_requested_at=NOW - GRACE), PROVEN),
    "overdue with a rollback owed": (held(cancel_action=ROLLBACK, cancel_requested_at=NOW - GRACE), LIVE),
}


@rule("O1", "O2", "O3", "O4", "B027", "B094")
@pytest.mark.parametrize("incumbent", RUN_IN_THE_WAY)
def test_a_run_in_the_way_refuses_is_waited_for_or_is_cancelled_whoever_owns_it(incumbent: str) -> None:
    run, owner = RUN_IN_THE_WAY[incumbent]
    behind = waits("before me")
    assert plans(view(run, behind, owner=owner)) == {
        REJECT: Deny(run, 1),
        ENQUEUE: Wait(run),
        Strategy.INTERRUPT: Displace(INTERRUPT, run, (behind,)),
        Strategy.ROLLBACK: Displace(ROLLBACK, run, (behind,)),
    }


NOBODYS: dict[str, tuple[Run, SessionFacts | None, RunEvent]] = {
    "an orphan to fail": (held(on_orphan=FAIL), RIPE, RunEvent.TAKE_OVER_FAIL),
    "an orphan whose death is proven": (held(on_orphan=FAIL), PROVEN, RunEvent.TAKE_OVER_FAIL),
    "an orphan out of attempts": (held(on_orphan=RESUME, attempt=3), RIPE, RunEvent.TAKE_OVER_FAIL),
    "a cancelled orphan": (held(cancel_action=INTERRUPT, cancel_requested_at=NOW), UNRIPE, RunEvent.FORCE),
    "cancelled and overdue": (held(cancel_action=INTERRUPT, cancel_requested_at=NOW - GRACE), LIVE, RunEvent.FORCE),
    "cancelled and vacant": (
        held(status=PENDING, owner_worker_id=None, cancel_action=INTERRUPT, cancel_requested_at=NOW),
        None,
        RunEvent.FORCE,
    ),
    "rolled back before it started": (
        held(status=PENDING, turn=None, cancel_action=ROLLBACK, cancel_requested_at=NOW),
        UNRIPE,
        RunEvent.FORCE,
    ),
    "a dead reservation": (
        held(status=PENDING, kind=OperationKind.DELETE, turn=None),
        UNRIPE,
        RunEvent.TAKE_OVER_RELEASE,
    ),
}


@rule("O1", "O3", "O4", "O28", "B028", "B051")
@pytest.mark.parametrize("incumbent", NOBODYS)
@pytest.mark.parametrize("delay", [0, 5])
def test_what_nobody_will_ever_run_is_ended_first_for_every_newcomer(incumbent: str, delay: int) -> None:
    run, owner, event = NOBODYS[incumbent]
    for strategy in STRATEGIES:
        newcomer = asking(strategy, delay=Micros(delay))
        assert plan_admission(newcomer, view(run, owner=owner), GIVEN) == ClearFirst(run, event)


@rule("O1", "O31")
def test_a_vacant_run_whose_home_is_dead_is_ended_first() -> None:
    homeless = held(status=PENDING, owner_worker_id=None, home_worker_id=OTHER)
    look = view(homeless, owner=None, home=PROVEN)
    assert plan_admission(asking(), look, GIVEN) == ClearFirst(homeless, RunEvent.TAKE_OVER_FAIL_WAITING)


@rule("O3", "B047", "B050")
def test_a_live_reservation_is_waited_for_but_never_displaced() -> None:
    reservation = held(status=PENDING, kind=OperationKind.CHECKPOINT_WRITE, turn=None)
    denied = Deny(reservation, 1)
    assert plans(view(reservation)) == {
        REJECT: denied,
        ENQUEUE: Wait(reservation),
        Strategy.INTERRUPT: denied,
        Strategy.ROLLBACK: denied,
    }


@rule("O1", "O2", "O3", "I17")
def test_a_run_for_later_counts_as_busy_for_reject_and_is_passed_by_enqueue() -> None:
    later = waits("later", NOW + 3_000_001)
    assert plans(view(None, later, owner=None)) == {
        REJECT: Deny(later, 4),
        ENQUEUE: Enter(),
        Strategy.INTERRUPT: Displace(INTERRUPT, None, (later,)),
        Strategy.ROLLBACK: Displace(ROLLBACK, None, (later,)),
    }


@rule("O1", "O2", "I17")
def test_nobody_passes_a_run_that_is_due() -> None:
    due, later = waits("due"), waits("later", NOW + 1)
    look = view(None, due, later, owner=None)
    assert plan_admission(asking(REJECT), look, GIVEN) == Deny(due, 1)
    assert plan_admission(asking(ENQUEUE), look, GIVEN) == PromoteFirst()


@rule("O2", "O3")
@pytest.mark.parametrize("strategy", [ENQUEUE, Strategy.INTERRUPT, Strategy.ROLLBACK])
def test_a_run_for_later_waits_whatever_stands_there_and_displaces_nobody(strategy: Strategy) -> None:
    newcomer = asking(strategy, delay=Micros(1))
    assert plan_admission(newcomer, view(owner=None), GIVEN) == Wait(None)
    assert plan_admission(newcomer, view(None, waits("due"), owner=None), GIVEN) == Wait(None)
    busy = held()
    assert plan_admission(newcomer, view(busy), GIVEN) == Wait(busy)


@rule("O1")
def test_reject_for_later_is_let_in_only_where_nothing_is() -> None:
    newcomer = asking(REJECT, delay=Micros(1))
    busy, due = held(), waits("due")
    assert plan_admission(newcomer, view(owner=None), GIVEN) == Wait(None)
    assert plan_admission(newcomer, view(busy), GIVEN) == Deny(busy, 1)
    assert plan_admission(newcomer, view(None, due, owner=None), GIVEN) == Deny(due, 1)


@rule("O1")
@pytest.mark.parametrize(("expires", "seconds"), [(-5, 1), (0, 1), (1, 1), (1_000_000, 1), (1_000_001, 2)])
def test_retry_after_is_the_rest_of_the_lease_in_whole_seconds_and_at_least_one(expires: int, seconds: int) -> None:
    busy = held()
    look = view(busy, waits("later", NOW + 90_000_000), owner_expires_at=Micros(NOW + expires))
    assert plan_admission(asking(), look, GIVEN) == Deny(busy, seconds)


# --- Limits ---------------------------------------------------------------------------------------------------------


@rule("I19")
@pytest.mark.parametrize("delay", [0, 1])
def test_a_full_queue_refuses_and_says_how_many_it_holds(delay: int) -> None:
    queue = (waits("first"), waits("second"))
    full = asking(ENQUEUE, max_queued=2, delay=Micros(delay))
    assert plan_admission(full, view(held(), *queue), GIVEN) == DenyFull(2, 1)
    busy = held()
    for limit in (3, None):
        roomy = asking(ENQUEUE, max_queued=limit, delay=Micros(delay))
        assert plan_admission(roomy, view(busy, *queue), GIVEN) == Wait(busy)


@rule("I19")
def test_a_queue_of_none_refuses_even_a_lone_run_for_later() -> None:
    later = asking(ENQUEUE, max_queued=0, delay=Micros(1))
    assert plan_admission(later, view(owner=None), GIVEN) == DenyFull(0, 1)


ANN: dict[str, Any] = {"user_id": "ann", "max_active_per_user": 2}


@rule("I19")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_user_at_the_limit_enters_no_free_thread(strategy: Strategy) -> None:
    newcomer = asking(strategy, **ANN)
    assert plan_admission(newcomer, view(user_active=2), GIVEN) == DenyUser(2, 1)
    assert plan_admission(newcomer, view(user_active=1), GIVEN) == plan_admission(asking(strategy), view(), GIVEN)


@rule("I19", "O2", "O3")
def test_a_user_at_the_limit_may_wait_behind_another_run_and_for_another_time() -> None:
    busy = held()
    for strategy in (ENQUEUE, Strategy.INTERRUPT, Strategy.ROLLBACK):
        look = view(busy, user_active=9)
        plan = plan_admission(asking(strategy, **ANN), look, GIVEN)
        assert isinstance(plan, Wait | Displace)
        assert plan == plan_admission(asking(strategy), look, GIVEN)
    later = asking(ENQUEUE, delay=Micros(1), **ANN)
    assert plan_admission(later, view(user_active=9), GIVEN) == Wait(None)


@rule("I19", "O1")
def test_what_stands_on_the_thread_is_answered_or_cleared_before_a_user_s_runs_are_counted() -> None:
    look = view(held(), user_active=9)
    assert isinstance(plan_admission(asking(**ANN), look, GIVEN), Deny)
    due = view(None, waits("due", NOW), user_active=9)
    assert plan_admission(asking(ENQUEUE, **ANN), due, GIVEN) == PromoteFirst()
    known = view(user_active=9, known=replace(held(user_id="ann"), run_id=RunId("new")))
    assert isinstance(plan_admission(asking(**ANN), known, GIVEN), Reuse)


@rule("I19")
def test_a_limit_is_for_runs_of_somebody_only() -> None:
    look = view(user_active=9)
    reservation = asking(kind=OperationKind.CHECKPOINT_WRITE, **ANN)
    for newcomer in (asking(max_active_per_user=0), asking(user_id="ann"), reservation):
        assert plan_admission(newcomer, look, GIVEN) == Enter()


@rule("I19", "O3")
def test_whoever_empties_the_queue_is_not_refused_for_its_length() -> None:
    busy, queue = held(), (waits("first"), waits("second"))
    newcomer = asking(Strategy.INTERRUPT, max_queued=2)
    assert plan_admission(newcomer, view(busy, *queue), GIVEN) == Displace(INTERRUPT, busy, queue)


# --- Reservations ---------------------------------------------------------------------------------------------------


@rule("B047", "B048", "I8")
@pytest.mark.parametrize(
    "more",
    [
        {"strategy": ENQUEUE},
        {"strategy": Strategy.INTERRUPT},
        {"delay": Micros(1)},
        {"take": False},
        {"pinned": True},
        {"idempotency_key": "key"},
    ],
    ids=str,
)
def test_a_reservation_that_could_wait_or_be_nobodys_is_a_callers_mistake(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reservation"):
        asking(kind=OperationKind.DELETE, **more)


@rule("O28", "B059")
def test_a_delete_ends_what_waits_but_not_what_runs() -> None:
    newcomer, later, busy = asking(kind=OperationKind.DELETE), waits("later", NOW + 1), held()
    assert plan_admission(newcomer, view(owner=None), GIVEN) == Enter()
    assert plan_admission(newcomer, view(None, later, owner=None), GIVEN) == Displace(INTERRUPT, None, (later,))
    assert plan_admission(newcomer, view(busy, later), GIVEN) == Deny(busy, 1)


@rule("O1", "B047")
def test_other_reservations_respect_what_waits() -> None:
    newcomer, later = asking(kind=OperationKind.ARTIFACT_WRITE), waits("later", NOW + 1)
    assert plan_admission(newcomer, view(None, later, owner=None), GIVEN) == Deny(later, 1)


# --- The same request again -----------------------------------------------------------------------------------------

KEYED: dict[str, Any] = {"idempotency_key": "key", "payload_digest": "digest", "user_id": "ann"}


def known(name: str = "new", **more: Any) -> Run:
    fields: dict[str, Any] = {"payload_digest": "digest", "user_id": "ann"}
    return replace(held(**(fields | more)), run_id=RunId(name))


@rule("O5", "O8", "I14", "B041", "B043")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("status", [QUEUED, PENDING, RUNNING, SUCCESS])
def test_the_same_request_is_answered_before_anything_else_is_looked_at(strategy: Strategy, status: RunStatus) -> None:
    busy = held()
    for name, by_key in (("new", False), ("older", True)):
        run = known(name, status=status)
        look = view(busy, waits("first"), owner=PROVEN, known=run)
        assert plan_admission(asking(strategy, **KEYED), look, GIVEN) == Reuse(run, by_key)


@rule("O5", "B042")
@pytest.mark.parametrize("name", ["new", "older"])
@pytest.mark.parametrize(
    "other",
    [
        {"payload_digest": "another"},
        {"user_id": "bob"},
        {"thread_id": ThreadId("elsewhere")},
        {"kind": OperationKind.DELETE},
    ],
    ids=str,
)
def test_another_request_under_the_same_name_is_a_clash(name: str, other: dict[str, Any]) -> None:
    run = replace(known(name), **other)
    assert plan_admission(asking(**KEYED), view(known=run), GIVEN) == Clash(run, name == "older")


@rule("O5")
def test_a_stateless_key_is_the_users_whatever_the_thread_but_a_run_id_is_not() -> None:
    run = replace(known("older"), thread_id=ThreadId("elsewhere"))
    assert plan_admission(asking(stateless=True, **KEYED), view(known=run), GIVEN) == Reuse(run, by_key=True)
    mine = replace(run, run_id=RunId("new"))
    assert plan_admission(asking(stateless=True, **KEYED), view(known=mine), GIVEN) == Clash(mine, by_key=False)


@rule("O5")
def test_two_scopes_read_alike_only_if_user_and_thread_are_the_same() -> None:
    texts = ["".join(letters) for length in range(4) for letters in product("a1:", repeat=length)]
    places = [(user, thread, stateless) for user in texts for thread in texts[1:] for stateless in (True, False)]
    meant = {(user, "" if stateless else thread) for user, thread, stateless in places}
    scopes = {
        asking(user_id=user or None, thread_id=ThreadId(thread), stateless=stateless).idempotency_scope
        for user, thread, stateless in places
    }
    assert len(scopes) == len(meant)


# --- Carried out ----------------------------------------------------------------------------------------------------

T = ThreadId("thread")


def world(*names: WorkerId) -> World:
    made = World(now=NOW)
    for name in names or (ME, OTHER):
        made.open_session(Session(name, lease=LEASE, hinted=True))
    return made


def admit(made: World, name: str, strategy: Strategy = REJECT, **more: Any) -> Run:
    answer = made.admit(asking(strategy, **({"run_id": RunId(name)} | more)), GIVEN)
    assert isinstance(answer, Admitted), answer
    return answer.run


def statuses(made: World) -> dict[str, tuple[str, str | None]]:
    return {run.run_id: (run.status.value, run.stop_reason) for run in made.runs.values()}


@rule("O1", "O30")
def test_a_newcomer_that_is_taken_is_owned_at_epoch_one_and_otherwise_vacant_at_none() -> None:
    taken = admit(world(), "r", pinned=True)
    assert (taken.owner_worker_id, taken.epoch, taken.attempt, taken.granted_at) == (ME, 1, 1, NOW)
    assert taken.home_worker_id == ME
    vacant = admit(world(), "r", take=False)
    assert vacant.vacant
    assert (vacant.epoch, vacant.attempt, vacant.granted_at, vacant.home_worker_id) == (0, 0, None, None)


@rule("O3", "I6", "I7")
def test_a_displacing_newcomer_cancels_the_holder_ends_all_that_wait_and_comes_next() -> None:
    made = world()
    admit(made, "held", worker_id=OTHER)
    admit(made, "first", ENQUEUE)
    admit(made, "later", ENQUEUE, delay=Micros(5))
    admit(made, "new", Strategy.ROLLBACK)
    assert statuses(made) == {
        "held": ("pending", None),
        "first": ("interrupted", "rollback"),
        "later": ("interrupted", "rollback"),
        "new": ("queued", None),
    }
    held_now = made.runs[RunId("held")]
    assert held_now.granted_at == NOW
    assert (held_now.cancel_action, held_now.cancel_requested_at, held_now.queue_behind) == (ROLLBACK, NOW + 1, True)
    assert [receipt.run_id for receipt in made.receipts] == ["first", "later"]


@rule("O3", "O19", "F12")
def test_a_second_displacement_does_not_change_the_word_of_the_first() -> None:
    made = world()
    admit(made, "held", worker_id=OTHER)
    admit(made, "one", Strategy.INTERRUPT)
    admit(made, "two", Strategy.ROLLBACK)
    assert made.runs[RunId("held")].cancel_action is CancelAction.INTERRUPT
    assert statuses(made)["one"] == ("interrupted", "rollback")


@rule("O2", "O7", "I7", "I17")
def test_the_end_of_the_holder_promotes_the_first_due_and_flags_it() -> None:
    made = world()
    admit(made, "held")
    admit(made, "later", ENQUEUE, delay=Micros(5))
    admit(made, "first", ENQUEUE)
    admit(made, "second", ENQUEUE)
    assert made.runs[RunId("held")].queue_behind
    made.apply(RunId("held"), RunEvent.SETTLE_ERROR, Actor(ME, 1))
    first = made.runs[RunId("first")]
    assert first.vacant
    assert first.queue_behind
    assert [run.run_id for run in made.queue(T)] == ["second", "later"]


@rule("I17")
def test_a_delayed_run_takes_its_place_by_the_time_it_is_due() -> None:
    made = world()
    admit(made, "held")
    admit(made, "later", ENQUEUE, delay=Micros(5))
    made.advance(7)
    admit(made, "after it was due", ENQUEUE)
    made.apply(RunId("held"), RunEvent.SETTLE_ERROR, Actor(ME, 1))
    assert made.active(T) == made.runs[RunId("later")]


@rule("O2", "O7", "I7")
def test_a_delayed_run_comes_to_life_on_an_idle_thread_and_not_before_its_time() -> None:
    made = world()
    admit(made, "later", ENQUEUE, delay=Micros(5))
    assert made.promote(T, Actor(ME)) is None
    made.advance(5)
    promoted = made.promote(T, Actor(ME))
    assert promoted is not None
    assert promoted.vacant


@rule("O2", "I17")
def test_enqueue_on_a_free_thread_lets_the_due_run_go_first() -> None:
    made = world()
    admit(made, "later", ENQUEUE, delay=Micros(5))
    made.advance(5)
    admit(made, "new", ENQUEUE)
    assert statuses(made) == {"later": ("pending", None), "new": ("queued", None)}


@rule("O1", "O28", "B051", "F09")
def test_a_dead_holder_is_ended_with_its_receipt_and_the_newcomer_enters() -> None:
    made = world()
    admit(made, "held", worker_id=OTHER)
    made.close_session(OTHER)
    admit(made, "new")
    assert statuses(made) == {"held": ("error", "orphan_recovered"), "new": ("pending", None)}
    assert [receipt.run_id for receipt in made.receipts] == ["held"]


@rule("O1", "O28", "I17")
def test_ending_a_dead_holder_gives_the_thread_to_whoever_waited_not_to_the_newcomer() -> None:
    made = world()
    admit(made, "held", worker_id=OTHER)
    admit(made, "first", ENQUEUE)
    made.close_session(OTHER)
    assert isinstance(made.admit(asking(), GIVEN), Deny)
    assert statuses(made) == {"held": ("error", "orphan_recovered"), "first": ("pending", None)}


@rule("O5", "O8", "I14")
@pytest.mark.parametrize("strategy", [ENQUEUE, Strategy.INTERRUPT, Strategy.ROLLBACK])
def test_a_repeated_admission_changes_nothing(strategy: Strategy) -> None:
    made = world()
    admit(made, "held", worker_id=OTHER)
    admit(made, "waits", ENQUEUE)
    newcomer = asking(strategy, **KEYED)
    first = made.admit(newcomer, GIVEN)
    assert isinstance(first, Admitted)
    admit(made, "behind", ENQUEUE)
    before = made.clone()
    assert made.admit(newcomer, GIVEN) == Reuse(first.run, by_key=False)
    other_id = replace(newcomer, run_id=RunId("retry"))
    assert made.admit(other_id, GIVEN) == Reuse(first.run, by_key=True)
    assert made == before


@rule("O5")
def test_a_key_lives_as_long_as_its_row() -> None:
    made = world()
    first = admit(made, "r", **KEYED)
    made.apply(first.run_id, RunEvent.SETTLE_ERROR, Actor(ME, 1))
    assert isinstance(made.admit(asking(**KEYED), GIVEN), Reuse)
    made.apply(first.run_id, RunEvent.REMOVE, Actor(ME))
    assert admit(made, "r2", **KEYED).run_id == "r2"
    assert made.receipts == []


@rule("O28", "I8")
def test_a_delete_on_a_world_ends_what_waits_as_it_comes_and_what_waits_as_it_goes() -> None:
    made = world()
    admit(made, "later", ENQUEUE, delay=Micros(5))
    admit(made, "gone", kind=OperationKind.DELETE)
    admit(made, "after", ENQUEUE)
    assert made.apply(RunId("gone"), RunEvent.RELEASE, Actor(ME, 1)).run is not None
    assert statuses(made) == {"later": ("interrupted", "interrupt"), "after": ("interrupted", "interrupt")}


@rule("I1", "I7", "I17", "I19")
@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(Strategy), st.sampled_from([0, 0, 5]), st.sampled_from(["", "time", "end", "cancel"])
        ),
        min_size=1,
        max_size=9,
    )
)
def test_whoever_comes_a_thread_has_one_holder_and_nobody_waits_on_an_idle_one(
    arrivals: list[tuple[Strategy, int, str]],
) -> None:
    made = world()
    for number, (strategy, delay, then) in enumerate(arrivals):
        made.admit(asking(strategy, run_id=RunId(f"r{number}"), delay=Micros(delay), max_queued=3), GIVEN)
        active = [run for run in made.runs.values() if run.active]
        queue = made.queue(T)
        assert len(active) <= 1
        assert active or all(run.due_at > run.created_at for run in queue)
        assert len(queue) <= 3
        holder = made.active(T)
        if then == "time":
            made.advance(5)
        elif holder is not None and then == "end":
            made.apply(holder.run_id, RunEvent.SETTLE_ERROR, Actor(ME, holder.epoch))
        elif holder is not None and then == "cancel":
            made.apply(holder.run_id, RunEvent.REQUEST_CANCEL, Actor(ME))


# --- Sessions of the world ------------------------------------------------------------------------------------------


@rule("I12", "O10")
def test_a_dead_session_never_beats_again_and_a_live_one_is_told_of_its_cancels() -> None:
    made = world()
    admit(made, "held")
    assert made.renew(ME) is not None
    made.apply(RunId("held"), RunEvent.REQUEST_CANCEL, Actor(OTHER))
    renewed = made.renew(ME, state=SessionState.DRAINING)
    assert renewed is not None
    assert renewed.signals == ((RunId("held"), CancelAction.INTERRUPT),)
    assert (renewed.session.beat, renewed.session.expires_at) == (2, NOW + LEASE)
    made.close_session(ME)
    assert made.renew(ME) is None
    with pytest.raises(ValueError, match="used before"):
        made.open_session(Session(ME))
