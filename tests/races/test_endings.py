"""Holders, takers and judges of one run, in every order of the statements: each race has one winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from sqlalchemy import Connection

from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    Micros,
    OnOrphan,
    Run,
    RunStatus,
    SessionState,
    Strategy,
    ThreadOutcome,
    WorkerId,
)
from deerflow_runs.protocol.admission import Reuse
from deerflow_runs.protocol.decision import Actor, Applied, Given, Refused
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store import threads
from deerflow_runs.store.base import Admitted, NotLive, Renewed
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.events import attempt
from deerflow_runs.store.sessions import open_session
from tests.races.stepping import Player, Verb
from tests.races.support import (
    DEAD,
    ME,
    OTHER,
    PAST,
    THREAD,
    Rows,
    World,
    admit,
    apply,
    ended,
    held_open,
    in_queue,
    pending,
    queued,
    running,
    sessions,
    sweep,
    the_active,
    vacant,
)
from tests.rules import rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELD: Final = running("held")
ORPHAN: Final = running("held", owner_worker_id=DEAD)
LATE: Final = apply(ORPHAN, RunEvent.SETTLE_SUCCESS, DEAD)
"""The settle of a worker that was declared dead and does not know it."""

E = RunEvent


def applied(*answers: Any) -> list[bool]:
    """Which of the events happened."""
    return [isinstance(answer, Applied) for answer in answers]


# --- Settle against cancel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", CancelAction)
@rule("O19", "O20", "I6")
async def test_a_run_whose_cancel_was_accepted_never_ends_as_success(world: World, action: CancelAction) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        settled, cancelled = answers
        if isinstance(cancelled, Refused):
            assert cancelled.reason is Refusal.TERMINAL
            assert rows["held"].status is RunStatus.SUCCESS
        elif action is CancelAction.ROLLBACK:
            assert isinstance(settled, Refused)
            assert settled.reason is Refusal.ROLLBACK_OWED
            assert rows["held"].status is RunStatus.RUNNING
        else:
            assert (rows["held"].status, rows["held"].stop_reason) == (RunStatus.INTERRUPTED, "interrupt")

    cancel = apply(HELD, E.REQUEST_CANCEL, OTHER, Given(action=action))
    await world.every_order([HELD], [apply(HELD, E.SETTLE_SUCCESS), cancel], verdict)


@rule("O19", "O20", "I6")
async def test_of_two_cancels_the_first_action_stays(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert applied(*answers) == [True, True]
        assert {answer.run.cancel_action for answer in answers} == {rows["held"].cancel_action}

    cancels = [apply(HELD, E.REQUEST_CANCEL, OTHER, Given(action=action)) for action in CancelAction]
    await world.every_order([HELD], cancels, verdict)


@pytest.mark.parametrize("event", [E.START, E.HAND_OVER, E.DEFER, E.GIVE_BACK_RESUME, E.GIVE_BACK_FAIL])
@rule("O20", "I4", "I6")
async def test_what_a_cancel_forbids_happens_before_it_or_not_at_all(world: World, event: RunEvent) -> None:
    attempts = 9 if event is E.GIVE_BACK_FAIL else 1
    held = pending("held", attempt=attempts)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        done, cancelled = answers
        assert isinstance(done, Applied) or done.reason is Refusal.CANCEL_RECORDED
        assert isinstance(cancelled, Applied) or cancelled.reason is Refusal.TERMINAL
        moved = rows["held"].epoch > held.epoch or rows["held"].status is RunStatus.RUNNING
        assert moved == isinstance(done, Applied)

    verbs = [apply(held, event, given=Given(requirements=frozenset({"gpu"}))), apply(held, E.REQUEST_CANCEL, OTHER)]
    await world.every_order([held], verbs, verdict)


# --- Settle against taking over -------------------------------------------------------------------------------------

TAKING: Final[dict[str, tuple[Run, Verb]]] = {
    "resume": (ORPHAN, apply(ORPHAN, E.TAKE_OVER_RESUME, OTHER)),
    "resume, many": (ORPHAN, sweep(E.TAKE_OVER_RESUME)),
    "fail": (replace(ORPHAN, on_orphan=OnOrphan.FAIL), apply(ORPHAN, E.TAKE_OVER_FAIL, OTHER)),
    "fail, many": (replace(ORPHAN, on_orphan=OnOrphan.FAIL), sweep(E.TAKE_OVER_FAIL)),
    "force": (replace(ORPHAN, cancel_action=CancelAction.INTERRUPT), apply(ORPHAN, E.FORCE, OTHER)),
    "force, many": (replace(ORPHAN, cancel_action=CancelAction.INTERRUPT), sweep(E.FORCE)),
}
"""Every way in which a run is taken from a dead owner."""


@pytest.mark.parametrize("taking", TAKING)
@rule("O14", "O26", "I2", "I4", "I5", "T9")
async def test_a_late_settle_or_the_one_who_takes_over_wins_but_not_both(world: World, taking: str) -> None:
    orphan, take = TAKING[taking]

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        late, taken = answers
        won = isinstance(taken, Applied) or (isinstance(taken, tuple) and len(taken) == 1)
        assert won != isinstance(late, Applied)
        assert rows["held"].epoch == ORPHAN.epoch + won
        assert won or rows["held"].settled_by == DEAD

    await world.every_order([orphan], [LATE, take], verdict)


@pytest.mark.parametrize("event", [E.START, E.PROGRESS, E.SETTLE_CANCELLED, E.HAND_OVER])
@rule("O14", "O26", "I2", "I4")
async def test_nothing_of_the_old_owner_happens_once_its_run_is_taken(world: World, event: RunEvent) -> None:
    orphan = pending("held", owner_worker_id=DEAD)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        late, taken = answers
        assert isinstance(late, Applied) or late.reason is Refusal.LOST
        over = event in {E.SETTLE_CANCELLED, E.HAND_OVER} and isinstance(late, Applied)
        assert isinstance(taken, Applied) != over
        assert rows["held"].epoch == orphan.epoch + (event is not E.SETTLE_CANCELLED or not over)

    verbs = [apply(orphan, event, DEAD), apply(orphan, E.TAKE_OVER_RESUME, OTHER)]
    await world.every_order([orphan], verbs, verdict)


@rule("O30", "I9")
async def test_a_checkpoint_that_was_written_in_time_starts_the_count_anew(world: World) -> None:
    orphan = replace(ORPHAN, attempt=2)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert isinstance(answers[1], Applied)
        assert rows["held"].attempt == (1 if isinstance(answers[0], Applied) else 3)

    progress = apply(orphan, E.PROGRESS, DEAD, Given(checkpoint="checkpoint"))
    await world.every_order([orphan], [progress, apply(orphan, E.TAKE_OVER_RESUME, OTHER)], verdict)


@pytest.mark.parametrize("taking", ["resume", "fail", "resume, many", "fail, many"])
@rule("O13", "O26", "I4", "T8", "T9")
async def test_a_run_is_taken_back_or_taken_over_but_not_both(world: World, taking: str) -> None:
    orphan, take = TAKING[taking]

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        back, taken = answers
        won = isinstance(taken, Applied) or (isinstance(taken, tuple) and len(taken) == 1)
        assert won != isinstance(back, Applied)
        assert rows["held"].epoch == ORPHAN.epoch + 1
        assert (rows["held"].owner_worker_id == ME) != won

    await world.every_order([orphan], [apply(orphan, E.TAKE_BACK, previous=DEAD), take], verdict)


@rule("O26", "T8")
async def test_a_sweep_steals_nothing_from_a_session_it_cannot_see_yet(postgres_world: World) -> None:
    """The session opens and takes its run back while the statement that takes over waits for the row: the statement
    still sees the dead owner's world, in which the new session does not exist."""
    mover, thief, _ = postgres_world.players
    await postgres_world.set(ORPHAN)
    new = replace(sessions()[0], worker_id=WorkerId("host:new"))
    back = Actor(new.worker_id, epoch=1, previous=DEAD)

    def move(connection: Connection, dialect: Dialect) -> None:
        open_session(connection, dialect, new)
        assert attempt(connection, dialect, ORPHAN.key, E.TAKE_BACK, back, Given()) is not None

    await mover.begin(lambda player: player.transaction(move))
    while mover.at != "COMMIT":
        await mover.step()
    await thief.begin(apply(ORPHAN, E.TAKE_OVER_RESUME, OTHER))
    assert not await thief.step(), "nobody stood in the way"
    await mover.finish()
    refused = await thief.finish()
    assert isinstance(refused, Refused)
    assert (await postgres_world.rows())["held"].owner_worker_id == new.worker_id


