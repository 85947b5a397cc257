"""The contract's part about ends: written once, by whoever holds the run at its epoch, and never changed again (I5).

What an end leaves in threads, receipts and the outbox is no business of an ownership store and is not checked here.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import EVERYONE, RunStatus, Usage
from deerflow_runs.protocol.decision import Actor, Given, Refused
from deerflow_runs.protocol.lifecycle import TRANSITIONS, Refusal, RunEvent
from deerflow_runs.store.base import Settlement
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import ME, OTHER, Stage, at, key

ENDINGS: Final = Checks()

SETTLES: Final = {
    RunEvent.SETTLE_SUCCESS: RunStatus.SUCCESS,
    RunEvent.SETTLE_ERROR: RunStatus.ERROR,
    RunEvent.SETTLE_TIMEOUT: RunStatus.TIMEOUT,
    RunEvent.SETTLE_CANCELLED: RunStatus.INTERRUPTED,
}
USED: Final = Usage(1, 2, 3, 4, 5, {"model": 3}, {"lead": 2, "tool": 1}, "hello", "bye")


@ENDINGS("I5", "O14", "B088")
async def a_run_is_settled_by_its_holder_at_its_epoch_and_by_nobody_else(stage: Stage) -> None:
    for event, status in SETTLES.items():
        run = await stage.starts(event.name, event.name)
        for stranger in (at(run, OTHER), Actor(ME, 0), Actor(ME, 2), Actor(ME)):
            assert await stage.refused(event, run, by=stranger) is Refusal.LOST
        ended = await stage.ends(run, Given(error="why", stop_reason="tokens", usage=USED, checkpoint="c"), how=event)
        assert (ended.status, ended.epoch, ended.settled_by, ended.stop_reason) == (status, 1, ME, "tokens")
        assert (ended.error, ended.usage, ended.last_checkpoint) == ("why", USED, "c")
        assert ended.settled_at is not None
        assert ended.settled_at >= ended.created_at


@ENDINGS("I5", "B076")
async def nothing_leaves_a_terminal_status(stage: Stage) -> None:
    await stage.opens(ME)
    able = {"capabilities": frozenset({"all"}), "previous": ME}
    for how in SETTLES:
        ended = await stage.ends(await stage.starts(how.name, how.name), how=how)
        for event in RunEvent:
            if TRANSITIONS[event].repeat is None and event is not RunEvent.REMOVE:
                reason = await stage.refused(event, ended, by=at(ended, ME, **able))
                assert reason is Refusal.TERMINAL, f"{event}: {reason}"


@ENDINGS("O8", "I5", "B087")
async def a_settle_repeated_after_a_lost_reply_answers_what_the_row_says(stage: Stage) -> None:
    for how, status in SETTLES.items():
        run = await stage.starts(how.name, how.name)
        await stage.ends(run, Given(error="first"), how=how)
        for again in SETTLES:
            answered = await stage.repeats(again, run, Given(error="second"))
            assert (answered.status, answered.error) == (status, "first")
        for event in SETTLES:
            assert await stage.refused(event, run, by=at(run, OTHER)) is Refusal.TERMINAL
            assert await stage.refused(event, run, by=Actor(ME, 0)) is Refusal.LOST


@ENDINGS("B083", "O30")
async def progress_keeps_what_it_does_not_mention_and_the_settle_too(stage: Stage) -> None:
    run = await stage.starts("run", model_name="large")
    await stage.happens(RunEvent.PROGRESS, run, Given(usage=USED, checkpoint="c-1"))
    after = await stage.happens(RunEvent.PROGRESS, run, Given(model_name="small"))
    facts = (after.usage, after.last_checkpoint, after.model_name, after.progress_epoch, after.status)
    assert facts == (USED, "c-1", "small", 1, RunStatus.RUNNING)
    assert after.progress_at is not None
    ended = await stage.ends(run)
    assert (ended.usage, ended.last_checkpoint, ended.model_name) == (USED, "c-1", "small")
    assert await stage.refused(RunEvent.PROGRESS, run) is Refusal.TERMINAL


@ENDINGS("O28", "B077")
async def what_is_not_on_the_thread_is_unknown(stage: Stage) -> None:
    run = await stage.starts("run")
    for wrong in (key("run", "another"), key("other")):
        for event in RunEvent:
            answer = await stage.store.apply(wrong, event, at(run))
            assert answer == Refused(Refusal.UNKNOWN), f"{event.value}: {answer}"
        assert await stage.store.get(wrong, scope=EVERYONE) is None
    assert (await stage.now(run)).status is RunStatus.RUNNING


@ENDINGS("B078", "I5")
async def an_ended_run_is_removed_once_and_never_comes_back(stage: Stage) -> None:
    run = await stage.starts("run")
    assert await stage.refused(RunEvent.REMOVE, run) is Refusal.WRONG_STATUS
    await stage.ends(run)
    assert (await stage.happens(RunEvent.REMOVE, run)).run_id == "run"
    assert await stage.row(run) is None
    for event in (RunEvent.REMOVE, RunEvent.SETTLE_SUCCESS, RunEvent.PROGRESS):
        assert await stage.refused(event, run) is Refusal.UNKNOWN
    assert (await stage.arrives("run")).epoch == 1


@ENDINGS("O8", "I5")
async def many_settles_at_once_are_answered_each_in_its_place(stage: Stage) -> None:
    runs = [await stage.starts(f"{number}", f"{number}") for number in range(4)]
    await stage.is_cancelled(runs[1])
    await stage.waits("next", "2")
    asked = [Settlement(run.key, RunEvent.SETTLE_SUCCESS, at(run)) for run in runs]
    stranger = Settlement(runs[3].key, RunEvent.SETTLE_SUCCESS, at(runs[3], OTHER))
    unknown = Settlement(key("none"), RunEvent.SETTLE_SUCCESS, Actor(ME, 1))
    answers = await stage.store.settle_many([unknown, *asked[:3], stranger, asked[3]])
    told = [answer.reason if isinstance(answer, Refused) else answer.run.status.value for answer in answers]
    assert told[:4] == [Refusal.UNKNOWN, "success", "interrupted", "success"]
    assert told[4] in (Refusal.LOST, Refusal.TERMINAL)
    assert told[5] == "success"
    holder = await stage.holder("2")
    assert holder is not None
    assert holder.run_id == "next"


@ENDINGS("B077")
async def an_id_that_no_row_could_have_is_refused_by_name(stage: Stage) -> None:
    run = await stage.starts("run")
    for path, wrong in (
        ("run_id", key("")),
        ("run_id", key("\0")),
        ("run_id", key("r" * 256)),
        ("thread_id", key("run", "\ud800")),
        ("thread_id", key("run", "")),
    ):
        for asking in (
            stage.store.apply(wrong, RunEvent.SETTLE_SUCCESS, at(run)),
            stage.store.get(wrong, scope=EVERYONE),
        ):
            refused = await _refused(asking)
            assert refused == path, f"{wrong} was looked for, or refused for its {refused}"
    assert (await stage.now(run)).status is RunStatus.RUNNING


async def _refused(asking: Awaitable[object]) -> str | None:
    """What is named as wrong with a request; None: nothing."""
    try:
        await asking
    except InvalidValue as error:
        return error.path
    return None
