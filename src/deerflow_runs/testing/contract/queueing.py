"""The contract's part about runs that wait: how many, in which order, what does not let them in, and which sweeps do.

Whose turn it is when something ends is in ``turns``.
"""

from __future__ import annotations

from typing import Any, Final

from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    Micros,
    OnOrphan,
    Run,
    RunStatus,
    Strategy,
)
from deerflow_runs.protocol.admission import Deny, DenyFull
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Given
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import (
    HOUR,
    INSTANT,
    ME,
    Stage,
    key,
    names,
    outcome,
)

QUEUEING: Final = Checks()

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
async def a_run_is_the_newest_of_its_thread_until_another_one_is_admitted_however_that_ends(stage: Stage) -> None:
    first = await stage.starts("first")
    await stage.starts("elsewhere", "another thread")
    assert await stage.store.is_newest(first.key)
    second = await stage.waits("second", delay=HOUR)
    assert await _newest(stage, "first", "second") == ["second"]
    await stage.happens(RunEvent.CANCEL_QUEUED, second)
    assert await _newest(stage, "first", "second") == ["second"]
    await stage.ends(first)
    third = await stage.starts("third")
    assert await _newest(stage, "first", "second", "third") == ["third"]
    await stage.ends(third)
    await stage.happens(RunEvent.REMOVE, await stage.now(third))
    assert await _newest(stage, "first", "second", "third") == ["second"]


async def _newest(stage: Stage, *run_ids: str) -> list[str]:
    return [run_id for run_id in run_ids if await stage.store.is_newest(key(run_id))]


@QUEUEING("I17", "B057")
async def neither_a_reservation_nor_a_run_that_is_not_there_is_the_newest(stage: Stage) -> None:
    run = await stage.ends(await stage.starts("run"))
    await stage.reserves("reservation")
    assert await _newest(stage, "run", "reservation", "nothing") == ["run"]
    assert not await stage.store.is_newest(key(run.run_id, "another thread"))


@QUEUEING("I17")
async def a_run_for_later_takes_its_place_by_the_time_it_is_due(stage: Stage) -> None:
    await stage.starts("holder")
    await stage.waits("far", delay=Micros(2 * HOUR))
    await stage.waits("soon", delay=INSTANT)
    await stage.passes(INSTANT)
    await stage.waits("now")
    await stage.waits("near", delay=HOUR)
    assert await stage.queue() == ["soon", "now", "near", "far"]
    await stage.ends(await stage.now(await stage.held()))
    assert names([await stage.held()]) == ["soon"]


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
        assert names([await stage.held(thread_id)]) == in_order[:1]


@QUEUEING("O2", "O3", "B022")
async def a_run_for_later_waits_whatever_stands_there_and_displaces_nobody(stage: Stage) -> None:
    held: dict[str, Run | None] = {
        "idle": None,
        "running": await stage.starts("holder-1", "running"),
        "vacant": await stage.arrives("holder-2", "vacant", take=False),
        "reserved": await stage.reserves("holder-3", "reserved"),
    }
    for thread_id, holder in held.items():
        await stage.waits(f"waiting-{thread_id}", thread_id, delay=HOUR)
        for strategy in (Strategy.ENQUEUE, Strategy.INTERRUPT, Strategy.ROLLBACK):
            run = await stage.arrives(f"{strategy}-{thread_id}", thread_id, strategy=strategy, delay=HOUR)
            assert (run.status, run.owner_worker_id, run.epoch) == (RunStatus.QUEUED, None, 0)
        answer = await stage.admit(f"reject-{thread_id}", thread_id, delay=HOUR)
        assert isinstance(answer, Deny), answer
        assert len(await stage.queue(thread_id)) == 4
        if holder is not None:
            now = await stage.now(holder)
            assert (now.status, now.cancel_action, now.queue_behind) == (holder.status, None, True)
    lone = await stage.arrives("lone", "free", delay=HOUR)
    assert (lone.status, await stage.holder("free")) == (RunStatus.QUEUED, None)


# --- What frees nothing ---------------------------------------------------------------------------------------------


@QUEUEING("O7", "I1")
async def what_takes_a_run_from_its_owner_without_ending_it_lets_nobody_in(stage: Stage) -> None:
    events = (RunEvent.HAND_OVER, RunEvent.DEFER, RunEvent.GIVE_BACK_RESUME)
    for event in events:
        run = await stage.starts(f"holder-{event.name}", event, on_orphan=OnOrphan.RESUME)
        await stage.waits(f"next-{event.name}", event)
        await stage.happens(event, run, Given(requirements=frozenset({"gpu"})))
        assert await stage.queue(event) == [f"next-{event.name}"]
    await stage.is_orphaned("holder")
    await stage.waits("next")
    assert names((await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).resumed) == ["holder"]
    assert await stage.queue() == ["next"]


@QUEUEING("O7", "I1")
async def the_end_of_a_waiting_run_lets_nobody_in(stage: Stage) -> None:
    await stage.starts("holder")
    first, _ = await stage.waits("first"), await stage.waits("second")
    ended = await stage.happens(RunEvent.CANCEL_QUEUED, first, Given(action=CancelAction.ROLLBACK))
    assert outcome(ended) == ("interrupted", "rollback", 0)
    assert (names([await stage.held()]), await stage.queue()) == (["holder"], ["second"])


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
    assert names([await stage.held()]) == ["first"]
    assert await stage.refused(RunEvent.PROMOTE, first) is Refusal.WRONG_STATUS


@QUEUEING("O1", "O2")
async def other_threads_are_nobody_s_concern(stage: Stage) -> None:
    await stage.starts("holder", "one")
    await stage.waits("behind", "one")
    await stage.starts("other", "two")
    assert (await stage.queue("two"), await stage.queue("one")) == ([], ["behind"])
    assert await stage.store.get(key("behind", "two"), scope=EVERYONE) is None
