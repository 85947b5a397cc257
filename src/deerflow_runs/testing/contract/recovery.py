"""The contract's part about dead sessions: who may do what to the runs they leave, and how often (O13, O26, O29–O31).

A death is a fact here (a session closed itself) or a belief (a judge went by a hint); the difference is checked.
"""

from __future__ import annotations

from typing import Any, Final

from deerflow_runs.model import (
    CancelAction,
    OnOrphan,
    SessionState,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Given
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import HOUR, INSTANT, ME, OTHER, Stage, at, outcome

RECOVERY: Final = Checks()

GONE: Final = WorkerId("host:gone")
BACK: Final = WorkerId("host:back")
LATER: Final = Given(backoff=HOUR)
RESUME: Final = OnOrphan.RESUME


# --- Who is an orphan -----------------------------------------------------------------------------------------------


@RECOVERY("O26", "O29")
async def only_the_runs_of_the_dead_are_orphans(stage: Stage) -> None:
    live, draining = await stage.opens(OTHER), await stage.opens(GONE)
    await stage.store.renew(draining, state=SessionState.DRAINING)
    for number, owner in enumerate((live, draining, WorkerId("host:unknown"))):
        for policy in OnOrphan:
            asked: dict[str, Any] = {"worker_id": owner, "on_orphan": policy}
            fails = policy is OnOrphan.FAIL
            run = await stage.starts(f"{number}-{policy}", f"{number}-{policy}", **asked)
            event = RunEvent.TAKE_OVER_FAIL if fails else RunEvent.TAKE_OVER_RESUME
            assert await stage.refused(event, run, by=Actor(ME)) is Refusal.HELD
            waits = await stage.arrives(
                f"pinned-{run.run_id}", f"pinned-{run.run_id}", **asked, take=False, pinned=True
            )
            event = RunEvent.TAKE_OVER_FAIL_WAITING if fails else RunEvent.TAKE_OVER_RESUME_WAITING
            assert await stage.refused(event, waits, by=Actor(ME)) is Refusal.HELD
    await stage.arrives("vacant", "vacant", take=False)
    assert await stage.sweeps() == {}


@RECOVERY("O26", "T9")
async def a_session_without_a_row_gets_a_tombstone_and_its_runs_are_found(stage: Stage) -> None:
    stranger, home = WorkerId("host:stranger"), WorkerId("host:stranger-home")
    await stage.starts("owned", "1", worker_id=stranger, on_orphan=RESUME)
    await stage.arrives("pinned", "2", worker_id=home, take=False, pinned=True)
    await stage.opens(ME)
    await stage.starts("mine", "3")
    assert await stage.store.bury_strangers() == 2
    assert await stage.store.bury_strangers() == 0
    tombstone = await stage.session(stranger)
    assert (tombstone.state, tombstone.proven) == (SessionState.DEAD, False)
    assert await stage.sweeps() == {"resumed": ["owned"]}


@RECOVERY("O26")
async def who_has_no_row_may_still_live_and_is_given_the_longest_lease_to_take_its_runs_back(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.starts("run", "1", worker_id=WorkerId("host:stranger"))
    await stage.store.bury_strangers()
    assert (await stage.session(WorkerId("host:stranger"))).lease == (await stage.session(ME)).lease
    assert await stage.sweeps() == {}


@RECOVERY("O26", "O31")
async def nobody_waits_for_a_session_without_a_row_longer_than_any_lease(stage: Stage) -> None:
    await stage.opens(ME, lease=INSTANT)
    await stage.arrives("pinned", "2", worker_id=WorkerId("host:stranger-home"), take=False, pinned=True)
    await stage.store.bury_strangers()
    assert await stage.sweeps() == {"ended": ["pinned"]}


@RECOVERY("O26")
async def a_sweep_recovers_no_more_of_a_kind_than_it_was_told(stage: Stage) -> None:
    await stage.opens(GONE)
    for number in range(5):
        await stage.starts(f"fail-{number}", f"fail-{number}", worker_id=GONE)
        await stage.starts(f"resume-{number}", f"resume-{number}", worker_id=GONE, on_orphan=RESUME)
    await stage.dies(GONE)
    passes = [await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 2) for _ in range(4)]
    assert [(len(done.ended), len(done.resumed)) for done in passes] == [(2, 2), (2, 2), (1, 1), (0, 0)]


# --- Fail -----------------------------------------------------------------------------------------------------------


@RECOVERY("O29", "O30")
async def a_local_run_of_the_dead_ends_as_failed_and_its_owner_is_fenced(stage: Stage) -> None:
    run = await stage.is_orphaned("run", on_orphan=OnOrphan.FAIL)
    assert await stage.refused(RunEvent.TAKE_OVER_RESUME, run, by=Actor(ME)) is Refusal.OTHER_POLICY
    ended = await stage.happens(RunEvent.TAKE_OVER_FAIL, run, Given(error="its worker is gone"), by=Actor(ME))
    assert (outcome(ended), ended.settled_by) == (("error", "orphan_recovered", 2), ME)
    assert ended.error == "its worker is gone"
    assert await stage.refused(RunEvent.SETTLE_SUCCESS, run) is Refusal.LOST


@RECOVERY("O26", "I10")
async def what_ends_a_run_for_good_waits_one_lease_after_a_death_that_is_not_proven(stage: Stage) -> None:
    for worker_id, lease in ((OTHER, HOUR), (GONE, INSTANT)):
        await stage.opens(worker_id, lease=lease)
        await stage.starts(f"run-of-{worker_id}", worker_id, worker_id=worker_id)
        await stage.arrives(
            f"pinned-to-{worker_id}", f"pinned-{worker_id}", worker_id=worker_id, take=False, pinned=True
        )
        await stage.is_believed_dead(worker_id)
    await stage.passes(INSTANT)
    fresh = await stage.store.active(ThreadId(OTHER))
    waiting = await stage.store.active(ThreadId(f"pinned-{OTHER}"))
    assert fresh is not None
    assert waiting is not None
    assert await stage.refused(RunEvent.TAKE_OVER_FAIL, fresh, by=Actor(ME)) is Refusal.TOO_EARLY
    assert await stage.refused(RunEvent.TAKE_OVER_FAIL_WAITING, waiting, by=Actor(ME)) is Refusal.TOO_EARLY
    assert await stage.sweeps() == {"ended": [f"pinned-to-{GONE}", f"run-of-{GONE}"]}


@RECOVERY("O26", "O29")
async def what_resumes_a_run_or_frees_it_of_its_home_does_not_wait(stage: Stage) -> None:
    await stage.opens(GONE)
    await stage.starts("run", "1", worker_id=GONE, on_orphan=RESUME)
    await stage.arrives("pinned", "2", worker_id=GONE, take=False, pinned=True, on_orphan=RESUME)
    await stage.is_believed_dead(GONE)
    assert await stage.sweeps() == {"resumed": ["run"], "freed": ["pinned"]}


# --- Resume and attempts --------------------------------------------------------------------------------------------


@RECOVERY("O29", "O30")
async def a_run_that_may_resume_becomes_vacant_stays_away_for_its_backoff_and_keeps_its_turn(stage: Stage) -> None:
    await stage.opens(ME)
    run = await stage.is_orphaned("run", pinned=True)
    assert await stage.refused(RunEvent.TAKE_OVER_FAIL, run, by=Actor(ME)) is Refusal.OTHER_POLICY
    resumed = await stage.happens(RunEvent.TAKE_OVER_RESUME, run, LATER, by=Actor(ME))
    assert (resumed.vacant, resumed.epoch, resumed.attempt, resumed.home_worker_id) == (True, 2, 2, None)
    assert (resumed.turn, resumed.started_at) == (run.turn, run.started_at)
    assert resumed.not_before > await stage.store.now()
    assert await stage.refused(RunEvent.CLAIM, resumed, by=Actor(ME)) is Refusal.TOO_EARLY
    assert await stage.store.claim(Actor(ME), 10) == ()
    for event in (RunEvent.SETTLE_SUCCESS, RunEvent.PROGRESS, RunEvent.HAND_OVER):
        assert await stage.refused(event, run) is Refusal.LOST


@RECOVERY("O30", "I9")
async def a_run_that_kills_its_workers_is_poison_once_its_attempts_are_used_up(stage: Stage) -> None:
    run = await stage.is_orphaned("run", max_attempts=3)
    for attempt in (2, 3):
        worker = await stage.opens(WorkerId(f"host:worker-{attempt}"))
        assert await stage.refused(RunEvent.TAKE_OVER_FAIL, run, by=Actor(ME)) is Refusal.OTHER_POLICY
        assert await stage.sweeps() == {"resumed": ["run"]}
        (run,) = await stage.store.claim(Actor(worker), 1)
        assert run.attempt == attempt
        run = await stage.happens(RunEvent.START, run)
        await stage.dies(worker)
    assert await stage.refused(RunEvent.TAKE_OVER_RESUME, run, by=Actor(ME)) is Refusal.OTHER_POLICY
    assert await stage.sweeps() == {"ended": ["run"]}
    assert outcome(await stage.now(run)) == ("error", "poison", 6)


@RECOVERY("O30")
async def an_epoch_that_wrote_a_checkpoint_starts_the_count_of_attempts_again(stage: Stage) -> None:
    await stage.opens(ME)
    checkpoint = Given(checkpoint="checkpoint-1")
    run = await stage.starts("run", on_orphan=RESUME, max_attempts=2)
    for event, given, attempt in (
        (RunEvent.GIVE_BACK_RESUME, None, 2),
        (RunEvent.GIVE_BACK_RESUME, checkpoint, 1),
        (RunEvent.GIVE_BACK_RESUME, Given(usage=Usage(total_tokens=1)), 2),
    ):
        if given is not None:
            await stage.happens(RunEvent.PROGRESS, run, given)
        vacant = await stage.happens(event, run)
        assert (vacant.vacant, vacant.attempt) == (True, attempt)
        (run,) = await stage.store.claim(Actor(ME), 1)
    assert run.last_checkpoint == "checkpoint-1", "what is not given stays"
    assert await stage.refused(RunEvent.GIVE_BACK_RESUME, run) is Refusal.OTHER_POLICY
    poisoned = await stage.ends(run, Given(stop_reason="not_attached"), how=RunEvent.GIVE_BACK_FAIL)
    assert outcome(poisoned) == ("error", "poison", 8)


@RECOVERY("O30", "I18")
async def whoever_passes_a_run_on_after_progress_leaves_it_as_many_attempts_as_a_new_one(stage: Stage) -> None:
    await stage.opens(ME)
    run = await stage.happens(RunEvent.GIVE_BACK_RESUME, await stage.starts("run", on_orphan=RESUME))
    for checkpoint, attempt in ((None, 2), ("checkpoint-1", 1)):
        (claimed,) = await stage.store.claim(Actor(ME), 1)
        if checkpoint is not None:
            await stage.happens(RunEvent.PROGRESS, claimed, Given(checkpoint=checkpoint))
        run = await stage.happens(RunEvent.HAND_OVER, claimed)
        assert (run.vacant, run.attempt) == (True, attempt)


@RECOVERY("O12", "O30")
async def a_local_run_that_is_given_back_ends_for_the_reason_given(stage: Stage) -> None:
    run = await stage.arrives("run")
    assert await stage.refused(RunEvent.GIVE_BACK_RESUME, run) is Refusal.OTHER_POLICY
    assert await stage.refused(RunEvent.GIVE_BACK_FAIL, run, by=at(run, OTHER)) is Refusal.LOST
    ended = await stage.ends(run, Given(stop_reason="not_attached"), how=RunEvent.GIVE_BACK_FAIL)
    assert outcome(ended) == ("error", "not_attached", 2)


# --- Taking back ----------------------------------------------------------------------------------------------------


@RECOVERY("O13", "I4")
async def a_live_copy_takes_its_runs_back_with_a_new_epoch_and_no_attempt(stage: Stage) -> None:
    await stage.opens(GONE)
    pinned = await stage.starts("pinned", "1", worker_id=GONE, pinned=True)
    free = await stage.is_cancelled(await stage.arrives("free", "2", worker_id=GONE))
    await stage.is_believed_dead(GONE)
    await stage.opens(BACK)
    for run, home in ((pinned, BACK), (free, None)):
        by = at(run, BACK, previous=GONE)
        back = await stage.happens(RunEvent.TAKE_BACK, run, by=by)
        facts = (back.owner_worker_id, back.home_worker_id, back.epoch, back.attempt, back.status, back.cancel_action)
        assert facts == (BACK, home, 2, 1, run.status, run.cancel_action)
        await stage.repeats(RunEvent.TAKE_BACK, run, by=by)
        assert await stage.refused(RunEvent.PROGRESS, run) is Refusal.LOST
    assert await stage.sweeps() == {}


@RECOVERY("O13", "I4")
async def nobody_takes_back_what_is_not_theirs_at_that_epoch(stage: Stage) -> None:
    run = await stage.is_orphaned("run", worker_id=await stage.opens(GONE))
    for by in (Actor(BACK, 1), Actor(BACK, 2, previous=GONE), Actor(BACK, 1, previous=OTHER)):
        assert await stage.refused(RunEvent.TAKE_BACK, run, by=by) is Refusal.LOST


@RECOVERY("O13", "O26", "I4", "I5")
async def of_taking_back_and_taking_over_one_wins(stage: Stage) -> None:
    await stage.opens(GONE)
    runs = {
        "back": await stage.starts("back", "1", worker_id=GONE, on_orphan=RESUME),
        "over": await stage.starts("over", "2", worker_id=GONE, on_orphan=RESUME),
        "ended": await stage.starts("ended", "3", worker_id=GONE),
    }
    await stage.dies(GONE)
    await stage.happens(RunEvent.TAKE_BACK, runs["back"], by=at(runs["back"], BACK, previous=GONE))
    assert await stage.refused(RunEvent.TAKE_OVER_RESUME, runs["back"], by=Actor(ME)) is Refusal.HELD
    assert await stage.sweeps() == {"resumed": ["over"], "ended": ["ended"]}
    for name in ("over", "ended"):
        by = at(runs[name], BACK, previous=GONE)
        assert await stage.refused(RunEvent.TAKE_BACK, runs[name], by=by) is Refusal.LOST


@RECOVERY("O13", "I16")
async def a_live_copy_does_not_take_back_what_its_new_session_is_restoring(stage: Stage) -> None:
    await stage.opens(GONE)
    run = await stage.is_cancelled(await stage.starts("run", worker_id=GONE), CancelAction.ROLLBACK)
    await stage.is_believed_dead(GONE)
    await stage.happens(RunEvent.SEIZE, run, by=Actor(BACK, capabilities=frozenset()))
    assert await stage.refused(RunEvent.TAKE_BACK, run, by=at(run, BACK, previous=GONE)) is Refusal.LOST
