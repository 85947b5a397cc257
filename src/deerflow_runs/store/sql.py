"""``SqlRunStore``: the one store, over SQLite and PostgreSQL.

A thin face: every method names a unit of work and how it runs (one statement, a transaction, a read). What the
statements are stands in the modules beside this one; what may happen at all, in ``protocol``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, assert_never, final

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import (
    Micros,
    OneUser,
    Run,
    RunId,
    RunKey,
    Scope,
    Session,
    SessionState,
    StopReason,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import (
    Clash,
    ClearFirst,
    Deny,
    DenyFull,
    DenyUser,
    Displace,
    Enter,
    Newcomer,
    Plan,
    PromoteFirst,
    Reuse,
    Wait,
    plan_admission,
)
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Decision, Given
from deerflow_runs.protocol.judge import Sign, Verdict
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store import arrivals, endings, events, incoming, reads, sessions, together, waiters
from deerflow_runs.store.base import (
    Admission,
    Admitted,
    Counts,
    Page,
    Renewal,
    RunFilter,
    SessionLine,
    Settlement,
    Swept,
    TokenTotals,
    Visibility,
)
from deerflow_runs.store.clauses import Shape
from deerflow_runs.store.coalesce import Coalescer
from deerflow_runs.store.faces import SqlOutbox, SqlThreads
from deerflow_runs.store.line import Lines
from deerflow_runs.store.line_memory import MemoryLines
from deerflow_runs.store.signals import Signal
from deerflow_runs.store.together import TOGETHER
from deerflow_runs.store.units import Unit, Units

T = TypeVar("T")


UNDER_LOCK: Final = frozenset({RunEvent.PROMOTE, RunEvent.REMOVE})
"""What ends nothing but needs a transaction all the same."""

SHUTDOWN: Final = Given(stop_reason=StopReason.SHUTDOWN.value)


@final
class SqlRunStore:
    """A ``RunStore`` on a database both dialects speak. Open it before use; ``async with`` does both ends."""

    def __init__(
        self,
        units: Units,
        *,
        upgrade: Callable[[], Awaitable[None]] | None = None,
        jitter: Callable[[], float] = random.random,
        lines: Lines | None = None,
    ) -> None:
        """Without ``lines`` its workers are woken, and its sessions beat, inside this process only."""
        self._units = units
        self._lines = lines or MemoryLines(units)
        self._upgrade = upgrade
        self._dialect = units.dialect
        self._jitter = jitter
        self.threads: Final = SqlThreads(units)
        self.outbox: Final = SqlOutbox(units)
        self._coalescer = Coalescer(self._alone, self._together) if units.dialect.writes_in_ctes else None

    @property
    def units(self) -> Units:
        """The way to the same database for those whose writes belong beside a run, guarded by ``store.fence``."""
        return self._units

    async def open(self) -> None:
        """See ``RunStore.open``."""
        if self._upgrade is not None:
            await self._upgrade()
        await self._units.open()

    async def close(self) -> None:
        """See ``RunStore.close``."""
        if self._coalescer is not None:
            await self._coalescer.idle()
        await self._lines.close()
        await self._units.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def now(self) -> Micros:
        """See ``RunStore.now``."""
        return await self._units.read(lambda connection: Micros(connection.scalar(select(self._dialect.now)) or 0))

    # --- Sessions ---------------------------------------------------------------------------------------------------

    async def open_session(self, session: Session) -> Session:
        """See ``RunStore.open_session``."""
        incoming.check_session(session)
        return await self._units.transaction(self._unit(sessions.open_session, session))

    async def renew(
        self, worker_id: WorkerId, *, hinted: bool = False, state: SessionState = SessionState.LIVE
    ) -> Renewal:
        """See ``RunStore.renew``."""
        return await self._units.once(self._unit(sessions.renew, worker_id, hinted=hinted, state=state))

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``RunStore.close_session``."""
        return await self._units.transaction(self._unit(sessions.close_session, worker_id))

    async def declare_dead(self, verdict: Verdict) -> bool:
        """See ``RunStore.declare_dead``."""
        return await self._units.once(self._unit(sessions.declare_dead, verdict))

    async def sessions(self) -> tuple[Session, ...]:
        """See ``RunStore.sessions``."""
        return await self._units.read(sessions.list_sessions)

    async def bury_strangers(self) -> int:
        """See ``RunStore.bury_strangers``."""
        return await self._units.once(self._unit(sessions.bury_strangers))

    async def forget_dead(self, *, kept_for: Micros) -> int:
        """Remove sessions that died longer ago than ``kept_for`` and that no open run names."""
        return await self._units.once(self._unit(sessions.forget_dead, kept_for))

    def session_line(self) -> SessionLine:
        """See ``RunStore.session_line``."""
        return self._lines.line()

    async def send(self, signal: Signal, to: WorkerId | None = None) -> None:
        """See ``RunStore.send``."""
        await self._lines.send(signal, to)

    @property
    def proves_deaths(self) -> bool:
        """Whether ``signs`` proves that a session is dead, and asks no database for it: then it may be asked often."""
        return self._lines.proves

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:
        """See ``RunStore.signs``."""
        return await self._lines.signs(sessions)

    # --- Admission --------------------------------------------------------------------------------------------------

    async def admit(self, newcomer: Newcomer, given: Given = NOTHING_GIVEN) -> Admission:
        """See ``RunStore.admit``. Nothing is stored, and nothing holds the thread, when a value is refused."""
        newcomer = incoming.storable_newcomer(newcomer)
        for _ in range(events.TRIES):
            answer = await self._admit_once(newcomer, given)
            if answer is not None:
                return await self._finished(answer, newcomer, given)
            await asyncio.sleep(0.005 * self._jitter())  # many newcomers on one thread take turns
        raise StoreUnavailable(f"thread {newcomer.thread_id} kept changing under an admission; repeat it")

    async def _admit_once(self, newcomer: Newcomer, given: Given) -> Admission | None:
        """One try; None: the thread changed, or was cleared, and a new look is due."""
        if newcomer.strategy in (Strategy.REJECT, Strategy.ENQUEUE) and not newcomer.delayed:
            if (run := await self._entered(newcomer)) is not None:
                return Admitted(run)
            if newcomer.strategy is Strategy.ENQUEUE and (waiting := await self._wait_behind(newcomer, given)):
                return waiting
            view = await self._units.read(self._unit(arrivals.look_at_thread, newcomer))
            plan = plan_admission(newcomer, view, given)
            if not isinstance(plan, Displace):
                return await self._carried_out(plan, newcomer, given)
        try:
            answer = await self._units.transaction(self._unit(arrivals.admit_locked, newcomer, given))
        except arrivals.StartAgain:
            return None
        return answer if isinstance(answer, Admitted) else await self._carried_out(answer, newcomer, given)

    async def _entered(self, newcomer: Newcomer) -> Run | None:
        how = self._units.once if newcomer.user_limit is None else self._units.transaction
        return await how(self._unit(arrivals.enter, newcomer))

    async def _wait_behind(self, newcomer: Newcomer, given: Given) -> Admitted | None:
        try:
            return await self._units.transaction(self._unit(arrivals.wait_behind, newcomer, given))
        except arrivals.StartAgain:
            return None

    async def _carried_out(self, plan: Plan, newcomer: Newcomer, given: Given) -> Admission | None:
        match plan:
            case Reuse() | Clash() | Deny() | DenyFull() | DenyUser():
                return plan
            case ClearFirst(run, event):
                await self.apply(run.key, event, Actor(newcomer.worker_id), given)
                return None
            case PromoteFirst():
                await self._promoted([newcomer.thread_id])
                return None
            case Enter() | Wait() | Displace():
                return None
            case _:
                assert_never(plan)

    async def _finished(self, answer: Admission, newcomer: Newcomer, given: Given) -> Admission:
        """O3: an incumbent that nobody holds is forced on the spot, and the newcomer that waited for it goes on."""
        if not isinstance(answer, Admitted) or answer.incumbent is None or answer.incumbent.cancel_action is None:
            return answer
        by = Actor(newcomer.worker_id, capabilities=newcomer.required_capabilities)
        seen = await self._units.read(self._unit(events.look, answer.incumbent.key, by))
        if not seen.unheld or not isinstance(
            await self.apply(answer.incumbent.key, RunEvent.FORCE, by, given), Applied
        ):
            return answer
        if newcomer.take:
            await self.apply(answer.run.key, RunEvent.CLAIM, by)
        seen = await self._units.read(self._unit(events.look, answer.run.key, by))
        return Admitted(seen.run or answer.run, None, answer.ended)

    # --- Events -----------------------------------------------------------------------------------------------------

    async def apply(self, key: RunKey, event: RunEvent, by: Actor, given: Given = NOTHING_GIVEN) -> Decision:
        """See ``RunStore.apply``."""
        incoming.check_key(key)
        asked = Settlement(key, event, by, incoming.storable_given(given))
        if self._coalescer is not None and event in TOGETHER:
            return await self._coalescer.apply(asked)
        return await self._alone(asked)

    async def settle_many(self, settlements: Sequence[Settlement]) -> tuple[Decision, ...]:
        """See ``RunStore.settle_many``."""
        return tuple(await asyncio.gather(*(self.apply(one.key, one.event, one.by, one.given) for one in settlements)))

    async def _alone(self, asked: Settlement) -> Decision:
        key, event, by, given = asked.key, asked.event, asked.by, asked.given
        if TRANSITIONS[event].ends or event in UNDER_LOCK:
            return await self._end(key, event, by, given)
        for _ in range(events.TRIES):
            run = await self._units.once(self._unit(events.attempt, key, event, by, given))
            if run is not None:
                return Applied(run)
            decision = await self._units.read(self._unit(events.explain, key, event, by, given))
            if not isinstance(decision, Applied) or decision.repeated:
                return decision
        raise StoreUnavailable(f"run {key.run_id} kept changing under {event.value!r}; repeat it")

    async def _together(self, event: RunEvent, shape: Shape, asked: Sequence[Settlement]) -> dict[RunId, Run]:
        return await self._units.once(self._unit(together.apply_together, event, shape, asked))

    async def _end(self, key: RunKey, event: RunEvent, by: Actor, given: Given) -> Decision:
        if endings.optimistic(event) and self._dialect.writes_in_ctes:
            run = await self._units.once(self._unit(endings.end_optimistically, key, event, by, given))
            if run is not None:
                return Applied(run)
        return await self._ending(self._unit(endings.end_locked, key, event, by, given))

    # --- Sets -------------------------------------------------------------------------------------------------------

    async def claim(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.claim``. On SQLite any commit may mean work: it is looked for before the file is locked."""
        if not self._dialect.writes_in_ctes and not await self._possible((RunEvent.CLAIM,), by, NOTHING_GIVEN):
            return ()
        return await self._change(RunEvent.CLAIM, by, NOTHING_GIVEN, limit)

    async def take_over(self, by: Actor, given: Given, limit: int) -> Swept:
        """See ``RunStore.take_over``."""
        given = incoming.storable_given(given)
        due = await self._possible(endings.TAKE_OVERS, by, given)
        changed = {
            event: await self._many(event, by, given, limit) if event in due else () for event in endings.TAKE_OVERS
        }
        return Swept(
            ended=changed[RunEvent.TAKE_OVER_FAIL] + changed[RunEvent.TAKE_OVER_FAIL_WAITING],
            resumed=changed[RunEvent.TAKE_OVER_RESUME],
            freed=changed[RunEvent.TAKE_OVER_RESUME_WAITING],
            released=changed[RunEvent.TAKE_OVER_RELEASE],
        )

    async def force(self, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.force``."""
        given = incoming.storable_given(given)
        due = await self._possible((RunEvent.FORCE,), by, given)
        return await self._many(RunEvent.FORCE, by, given, limit) if due else ()

    async def promote(self, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.promote``."""
        if limit < 1:
            return ()
        for _ in range(events.TRIES):
            threads = await self._units.read(self._unit(reads.idle_threads_with_due_runs, limit))
            promoted = await self._promoted(threads) if threads else ()
            if promoted is not None:
                return promoted
        raise StoreUnavailable("idle threads kept changing under a promotion; repeat it")

    async def _promoted(self, threads: Sequence[ThreadId]) -> tuple[Run, ...] | None:
        """None, and nothing is promoted: somebody entered one of the threads just before its first run was due. The
        index has the last word (I1), and a new look sees who it was."""
        try:
            return await self._units.transaction(self._unit(endings.promote_under_lock, threads))
        except IntegrityError:
            return None

    async def hand_over(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.hand_over``."""
        return await self._change(RunEvent.HAND_OVER, by, NOTHING_GIVEN, limit)

    async def end_held(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.end_held``."""
        return await self._end_many(RunEvent.SETTLE_CANCELLED, by, SHUTDOWN, limit)

    async def release_held(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.release_held``."""
        return await self._end_many(RunEvent.RELEASE, by, NOTHING_GIVEN, limit)

    async def re_home(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.re_home``."""
        return await self._change(RunEvent.RE_HOME, by, NOTHING_GIVEN, limit)

    async def end_waiting(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.end_waiting``."""
        return await self._end_many(RunEvent.END_WAITING, by, NOTHING_GIVEN, limit)

    async def purge(self, *, before: Micros, limit: int) -> int:
        """See ``RunStore.purge``."""
        if limit < 1:
            return 0
        return len(await self._units.transaction(self._unit(endings.purge, before, limit)))

    async def _possible(self, events: tuple[RunEvent, ...], by: Actor, given: Given) -> frozenset[RunEvent]:
        return await self._units.read(self._unit(endings.possible, events, by, given))

    async def _change(self, event: RunEvent, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        if limit < 1:  # a worker without a free slot; SQLite would take a negative limit for none
            return ()
        how = self._units.once if self._dialect.writes_in_ctes else self._units.transaction
        return await how(self._unit(endings.change_batch, event, by, given, limit))

    async def _many(self, event: RunEvent, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        how = self._end_many if TRANSITIONS[event].ends else self._change
        return await how(event, by, given, limit)

    async def _end_many(self, event: RunEvent, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        if limit < 1:
            return ()
        return await self._ending(self._unit(endings.end_batch, event, by, given, limit))

    async def _ending(self, unit: Unit[T]) -> T:
        """What ends a waiting run, or promotes one, on a thread that nobody holds may lose the thread to a newcomer, as
        ``_promoted`` may: then all of it again, with a look that sees who it was."""
        for _ in range(events.TRIES - 1):
            try:
                return await self._units.transaction(unit)
            except IntegrityError:
                continue
        return await self._units.transaction(unit)

    # --- Reads ------------------------------------------------------------------------------------------------------

    async def get(self, key: RunKey, *, scope: Scope) -> Run | None:
        """See ``RunStore.get``."""
        incoming.check_key(key)
        incoming.check_scope(scope)
        return await self._units.read(self._unit(reads.get, key, scope=scope))

    async def get_many(self, thread_id: ThreadId, run_ids: Collection[RunId], *, scope: Scope) -> dict[RunId, Run]:
        """See ``RunStore.get_many``."""
        for run_id in run_ids:
            incoming.check_key(RunKey(thread_id, run_id))
        incoming.check_scope(scope)
        return await self._units.read(self._unit(reads.get_many, thread_id, run_ids, scope=scope))

    async def list_runs(
        self,
        thread_id: ThreadId,
        *,
        scope: Scope,
        only: RunFilter | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """See ``RunStore.list_runs``."""
        incoming.check_ids(thread_id=thread_id)
        incoming.check_scope(scope)
        unit = self._unit(reads.list_runs, thread_id, scope=scope, only=only, limit=limit, after=after)
        return await self._units.read(unit)

    async def owned(self, worker_id: WorkerId) -> tuple[Run, ...]:
        """See ``RunStore.owned``."""
        return await self._units.read(self._unit(reads.owned, worker_id))

    async def active(self, thread_id: ThreadId) -> Run | None:
        """See ``RunStore.active``."""
        incoming.check_ids(thread_id=thread_id)
        return await self._units.read(self._unit(reads.active, thread_id))

    async def queue(self, thread_id: ThreadId) -> tuple[Run, ...]:
        """See ``RunStore.queue``."""
        incoming.check_ids(thread_id=thread_id)
        return await self._units.read(self._unit(reads.queue, thread_id))

    async def is_newest(self, key: RunKey) -> bool:
        """See ``RunStore.is_newest``."""
        incoming.check_key(key)
        return await self._units.read(self._unit(reads.is_newest, key))

    async def threads_of(
        self, user_id: str, *, limit: int = 100, after: ThreadId | None = None
    ) -> tuple[ThreadId, ...]:
        """See ``RunStore.threads_of``."""
        incoming.check_scope(OneUser(user_id))
        incoming.check_ids(after=after)
        return await self._units.read(self._unit(reads.threads_of, user_id, limit=limit, after=after))

    async def has_inflight(self, thread_id: ThreadId) -> bool:
        """See ``RunStore.has_inflight``."""
        incoming.check_ids(thread_id=thread_id)
        return await self._units.read(self._unit(reads.in_flight, thread_id))

    async def next_due(self) -> Micros | None:
        """See ``RunStore.next_due``."""
        return await self._units.read(self._unit(reads.next_due))

    async def unclaimed(self, waited_for: Micros, *, limit: int, after: Run | None = None) -> tuple[Run, ...]:
        """See ``RunStore.unclaimed``."""
        return await self._units.read(self._unit(waiters.unclaimed, waited_for, limit=limit, after=after))

    async def have_ended(self, run_ids: Collection[RunId]) -> Mapping[RunId, bool]:
        """See ``RunStore.have_ended``."""
        for run_id in run_ids:
            incoming.check_ids(run_id=run_id)
        return await self._units.read(self._unit(waiters.have_ended, run_ids))

    async def note_waiting(self, key: RunKey, waits_for: Mapping[str, Any]) -> bool:
        """See ``RunStore.note_waiting``."""
        incoming.check_key(key)
        return await self._units.once(self._unit(reads.note_waiting, key, waits_for))

    async def seizable(self, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """See ``RunStore.seizable``."""
        return await self._units.read(self._unit(reads.seizable, by, given, limit))

    async def counts(self) -> Counts:
        """See ``RunStore.counts``."""
        return await self._units.read(self._unit(reads.counts))

    async def tokens_by_thread(self, thread_id: ThreadId, *, scope: Scope, include_active: bool = False) -> TokenTotals:
        """See ``RunStore.tokens_by_thread``."""
        incoming.check_ids(thread_id=thread_id)
        incoming.check_scope(scope)
        unit = self._unit(reads.tokens_by_thread, thread_id, scope=scope, include_active=include_active)
        return await self._units.read(unit)

    async def visibility(self, thread_id: ThreadId, *, scope: Scope) -> Visibility:
        """See ``RunStore.visibility``."""
        incoming.check_ids(thread_id=thread_id)
        incoming.check_scope(scope)
        return await self._units.read(self._unit(reads.visibility, thread_id, scope=scope))

    def _unit(self, function: Callable[..., T], *arguments: Any, **named: Any) -> Unit[T]:
        return partial(_run, function, self._dialect, arguments, named)


def _run(
    function: Callable[..., T], dialect: Any, arguments: tuple[Any, ...], named: dict[str, Any], connection: Connection
) -> T:
    return function(connection, dialect, *arguments, **named)
