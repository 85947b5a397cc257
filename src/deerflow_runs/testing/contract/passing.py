"""The contract's part about runs that nobody holds: whose they are to claim, and how they pass from one to the next.

Homes, capabilities, claims, hand over, defer, and what becomes of waiting runs when a session drains (O13, O31, O35).
"""

from __future__ import annotations

from typing import Final

from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    OnOrphan,
    RunStatus,
    SessionState,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import INSTANT, ME, OTHER, Stage, key, names, outcome

PASSING: Final = Checks()

GONE: Final = WorkerId("host:gone")
BACK: Final = WorkerId("host:back")
RESUME: Final = OnOrphan.RESUME


# --- Homes ----------------------------------------------------------------------------------------------------------


@PASSING("O31")
async def a_run_with_a_home_is_claimed_there_and_nowhere_else(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.opens(OTHER)
    run = await stage.arrives("run", take=False, pinned=True)
    assert await stage.refused(RunEvent.CLAIM, run, by=Actor(OTHER)) is Refusal.AT_HOME_ELSEWHERE
    assert await stage.store.claim(Actor(OTHER), 10) == ()
    assert names(await stage.store.claim(Actor(ME), 10)) == ["run"]


@PASSING("O31")
async def what_waits_for_a_dead_home_follows_its_policy(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.opens(GONE)
    await stage.starts("holder", "busy")
    for name, thread, policy, asked in (
        ("queued-fails", "busy", OnOrphan.FAIL, {"strategy": Strategy.ENQUEUE}),
        ("queued-resumes", "busy", RESUME, {"strategy": Strategy.ENQUEUE}),
        ("vacant-fails", "1", OnOrphan.FAIL, {"take": False}),
        ("vacant-resumes", "2", RESUME, {"take": False, "max_attempts": 1}),
    ):
        await stage.arrives(name, thread, worker_id=GONE, pinned=True, on_orphan=policy, **asked)
    started = await stage.starts("vacant-again", "3", worker_id=GONE, pinned=True, on_orphan=RESUME, max_attempts=1)
    await stage.happens(RunEvent.HAND_OVER, started)
    assert await stage.sweeps() == {}
    await stage.dies(GONE)
    fate = await stage.sweeps()
    freed = ["queued-resumes", "vacant-again", "vacant-resumes"]
    assert fate == {"ended": ["queued-fails", "vacant-fails"], "freed": freed}
    assert await stage.queue("busy") == ["queued-resumes"]
    claimed = {run.run_id: (run.home_worker_id, run.epoch) for run in await stage.store.claim(Actor(ME), 10)}
    assert claimed == {"vacant-resumes": (None, 1), "vacant-again": (None, 3)}
    ended = await stage.store.get(key("vacant-fails", "1"), scope=EVERYONE)
    assert ended is not None
    assert outcome(ended) == ("error", "orphan_recovered", 1)


@PASSING("O13")
async def what_waits_at_home_moves_to_its_next_session(stage: Stage) -> None:
    await stage.opens(GONE)
    await stage.starts("holder", "busy", worker_id=OTHER)
    queued = await stage.waits("queued", "busy", worker_id=GONE, pinned=True)
    vacant = await stage.arrives("vacant", "1", worker_id=GONE, pinned=True, take=False)
    await stage.arrives("others", "2", worker_id=OTHER, pinned=True, take=False)
    owned = await stage.starts("owned", "3", worker_id=GONE, pinned=True)
    await stage.is_believed_dead(GONE)
    await stage.opens(BACK)
    by = Actor(BACK, previous=GONE)
    assert await stage.refused(RunEvent.RE_HOME, owned, by=by) is not None
    assert await stage.refused(RunEvent.RE_HOME, vacant, by=Actor(BACK, previous=OTHER)) is Refusal.AT_HOME_ELSEWHERE
    moved = await stage.happens(RunEvent.RE_HOME, vacant, by=by)
    assert (moved.home_worker_id, moved.epoch, moved.owner_worker_id) == (BACK, vacant.epoch, None)
    await stage.repeats(RunEvent.RE_HOME, vacant, by=by)
    assert names(await stage.store.re_home(by, 10)) == ["queued"]
    assert (await stage.now(queued)).home_worker_id == BACK
    assert await stage.store.re_home(by, 10) == ()
    assert names(await stage.store.claim(by, 10)) == ["vacant"]


@PASSING("O13", "O31")
async def of_moving_home_and_taking_over_one_wins(stage: Stage) -> None:
    await stage.opens(GONE)
    run = await stage.arrives("run", "1", worker_id=GONE, pinned=True, take=False, on_orphan=RESUME)
    other = await stage.arrives("other", "2", worker_id=GONE, pinned=True, take=False)
    await stage.dies(GONE)
    by = Actor(BACK, previous=GONE)
    await stage.happens(RunEvent.RE_HOME, other, by=by)
    assert await stage.refused(RunEvent.TAKE_OVER_FAIL_WAITING, other, by=Actor(ME)) is Refusal.HELD
    await stage.happens(RunEvent.TAKE_OVER_RESUME_WAITING, run, by=Actor(ME))
    assert await stage.refused(RunEvent.RE_HOME, run, by=by) is Refusal.AT_HOME_ELSEWHERE


# --- Passing on -----------------------------------------------------------------------------------------------------


@PASSING("O35", "I18", "O30")
async def a_session_that_leaves_hands_over_all_that_may_resume_and_no_attempt_is_lost(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.opens(OTHER)
    running = await stage.starts("running", "1", on_orphan=RESUME)
    later_epoch = await stage.happens(RunEvent.HAND_OVER, await stage.arrives("claimed", "2", on_orphan=RESUME))
    assert names(await stage.store.claim(Actor(ME), 10)) == ["claimed"]
    await stage.starts("local", "3")
    await stage.is_cancelled(await stage.starts("cancelled", "4", on_orphan=RESUME))
    await stage.starts("others", "5", worker_id=OTHER, on_orphan=RESUME)
    await stage.reserves("reserved", "6")
    handed = {str(run.run_id): run for run in await stage.store.hand_over(Actor(ME), 10)}
    assert {name: (run.vacant, run.epoch, run.attempt) for name, run in handed.items()} == {
        "running": (True, 2, 1),
        "claimed": (True, 4, 1),
    }
    assert (handed["running"].turn, later_epoch.epoch) == (running.turn, 2)
    assert await stage.refused(RunEvent.SETTLE_SUCCESS, running) is Refusal.LOST
    assert sorted(names(await stage.store.claim(Actor(OTHER), 10))) == ["claimed", "running"]


@PASSING("O35")
async def a_session_hands_over_no_more_at_once_than_it_was_told(stage: Stage) -> None:
    for number in range(5):
        await stage.starts(f"{number}", f"{number}", on_orphan=RESUME)
    assert [len(await stage.store.hand_over(Actor(ME), 2)) for _ in range(4)] == [2, 2, 1, 0]


@PASSING("O35", "O23", "I16", "I7")
async def a_session_that_leaves_ends_what_nobody_else_can_go_on_with(stage: Stage) -> None:
    await stage.starts("local", "1", pinned=True)
    await stage.waits("behind", "1")
    await stage.arrives("unattached", "2", pinned=True)
    await stage.is_cancelled(await stage.starts("cancelled", "3", on_orphan=RESUME))
    await stage.is_cancelled(await stage.starts("owed", "4"), CancelAction.ROLLBACK)
    await stage.starts("travels", "5", on_orphan=RESUME)
    await stage.starts("others", "6", worker_id=OTHER)
    await stage.reserves("reserved", "7")
    ended = await stage.store.end_held(Actor(ME), 10)
    assert sorted((run.run_id, *outcome(run)) for run in ended) == [
        ("cancelled", "interrupted", "interrupt", 1),
        ("local", "interrupted", "shutdown", 1),
        ("unattached", "interrupted", "shutdown", 1),
    ]
    behind = await stage.store.active(ThreadId("1"))
    assert behind is not None
    assert (behind.run_id, behind.vacant) == ("behind", True)


@PASSING("O35")
async def a_session_that_leaves_releases_what_it_has_reserved_and_nothing_else(stage: Stage) -> None:
    await stage.reserves("mine", "1")
    await stage.waits("behind", "1")
    await stage.reserves("others", "2", worker_id=OTHER)
    await stage.starts("run", "3")
    assert names(await stage.store.release_held(Actor(ME), 10)) == ["mine"]
    behind = await stage.store.active(ThreadId("1"))
    assert behind is not None
    assert behind.run_id == "behind"


@PASSING("O35")
async def a_session_ends_no_more_at_once_than_it_was_told(stage: Stage) -> None:
    for number in range(5):
        await stage.starts(f"{number}", f"{number}")
    assert [names(await stage.store.end_held(Actor(ME), 2)) for _ in range(4)] == [["0", "1"], ["2", "3"], ["4"], []]


@PASSING("O31", "O30")
async def a_deferred_run_waits_for_somebody_who_can_run_it(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.opens(OTHER)
    needs = Given(requirements=frozenset({"gpu"}))
    run = await stage.starts("run", required_capabilities=frozenset({"executor:agent"}))
    deferred = await stage.happens(RunEvent.DEFER, run, needs)
    assert (deferred.vacant, deferred.epoch, deferred.attempt) == (True, 2, 1)
    assert deferred.required_capabilities == {"executor:agent", "gpu"}
    for able in (frozenset[str](), frozenset({"executor:agent"}), frozenset({"gpu"})):
        by = Actor(ME, capabilities=able)
        assert await stage.refused(RunEvent.CLAIM, deferred, by=by) is Refusal.NOT_CAPABLE
        assert await stage.store.claim(by, 10) == ()
    by = Actor(OTHER, capabilities=frozenset({"executor:agent", "gpu", "more"}))
    (claimed,) = await stage.store.claim(by, 10)
    assert (claimed.owner_worker_id, claimed.epoch, claimed.attempt) == (OTHER, 3, 1)


@PASSING("O30", "I18")
async def a_run_that_has_recorded_something_at_this_epoch_is_not_deferred(stage: Stage) -> None:
    run = await stage.starts("run", on_orphan=RESUME)
    await stage.happens(RunEvent.PROGRESS, run, Given(checkpoint="checkpoint-1"))
    assert await stage.refused(RunEvent.DEFER, run) is Refusal.RECORDED
    await stage.opens(OTHER)
    await stage.happens(RunEvent.HAND_OVER, run)
    (claimed,) = await stage.store.claim(Actor(OTHER), 10)
    more = Given(requirements=frozenset({"gpu"}))
    deferred = await stage.happens(RunEvent.DEFER, claimed, more)
    assert deferred.vacant


@PASSING("O31")
async def a_run_is_not_deferred_for_what_it_requires_already(stage: Stage) -> None:
    run = await stage.starts("run", required_capabilities=frozenset({"executor:agent", "gpu"}))
    assert await stage.refused(RunEvent.DEFER, run) is Refusal.NOTHING_NEW
    assert await stage.refused(RunEvent.DEFER, run, Given(requirements=frozenset({"gpu"}))) is Refusal.NOTHING_NEW


@PASSING("O35")
async def what_waits_for_a_session_that_drains_ends_with_it(stage: Stage) -> None:
    for worker_id in (ME, OTHER):
        await stage.opens(worker_id)
        await stage.arrives(f"vacant-{worker_id}", f"vacant-{worker_id}", worker_id=worker_id, pinned=True, take=False)
    await stage.starts("holder", "busy", pinned=True)
    queued = await stage.waits("queued", "busy", pinned=True)
    await stage.waits("anyone", "busy")
    assert await stage.refused(RunEvent.END_WAITING, queued, by=Actor(ME)) is Refusal.SESSION_NOT_DRAINING
    assert await stage.store.end_waiting(Actor(ME), 10) == ()
    await stage.store.renew(ME, state=SessionState.DRAINING)
    assert await stage.refused(RunEvent.END_WAITING, queued, by=Actor(OTHER)) is Refusal.AT_HOME_ELSEWHERE
    ended = await stage.store.end_waiting(Actor(ME), 10)
    assert sorted((run.run_id, *outcome(run)) for run in ended) == [
        ("queued", "interrupted", "shutdown", 1),
        (f"vacant-{ME}", "interrupted", "shutdown", 1),
    ]
    assert await stage.queue("busy") == ["anyone"]


# --- Claims ---------------------------------------------------------------------------------------------------------


@PASSING("O31", "O35", "I12")
async def only_a_live_session_claims(stage: Stage) -> None:
    run = await stage.arrives("run", take=False)
    draining, dead = await stage.opens(WorkerId("host:draining")), await stage.opens(GONE)
    await stage.store.renew(draining, state=SessionState.DRAINING)
    await stage.dies(dead)
    for worker_id in (draining, dead, WorkerId("host:unknown")):
        assert await stage.refused(RunEvent.CLAIM, run, by=Actor(worker_id)) is Refusal.SESSION_NOT_LIVE
        assert await stage.store.claim(Actor(worker_id), 10) == ()
    live = await stage.opens(OTHER)
    claimed = await stage.happens(RunEvent.CLAIM, run, by=Actor(live))
    assert (claimed.owner_worker_id, claimed.epoch, claimed.attempt) == (live, 1, 1)
    assert claimed.granted_at is not None
    assert await stage.refused(RunEvent.CLAIM, run, by=Actor(live)) is Refusal.HELD


@PASSING("O31", "I1")
async def a_claim_takes_what_is_ready_longest_first_with_its_input_and_no_more_than_asked(stage: Stage) -> None:
    await stage.opens(ME)
    for number in (3, 1, 2):
        await stage.arrives(f"run-{number}", f"{number}", take=False, kwargs={"input": number})
        await stage.passes(INSTANT)
    first = await stage.store.claim(Actor(ME), 2)
    assert sorted((run.run_id, (run.kwargs or {})["input"]) for run in first) == [("run-1", 1), ("run-3", 3)]
    assert names(await stage.store.claim(Actor(ME), 2)) == ["run-2"]
    assert await stage.store.claim(Actor(ME), 2) == ()
    assert sorted(names(await stage.store.owned(ME))) == ["run-1", "run-2", "run-3"]


@PASSING("O15")
async def a_turn_is_drawn_once_and_kept_over_every_owner(stage: Stage) -> None:
    await stage.opens(ME)
    base = Given(base_heads={"": "checkpoint-0"})
    run = await stage.happens(RunEvent.START, await stage.arrives("run", on_orphan=RESUME), base)
    assert (run.status, run.base_known, run.base_heads) == (RunStatus.RUNNING, True, {"": "checkpoint-0"})
    await stage.repeats(RunEvent.START, run)
    await stage.starts("between", "other")
    await stage.happens(RunEvent.HAND_OVER, run)
    (claimed,) = await stage.store.claim(Actor(ME), 1)
    again = await stage.happens(RunEvent.START, claimed, Given(base_heads={"": "checkpoint-7"}))
    assert (again.turn, again.started_at, again.base_heads) == (run.turn, run.started_at, run.base_heads)
    assert await stage.refused(RunEvent.START, run) is Refusal.LOST
