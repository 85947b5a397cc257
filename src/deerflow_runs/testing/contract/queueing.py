"""The contract's part about runs that wait: their order, their number, and whose turn it is when a thread is free.

Every kind of end promotes in its own transaction (O7, O28), so none of these checks ever asks for a sweep, but those
about runs for later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    SessionState,
    Strategy,
    WorkerId,
)
from deerflow_runs.protocol.admission import DenyFull
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Given
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import AT_ONCE, HOUR, INSTANT, ME, OTHER, THREAD, Stage, at, key, names

QUEUEING: Final = Checks()

RESTORED: Final = Given(restored=True)
A_WHILE: Final = Micros(20_000)
"""Longer than an admission takes, as a rule. Where it is not, a check proves less, and is true all the same."""


# --- How many, and in which order -----------------------------------------------------------------------------------


@QUEUEING("I19")
async def a_queue_takes_exactly_as_many_as_its_limit_says(stage: Stage) -> None:
    await stage.starts("holder")
    await stage.waits("one", max_queued=2)
    await stage.waits("two", max_queued=2, delay=HOUR)
    limited: dict[str, Any] = {"strategy": Strategy.ENQUEUE, "max_queued": 2}
    attempts = (limited, limited | {"delay": HOUR}, limited | {"delay": HOUR, "strategy": Strategy.INTERRUPT})
    for asked in attempts:
        answer = await stage.admit("three", **asked)
        assert isinstance(answer, DenyFull), answer
        assert (answer.limit, answer.retry_after >= 1) == (2, True)
    await stage.waits("three", max_queued=3)
    await stage.waits("four", max_queued=None)
    assert await stage.queue() == ["one", "three", "four", "two"]


@QUEUEING("I19")
async def a_queue_of_none_lets_nobody_wait_but_lets_runs_in(stage: Stage) -> None:
    none: dict[str, Any] = {"strategy": Strategy.ENQUEUE, "max_queued": 0}
    assert isinstance(await stage.admit("later", delay=HOUR, **none), DenyFull)
    await stage.starts("holder", **none)
    assert isinstance(await stage.admit("now", **none), DenyFull)
    assert isinstance(await stage.admit("later", delay=HOUR, **none), DenyFull)


@QUEUEING("O3")
async def whoever_displaces_takes_the_place_of_a_full_queue(stage: Stage) -> None:
    await stage.starts("holder")
    await stage.waits("waiting", max_queued=1)
    await stage.arrives("newcomer", strategy=Strategy.INTERRUPT, max_queued=1)
    assert await stage.queue() == ["newcomer"]


@QUEUEING("I17", "O7")
async def runs_start_in_the_order_in_which_they_came(stage: Stage) -> None:
    await stage.opens(ME)
    running = await stage.starts("run-0")
    for number in range(1, 5):
        await stage.waits(f"run-{number}", take=bool(number % 2))
    turns = [running.turn or 0]
    for number in range(1, 5):
        await stage.ends(running)
        (claimed,) = await stage.store.claim(Actor(ME), 10)
        assert claimed.run_id == f"run-{number}"
        running = await stage.happens(RunEvent.START, claimed)
        turns.append(running.turn or 0)
    assert turns == sorted(set(turns)), "turns are drawn in order of start, each once (O15)"


@QUEUEING("I17")
async def a_run_for_later_takes_its_place_by_the_time_it_is_due(stage: Stage) -> None:
    await stage.starts("holder")
    await stage.waits("far", delay=Micros(2 * HOUR))
    await stage.waits("soon", delay=INSTANT)
    await stage.passes(INSTANT)
    await stage.waits("now")
    await stage.waits("near", delay=HOUR)
    assert await stage.queue() == ["soon", "now", "near", "far"]
    await stage.ends(await stage.now(await _active(stage)))
    assert names([await _active(stage)]) == ["soon"]


@QUEUEING("I17")
async def whoever_is_due_first_goes_first_in_whatever_order_they_came(stage: Stage) -> None:
    for thread_id in ("slow at first", "quick"):
        run = await stage.starts(f"holder of {thread_id}", thread_id)
        waiting = [await stage.waits(f"later {thread_id}", thread_id, delay=A_WHILE)]
        waiting += [await stage.waits(f"now {thread_id}", thread_id), await stage.waits(f"last {thread_id}", thread_id)]
        await stage.passes(A_WHILE)
        in_order = names(sorted(waiting, key=lambda one: (one.due_at, one.seq)))
        assert await stage.queue(thread_id) == in_order
        await stage.ends(run)
        assert names([await _active(stage, thread_id)]) == in_order[:1]


async def _active(stage: Stage, thread_id: str = THREAD) -> Run:
    holder = await stage.holder(thread_id)
    assert holder is not None
    return holder


# --- Whose turn it is when something ends ---------------------------------------------------------------------------

End = Callable[[Stage], Awaitable[object]]


async def _settled(stage: Stage, how: RunEvent) -> None:
    run = await stage.starts("holder")
    await stage.waits("next")
    await stage.ends(run, how=how)


async def _unstarted(stage: Stage) -> None:
    run = await stage.arrives("holder")
    await stage.waits("next")
    await stage.ends(run, how=RunEvent.SETTLE_ERROR)


async def _cancelled(stage: Stage) -> None:
    run = await stage.starts("holder")
    await stage.arrives("next", strategy=Strategy.INTERRUPT)
    await stage.ends(run, how=RunEvent.SETTLE_CANCELLED)


async def _cancelled_but_finished(stage: Stage) -> None:
    run = await stage.starts("holder")
    await stage.arrives("next", strategy=Strategy.INTERRUPT)
    await stage.ends(run)


async def _forced(stage: Stage) -> None:
    run = await stage.starts("holder")
    await stage.arrives("next", strategy=Strategy.INTERRUPT)
    await stage.happens(RunEvent.FORCE, run, AT_ONCE, by=at(run, OTHER))


async def _forced_by_a_sweep(stage: Stage) -> None:
    await stage.starts("holder")
    await stage.arrives("next", strategy=Strategy.INTERRUPT)
    assert names(await stage.store.force(Actor(OTHER), AT_ONCE, 10)) == ["holder"]


async def _rolled_back(stage: Stage, *, by: WorkerId) -> None:
    run = await stage.starts("holder")
    await stage.arrives("next", strategy=Strategy.ROLLBACK)
    seized = await stage.happens(RunEvent.SEIZE, run, AT_ONCE, by=at(run, by))
    assert await stage.queue() == ["next"], "a seized run still holds its thread"
    await stage.ends(seized, RESTORED, how=RunEvent.SETTLE_CANCELLED)


async def _rollback_failed(stage: Stage) -> None:
    run = await stage.starts("holder", max_attempts=1)
    await stage.arrives("next", strategy=Strategy.ROLLBACK)
    for _ in range(2):
        run = await stage.happens(RunEvent.SEIZE, run)
    await stage.ends(run, how=RunEvent.SETTLE_ROLLBACK_FAILED)


async def _orphan(stage: Stage, **asked: Any) -> Run:
    owner = await stage.opens(WorkerId("host:gone"))
    run = await stage.starts("holder", **{"worker_id": owner} | asked)
    await stage.waits("next")
    await stage.dies(owner)
    return run


async def _taken_over(stage: Stage, **asked: Any) -> None:
    run = await _orphan(stage, **asked)
    await stage.happens(RunEvent.TAKE_OVER_FAIL, run, by=Actor(ME))


async def _taken_over_by_a_sweep(stage: Stage) -> None:
    await _orphan(stage)
    assert names((await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).ended) == ["holder"]


async def _homeless(stage: Stage) -> None:
    home = await stage.opens(WorkerId("host:gone"))
    await stage.arrives("holder", worker_id=home, take=False, pinned=True)
    await stage.waits("next")
    await stage.dies(home)
    assert names((await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).ended) == ["holder"]


async def _given_back(stage: Stage) -> None:
    run = await stage.starts("holder")
    await stage.waits("next")
    await stage.ends(run, how=RunEvent.GIVE_BACK_FAIL)


async def _ended_while_vacant(stage: Stage) -> None:
    await stage.arrives("holder", take=False, pinned=True)
    await stage.waits("next")
    await stage.opens(ME)
    await stage.store.renew(ME, state=SessionState.DRAINING)
    assert names(await stage.store.end_waiting(Actor(ME), 10)) == ["holder"]


async def _released(stage: Stage) -> None:
    held = await stage.reserves("holder")
    await stage.waits("next")
    await stage.happens(RunEvent.RELEASE, held)


async def _released_by_a_sweep(stage: Stage) -> None:
    owner = await stage.opens(WorkerId("host:gone"))
    await stage.reserves("holder", worker_id=owner)
    await stage.waits("next")
    await stage.dies(owner)
    assert names((await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).released) == ["holder"]


ENDS: Final[dict[str, End]] = {
    "that succeeds": partial(_settled, how=RunEvent.SETTLE_SUCCESS),
    "that fails": partial(_settled, how=RunEvent.SETTLE_ERROR),
    "that runs out of time": partial(_settled, how=RunEvent.SETTLE_TIMEOUT),
    "that is stopped": partial(_settled, how=RunEvent.SETTLE_CANCELLED),
    "that fails before it has started": _unstarted,
    "that is interrupted by its owner": _cancelled,
    "that finishes although it was interrupted": _cancelled_but_finished,
    "that is forced": _forced,
    "that is forced by a sweep": _forced_by_a_sweep,
    "that is rolled back by its owner": partial(_rolled_back, by=ME),
    "that is rolled back by another session": partial(_rolled_back, by=OTHER),
    "whose rollback failed": _rollback_failed,
    "whose owner died": _taken_over,
    "whose owner died and that has no attempt left": partial(_taken_over, on_orphan=OnOrphan.RESUME, max_attempts=1),
    "whose owner died, by a sweep": _taken_over_by_a_sweep,
    "that waited for a home that died": _homeless,
    "that is given back and can only fail": _given_back,
    "that waited for a session that drains": _ended_while_vacant,
    "that was a reservation": _released,
    "that was a dead session's reservation": _released_by_a_sweep,
}
"""Every way in which what holds a thread comes to its end."""


async def _lets_the_next_in(stage: Stage, *, end: End) -> None:
    await end(stage)
    after = await _active(stage)
    assert (after.run_id, after.vacant, after.queue_behind, after.epoch) == ("next", True, True, 0), after
    assert after.not_before <= await stage.store.now()
    assert await stage.queue() == []


for _sentence, _end in ENDS.items():
    QUEUEING.tell(
        f"the end of a holder {_sentence} gives the thread to the next at once",
        partial(_lets_the_next_in, end=_end),
        *("O7", "O28", "I7"),
    )


@QUEUEING("O28")
async def the_end_of_a_delete_ends_what_waits_behind_it(stage: Stage) -> None:
    held = await stage.reserves("delete", kind=OperationKind.DELETE)
    waiting = [await stage.waits("one"), await stage.waits("two", delay=HOUR)]
    await stage.happens(RunEvent.RELEASE, held)
    assert [as_ended(await stage.now(run)) for run in waiting] == 2 * [("interrupted", "interrupt")]
    assert await stage.holder() is None


@QUEUEING("O28")
async def the_arrival_of_a_delete_ends_what_waits_on_an_idle_thread(stage: Stage) -> None:
    waiting = await stage.waits("one", delay=HOUR)
    await stage.reserves("delete", kind=OperationKind.DELETE)
    assert as_ended(await stage.now(waiting)) == ("interrupted", "interrupt")


def as_ended(run: Run) -> tuple[str, str | None]:
    """How it ended."""
    return (run.status.value, run.stop_reason)


# --- What frees nothing ---------------------------------------------------------------------------------------------


@QUEUEING("O7", "I1")
async def what_takes_a_run_from_its_owner_without_ending_it_lets_nobody_in(stage: Stage) -> None:
    events = (RunEvent.HAND_OVER, RunEvent.DEFER, RunEvent.GIVE_BACK_RESUME)
    for event in events:
        run = await stage.starts(f"holder-{event.name}", event, on_orphan=OnOrphan.RESUME)
        await stage.waits(f"next-{event.name}", event)
        await stage.happens(event, run, Given(requirements=frozenset({"gpu"})))
        assert await stage.queue(event) == [f"next-{event.name}"]
    await _orphan(stage, on_orphan=OnOrphan.RESUME)
    assert names((await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).resumed) == ["holder"]
    assert await stage.queue() == ["next"]


@QUEUEING("O7", "I1")
async def the_end_of_a_waiting_run_lets_nobody_in(stage: Stage) -> None:
    await stage.starts("holder")
    first, _ = await stage.waits("first"), await stage.waits("second")
    ended = await stage.happens(RunEvent.CANCEL_QUEUED, first, Given(action=CancelAction.ROLLBACK))
    assert as_ended(ended) == ("interrupted", "rollback")
    assert (names([await _active(stage)]), await stage.queue()) == (["holder"], ["second"])


@QUEUEING("O7")
async def a_run_that_is_not_due_is_not_let_in_when_the_thread_becomes_free(stage: Stage) -> None:
    run = await stage.starts("holder")
    await stage.waits("later", delay=HOUR)
    await stage.ends(run)
    assert (await stage.holder(), await stage.queue()) == (None, ["later"])


@QUEUEING("O7")
async def removing_an_ended_run_lets_nobody_in(stage: Stage) -> None:
    ended = await stage.ends(await stage.starts("old"))
    await stage.waits("due", delay=INSTANT)
    await stage.passes(INSTANT)
    await stage.happens(RunEvent.REMOVE, ended)
    assert (await stage.holder(), await stage.queue()) == (None, ["due"])


# --- Sweeps that promote --------------------------------------------------------------------------------------------


@QUEUEING("O7", "I7")
async def a_sweep_promotes_the_first_due_run_of_every_idle_thread_and_nothing_else(stage: Stage) -> None:
    await stage.starts("holder", "busy")
    await stage.waits("behind", "busy", delay=INSTANT)
    await stage.waits("early", "idle", delay=INSTANT)
    await stage.waits("late", "idle", delay=Micros(2))
    await stage.waits("tomorrow", "not-yet", delay=HOUR)
    await stage.passes(Micros(2))
    (promoted,) = await stage.store.promote(10)
    assert (promoted.run_id, promoted.vacant, promoted.queue_behind) == ("early", True, True)
    assert await stage.store.promote(10) == ()
    queues = [await stage.queue(thread_id) for thread_id in ("busy", "idle", "not-yet")]
    assert queues == [["behind"], ["late"], ["tomorrow"]]


@QUEUEING("O7")
async def a_sweep_promotes_on_no_more_threads_than_it_was_told(stage: Stage) -> None:
    for number in range(5):
        await stage.waits(f"run-{number}", f"thread-{number}", delay=INSTANT)
    await stage.passes(INSTANT)
    assert [len(await stage.store.promote(2)) for _ in range(4)] == [2, 2, 1, 0]


@QUEUEING("O7", "I1", "I17")
async def a_promotion_by_name_obeys_order_time_and_the_thread(stage: Stage) -> None:
    run = await stage.starts("holder")
    first, second = await stage.waits("first"), await stage.waits("second")
    later = await stage.waits("later", "other", delay=HOUR)
    assert await stage.refused(RunEvent.PROMOTE, first) is Refusal.THREAD_BUSY
    assert await stage.refused(RunEvent.PROMOTE, second) in (Refusal.THREAD_BUSY, Refusal.NOT_FIRST)
    assert await stage.refused(RunEvent.PROMOTE, later) is Refusal.TOO_EARLY
    await stage.ends(run)
    assert names([await _active(stage)]) == ["first"]
    assert await stage.refused(RunEvent.PROMOTE, first) is Refusal.WRONG_STATUS


@QUEUEING("O1", "O2")
async def other_threads_are_nobody_s_concern(stage: Stage) -> None:
    await stage.starts("holder", "one")
    await stage.waits("behind", "one")
    await stage.starts("other", "two")
    assert (await stage.queue("two"), await stage.queue("one")) == ([], ["behind"])
    assert await stage.store.get(key("behind", "two"), scope=EVERYONE) is None
