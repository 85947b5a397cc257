"""The contract's part about requests that come twice: by run id after a lost reply, by key from anywhere (O5, O8).

Whether a key is decided before the thread is looked at, what counts as the same request, and how long it is remembered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from deerflow_runs.model import CancelAction, OperationKind, Run, Strategy
from deerflow_runs.protocol.admission import Clash, Deny, Reuse
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admission
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import HOUR, ME, OTHER, Stage

REQUESTS: Final = Checks()

KEYED: Final[dict[str, Any]] = {"idempotency_key": "key", "payload_digest": "payload", "user_id": "ann"}


def reused(answer: Admission, *, by_key: bool) -> Run:
    """The run that answers, or a failed check."""
    assert isinstance(answer, Reuse), answer
    assert answer.by_key is by_key
    return answer.run


def clashed(answer: Admission, *, by_key: bool) -> Run:
    """The run of the other request, or a failed check."""
    assert isinstance(answer, Clash), answer
    assert answer.by_key is by_key
    return answer.run


# --- The same key ---------------------------------------------------------------------------------------------------


@REQUESTS("O5", "I14", "B040", "B041", "B043")
async def a_known_key_answers_its_run_whatever_the_strategy_and_changes_nothing(stage: Stage) -> None:
    await stage.opens(ME)
    first = await stage.starts("first", **KEYED)
    waiting = await stage.waits("waiting")
    before = [await stage.now(run) for run in (first, waiting)]
    for strategy in Strategy:
        for delay in (0, HOUR):
            asked = KEYED | {"strategy": strategy, "delay": delay, "worker_id": OTHER, "max_queued": 0}
            run = reused(await stage.admit(f"again-{strategy}-{delay}", **asked), by_key=True)
            assert (run.run_id, run.owner_worker_id, run.epoch) == ("first", ME, 1)
    assert [await stage.now(run) for run in (first, waiting)] == before
    assert await stage.queue() == ["waiting"]


@REQUESTS("O5", "I14")
async def a_known_key_answers_its_run_while_that_waits_is_vacant_or_has_ended(stage: Stage) -> None:
    holder = await stage.starts("holder")
    await stage.waits("keyed", **KEYED)
    assert reused(await stage.admit("again", **KEYED), by_key=True).status == "queued"
    await stage.ends(holder)
    vacant = reused(await stage.admit("again", **KEYED), by_key=True)
    assert vacant.vacant
    await stage.is_cancelled(vacant)
    ended = await stage.happens(RunEvent.FORCE, vacant)
    assert reused(await stage.admit("again", **KEYED), by_key=True) == ended
    assert await stage.holder() is None


@REQUESTS("O5", "B042")
async def another_payload_under_a_key_is_refused_by_name_and_changes_nothing(stage: Stage) -> None:
    first = await stage.starts("first", **KEYED)
    for strategy in Strategy:
        for other in ({"payload_digest": "another"}, {"payload_digest": None}):
            answer = await stage.admit("again", **KEYED | other | {"strategy": strategy})
            assert clashed(answer, by_key=True).run_id == "first"
    assert await stage.now(first) == replace(first, kwargs=None)
    assert await stage.queue() == []


@REQUESTS("O5")
async def a_key_is_known_to_its_user_and_its_thread_only(stage: Stage) -> None:
    await stage.starts("first", **KEYED)
    await stage.waits("another-user", **KEYED | {"user_id": "bob"})
    await stage.waits("nobody", **KEYED | {"user_id": None})
    await stage.arrives("another-thread", "another", **KEYED)
    assert await stage.queue() == ["another-user", "nobody"]
    assert reused(await stage.admit("again", "another", **KEYED), by_key=True).run_id == "another-thread"


@REQUESTS("O5")
async def a_stateless_key_is_known_to_its_user_on_every_thread(stage: Stage) -> None:
    stateless = KEYED | {"stateless": True}
    await stage.arrives("first", "temporary-1", **stateless)
    again = await stage.admit("again", "temporary-2", **stateless)
    assert reused(again, by_key=True).thread_id == "temporary-1"
    assert await stage.holder("temporary-2") is None
    await stage.arrives("with-a-thread", "temporary-2", **KEYED)
    await stage.arrives("another-user", "temporary-3", **stateless | {"user_id": "bob"})


@REQUESTS("O5", "B045")
async def a_key_lives_exactly_as_long_as_its_run(stage: Stage) -> None:
    ended = await stage.ends(await stage.starts("first", **KEYED))
    assert reused(await stage.admit("again", **KEYED), by_key=True).run_id == "first"
    await stage.happens(RunEvent.REMOVE, ended)
    assert (await stage.arrives("again", **KEYED)).epoch == 1


@REQUESTS("O5")
async def a_request_without_a_key_is_never_another_one(stage: Stage) -> None:
    await stage.arrives("first", payload_digest="payload", user_id="ann")
    answer = await stage.admit("second", payload_digest="payload", user_id="ann")
    assert isinstance(answer, Deny), answer


# --- The same run id ------------------------------------------------------------------------------------------------


@REQUESTS("O1", "O2", "O3", "O8", "B020")
async def an_admission_repeated_after_a_lost_reply_answers_its_own_run_and_changes_nothing(stage: Stage) -> None:
    await stage.opens(ME)
    for strategy in Strategy:
        incumbent = await stage.starts(f"incumbent-{strategy}", strategy, worker_id=OTHER)
        if strategy is Strategy.REJECT:
            await stage.ends(incumbent)
        asked: dict[str, Any] = {"strategy": strategy, "payload_digest": "payload"}
        run = await stage.arrives(f"run-{strategy}", strategy, **asked)
        before = [await stage.row(one) for one in (incumbent, run)]
        assert reused(await stage.admit(run.run_id, strategy, **asked), by_key=False).run_id == run.run_id
        assert [await stage.row(one) for one in (incumbent, run)] == before


@REQUESTS("O8")
async def a_repeated_admission_answers_what_has_become_of_its_run(stage: Stage) -> None:
    run = await stage.starts("run")
    assert reused(await stage.admit("run"), by_key=False) == run
    ended = await stage.ends(run)
    assert reused(await stage.admit("run", strategy=Strategy.INTERRUPT), by_key=False) == ended
    later = await stage.waits("later", delay=HOUR)
    assert reused(await stage.admit("later", delay=HOUR), by_key=False) == later


@REQUESTS("O5", "O8")
async def a_run_id_that_belongs_to_another_request_is_refused_by_name(stage: Stage) -> None:
    await stage.arrives("run", payload_digest="payload", user_id="ann")
    same: dict[str, Any] = {"payload_digest": "payload", "user_id": "ann"}
    others: list[tuple[str, dict[str, Any]]] = [
        ("another-thread", same),
        ("thread", same | {"payload_digest": "another"}),
        ("thread", same | {"user_id": "bob"}),
        ("thread", same | {"kind": OperationKind.CHECKPOINT_WRITE}),
    ]
    for thread_id, asked in others:
        assert clashed(await stage.admit("run", thread_id, **asked), by_key=False).run_id == "run"
    assert await stage.holder("another-thread") is None


@REQUESTS("O5", "O8")
async def the_run_id_speaks_before_the_key(stage: Stage) -> None:
    await stage.arrives("keyed", "one", **KEYED | {"stateless": True})
    await stage.arrives("run", "two", payload_digest="payload", user_id="ann")
    answer = await stage.admit("run", "two", **KEYED | {"stateless": True})
    assert reused(answer, by_key=False).run_id == "run"


@REQUESTS("O1", "B052")
async def a_reservation_repeated_after_a_lost_reply_is_the_same_reservation(stage: Stage) -> None:
    held = await stage.reserves("held")
    again = await stage.admit("held", kind=OperationKind.CHECKPOINT_WRITE)
    assert reused(again, by_key=False).run_id == "held"
    assert await stage.now(held) == replace(held, kwargs=None)


@REQUESTS("O8")
async def a_displacement_repeated_after_a_lost_reply_cancels_nothing_twice(stage: Stage) -> None:
    incumbent = await stage.starts("incumbent", worker_id=OTHER)
    await stage.arrives("newcomer", strategy=Strategy.INTERRUPT)
    cancelled = await stage.now(incumbent)
    assert cancelled.cancel_action is CancelAction.INTERRUPT
    await stage.waits("behind")
    reused(await stage.admit("newcomer", strategy=Strategy.INTERRUPT), by_key=False)
    assert await stage.queue() == ["newcomer", "behind"]
    assert (await stage.now(incumbent)).cancel_requested_at == cancelled.cancel_requested_at
