"""The contract's part about reservations: what holds a thread for a moment without being a run (B047–B059, O22)."""

from __future__ import annotations

from typing import Final

from deerflow_runs.model import EVERYONE, OperationKind, RunStatus, WorkerId
from deerflow_runs.protocol.admission import Deny
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import HOUR, INSTANT, ME, OTHER, Stage, at, names

RESERVATIONS: Final = Checks()

KINDS: Final = tuple(kind for kind in OperationKind if kind is not OperationKind.RUN)


@RESERVATIONS("B047", "B049", "I1")
async def reservations_and_whatever_holds_a_thread_exclude_each_other(stage: Stage) -> None:
    for held_by in OperationKind:
        await stage.arrives(f"holder-{held_by}", held_by, kind=held_by)
        wanted = OperationKind if held_by is not OperationKind.RUN else KINDS
        for kind in wanted:
            answer = await stage.admit(f"late-{kind}", held_by, kind=kind)
            assert isinstance(answer, Deny), answer
            assert (answer.holder.run_id, answer.retry_after >= 1) == (f"holder-{held_by}", True)
    await stage.reserves("elsewhere", "another thread")


@RESERVATIONS("B047")
async def a_reservation_respects_a_vacant_run_and_one_for_later_and_a_delete_only_the_first(stage: Stage) -> None:
    await stage.arrives("vacant", "vacant", take=False)
    later = await stage.waits("later", "later", delay=HOUR)
    for kind in KINDS:
        assert isinstance(await stage.admit(f"{kind}-1", "vacant", kind=kind), Deny)
        answer = await stage.admit(f"{kind}-2", "later", kind=kind)
        assert isinstance(answer, Deny) == (kind is not OperationKind.DELETE)
    assert (await stage.now(later)).status is RunStatus.INTERRUPTED


@RESERVATIONS("B057")
async def a_reservation_is_no_run_for_whoever_asks_for_runs(stage: Stage) -> None:
    held = await stage.reserves("held")
    assert await stage.store.get(held.key, scope=EVERYONE) is None
    assert await stage.store.get_many(held.thread_id, [held.run_id], scope=EVERYONE) == {}
    assert names(await stage.store.owned(ME)) == ["held"]
    assert (await stage.now(held)).kind is OperationKind.CHECKPOINT_WRITE


@RESERVATIONS("O22", "B050")
async def a_reservation_can_only_be_released(stage: Stage) -> None:
    await stage.opens(ME)
    held = await stage.reserves("held")
    by = at(held, capabilities=frozenset({"all"}), previous=WorkerId("host:before"))
    runs_only = set(RunEvent) - {
        RunEvent.RELEASE,
        RunEvent.TAKE_OVER_RELEASE,
        RunEvent.TAKE_BACK,
        RunEvent.PROMOTE,
        RunEvent.CANCEL_QUEUED,
        RunEvent.REMOVE,
        RunEvent.SETTLE_SUCCESS,
        RunEvent.SETTLE_TIMEOUT,
    }
    assert {await stage.refused(event, held, by=by) for event in sorted(runs_only)} == {Refusal.NOT_A_RUN}
    assert await stage.refused(RunEvent.TAKE_OVER_RELEASE, held) is Refusal.HELD
    assert await stage.refused(RunEvent.REMOVE, held) is Refusal.WRONG_STATUS


@RESERVATIONS("O14", "B052")
async def only_its_holder_releases_a_reservation_and_only_once(stage: Stage) -> None:
    held = await stage.reserves("held")
    assert await stage.refused(RunEvent.RELEASE, held, by=at(held, OTHER)) is Refusal.LOST
    assert await stage.refused(RunEvent.RELEASE, held, by=Actor(ME, 2)) is Refusal.LOST
    assert (await stage.happens(RunEvent.RELEASE, held)).run_id == "held"
    assert await stage.refused(RunEvent.RELEASE, held) is Refusal.UNKNOWN
    run = await stage.starts("run")
    assert await stage.refused(RunEvent.RELEASE, run) is Refusal.NOT_A_RESERVATION


@RESERVATIONS("B051", "B058", "O26")
async def a_dead_session_s_reservation_is_released_and_counts_as_no_run(stage: Stage) -> None:
    await stage.opens(OTHER)
    held = await stage.reserves("held", worker_id=OTHER)
    assert await stage.refused(RunEvent.TAKE_OVER_RELEASE, held, by=Actor(ME)) is Refusal.HELD
    assert (await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)).total == 0
    await stage.is_believed_dead(OTHER)
    swept = await stage.store.take_over(Actor(ME), NOTHING_GIVEN, 10)
    assert (names(swept.released), swept.total) == (["held"], 1)
    assert await stage.holder() is None


@RESERVATIONS("O13", "B054")
async def a_live_copy_takes_its_reservation_back_or_learns_that_it_is_gone(stage: Stage) -> None:
    await stage.opens(OTHER)
    kept, gone = await stage.reserves("kept", "1", worker_id=OTHER), await stage.reserves("gone", "2", worker_id=OTHER)
    await stage.is_believed_dead(OTHER)
    back = await stage.happens(RunEvent.TAKE_BACK, kept, by=at(kept, ME, previous=OTHER))
    assert (back.owner_worker_id, back.epoch) == (ME, 2)
    assert await stage.refused(RunEvent.RELEASE, kept) is Refusal.LOST
    await stage.happens(RunEvent.TAKE_OVER_RELEASE, gone, by=Actor(ME))
    assert await stage.refused(RunEvent.TAKE_BACK, gone, by=at(gone, ME, previous=OTHER)) is Refusal.UNKNOWN
    await stage.happens(RunEvent.RELEASE, back)


@RESERVATIONS("B047")
async def a_run_that_queues_behind_a_reservation_comes_to_its_turn(stage: Stage) -> None:
    held = await stage.reserves("held", worker_id=OTHER)
    await stage.waits("run", delay=INSTANT)
    await stage.waits("second")
    await stage.happens(RunEvent.RELEASE, held)
    holder = await stage.holder()
    assert holder is not None
    assert (holder.run_id, holder.kind, await stage.queue()) == ("run", OperationKind.RUN, ["second"])
