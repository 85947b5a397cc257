"""Every verb that writes, on a scene where it has something to do, and what anybody could find afterwards.

What is done to the verbs (repeated, interrupted, broken off) is the business of the tests that use them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import select

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    Strategy,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.admission import Newcomer, Reuse
from deerflow_runs.protocol.decision import Actor, Applied, Given, Refused
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store.base import Admitted, Renewed
from deerflow_runs.store.schema import outbox, threads, workers
from deerflow_runs.store.sql import SqlRunStore
from tests.races.support import (
    DEAD,
    ME,
    OTHER,
    PAST,
    THREAD,
    Rows,
    World,
    due,
    ended,
    pending,
    queued,
    running,
    sessions,
    vacant,
)

E = RunEvent
DRAINING: Final = (replace(sessions()[0], state=SessionState.DRAINING), *sessions()[1:])
HOOK: Final = {"hook": {"to": "somebody"}}
HELD: Final = running("held", deliveries=HOOK)
BEHIND: Final = (running("held", queue_behind=True, deliveries=HOOK), queued("one"), queued("two"))


@dataclass(frozen=True)
class Case:
    """A verb on a scene, and how its answer must fit the rows, whether it was asked once or again."""

    scene: Sequence[Run]
    verb: Callable[[SqlRunStore], Awaitable[Any]]
    fits: Callable[[Any, Rows], bool]
    living: Sequence[Session] = ()


def admitting(strategy: Strategy, *scene: Run, **given: Any) -> Case:
    asked = {"worker_id": ME, "strategy": strategy, "deliveries": HOOK} | given
    newcomer = Newcomer(run_id=RunId("new"), thread_id=THREAD, **asked)

    def fits(answer: Any, rows: Rows) -> bool:
        mine = isinstance(answer, Admitted) or (isinstance(answer, Reuse) and not answer.by_key)
        return mine and answer.run == replace(rows["new"], kwargs=answer.run.kwargs)

    return Case(scene, lambda store: store.admit(newcomer), fits)


def applying(event: RunEvent, *scene: Run, again: Refusal | None = None, by: Actor | None = None, **given: Any) -> Case:
    """The first of the scene has the event. ``again``: what a repeat is told that cannot know it was there before."""
    actor = by or Actor(scene[0].owner_worker_id or ME, scene[0].epoch)

    def fits(answer: Any, rows: Rows) -> bool:
        if isinstance(answer, Refused):
            return answer.reason is again
        return isinstance(answer, Applied) and rows.get(answer.run.run_id, answer.run).epoch == answer.run.epoch

    return Case(scene, lambda store: store.apply(scene[0].key, event, actor, Given(**given)), fits)


def sweeping(
    verb: Callable[[SqlRunStore], Awaitable[Any]], *scene: Run, changed: str, living: Sequence[Session] = ()
) -> Case:
    """A sweep changes ``changed``; a repeat after a lost reply finds nothing more to do."""

    def fits(answer: Any, rows: Rows) -> bool:
        found = answer if isinstance(answer, tuple) else (*answer.ended, *answer.resumed, *answer.freed)
        return [run.run_id for run in found] in ([], [changed])

    return Case(scene, verb, fits, living)


def answering(verb: Callable[[SqlRunStore], Awaitable[Any]], *allowed: Any, scene: Sequence[Run] = ()) -> Case:
    return Case(scene, verb, lambda answer, _: answer in allowed)


ORPHAN: Final = running("held", owner_worker_id=DEAD)
OWED: Final = replace(HELD, cancel_action=CancelAction.ROLLBACK, cancel_requested_at=PAST)
SEIZED: Final = replace(OWED, status=RunStatus.PENDING, epoch=2, granted_at=Micros(PAST + 1))
NEW: Final = Session(WorkerId("host:new"), labels={"zone": "a"})
RESERVED: Final = pending("held", kind=OperationKind.CHECKPOINT_WRITE, queue_behind=True)
USAGE: Final = Usage(total_tokens=7)

CASES: Final[Mapping[str, Case]] = {
    "admit, reject": admitting(Strategy.REJECT),
    "admit, reject, dead holder": admitting(Strategy.REJECT, replace(ORPHAN, on_orphan=OnOrphan.FAIL)),
    "admit, enqueue, free": admitting(Strategy.ENQUEUE),
    "admit, enqueue, behind": admitting(Strategy.ENQUEUE, HELD),
    "admit, enqueue, due": admitting(Strategy.ENQUEUE, due("due")),
    "admit, enqueue, delayed": admitting(Strategy.ENQUEUE, HELD, delay=Micros(10**12)),
    "admit, interrupt, free": admitting(Strategy.INTERRUPT),
    "admit, interrupt": admitting(Strategy.INTERRUPT, *BEHIND),
    "admit, rollback": admitting(Strategy.ROLLBACK, *BEHIND),
    "start": applying(E.START, pending("held"), base_heads={"": "checkpoint"}),
    "progress": applying(E.PROGRESS, HELD, usage=USAGE, checkpoint="checkpoint"),
    "settle": applying(E.SETTLE_SUCCESS, HELD, usage=USAGE),
    "settle, behind": applying(E.SETTLE_SUCCESS, *BEHIND, usage=USAGE),
    "settle, error": applying(E.SETTLE_ERROR, *BEHIND, error="it broke"),
    "settle, timeout": applying(E.SETTLE_TIMEOUT, HELD),
    "settle, cancelled": applying(E.SETTLE_CANCELLED, *BEHIND),
    "settle, restored": applying(E.SETTLE_CANCELLED, SEIZED, queued("one"), restored=True),
    "request cancel": applying(E.REQUEST_CANCEL, HELD, by=Actor(OTHER), action=CancelAction.ROLLBACK),
    "cancel queued": applying(E.CANCEL_QUEUED, queued("one"), HELD, by=Actor(OTHER)),
    "force": applying(E.FORCE, replace(ORPHAN, cancel_action=CancelAction.INTERRUPT), again=Refusal.TERMINAL),
    "take back": applying(E.TAKE_BACK, ORPHAN, by=Actor(ME, 1, previous=DEAD)),
    "take back, at home": applying(E.TAKE_BACK, replace(ORPHAN, home_worker_id=DEAD), by=Actor(ME, 1, previous=DEAD)),
    "re-home": applying(E.RE_HOME, vacant("held", home_worker_id=DEAD), by=Actor(ME, previous=DEAD)),
    "hand over": applying(E.HAND_OVER, HELD, again=Refusal.LOST),
    "give back": applying(E.GIVE_BACK_RESUME, HELD, again=Refusal.LOST),
    "release": applying(E.RELEASE, RESERVED, queued("one"), again=Refusal.UNKNOWN),
    "claim": sweeping(lambda store: store.claim(Actor(ME), 5), vacant("held"), changed="held"),
    "take over, resume": sweeping(lambda store: store.take_over(Actor(ME), Given(), 5), ORPHAN, changed="held"),
    "take over, fail": sweeping(
        lambda store: store.take_over(Actor(ME), Given(), 5),
        replace(ORPHAN, on_orphan=OnOrphan.FAIL, queue_behind=True, deliveries=HOOK),
        queued("one"),
        changed="held",
    ),
    "force, many": sweeping(
        lambda store: store.force(Actor(ME), Given(), 5),
        replace(ORPHAN, cancel_action=CancelAction.INTERRUPT),
        queued("one"),
        changed="held",
    ),
    "promote": sweeping(lambda store: store.promote(5), due("due"), due("next"), changed="due"),
    "hand over, many": sweeping(lambda store: store.hand_over(Actor(ME), 5), HELD, changed="held"),
    "re-home, many": sweeping(
        lambda store: store.re_home(Actor(ME, previous=DEAD), 5), vacant("held", home_worker_id=DEAD), changed="held"
    ),
    "end waiting": sweeping(
        lambda store: store.end_waiting(Actor(ME), 5),
        vacant("held", home_worker_id=ME),
        queued("one"),
        changed="held",
        living=DRAINING,
    ),
    "open session": Case(
        (), lambda store: store.open_session(NEW), lambda answer, _: answer.worker_id == NEW.worker_id
    ),
    "close session": answering(lambda store: store.close_session(ME), True),
    "declare dead": answering(
        lambda store: store.declare_dead(Verdict(ME, beat=0, how=How.PROOF, grace=Micros(0))), True, False
    ),
    "renew": Case((), lambda store: store.renew(ME), lambda answer, _: isinstance(answer, Renewed)),
    "bury": answering(lambda store: store.bury_strangers(), 0, 1, scene=[running("held", owner_worker_id="host:gone")]),
    "forget": answering(lambda store: store.forget_dead(kept_for=Micros(0)), 0, 1),
    "purge": answering(lambda store: store.purge(before=Micros(PAST + 1), limit=5), 0, 1, scene=[ended("old"), HELD]),
}


# --- What there is to be found ----------------------------------------------------------------------------------

DELIVERED: Final = select(outbox.c.run_id, outbox.c.kind)
OUTCOMES: Final = select(threads.c.thread_id, threads.c.outcome, threads.c.error)
PEOPLE: Final = select(workers.c.worker_id, workers.c.state, workers.c.proven)


async def kept(world: World) -> Hashable:
    """All that anybody could find, but for instants, beats, and numbers that only have to grow."""
    tables = await world.units.read(
        lambda connection: [frozenset(map(tuple, connection.execute(s))) for s in (DELIVERED, OUTCOMES, PEOPLE)]
    )
    usage = frozenset((run.run_id, run.usage.total_tokens, run.superseded_by) for run in (await world.rows()).values())
    runs, order, _ = await world.look()
    return runs, order, tuple(tables), usage


async def set_scene(world: World, case: Case) -> None:
    await world.set(*case.scene, living=case.living or None)
    await world.look()
