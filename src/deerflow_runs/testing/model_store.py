"""The model store: a dict and ``decide()`` behind the store's asynchronous face.

It holds no rule of its own (see ``world``), so whatever it answers is the table's answer; the contract suite and the
random histories hold the SQL stores against it. It lives in one process and forgets everything: not for production.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice
from typing import final

from deerflow_runs.errors import UsageError
from deerflow_runs.model import (
    Everyone,
    Micros,
    OnOrphan,
    Run,
    RunId,
    RunKey,
    Scope,
    Session,
    SessionState,
    StopReason,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import Displace, Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Decision, Given, Refused
from deerflow_runs.protocol.judge import Verdict
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store import incoming
from deerflow_runs.store.base import Admission, Admitted, CancelRequest, NotLive, Renewal, Renewed, Settlement, Swept
from deerflow_runs.testing import world as worlds
from deerflow_runs.testing.world import World


@final
class ModelStore:
    """An ``OwnershipStore`` on a ``World``."""

    def __init__(self, world: World | None = None) -> None:
        self.world = World(now=Micros(1_000_000_000_000)) if world is None else world

    async def open(self) -> None:
        """Nothing to connect."""

    async def close(self) -> None:
        """Nothing to release."""

    async def now(self) -> Micros:
        """The world's clock; it moves a little with every question, as clocks do."""
        self.world.advance(1)
        return self.world.now

    # --- Sessions ---------------------------------------------------------------------------------------------------

    async def open_session(self, session: Session) -> Session:
        """See ``RunStore.open_session``."""
        incoming.check_session(session)
        known = self.world.sessions.get(session.worker_id)
        if known is not None and known.state is SessionState.DEAD:
            raise UsageError(f"worker id {session.worker_id} belongs to a dead session; open one under a new id")
        return known or self.world.open_session(session)

    async def renew(
        self, worker_id: WorkerId, *, hinted: bool = False, state: SessionState = SessionState.LIVE
    ) -> Renewal:
        """See ``RunStore.renew``."""
        known = self.world.sessions.get(worker_id)
        draining = known is not None and known.state is SessionState.DRAINING
        beaten = self.world.renew(worker_id, state=SessionState.DRAINING if draining else state, hinted=hinted)
        if beaten is None:
            return NotLive()
        session = beaten.session
        runs = [self.world.runs[run_id] for run_id, _ in beaten.signals]
        requests = tuple(CancelRequest(run.key, run.epoch, run.cancel_action) for run in runs if run.cancel_action)
        return Renewed(session.beat, session.expires_at, session.state, requests)

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``RunStore.close_session``."""
        self.world.close_session(worker_id)
        session = self.world.sessions.get(worker_id)
        return session is not None and session.proven

    async def declare_dead(self, verdict: Verdict) -> bool:
        """See ``RunStore.declare_dead``."""
        return self.world.declare_dead(verdict)

    async def sessions(self) -> tuple[Session, ...]:
        """See ``RunStore.sessions``."""
        return tuple(sorted(self.world.sessions.values(), key=lambda one: (one.started_at, one.worker_id)))

    async def bury_strangers(self) -> int:
        """See ``RunStore.bury_strangers``."""
        open_runs = [run for run in self.world.runs.values() if not run.terminal]
        named = {run.owner_worker_id for run in open_runs if run.active} | {
            run.home_worker_id for run in open_runs if run.status.value in ("queued", "pending")
        }
        strangers = {worker_id for worker_id in named if worker_id is not None and worker_id not in self.world.sessions}
        longest = max((session.lease for session in self.world.sessions.values()), default=Micros(0))
        for worker_id in strangers:
            dead = Session(worker_id, SessionState.DEAD, lease=longest, dead_at=self.world.now)
            self.world.sessions[worker_id] = dead
        return len(strangers)

    # --- Operations -------------------------------------------------------------------------------------------------

    async def admit(self, newcomer: Newcomer, given: Given = NOTHING_GIVEN) -> Admission:
        """See ``RunStore.admit``."""
        newcomer = incoming.storable_newcomer(newcomer)
        self.world.advance(1)
        answer = self.world.admit(newcomer, given)
        if not isinstance(answer, worlds.Admitted):
            return answer
        displaced = answer.plan.ended if isinstance(answer.plan, Displace) else ()
        ended = tuple(self.world.runs[run.run_id] for run in displaced)
        incumbent = self.world.active(newcomer.thread_id)
        if incumbent is None or incumbent.run_id == newcomer.run_id:
            return Admitted(answer.run, None, ended)
        return self._finished(newcomer, incumbent, ended, given)

    def _finished(self, newcomer: Newcomer, incumbent: Run, ended: tuple[Run, ...], given: Given) -> Admitted:
        """O3: an incumbent that nobody holds is forced on the spot."""
        by = Actor(newcomer.worker_id, capabilities=newcomer.required_capabilities)
        owner = self.world.sessions.get(incumbent.owner_worker_id) if incumbent.owner_worker_id else None
        unheld = incumbent.vacant or (owner is not None and owner.state is SessionState.DEAD)
        forced = unheld and isinstance(self.world.apply(incumbent.run_id, RunEvent.FORCE, by, given), Applied)
        if forced and newcomer.take:
            self.world.apply(newcomer.run_id, RunEvent.CLAIM, by)
        return Admitted(self.world.runs[newcomer.run_id], None if forced else incumbent, ended)

    async def apply(self, key: RunKey, event: RunEvent, by: Actor, given: Given = NOTHING_GIVEN) -> Decision:
        """See ``RunStore.apply``."""
        incoming.check_key(key)
        self.world.advance(1)
        run = self.world.runs.get(key.run_id)
        if run is not None and run.thread_id != key.thread_id:
            return Refused(Refusal.UNKNOWN)
        return self.world.apply(key.run_id, event, by, incoming.storable_given(given))

    async def settle_many(self, settlements: Sequence[Settlement]) -> tuple[Decision, ...]:
        """See ``RunStore.settle_many``."""
        return tuple([await self.apply(one.key, one.event, one.by, one.given) for one in settlements])

    # --- Sets -------------------------------------------------------------------------------------------------------

    async def claim(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.claim``."""
        return self.world.claim(by, limit)

    async def take_over(self, by: Actor, given: Given, limit: int) -> Swept:
        """See ``RunStore.take_over``."""
        self.world.advance(1)
        done = {event: self._each(event, by, given, limit) for event in worlds.TAKE_OVERS}
        ended = (*done[RunEvent.TAKE_OVER_FAIL], *done[RunEvent.TAKE_OVER_FAIL_WAITING])
        freed = done[RunEvent.TAKE_OVER_RESUME_WAITING]
        return Swept(ended, done[RunEvent.TAKE_OVER_RESUME], freed, done[RunEvent.TAKE_OVER_RELEASE])

    async def force(self, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.force``."""
        return self._each(RunEvent.FORCE, by, given, limit)

    async def promote(self, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.promote``."""
        threads = sorted({run.thread_id for run in self.world.runs.values()})
        promoted = (self.world.promote(thread_id, Actor(WorkerId(""))) for thread_id in threads)
        return tuple(islice((run for run in promoted if run is not None), limit))

    async def re_home(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.re_home``."""
        return self._each(RunEvent.RE_HOME, by, NOTHING_GIVEN, limit)

    async def end_waiting(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.end_waiting``."""
        return self._each(RunEvent.END_WAITING, by, NOTHING_GIVEN, limit)

    async def hand_over(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.hand_over``."""
        resumable = [run for run in await self.owned(by.worker_id) if run.on_orphan is OnOrphan.RESUME]
        return self._leave(RunEvent.HAND_OVER, resumable, by, NOTHING_GIVEN, limit)

    async def end_held(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.end_held``."""
        mine = await self.owned(by.worker_id)
        stays = [run for run in mine if run.on_orphan is OnOrphan.FAIL or run.cancel_action is not None]
        given = Given(stop_reason=StopReason.SHUTDOWN.value)
        return self._leave(RunEvent.SETTLE_CANCELLED, stays, by, given, limit)

    async def release_held(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.release_held``."""
        return self._leave(RunEvent.RELEASE, await self.owned(by.worker_id), by, NOTHING_GIVEN, limit)

    def _leave(self, event: RunEvent, runs: Sequence[Run], by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """To those of a session's own runs that it may happen to, oldest first, each at the epoch it has."""
        asked = [(run, replace(by, epoch=run.epoch)) for run in sorted(runs, key=lambda run: run.seq)]
        decisions = (self.world.apply(run.run_id, event, actor, given) for run, actor in asked)
        return tuple(islice((one.run for one in decisions if isinstance(one, Applied)), limit))

    def _each(self, event: RunEvent, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """To every run that it may happen to, oldest first."""
        oldest_first = sorted(self.world.runs.values(), key=lambda run: run.seq)
        decisions = (self.world.apply(run.run_id, event, by, given) for run in oldest_first)
        happened = (one.run for one in decisions if isinstance(one, Applied) and not one.repeated)
        return tuple(islice(happened, limit))

    # --- Reads ------------------------------------------------------------------------------------------------------

    async def get(self, key: RunKey, *, scope: Scope) -> Run | None:
        """See ``RunStore.get``."""
        incoming.check_key(key)
        incoming.check_scope(scope)
        run = self.world.runs.get(key.run_id)
        if run is None or run.thread_id != key.thread_id or run.reservation:
            return None
        return run if isinstance(scope, Everyone) or run.user_id == scope.user_id else None

    async def owned(self, worker_id: WorkerId) -> tuple[Run, ...]:
        """See ``RunStore.owned``."""
        return tuple(run for run in self.world.runs.values() if run.active and run.owner_worker_id == worker_id)

    async def active(self, thread_id: ThreadId) -> Run | None:
        """See ``RunStore.active``."""
        incoming.check_ids(thread_id=thread_id)
        return self.world.active(thread_id)

    async def queue(self, thread_id: ThreadId) -> tuple[Run, ...]:
        """See ``RunStore.queue``."""
        incoming.check_ids(thread_id=thread_id)
        return self.world.queue(thread_id)

    async def is_newest(self, key: RunKey) -> bool:
        """See ``RunStore.is_newest``."""
        incoming.check_key(key)
        here = [run for run in self.world.runs.values() if run.thread_id == key.thread_id and not run.reservation]
        last = max(here, key=lambda run: run.seq, default=None)
        return last is not None and last.run_id == key.run_id

    async def get_many(self, thread_id: ThreadId, run_ids: Collection[RunId], *, scope: Scope) -> dict[RunId, Run]:
        """See ``RunStore.get_many``."""
        found = {run_id: await self.get(RunKey(thread_id, run_id), scope=scope) for run_id in run_ids}
        return {run_id: run for run_id, run in found.items() if run is not None}