@rule("O2", "O26", "I2", "I7")
async def test_a_late_settle_a_sweep_and_an_enqueue_agree_on_what_is_left(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        late, taken, newcomer = answers
        assert isinstance(newcomer, Admitted)
        assert isinstance(late, Applied) != (len(taken) == 1)
        assert (the_active(rows), in_queue(rows)) == (("held", ["new"]) if taken else ("new", []))

    await world.every_order([ORPHAN], [LATE, sweep(E.TAKE_OVER_RESUME), admit("new", Strategy.ENQUEUE)], verdict)


# --- Two of a kind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [E.SETTLE_SUCCESS, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.SETTLE_CANCELLED])
@rule("O8", "I5")
async def test_one_settle_that_comes_twice_ends_the_run_once_and_both_are_told_yes(
    world: World, event: RunEvent
) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert applied(*answers) == [True, True]
        assert sorted(answer.repeated for answer in answers) == [False, True]
        assert rows["held"].epoch == HELD.epoch

    scene = [replace(HELD, queue_behind=True), queued("waits"), queued("next")]
    await world.every_order(scene, [apply(HELD, event), apply(HELD, event)], verdict)


@rule("O4", "I4", "I16")
async def test_two_who_would_seize_one_run_do_not_both_get_it(world: World) -> None:
    owed = replace(ORPHAN, cancel_action=CancelAction.ROLLBACK, cancel_requested_at=PAST)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert sorted(applied(*answers)) == [False, True]
        assert rows["held"].epoch == owed.epoch + 1

    await world.every_order([owed], [apply(owed, E.SEIZE, worker) for worker in (ME, OTHER)], verdict)


@rule("O4", "I16")
async def test_an_owner_and_a_seizer_never_both_end_a_run_that_owes_a_rollback(world: World) -> None:
    owed = replace(HELD, cancel_action=CancelAction.ROLLBACK, cancel_requested_at=PAST)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        settled, seized = answers
        assert isinstance(settled, Refused)
        assert settled.reason in {Refusal.ROLLBACK_OWED, Refusal.LOST}
        assert isinstance(seized, Applied)
        assert (rows["held"].owner_worker_id, rows["held"].status) == (OTHER, RunStatus.PENDING)

    await world.every_order([owed], [apply(owed, E.SETTLE_CANCELLED), apply(owed, E.SEIZE, OTHER)], verdict)


@pytest.mark.parametrize("sweeping", [False, True])
@rule("O31", "I4", "T6")
async def test_of_two_claims_one_gets_the_run(world: World, sweeping: bool) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        won = [isinstance(answer, Applied) or (isinstance(answer, tuple) and len(answer) == 1) for answer in answers]
        assert sorted(won) == [False, True]
        assert rows["held"].owner_worker_id == (ME if won[0] else OTHER)
        assert rows["held"].epoch == 1

    free = vacant("held")
    one = [apply(free, E.CLAIM, worker) for worker in (ME, OTHER)]
    many = [sweep(E.CLAIM, worker) for worker in (ME, OTHER)]
    await world.every_order([free], many if sweeping else one, verdict)


@rule("O13", "O31")
async def test_a_waiting_run_gets_a_new_home_or_is_freed_of_the_dead_one(world: World) -> None:
    waits = vacant("held", home_worker_id=DEAD)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        moved, freed = answers
        assert rows["held"].home_worker_id == (ME if moved else None)
        assert len(moved) + len(freed) == 1

    move: Verb = lambda player: player.store.re_home(Actor(ME, previous=DEAD), 10)  # noqa: E731 - as short as its peers
    await world.every_order([waits], [move, sweep(E.TAKE_OVER_RESUME_WAITING)], verdict)


BUSY: Final[dict[RunEvent, dict[str, Any]]] = {
    E.CLAIM: {},
    E.FORCE: {"cancel_action": CancelAction.INTERRUPT},
    E.TAKE_OVER_FAIL: {"owner_worker_id": DEAD, "on_orphan": OnOrphan.FAIL},
    E.TAKE_OVER_RESUME: {"owner_worker_id": DEAD},
    E.TAKE_OVER_FAIL_WAITING: {"home_worker_id": DEAD, "on_orphan": OnOrphan.FAIL},
}


@pytest.mark.parametrize("event", BUSY)
@rule("O7", "O26", "T6")
async def test_a_sweep_passes_over_a_run_that_somebody_is_busy_with(postgres_world: World, event: RunEvent) -> None:
    """And takes the others; a stopped owner of one row must not stop the recovery of all."""
    busy, free = (vacant(name, name, **BUSY[event]) for name in ("busy", "free"))
    holder, sweeper, _ = postgres_world.players
    await postgres_world.set(busy, free)
    await holder.begin(held_open(busy, E.REQUEST_CANCEL))
    await holder.step()
    await sweeper.begin(sweep(event))
    while sweeper.stands:
        assert await sweeper.step(), "it waited"
    assert [run.run_id for run in await sweeper.finish()] == ["free"]
    await holder.finish()


# --- Sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", How)
@rule("O24", "I12")
async def test_a_session_beats_or_dies_and_a_verdict_on_an_old_beat_is_void(world: World, how: How) -> None:
    expired = replace(sessions()[0], hinted=True, expires_at=PAST, beat=7)

    async def verdict(answers: Sequence[Any], rows: Rows) -> None:
        beat, dead = answers
        assert isinstance(beat, Renewed) != dead
        (mine,) = [session for session in await world.players[0].store.sessions() if session.worker_id == ME]
        assert (mine.state is SessionState.DEAD) == dead
        assert isinstance(beat, NotLive) == dead

    judged = Verdict(ME, beat=7, how=how, grace=Micros(0))
    verbs: list[Verb] = [lambda player: player.store.renew(ME), lambda player: player.store.declare_dead(judged)]
    await world.every_order([], verbs, verdict, living=[expired])


@rule("O26", "I8")
async def test_a_run_admitted_while_its_session_is_declared_dead_is_found_by_the_next_sweep(world: World) -> None:
    judged = Verdict(ME, beat=0, how=How.PROOF, grace=Micros(0))

    async def bury(player: Player) -> Any:
        assert await player.store.declare_dead(judged)
        return await player.store.take_over(Actor(OTHER), Given(), 10)

    async def verdict(answers: Sequence[Any], rows: Rows) -> None:
        swept = answers[1].total
        again = await world.players[0].store.take_over(Actor(OTHER), Given(), 10)
        assert swept + again.total == 1
        assert the_active(await world.rows()) is None

    await world.every_order([], [admit("new"), bury], verdict)


@rule("O35", "I8")
async def test_a_waiting_run_of_a_draining_session_ends_or_is_displaced_once(world: World) -> None:
    draining = replace(sessions()[0], state=SessionState.DRAINING)
    scene = [running("held", owner_worker_id=OTHER, queue_behind=True)]
    scene += [queued(name, home_worker_id=ME) for name in ("one", "two")]

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        ended_here, newcomer = answers
        assert len(ended_here) + len(newcomer.ended) == 2
        assert in_queue(rows) == ["new"]

    end: Verb = lambda player: player.store.end_waiting(Actor(ME), 10)  # noqa: E731 - as short as its peers
    interrupt = admit("new", Strategy.INTERRUPT, worker_id=OTHER)
    await world.every_order(scene, [end, interrupt], verdict, living=[draining, sessions()[1]])


# --- What hangs on a run --------------------------------------------------------------------------------------------


@rule("O7", "O28")
async def test_an_end_and_a_change_of_its_thread_are_both_kept(world: World) -> None:
    change = threads.ThreadChange(metadata={"title": "new"})

    async def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert isinstance(answers[0], Applied)
        thread = await world.units.read(
            lambda connection: threads.get(connection, world.units.dialect, THREAD, scope=EVERYONE)
        )
        assert thread is not None
        assert thread.metadata == {"title": "new"}
        assert (thread.outcome, thread.error) == (ThreadOutcome.ERROR, "it broke")

    settle = apply(HELD, E.SETTLE_ERROR, given=Given(error="it broke"))
    await world.every_order([HELD], [settle, _changing(change)], verdict)


def _changing(change: threads.ThreadChange) -> Verb:
    async def verb(player: Player) -> Any:
        units = player.units
        return await units.transaction(
            lambda connection: threads.update(connection, units.dialect, THREAD, change, scope=EVERYONE)
        )

    return verb


@rule("O5", "I14")
async def test_a_key_is_found_again_or_free_while_its_run_is_removed(world: World) -> None:
    old = ended("old", idempotency_key="key")

    async def purge(player: Player) -> Any:
        return await player.store.purge(before=Micros(PAST + 1), limit=10)

    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        removed, newcomer = answers
        assert removed == 1
        assert list(rows) == ([] if isinstance(newcomer, Reuse) else ["new"])

    await world.every_order([old], [purge, admit("new", Strategy.ENQUEUE, idempotency_key="key")], verdict)
