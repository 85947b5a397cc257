"""The verbs of a store as a check needs them: what must happen happens or fails the check, and names are short.

Everything goes through the store's public verbs; no rule is asserted here but that what is called ``happens`` happens
and what is called ``refused`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, final

from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunKey,
    Session,
    Strategy,
    ThreadId,
    WorkerId,
    micros,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Given, Refused
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store.base import Admission, Admitted, OwnershipStore

HOUR: Final = micros(3600)
INSTANT: Final = Micros(1)
"""The shortest time there is: over at the store's next statement but one."""

ME: Final = WorkerId("host:me")
OTHER: Final = WorkerId("host:other")
THREAD: Final = ThreadId("thread")
AT_ONCE: Final = Given(cancel_grace=Micros(0))
"""A cancel's grace is over as soon as it is recorded."""


@final
class Stage:
    """A store under a check."""

    def __init__(self, store: OwnershipStore) -> None:
        self.store = store

    # --- Sessions ---------------------------------------------------------------------------------------------------

    async def opens(self, worker_id: WorkerId = ME, *, lease: Micros = HOUR, **more: Any) -> WorkerId:
        """A session begins. It holds the kernel's hint, so that it can be believed dead whatever its lease is."""
        given: dict[str, Any] = {"hinted": True} | more
        await self.store.open_session(Session(worker_id, lease=lease, **given))
        return worker_id

    async def dies(self, worker_id: WorkerId) -> None:
        """A session's death is a fact."""
        assert await self.store.close_session(worker_id)

    async def is_believed_dead(self, worker_id: WorkerId) -> None:
        """A judge declares a session dead on a hint, which proves nothing."""
        session = await self.session(worker_id)
        assert await self.store.declare_dead(Verdict(worker_id, session.beat, How.HINT, Micros(0)))

    async def session(self, worker_id: WorkerId) -> Session:
        """A session as it is kept."""
        return next(one for one in await self.store.sessions() if one.worker_id == worker_id)

    async def passes(self, duration: Micros) -> None:
        """Come back when so much time, which must be short, has passed by the store's clock."""
        end = await self.store.now() + duration
        while await self.store.now() <= end:
            pass

    # --- Arrivals ---------------------------------------------------------------------------------------------------

    async def admit(
        self, run_id: str, thread_id: str = THREAD, *, given: Given = NOTHING_GIVEN, **asked: Any
    ) -> Admission:
        """An operation asks for a thread."""
        wanted: dict[str, Any] = {"worker_id": ME} | asked
        return await self.store.admit(Newcomer(run_id=RunId(run_id), thread_id=ThreadId(thread_id), **wanted), given)

    async def arrives(self, run_id: str, thread_id: str = THREAD, **asked: Any) -> Run:
        """An operation gets in: it holds the thread, or waits if it asked for that."""
        answer = await self.admit(run_id, thread_id, **asked)
        assert isinstance(answer, Admitted), answer
        return answer.run

    async def waits(self, run_id: str, thread_id: str = THREAD, **asked: Any) -> Run:
        """A run gets in behind another one, or for a later time."""
        return await self.arrives(run_id, thread_id, strategy=Strategy.ENQUEUE, **asked)

    async def starts(self, run_id: str, thread_id: str = THREAD, **asked: Any) -> Run:
        """A run gets in and starts."""
        return await self.happens(RunEvent.START, await self.arrives(run_id, thread_id, **asked))

    async def reserves(self, run_id: str, thread_id: str = THREAD, **asked: Any) -> Run:
        """A reservation takes the thread."""
        return await self.arrives(run_id, thread_id, **{"kind": OperationKind.CHECKPOINT_WRITE} | asked)

    async def is_orphaned(self, run_id: str, thread_id: str = THREAD, **asked: Any) -> Run:
        """A run that may resume elsewhere runs, and its owner dies, as a fact."""
        owner = await self.opens(WorkerId(f"host:owner-of-{run_id}"))
        asked = {"worker_id": owner, "on_orphan": OnOrphan.RESUME} | asked
        run = await self.starts(run_id, thread_id, **asked)
        await self.dies(owner)
        return run

    # --- Events -----------------------------------------------------------------------------------------------------

    async def happens(self, event: RunEvent, run: Run, given: Given = NOTHING_GIVEN, *, by: Actor | None = None) -> Run:
        """An event happens to a run, brought about by its owner if nobody else is named; the row afterwards."""
        decision = await self.store.apply(run.key, event, by or owner_of(run), given)
        assert isinstance(decision, Applied), f"{event.value}: {decision}"
        assert not decision.repeated, f"{event.value} had happened before: {decision}"
        return decision.run

    async def repeats(self, event: RunEvent, run: Run, given: Given = NOTHING_GIVEN, *, by: Actor | None = None) -> Run:
        """An event is asked for again after a lost reply: the answer is yes, and nothing changes."""
        before = await self.row(run)
        decision = await self.store.apply(run.key, event, by or owner_of(run), given)
        assert isinstance(decision, Applied), f"{event.value}: {decision}"
        assert decision.repeated, f"{event.value} happened once more: {decision}"
        assert await self.row(run) == before
        return decision.run

    async def refused(
        self, event: RunEvent, run: Run, given: Given = NOTHING_GIVEN, *, by: Actor | None = None
    ) -> Refusal:
        """An event does not happen, and nothing changes; the reason."""
        before = await self.row(run)
        decision = await self.store.apply(run.key, event, by or owner_of(run), given)
        assert isinstance(decision, Refused), f"{event.value}: {decision}"
        assert await self.row(run) == before, f"{event.value} was refused and changed the row"
        return decision.reason

    async def is_cancelled(self, run: Run, action: CancelAction = CancelAction.INTERRUPT) -> Run:
        """A cancel is recorded on an active run."""
        return await self.happens(RunEvent.REQUEST_CANCEL, run, Given(action=action))

    async def ends(self, run: Run, given: Given = NOTHING_GIVEN, *, how: RunEvent = RunEvent.SETTLE_SUCCESS) -> Run:
        """A run's owner settles it."""
        return await self.happens(how, run, given)

    async def sweeps(self, given: Given = NOTHING_GIVEN) -> dict[str, list[str]]:
        """One sweep over what the dead have left; which runs it ended, resumed, freed or released, where it did."""
        done = await self.store.take_over(Actor(ME), given, 10)
        parts = {"ended": done.ended, "resumed": done.resumed, "freed": done.freed, "released": done.released}
        return {name: sorted(names(runs)) for name, runs in parts.items() if runs}

    # --- Looks ------------------------------------------------------------------------------------------------------

    async def row(self, run: Run) -> Run | None:
        """An operation as it is kept now, without its stored input."""
        found = await self.store.get(run.key, scope=EVERYONE)
        if found is None:
            active = await self.store.active(run.thread_id)
            found = active if active is not None and active.run_id == run.run_id else None
        return None if found is None else replace(found, kwargs=None)

    async def now(self, run: Run) -> Run:
        """An operation that must still be there."""
        found = await self.row(run)
        assert found is not None, f"{run} is gone"
        return found

    async def holder(self, thread_id: str = THREAD) -> Run | None:
        """What holds a thread."""
        return await self.store.active(ThreadId(thread_id))

    async def held(self, thread_id: str = THREAD) -> Run:
        """What holds a thread that must be held."""
        holder = await self.holder(thread_id)
        assert holder is not None, f"nothing holds {thread_id}"
        return holder

    async def queue(self, thread_id: str = THREAD) -> list[str]:
        """The ids of what waits on a thread, in order."""
        return names(await self.store.queue(ThreadId(thread_id)))


def owner_of(run: Run) -> Actor:
    """Whoever owns the run, at its epoch; where nobody does, we."""
    return Actor(run.owner_worker_id or ME, run.epoch)


def at(run: Run, worker_id: WorkerId = ME, **more: Any) -> Actor:
    """A session that knows the run's epoch."""
    return Actor(worker_id, run.epoch, **more)


def outcome(run: Run) -> tuple[str, str | None, int]:
    """How a run ended, and at which epoch."""
    return (run.status.value, run.stop_reason, run.epoch)


def names(runs: Iterable[Run]) -> list[str]:
    """The ids of runs, in their order."""
    return [run.run_id for run in runs]


def key(run_id: str, thread_id: str = THREAD) -> RunKey:
    """Where a run would be found."""
    return RunKey(ThreadId(thread_id), RunId(run_id))
