"""Newcomers against whatever else happens to the thread they ask for, in every order of the statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest

from deerflow_runs.model import CancelAction, Micros, OnOrphan, OperationKind, Run, RunId, RunStatus, Strategy
from deerflow_runs.protocol.admission import Clash, Deny, DenyFull, Newcomer, Reuse
from deerflow_runs.protocol.decision import Actor, Applied, Given, Refused
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import arrivals
from deerflow_runs.store.base import Admitted, Settlement
from tests.races.stepping import Verb
from tests.races.support import (
    DEAD,
    ME,
    OTHER,
    THREAD,
    Rows,
    World,
    admit,
    apply,
    due,
    in_queue,
    pending,
    queued,
    running,
    sweep,
    the_active,
    vacant,
)
from tests.rules import rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELD: Final = running("held")
BEFORE_QUEUE: Final = running("held", queue_behind=True)
RESERVED: Final = pending("held", kind=OperationKind.CHECKPOINT_WRITE)
SETTLE: Final = apply(HELD, RunEvent.SETTLE_SUCCESS)


def only(answers: Sequence[Any], kind: type[Any]) -> list[Any]:
    """Those of the answers that are of this kind."""
    return [answer for answer in answers if isinstance(answer, kind)]


def ended_by(rows: Rows, reason: str) -> set[str]:
    """Who ended for this reason."""
    return {run.run_id for run in rows.values() if run.terminal and run.stop_reason == reason}


# --- Reject ---------------------------------------------------------------------------------------------------------


@rule("O1", "I1")
async def test_of_two_newcomers_one_gets_the_thread_and_the_other_is_told_who(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (winner,) = only(answers, Admitted)
        (loser,) = only(answers, Deny)
        assert loser.holder.run_id == winner.run.run_id
        assert list(rows) == [winner.run.run_id]

    await world.every_order([], [admit("one"), admit("two")], verdict)


@rule("O1", "O7", "T1")
async def test_a_reject_never_passes_the_queue(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        settled, newcomer = answers
        assert isinstance(settled, Applied)
        assert isinstance(newcomer, Deny)
        assert the_active(rows) == "waits"

    await world.every_order([BEFORE_QUEUE, queued("waits")], [SETTLE, admit("new")], verdict)


@rule("O1", "O2", "O7", "T1")
async def test_a_reject_does_not_pass_by_an_old_look(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        _, behind, newcomer = answers
        assert isinstance(behind, Admitted)
        if isinstance(newcomer, Admitted):
            assert the_active(rows) == "new"
            assert behind.incumbent is not None
            assert behind.incumbent.run_id == "new"
        else:
            assert the_active(rows) == "waits"

    await world.every_order([HELD], [SETTLE, admit("waits", Strategy.ENQUEUE), admit("new")], verdict)


@rule("O1", "I1")
async def test_a_reject_gets_the_thread_only_once_the_settle_is_done(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert isinstance(answers[0], Applied)
        assert the_active(rows) == ("new" if isinstance(answers[1], Admitted) else None)
        assert isinstance(answers[1], Admitted) or answers[1].holder.run_id == "held"

    await world.every_order([HELD], [SETTLE, admit("new")], verdict)


# --- Enqueue --------------------------------------------------------------------------------------------------------

ENDINGS: Final[Mapping[str, tuple[Run, Verb]]] = {
    "settle": (HELD, SETTLE),
    "settle error": (pending("held"), apply(HELD, RunEvent.SETTLE_ERROR)),
    "settle cancelled": (HELD, apply(HELD, RunEvent.SETTLE_CANCELLED)),
    "give back": (running("held", attempt=9), apply(HELD, RunEvent.GIVE_BACK_FAIL)),
    "force": (vacant("held", cancel_action=CancelAction.INTERRUPT), apply(vacant("held"), RunEvent.FORCE)),
    "force sweep": (vacant("held", cancel_action=CancelAction.INTERRUPT), sweep(RunEvent.FORCE)),
    "take over": (running("held", owner_worker_id=DEAD, attempt=9), apply(HELD, RunEvent.TAKE_OVER_FAIL, OTHER)),
    "take over sweep": (running("held", owner_worker_id=DEAD, attempt=9), sweep(RunEvent.TAKE_OVER_FAIL)),
    "release": (RESERVED, apply(RESERVED, RunEvent.RELEASE)),
    "release sweep": (
        pending("held", kind=OperationKind.CHECKPOINT_WRITE, owner_worker_id=DEAD),
        sweep(RunEvent.TAKE_OVER_RELEASE),
    ),
}
"""Every way in which a thread becomes free."""


@pytest.mark.parametrize("ending", ENDINGS)
@rule("O2", "O7", "O28", "I7", "T3")
async def test_nobody_is_stranded_between_an_enqueue_and_an_end(world: World, ending: str) -> None:
    holder, end = ENDINGS[ending]

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert isinstance(answers[1], Admitted)
        assert the_active(rows) == "new"
        assert "held" not in rows or rows["held"].terminal

    await world.every_order([holder], [end, admit("new", Strategy.ENQUEUE)], verdict)


@rule("O2", "O7", "I7", "T3")
async def test_settles_that_go_together_strand_nobody(world: World) -> None:
    other = running("other", "elsewhere")
    asked = [Settlement(run.key, RunEvent.SETTLE_SUCCESS, Actor(ME, run.epoch)) for run in (HELD, other)]

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert all(isinstance(answer, Applied) for answer in answers[0])
        assert isinstance(answers[1], Admitted)
        assert rows["held"].terminal
        assert rows["other"].terminal
        assert the_active(rows) == "new"

    await world.every_order(
        [HELD, other], [lambda player: player.store.settle_many(asked), admit("new", Strategy.ENQUEUE)], verdict
    )


@rule("O2", "I17", "T3")
async def test_two_enqueued_runs_start_in_the_order_of_their_admission(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert len(only(answers, Admitted)) == 2
        first, second = sorted(rows.values(), key=lambda run: run.seq)
        assert (first.active, second.status) == (True, RunStatus.QUEUED)

    await world.every_order([], [admit(name, Strategy.ENQUEUE) for name in ("one", "two")], verdict)


@rule("O2", "I19")
async def test_a_queue_never_grows_beyond_its_limit(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (winner,) = only(answers, Admitted)
        assert only(answers, DenyFull)
        assert in_queue(rows) == [winner.run.run_id]

    newcomers = [admit(name, Strategy.ENQUEUE, max_queued=1) for name in ("one", "two")]
    await world.every_order([HELD], newcomers, verdict)


# --- Interrupt and rollback -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Strategy.INTERRUPT, Strategy.ROLLBACK])
@rule("O3", "O20", "I6", "T5")
async def test_an_interrupted_run_ends_as_it_was_told_or_had_ended_before(world: World, strategy: Strategy) -> None:
    """The holder has not started yet, so nothing is owed for a rollback."""
    holder = pending("held")

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert [type(answer) for answer in answers] == [Applied, Admitted]
        assert the_active(rows) == "new"
        told = answers[1].incumbent is not None
        assert rows["held"].status is (RunStatus.INTERRUPTED if told else RunStatus.ERROR)
        assert rows["held"].stop_reason == (strategy.value if told else None)

    await world.every_order([holder], [apply(holder, RunEvent.SETTLE_ERROR), admit("new", strategy)], verdict)


@rule("O3", "T5")
async def test_of_two_interrupts_one_survives_and_all_others_end(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert len(only(answers, Admitted)) == 2
        (survivor,) = in_queue(rows)
        (loser,) = {"one", "two"} - {survivor}
        assert the_active(rows) == "held"
        assert ended_by(rows, "interrupt") == {"waits", loser}
        assert rows[loser].seq < rows[survivor].seq

    newcomers = [admit(name, Strategy.INTERRUPT) for name in ("one", "two")]
    await world.every_order([BEFORE_QUEUE, queued("waits")], newcomers, verdict)


@rule("O3", "I1", "T5")
async def test_of_two_interrupts_on_an_idle_thread_one_waits_behind_the_other(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert len(only(answers, Admitted)) == 2
        first, second = sorted(rows.values(), key=lambda run: run.seq)
        assert (first.cancel_action, second.status) == (CancelAction.INTERRUPT, RunStatus.QUEUED)

    await world.every_order([], [admit(name, Strategy.INTERRUPT) for name in ("one", "two")], verdict)


@rule("O3", "I6")
async def test_the_first_of_two_actions_wins_and_both_are_told_which(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        first = min(("interrupt", "rollback"), key=lambda name: rows[name].seq)
        assert rows["held"].cancel_action == first
        assert [answer.incumbent.cancel_action for answer in answers] == [first, first]

    newcomers = [admit(strategy.value, strategy) for strategy in (Strategy.INTERRUPT, Strategy.ROLLBACK)]
    await world.every_order([HELD], newcomers, verdict)


@rule("O2", "O3", "T5")
async def test_an_interrupt_displaces_whoever_was_enqueued_before_it(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert len(only(answers, Admitted)) == 2
        assert in_queue(rows) in (["interrupts"], ["interrupts", "waits"])
        assert rows["waits"].terminal == (answers[0].ended != ())

    newcomers = [admit("interrupts", Strategy.INTERRUPT), admit("waits", Strategy.ENQUEUE)]
    await world.every_order([HELD], newcomers, verdict)


@rule("O3", "O7")
async def test_an_interrupt_and_a_settle_that_somebody_waits_for_share_one_slot(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert isinstance(answers[1], Admitted)
        holder = the_active(rows)
        assert holder in {"new", "waits"}
        assert rows["waits"].status is (RunStatus.INTERRUPTED if holder == "new" else RunStatus.PENDING)
        assert in_queue(rows) == ([] if holder == "new" else ["new"])

    await world.every_order([BEFORE_QUEUE, queued("waits")], [SETTLE, admit("new", Strategy.INTERRUPT)], verdict)


@rule("O3", "I6")
async def test_a_run_that_is_interrupted_before_it_starts_does_not_start(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        started, newcomer = answers
        assert isinstance(newcomer, Admitted)
        assert rows["held"].cancel_action is CancelAction.INTERRUPT
        assert rows["held"].status is (RunStatus.RUNNING if isinstance(started, Applied) else RunStatus.PENDING)

    verbs = [apply(pending("held"), RunEvent.START), admit("new", Strategy.INTERRUPT)]
    await world.every_order([pending("held")], verbs, verdict)


@pytest.mark.parametrize(
    "claim", [apply(vacant("held"), RunEvent.CLAIM, OTHER), sweep(RunEvent.CLAIM)], ids=["one", "many"]
)
@rule("O3", "O4", "I4")
async def test_a_vacant_run_is_claimed_or_forced_by_an_interrupt_but_not_both(world: World, claim: Verb) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        claimed = isinstance(answers[0], Applied) or (isinstance(answers[0], tuple) and answers[0] != ())
        assert isinstance(answers[1], Admitted)
        assert rows["held"].terminal or rows["held"].owner_worker_id == OTHER
        assert the_active(rows) == ("held" if not rows["held"].terminal else "new")
        assert rows["held"].terminal or claimed

    await world.every_order([vacant("held")], [claim, admit("new", Strategy.INTERRUPT)], verdict)


HOMELESS: Final[Mapping[str, Any]] = {"home_worker_id": DEAD, "on_orphan": OnOrphan.FAIL}


@pytest.mark.parametrize("held", [True, False], ids=["held", "idle"])
@rule("O3", "O7", "O26", "T13")
async def test_ends_of_waiting_runs_and_an_interrupt_never_wait_in_a_ring(world: World, held: bool) -> None:
    """The sweep ends waiting runs without holding the thread's active row; both touch the whole queue."""

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert isinstance(answers[1], Admitted)
        assert rows["two"].terminal
        assert rows["three"].terminal
        assert rows["one"].terminal or rows["one"].cancel_action is CancelAction.INTERRUPT
        assert (the_active(rows), tuple(in_queue(rows))) in {("held", ("new",)), ("one", ("new",)), ("new", ())}

    wait = queued if held else due
    scene = [wait("one"), wait("two", **HOMELESS), wait("three", **HOMELESS), *([BEFORE_QUEUE] if held else [])]
    await world.every_order(scene, [sweep(RunEvent.TAKE_OVER_FAIL_WAITING), admit("new", Strategy.INTERRUPT)], verdict)


