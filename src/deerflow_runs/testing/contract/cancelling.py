"""The contract's part about cancels: what is recorded, who then ends the run, and what is owed before it may end.

Covers request, force, seize and every settle that meets a cancel (O4, O19, O20, I6, I16).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from deerflow_runs.model import CancelAction, OnOrphan, Run, RunStatus, Usage, WorkerId
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import AT_ONCE, HOUR, ME, OTHER, Stage, at, names, outcome

CANCELLING: Final = Checks()

INTERRUPT, ROLLBACK = CancelAction.INTERRUPT, CancelAction.ROLLBACK
RESTORED: Final = Given(restored=True)
SETTLES: Final = (RunEvent.SETTLE_SUCCESS, RunEvent.SETTLE_ERROR, RunEvent.SETTLE_TIMEOUT)


# --- What is recorded -----------------------------------------------------------------------------------------------


@CANCELLING("I6", "O19", "B098")
async def the_first_action_and_its_time_win(stage: Stage) -> None:
    for first in CancelAction:
        for second in CancelAction:
            thread = f"{first}-{second}"
            run = await stage.starts(thread, thread)
            recorded = await stage.happens(RunEvent.REQUEST_CANCEL, run, Given(action=first), by=Actor(OTHER))
            assert (recorded.cancel_action, recorded.status, recorded.epoch) == (first, RunStatus.RUNNING, 1)
            again = await stage.happens(RunEvent.REQUEST_CANCEL, run, Given(action=second), by=Actor(OTHER))
            assert again == replace(recorded, updated_at=again.updated_at)


@CANCELLING("O19", "B101")
async def any_active_run_can_be_cancelled_and_keeps_its_thread(stage: Stage) -> None:
    runs = [
        await stage.arrives("pending", "pending"),
        await stage.starts("running", "running"),
        await stage.arrives("vacant", "vacant", take=False),
        await stage.is_orphaned("orphan", "orphan"),
    ]
    for run in runs:
        assert (await stage.is_cancelled(run)).status is run.status
        assert names([await stage.now(run)]) == names([await stage.holder(run.thread_id) or run])


@CANCELLING("O22", "B105")
async def what_waits_is_cancelled_at_once_and_by_its_own_event(stage: Stage) -> None:
    await stage.starts("holder")
    for action in CancelAction:
        for delay in (0, HOUR):
            run = await stage.waits(f"{action}-{delay}", delay=delay)
            assert await stage.refused(RunEvent.REQUEST_CANCEL, run) is Refusal.WRONG_STATUS
            ended = await stage.happens(RunEvent.CANCEL_QUEUED, run, Given(action=action), by=Actor(OTHER))
            assert (outcome(ended), ended.settled_by) == (("interrupted", action.value, 0), OTHER)
            assert ended.cancel_action is action
    active = await stage.holder()
    assert active is not None
    assert await stage.refused(RunEvent.CANCEL_QUEUED, active) is Refusal.WRONG_STATUS


@CANCELLING("O20", "B093", "B110")
async def an_ended_run_cannot_be_cancelled(stage: Stage) -> None:
    for event in (*SETTLES, RunEvent.SETTLE_CANCELLED):
        run = await stage.ends(await stage.starts(event.name, event.name), how=event)
        assert await stage.refused(RunEvent.REQUEST_CANCEL, run) is Refusal.TERMINAL
        assert await stage.refused(RunEvent.CANCEL_QUEUED, run) is Refusal.TERMINAL


@CANCELLING("O20", "O22")
async def a_cancelled_run_is_neither_begun_nor_passed_on(stage: Stage) -> None:
    await stage.opens(ME)
    owned = await stage.is_cancelled(await stage.arrives("owned", "1", on_orphan=OnOrphan.RESUME))
    for event in (RunEvent.START, RunEvent.HAND_OVER, RunEvent.DEFER, RunEvent.GIVE_BACK_RESUME):
        assert await stage.refused(event, owned) is Refusal.CANCEL_RECORDED
    failing = await stage.is_cancelled(await stage.arrives("failing", "2"))
    assert await stage.refused(RunEvent.GIVE_BACK_FAIL, failing) is Refusal.CANCEL_RECORDED
    vacant = await stage.is_cancelled(await stage.arrives("vacant", "3", take=False))
    assert await stage.refused(RunEvent.CLAIM, vacant, by=Actor(ME)) is Refusal.CANCEL_RECORDED
    assert await stage.store.claim(Actor(ME), 10) == ()
    orphan = await stage.is_cancelled(await stage.is_orphaned("orphan", "4"))
    assert await stage.refused(RunEvent.TAKE_OVER_RESUME, orphan, by=Actor(ME)) is Refusal.CANCEL_RECORDED


# --- Completion against cancel --------------------------------------------------------------------------------------


@CANCELLING("I6", "O20", "B086", "B109")
async def a_run_that_was_cancelled_before_it_settled_ends_interrupted_whatever_its_owner_says(stage: Stage) -> None:
    told = Given(error="broke", stop_reason="tokens", usage=Usage(total_tokens=7))
    for event in SETTLES:
        run = await stage.starts(event.name, event.name)
        await stage.is_cancelled(run)
        ended = await stage.ends(run, told, how=event)
        assert (outcome(ended), ended.settled_by) == (("interrupted", "interrupt", 1), ME)
        assert (ended.error, ended.usage.total_tokens) == ("broke", 7)


@CANCELLING("O20", "B064")
async def a_cancel_after_the_settle_changes_nothing(stage: Stage) -> None:
    run = await stage.starts("run")
    ended = await stage.ends(run)
    assert await stage.refused(RunEvent.REQUEST_CANCEL, run, Given(action=ROLLBACK)) is Refusal.TERMINAL
    assert outcome(ended) == ("success", None, 1)


@CANCELLING("O23", "O35")
async def a_stopped_run_ends_for_the_reason_that_was_recorded_first(stage: Stage) -> None:
    told = Given(stop_reason="shutdown")
    stopped = await stage.ends(await stage.starts("1", "1"), told, how=RunEvent.SETTLE_CANCELLED)
    assert outcome(stopped) == ("interrupted", "shutdown", 1)
    run = await stage.starts("2", "2")
    await stage.is_cancelled(run)
    assert outcome(await stage.ends(run, told, how=RunEvent.SETTLE_CANCELLED)) == ("interrupted", "interrupt", 1)


# --- Force ----------------------------------------------------------------------------------------------------------


@CANCELLING("O4")
async def only_a_cancelled_run_is_forced_and_only_once_its_grace_is_over(stage: Stage) -> None:
    run = await stage.starts("run")
    by = at(run, OTHER)
    assert await stage.refused(RunEvent.FORCE, run, AT_ONCE, by=by) is Refusal.NO_CANCEL
    await stage.is_cancelled(run)
    assert await stage.refused(RunEvent.FORCE, run, by=by) is Refusal.HELD
    assert await stage.store.force(by, Given(), 10) == ()
    forced = await stage.happens(RunEvent.FORCE, run, AT_ONCE, by=by)
    assert (outcome(forced), forced.settled_by) == (("interrupted", "interrupt", 2), OTHER)
    for event in (*SETTLES, RunEvent.SETTLE_CANCELLED, RunEvent.PROGRESS):
        assert await stage.refused(event, run) is Refusal.LOST


@CANCELLING("O4", "B116")
async def a_cancelled_run_that_nobody_holds_is_forced_at_once(stage: Stage) -> None:
    await stage.is_cancelled(await stage.arrives("vacant", "1", take=False))
    await stage.is_cancelled(await stage.is_orphaned("orphan", "2"))
    await stage.is_cancelled(await stage.starts("held", "3"))
    await stage.is_orphaned("not-cancelled", "4")
    forced = await stage.store.force(Actor(ME), Given(), 10)
    assert sorted((run.run_id, *outcome(run)) for run in forced) == [
        ("orphan", "interrupted", "interrupt", 2),
        ("vacant", "interrupted", "interrupt", 1),
    ]


@CANCELLING("O4", "O26")
async def a_sweep_forces_no_more_than_it_was_told(stage: Stage) -> None:
    for number in range(5):
        await stage.is_cancelled(await stage.arrives(f"{number}", f"{number}", take=False))
    assert [len(await stage.store.force(Actor(ME), Given(), 2)) for _ in range(4)] == [2, 2, 1, 0]


# --- Rollback -------------------------------------------------------------------------------------------------------


async def _owed(stage: Stage, name: str = "run", **asked: object) -> Run:
    return await stage.is_cancelled(await stage.starts(name, name, **asked), ROLLBACK)


@CANCELLING("O4", "I16")
async def a_rollback_is_not_owed_by_a_run_that_never_started(stage: Stage) -> None:
    for event in (RunEvent.SETTLE_CANCELLED, RunEvent.SETTLE_ERROR):
        run = await stage.is_cancelled(await stage.arrives(event.name, event.name), ROLLBACK)
        assert await stage.refused(RunEvent.SEIZE, run, AT_ONCE) is Refusal.NOTHING_OWED
        assert outcome(await stage.ends(run, how=event)) == ("interrupted", "rollback", 1)
    vacant = await stage.is_cancelled(await stage.arrives("vacant", "vacant", take=False), ROLLBACK)
    assert outcome(await stage.happens(RunEvent.FORCE, vacant, by=Actor(OTHER))) == ("interrupted", "rollback", 1)


@CANCELLING("I16", "O4")
async def a_run_that_owes_a_rollback_cannot_end_before_somebody_has_seized_it(stage: Stage) -> None:
    run = await _owed(stage)
    for event in (*SETTLES, RunEvent.SETTLE_CANCELLED):
        assert await stage.refused(event, run, RESTORED) is Refusal.ROLLBACK_OWED
    assert await stage.refused(RunEvent.FORCE, run, AT_ONCE, by=Actor(OTHER)) is Refusal.ROLLBACK_OWED
    assert await stage.store.force(Actor(OTHER), AT_ONCE, 10) == ()
    assert await stage.refused(RunEvent.SETTLE_ROLLBACK_FAILED, run) is Refusal.WRONG_STATUS


@CANCELLING("O4", "I2", "I16")
async def its_owner_seizes_an_owed_run_at_once_and_is_fenced_at_its_old_epoch(stage: Stage) -> None:
    run = await _owed(stage)
    seized = await stage.happens(RunEvent.SEIZE, run)
    facts = (seized.status, seized.owner_worker_id, seized.epoch, seized.turn, seized.attempt)
    assert facts == (RunStatus.PENDING, ME, 2, run.turn, 1)
    for event in (RunEvent.PROGRESS, RunEvent.SETTLE_CANCELLED, RunEvent.SETTLE_ERROR, RunEvent.HAND_OVER):
        assert await stage.refused(event, run, RESTORED) is Refusal.LOST
    assert await stage.refused(RunEvent.SETTLE_CANCELLED, seized) is Refusal.ROLLBACK_OWED
    assert await stage.refused(RunEvent.SETTLE_ERROR, seized, RESTORED) is Refusal.ROLLBACK_OWED
    ended = await stage.ends(seized, RESTORED, how=RunEvent.SETTLE_CANCELLED)
    assert outcome(ended) == ("interrupted", "rollback", 2)
    await stage.repeats(RunEvent.SETTLE_CANCELLED, seized, RESTORED)


@CANCELLING("O4")
async def another_session_seizes_what_is_vacant_orphaned_or_overdue(stage: Stage) -> None:
    held = await _owed(stage, "held", worker_id=ME)
    assert await stage.refused(RunEvent.SEIZE, held, by=Actor(OTHER)) is Refusal.HELD
    vacant = await stage.happens(RunEvent.HAND_OVER, await stage.starts("vacant", "vacant"))
    orphan = await stage.is_orphaned("orphan", "orphan")
    for run in (vacant, orphan):
        await stage.is_cancelled(run, ROLLBACK)
        seized = await stage.happens(RunEvent.SEIZE, run, by=Actor(OTHER))
        assert (seized.owner_worker_id, seized.epoch, seized.attempt) == (OTHER, run.epoch + 1, 1)
    overdue = await stage.happens(RunEvent.SEIZE, held, AT_ONCE, by=Actor(OTHER))
    assert await stage.refused(RunEvent.SEIZE, overdue, by=Actor(ME)) is Refusal.HELD
    assert await stage.refused(RunEvent.SETTLE_CANCELLED, held, RESTORED) is Refusal.LOST


@CANCELLING("O31")
async def only_who_can_run_an_owed_run_seizes_it(stage: Stage) -> None:
    run = await _owed(stage, required_capabilities=frozenset({"gpu"}))
    assert await stage.refused(RunEvent.SEIZE, run, AT_ONCE, by=Actor(OTHER)) is Refusal.NOT_CAPABLE
    able = Actor(OTHER, capabilities=frozenset({"gpu", "more"}))
    assert (await stage.happens(RunEvent.SEIZE, run, AT_ONCE, by=able)).owner_worker_id == OTHER
    running = await stage.starts("running", "running")
    assert await stage.refused(RunEvent.SEIZE, running) is Refusal.NOTHING_OWED
    await stage.is_cancelled(running)
    assert await stage.refused(RunEvent.SEIZE, running) is Refusal.NOTHING_OWED


@CANCELLING("O4", "I8", "I9", "I16")
async def a_rollback_that_fails_as_often_as_it_may_ends_the_run_as_failed(stage: Stage) -> None:
    run = await _owed(stage, max_attempts=2)
    for attempt in (1, 2, 3):
        seizer = await stage.opens(WorkerId(f"host:seizer-{attempt}"))
        assert await stage.refused(RunEvent.SETTLE_ROLLBACK_FAILED, run) is not None
        run = await stage.happens(RunEvent.SEIZE, run, AT_ONCE, by=Actor(seizer))
        assert run.attempt == attempt
        if attempt <= 2:
            assert await stage.refused(RunEvent.SETTLE_ROLLBACK_FAILED, run) is Refusal.TOO_EARLY
            await stage.dies(seizer)
    ended = await stage.ends(run, Given(error="the saver is gone"), how=RunEvent.SETTLE_ROLLBACK_FAILED)
    assert (outcome(ended), ended.error) == (("error", "rollback_failed", 4), "the saver is gone")


@CANCELLING("O8", "O30")
async def a_seizure_asked_for_twice_after_a_lost_reply_is_one_attempt(stage: Stage) -> None:
    run = await _owed(stage)
    first = await stage.happens(RunEvent.SEIZE, run)
    again = await stage.happens(RunEvent.SEIZE, run)
    assert (first.attempt, again.attempt, again.epoch) == (1, 1, 3)
    next_try = await stage.happens(RunEvent.SEIZE, again)
    assert next_try.attempt == 2
