"""The contract's part about the limit of a user: whose arrivals it stops, and what it neither counts nor stops (I19).

That no number of newcomers at once gets past it is a matter of connections, and not checked here.
"""

from __future__ import annotations

from typing import Any, Final

from deerflow_runs.model import OnOrphan, OperationKind, RunStatus, Strategy
from deerflow_runs.protocol.admission import Clash, Deny, DenyFull, DenyUser, Reuse
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import AT_ONCE, HOUR, ME, Stage, names

LIMITS: Final = Checks()

ANN: Final[dict[str, Any]] = {"user_id": "ann"}
ANN_AT_ONE: Final[dict[str, Any]] = ANN | {"max_active_per_user": 1}
ANN_AT_TWO: Final[dict[str, Any]] = ANN | {"max_active_per_user": 2}


@LIMITS("I19")
async def a_user_has_no_more_active_runs_than_the_limit_on_whatever_threads(stage: Stage) -> None:
    first = await stage.starts("first", "first", **ANN_AT_TWO)
    await stage.arrives("second", "second", take=False, **ANN_AT_TWO)
    for strategy in Strategy:
        answer = await stage.admit("third", strategy, strategy=strategy, **ANN_AT_TWO)
        assert isinstance(answer, DenyUser), answer
        assert (answer.limit, answer.retry_after >= 1) == (2, True)
        assert (await stage.holder(strategy), await stage.queue(strategy)) == (None, [])
    await stage.ends(first)
    third = await stage.arrives("third", "third", **ANN_AT_TWO)
    assert third.owner_worker_id == ME
    assert isinstance(await stage.admit("fourth", "fourth", **ANN_AT_TWO), DenyUser)
    await stage.arrives("fourth", "fourth", **ANN | {"max_active_per_user": 3})


@LIMITS("I19")
async def a_limit_of_none_lets_nothing_in_and_no_limit_everything(stage: Stage) -> None:
    for number in range(3):
        await stage.arrives(f"free-{number}", f"free-{number}", **ANN)
    assert isinstance(await stage.admit("late", "late", user_id="ben", max_active_per_user=0), DenyUser)


@LIMITS("I19")
async def only_active_runs_of_the_same_user_are_counted(stage: Stage) -> None:
    await stage.ends(await stage.starts("ended", "ended", **ANN))
    await stage.arrives("other", "other", user_id="ben")
    await stage.arrives("nobody's", "nobody's")
    await stage.arrives("nameless", "nameless", user_id="")
    await stage.reserves("reserved", "reserved", **ANN)
    await stage.waits("queued", "other", **ANN)
    await stage.waits("delayed", "delayed", delay=HOUR, **ANN)
    await stage.arrives("counted", "counted", **ANN_AT_ONE)
    assert isinstance(await stage.admit("late", "late", **ANN_AT_ONE), DenyUser)


@LIMITS("I19")
async def reservations_and_runs_of_nobody_have_no_limit_and_a_nameless_user_has(stage: Stage) -> None:
    none: dict[str, Any] = {"max_active_per_user": 0}
    await stage.reserves("reserved", "reserved", **ANN | none)
    await stage.arrives("nobody's", "nobody's", **none)
    assert isinstance(await stage.admit("nameless", "nameless", user_id="", **none), DenyUser)
    await stage.waits("later", "delete", delay=HOUR)
    await stage.arrives("deletes", "delete", kind=OperationKind.DELETE, **ANN | none)


@LIMITS("I19", "O2", "O3")
async def what_waits_is_let_into_its_queue_whatever_the_limit(stage: Stage) -> None:
    await stage.starts("mine", "mine", **ANN_AT_ONE)
    await stage.starts("other", "other", user_id="ben")
    await stage.waits("behind mine", "mine", **ANN_AT_ONE)
    await stage.waits("behind other", "other", **ANN_AT_ONE)
    await stage.waits("later", "later", delay=HOUR, **ANN_AT_ONE)
    displacing = await stage.arrives("displacing", "other", strategy=Strategy.INTERRUPT, **ANN_AT_ONE)
    assert displacing.status is RunStatus.QUEUED
    assert (await stage.queue("mine"), await stage.queue("other")) == (["behind mine"], ["displacing"])
    full = await stage.admit("one too many", "other", strategy=Strategy.ENQUEUE, max_queued=1, **ANN_AT_ONE)
    assert isinstance(full, DenyFull), full


@LIMITS("I19", "O7", "I8")
async def what_has_waited_is_not_held_up_by_the_limit_and_counts_from_then_on(stage: Stage) -> None:
    run = await stage.starts("other", "other", user_id="ben")
    await stage.waits("waited", "other", **ANN_AT_ONE)
    mine = await stage.arrives("mine", "mine", **ANN_AT_ONE)
    await stage.ends(run)
    assert names([await stage.held("other")]) == ["waited"]
    await stage.happens(RunEvent.START, mine)
    await stage.ends(await stage.now(mine))
    assert isinstance(await stage.admit("late", "late", **ANN_AT_ONE), DenyUser)


@LIMITS("I19", "O3")
async def a_user_at_the_limit_displaces_nobody_that_waits_for_its_time(stage: Stage) -> None:
    await stage.starts("mine", "mine", **ANN)
    waiting = await stage.waits("waiting", delay=HOUR)
    for strategy in (Strategy.INTERRUPT, Strategy.ROLLBACK):
        assert isinstance(await stage.admit("late", strategy=strategy, **ANN_AT_ONE), DenyUser)
    assert (await stage.now(waiting)).status is RunStatus.QUEUED


@LIMITS("I19", "O5", "O8")
async def the_same_request_again_is_answered_before_anything_is_counted(stage: Stage) -> None:
    asked: dict[str, Any] = ANN_AT_ONE | {"idempotency_key": "key", "payload_digest": "one"}
    await stage.arrives("mine", **asked)
    for strategy in Strategy:
        lost = await stage.admit("mine", strategy=strategy, **asked)
        again = await stage.admit("again", strategy=strategy, **asked)
        assert isinstance(lost, Reuse), lost
        assert isinstance(again, Reuse), again
        assert (lost.by_key, again.by_key, again.run.run_id) == (False, True, "mine")
        other = await stage.admit("other", strategy=strategy, **asked | {"payload_digest": "two"})
        assert isinstance(other, Clash), other


@LIMITS("I19", "O1")
async def who_asks_for_a_busy_thread_is_told_of_its_holder_not_of_the_limit(stage: Stage) -> None:
    await stage.arrives("mine", **ANN_AT_ONE)
    answer = await stage.admit("late", **ANN_AT_ONE)
    assert isinstance(answer, Deny), answer
    assert answer.holder.run_id == "mine"


@LIMITS("I19", "O1", "O4")
async def a_run_that_nobody_holds_is_cleared_away_and_counts_no_more(stage: Stage) -> None:
    await stage.opens(ME)
    await stage.is_orphaned("dead", "dead", on_orphan=OnOrphan.FAIL, **ANN)
    await stage.arrives("next", "dead", **ANN_AT_ONE)
    assert isinstance(await stage.admit("late", "late", **ANN_AT_ONE), DenyUser)
    await stage.is_cancelled(await stage.held("dead"))
    await stage.store.force(Actor(ME), AT_ONCE, 10)
    await stage.arrives("late", "late", **ANN_AT_ONE)
    assert (await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).total == 0
