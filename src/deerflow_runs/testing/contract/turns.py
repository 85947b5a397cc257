"""The contract's part about turns: when what holds a thread comes to its end, in whatever way, the next one gets it.

Every kind of end promotes in its own transaction (O7, O28), so no check here asks for a sweep to do it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from deerflow_runs.model import (
    OnOrphan,
    OperationKind,
    Run,
    SessionState,
    Strategy,
    WorkerId,
)
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.testing.contract.check import Checks
from deerflow_runs.testing.contract.stage import (
    AT_ONCE,
    HOUR,
    ME,
    OTHER,
    Stage,
    at,
    names,
    outcome,
)

TURNS: Final = Checks()

RESTORED: Final = Given(restored=True)

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
    after = await stage.held()
    assert (after.run_id, after.vacant, after.queue_behind, after.epoch) == ("next", True, True, 0), after
    assert after.not_before <= await stage.store.now()
    assert await stage.queue() == []


for _sentence, _end in ENDS.items():
    TURNS.tell(
        f"the end of a holder {_sentence} gives the thread to the next at once",
        partial(_lets_the_next_in, end=_end),
        *("O7", "O28", "I7"),
    )


@TURNS("O28")
async def the_end_of_a_delete_ends_what_waits_behind_it(stage: Stage) -> None:
    held = await stage.reserves("delete", kind=OperationKind.DELETE)
    waiting = [await stage.waits("one"), await stage.waits("two", delay=HOUR)]
    await stage.happens(RunEvent.RELEASE, held)
    assert [outcome(await stage.now(run)) for run in waiting] == 2 * [("interrupted", "interrupt", 0)]
    assert await stage.holder() is None


@TURNS("O28")
async def the_arrival_of_a_delete_ends_what_waits_on_an_idle_thread(stage: Stage) -> None:
    waiting = await stage.waits("one", delay=HOUR)
    await stage.reserves("delete", kind=OperationKind.DELETE)
    assert outcome(await stage.now(waiting)) == ("interrupted", "interrupt", 0)