@rule("O7", "O26", "T13", "T14")
async def test_sweeps_over_the_same_threads_never_wait_in_a_ring(world: World) -> None:
    """One ends what runs and promotes, the other ends what waits: each holds what the other would promote."""
    scene = [
        running("a", "a", owner_worker_id=DEAD, on_orphan=OnOrphan.FAIL, queue_behind=True),
        queued("a1", "a"),
        queued("a2", "a", **HOMELESS),
        running("b", "b", owner_worker_id=DEAD, on_orphan=OnOrphan.FAIL, queue_behind=True),
        queued("b1", "b", **HOMELESS),
    ]

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert len(answers[0]) == 2
        assert rows["a1"].active
        assert all(rows[name].terminal for name in ("a", "b", "a2"))
        assert rows["b1"].terminal or rows["b1"].active

    await world.every_order(scene, [sweep(RunEvent.TAKE_OVER_FAIL), sweep(RunEvent.TAKE_OVER_FAIL_WAITING)], verdict)


@rule("O3", "I19")
async def test_the_limit_of_a_queue_counts_delayed_runs_that_come_at_once(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (winner,) = only(answers, Admitted)
        assert only(answers, DenyFull)
        assert in_queue(rows) == [winner.run.run_id]

    delayed = [admit(name, Strategy.ENQUEUE, delay=Micros(10**12), max_queued=1) for name in ("one", "two")]
    await world.every_order([], delayed, verdict)


# --- Replays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", Strategy)
@rule("O5", "O8", "I14", "T10", "T11")
async def test_one_request_that_comes_twice_at_once_is_one_run(world: World, strategy: Strategy) -> None:
    asked = {"idempotency_key": "key", "payload_digest": "same"}

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (admitted,) = only(answers, Admitted)
        (again,) = only(answers, Reuse)
        assert again.run.run_id == admitted.run.run_id
        assert set(rows) - {admitted.run.run_id} <= {"held"}
        assert not rows[admitted.run.run_id].terminal
        assert rows[admitted.run.run_id].cancel_action is None

    scene = [] if strategy is Strategy.REJECT else [HELD]
    await world.every_order(scene, [admit(name, strategy, **asked) for name in ("one", "two")], verdict)


@pytest.mark.parametrize("strategy", Strategy)
@rule("O5", "O8", "T11")
async def test_the_same_run_asked_for_twice_displaces_nobody_twice(world: World, strategy: Strategy) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert len(only(answers, Admitted)) == 1
        assert [answer.by_key for answer in only(answers, Reuse)] == [False]
        assert not rows["new"].terminal
        assert rows["new"].cancel_action is None

    scene = [] if strategy is Strategy.REJECT else [BEFORE_QUEUE, queued("waits")]
    await world.every_order(scene, [admit("new", strategy), admit("new", strategy)], verdict)


@rule("O5", "I14", "T10")
async def test_one_key_on_two_threads_is_one_run_where_it_is_stateless(world: World) -> None:
    asked = {"idempotency_key": "key", "stateless": True}

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (admitted,) = only(answers, Admitted)
        (again,) = only(answers, Reuse)
        assert list(rows) == [again.run.run_id] == [admitted.run.run_id]

    newcomers = [admit(name, Strategy.ENQUEUE, thread_id=name, **asked) for name in ("one", "two")]
    await world.every_order([], newcomers, verdict)


@rule("O5")
async def test_one_key_with_two_payloads_admits_one_of_them(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        (admitted,) = only(answers, Admitted)
        (clash,) = only(answers, Clash)
        assert clash.run.run_id == admitted.run.run_id

    newcomers = [admit(name, Strategy.ENQUEUE, idempotency_key="key", payload_digest=name) for name in ("one", "two")]
    await world.every_order([], newcomers, verdict)


# --- Delayed runs and idle threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", Strategy)
@rule("O1", "O2", "O7", "I1", "I7")
async def test_a_newcomer_and_the_promotion_of_a_due_run_agree_on_one_holder(world: World, strategy: Strategy) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        holder = the_active(rows)
        match strategy:
            case Strategy.REJECT:
                assert isinstance(answers[1], Deny)
                assert holder == "due"
            case Strategy.ENQUEUE:
                assert (holder, in_queue(rows)) == ("due", ["new"])
            case _:
                assert rows["due"].cancel_action is not None
                assert holder == "new"

    verbs = [lambda player: player.store.promote(10), admit("new", strategy)]
    await world.every_order([due("due")], verbs, verdict)


@rule("O7", "I1", "T15")
async def test_two_sweeps_promote_one_run(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert sorted(len(promoted) for promoted in answers) == [0, 1]
        assert (the_active(rows), in_queue(rows)) == ("one", ["two"])

    sweeps: list[Verb] = [lambda player: player.store.promote(10)] * 2
    await world.every_order([due("one"), due("two")], sweeps, verdict)


@rule("O7", "O28")
async def test_a_due_run_that_is_cancelled_is_not_promoted(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        cancelled = isinstance(answers[1], Applied)
        assert rows["one"].terminal == cancelled
        assert the_active(rows) == "one" or (cancelled and the_active(rows) in {"two", None})

    one = due("one")
    verbs = [lambda player: player.store.promote(10), apply(one, RunEvent.CANCEL_QUEUED, given=Given())]
    await world.every_order([one, due("two")], verbs, verdict)


@rule("O7", "O28", "I7")
async def test_a_waiting_run_is_cancelled_or_promoted_but_nobody_behind_it_is_stranded(world: World) -> None:
    waits = queued("waits")

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        settled, cancelled = answers
        assert isinstance(settled, Applied)
        assert isinstance(cancelled, Applied | Refused)
        assert the_active(rows) == ("next" if isinstance(cancelled, Applied) else "waits")

    verbs = [SETTLE, apply(waits, RunEvent.CANCEL_QUEUED)]
    await world.every_order([BEFORE_QUEUE, waits, queued("next")], verbs, verdict)


@rule("O2", "O28")
async def test_what_waits_on_a_thread_that_is_deleted_ends_with_it(world: World) -> None:
    deleting = pending("held", kind=OperationKind.DELETE)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        released, newcomer = answers
        assert isinstance(released, Applied)
        assert isinstance(newcomer, Admitted)
        assert newcomer.incumbent is None or rows["new"].status is RunStatus.INTERRUPTED
        assert the_active(rows) == ("new" if newcomer.incumbent is None else None)

    await world.every_order([deleting], [apply(deleting, RunEvent.RELEASE), admit("new", Strategy.ENQUEUE)], verdict)


@rule("O7", "I1", "I7")
async def test_a_promotion_that_lost_its_thread_while_it_looked_is_no_error(postgres_world: World) -> None:
    """A newcomer's statement looked while the waiting run was not due yet, and commits when it is."""
    world = postgres_world
    newcomer, promoter, _ = world.players
    asked = Newcomer(run_id=RunId("new"), thread_id=THREAD, worker_id=ME, strategy=Strategy.ENQUEUE)
    await world.set(queued("late", due_at=Micros(10**18)))
    await newcomer.begin(lambda player: player.transaction(arrivals.enter, asked))
    await newcomer.step()
    await world.make_due("late")
    await promoter.begin(lambda player: player.store.promote(10))
    while await promoter.step():
        assert promoter.stands, "nobody stood in the way"
    await newcomer.finish()
    assert await promoter.finish() == ()
    assert the_active(await world.rows()) == "new"
