"""Carrying a run out in the caller's own task: wait for its turn, start it, stop with it, end it.

``try_start`` answers; ``Execution`` is the same as a block, which ends the run by the way in which it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Token as ContextToken
from types import TracebackType
from typing import Any, final

from deerflow_runs.errors import RunCancelled, StillWaiting, UsageError
from deerflow_runs.manager.admitting import Spawn
from deerflow_runs.manager.answers import Ended, Start, Started, Waiting
from deerflow_runs.manager.body import BodyEnd, Failed, Finished, Stopped, body_end
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import OwnershipLost, RunLease, enter, leave
from deerflow_runs.manager.life import Life
from deerflow_runs.manager.registry import Expected, Held, Phase
from deerflow_runs.model import EVERYONE, Run, RunKey


@final
class Attaching:
    """Hands granted runs to callers. Belongs to the main loop."""

    def __init__(self, ground: Ground, spawn: Spawn, withdraw: Callable[[RunKey], Coroutine[Any, Any, None]]) -> None:
        self._ground = ground
        self._spawn = spawn
        self._withdraw = withdraw
        self._attached: dict[Held, Life] = {}

    async def try_start(self, key: RunKey, timeout: float | None) -> Start:
        """See ``RunManager.try_start``."""
        held = self._ground.registry.get(key.run_id)
        if held is None:
            expected = self._ground.registry.expected(key.run_id)
            if expected is None:
                return await self._not_here(key)
            if not await self._granted(expected, timeout):
                return Waiting(key)
            if expected.granted.cancelled():
                return Ended(await self._row(key))
            held = expected.granted.result()
        return await self._start(held)

    async def _granted(self, expected: Expected, timeout: float | None) -> bool:
        """Whether its turn, or its end, came in time. A caller that is gone meanwhile takes its run along (O6)."""
        self._ground.work.set()
        try:
            done, _ = await asyncio.wait({expected.granted}, timeout=timeout)
        except asyncio.CancelledError:
            _ = self._spawn(self._withdraw(expected.key), "withdrawal")
            raise
        return bool(done)

    async def _start(self, held: Held) -> Start:
        if held.phase is not Phase.UNATTACHED:
            return await self._too_late(held)
        life = Life(self._ground, held)
        held.phase = Phase.STARTING
        begun = self._spawn(self._begin(held, life), f"start of {held.run.run_id}")
        try:
            started = await asyncio.shield(begun)
        except asyncio.CancelledError:
            _ = self._spawn(self._end_begun(held, begun), f"end of {held.run.run_id}")
            raise
        if started:
            return Started(held.lease)
        return Ended(held.ended or await self._row(held.key))

    async def _too_late(self, held: Held) -> Start:
        """It is being ended, by a cancel, a drain or because nobody had come; or it has a body."""
        if held.phase is not Phase.SETTLING and held.lease.stop_cause is None:
            raise UsageError(f"run {held.run.run_id} is carried out already; a run has one body")
        await held.over.wait()
        return Ended(held.ended or await self._row(held.key))

    async def _begin(self, held: Held, life: Life) -> bool:
        begun = False
        try:
            begun = await life.start()
        finally:
            if not begun:
                life.leave()
        if begun:
            self._attached[held] = life
            life.watch()
            life.abandoned.add_done_callback(lambda left: self._left_behind(held, life, left))
        return begun

    async def _end_begun(self, held: Held, begun: asyncio.Task[bool]) -> None:
        """The caller is gone while its run was being started: it has no body (O6)."""
        if await begun and (life := self._attached.pop(held, None)) is not None:
            await self._finish(life, Stopped(None))

    def _left_behind(self, held: Held, life: Life, end: asyncio.Future[Stopped]) -> None:
        """The caller's task swallows its cancellation: the run ends without it (O4)."""
        if self._attached.pop(held, None) is not None:
            _ = self._spawn(self._finish(life, end.result()), f"end of {held.run.run_id}")

    async def _not_here(self, key: RunKey) -> Start:
        run = await self._row(key)
        if run is None:
            raise UsageError(f"there is no run {key.run_id} on thread {key.thread_id}")
        if run.terminal:
            return Ended(run)
        raise UsageError(f"run {key.run_id} is carried out by whoever admitted it, not here")

    async def _row(self, key: RunKey) -> Run | None:
        return await self._ground.store.get(key, scope=EVERYONE)

    def carries(self, lease: RunLease) -> bool:
        """Whether the run is still the caller's who was given ``lease``; not if it had to be ended without it."""
        held = self._ground.registry.get(lease.run_id)
        return held is not None and held in self._attached and held.lease is lease

    # --- With the run -----------------------------------------------------------------------------------------------

    def life_of(self, key: RunKey) -> tuple[Held, Life]:
        """The run that a caller carries out, and its life."""
        held = self._ground.registry.get(key.run_id)
        life = self._attached.get(held) if held is not None else None
        if held is None or life is None:
            raise UsageError(f"run {key.run_id} was not started by try_start() or execute() of this manager")
        return held, life

    async def finish(self, key: RunKey, end: BodyEnd) -> Run | None:
        """Write the end of a run that a caller carried out. Seen through whatever becomes of the caller; None: it was
        not this holder's to end."""
        held = self._ground.registry.get(key.run_id)
        if held is None:
            return None
        if held.phase is Phase.SETTLING and held not in self._attached:  # somebody ends it already
            await held.over.wait()
            return held.ended
        held, life = self.life_of(key)
        del self._attached[held]
        await asyncio.shield(self._spawn(self._finish(life, end), f"end of {key.run_id}"))
        return held.ended

    async def _finish(self, life: Life, end: BodyEnd) -> None:
        try:
            await life.part(end)
        finally:
            life.leave()

    def end_if_unattached(self, held: Held) -> None:
        """A run that was told to stop and whose caller has not come for it has nobody else to end it."""
        if held.phase is Phase.UNATTACHED and not held.run.reservation:
            end = Stopped(held.lease.stop_cause, held.lease.cancel_action)
            _ = self._spawn(self.end_unattached(held, end), f"end of {held.run.run_id}")

    async def end_unattached(self, held: Held, end: BodyEnd) -> None:
        """End a granted run that nobody took up."""
        if held.phase is Phase.UNATTACHED:
            held.phase = Phase.STARTING
            await Life(self._ground, held).carry_out_end(end)


@final
class Execution:
    """``async with manager.execute(run) as lease``: the block is the run's body, in the caller's own task.

    Entering waits for the turn and raises ``StillWaiting`` or ``RunCancelled``. When the run is cancelled, its time is
    up or the worker drains, the block is cancelled and leaving it raises ``RunCancelled``; when the run is lost,
    ``OwnershipLost``. Otherwise the run ends as the block does: success, or an error that is raised on.
    """

    def __init__(self, attaching: Attaching, key: RunKey, timeout: float | None) -> None:
        self._attaching = attaching
        self._key = key
        self._timeout = timeout
        self._lease: RunLease | None = None
        self._context: ContextToken[RunLease | None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> RunLease:
        started = await self._attaching.try_start(self._key, self._timeout)
        match started:
            case Waiting(key):
                raise StillWaiting(run_id=key.run_id, thread_id=key.thread_id)
            case Ended(run):
                raise self._cancelled(run)
            case Started(lease):
                return self._entered(lease)

    def _entered(self, lease: RunLease) -> RunLease:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        _, life = self._attaching.life_of(self._key)
        self._lease, self._task, self._cancelling = lease, task, task.cancelling()
        self._context = enter(lease)
        life.bind(task)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        lease, task = self._lease, self._task
        assert lease is not None
        assert task is not None
        if self._context is not None:
            leave(self._context)
        end = body_end(lease, lease.outcome, error)
        await take_back_cancellations(lease, task, error, before=self._cancelling)
        run = await self._attaching.finish(self._key, end) if self._attaching.carries(lease) else None
        if task.cancelling() == self._cancelling:  # otherwise somebody else cancels it, and is heard first
            self._raise(lease, end, error, run)
        return False

    def _raise(self, lease: RunLease, end: BodyEnd, error: BaseException | None, run: Run | None) -> None:
        """What the block's own error does not say yet."""
        match end:
            case Finished() | Failed():
                return
            case Stopped() if lease.fenced:
                raise OwnershipLost(lease.run_id, lease.fence_reason or "lost") from error
            case Stopped(cause, _) if cause is not None:
                raise self._cancelled(run) from error
            case _:
                return

    def _cancelled(self, run: Run | None) -> RunCancelled:
        reason = run.stop_reason if run is not None else None
        ended_as = run.status.value if run is not None and run.terminal else None
        return RunCancelled(
            run_id=self._key.run_id, thread_id=self._key.thread_id, stop_reason=reason, ended_as=ended_as
        )


async def take_back_cancellations(
    lease: RunLease, task: asyncio.Task[Any], error: BaseException | None, *, before: int
) -> None:
    """Leave the block of ``lease`` in ``task``, the current one, which ``error`` is leaving: the lease cancels it no
    more, and what it did is undone. A cancellation that the block never noticed is taken here; if somebody else has
    cancelled the task as well, which counted ``before`` cancellations when it entered, that is still to be heard."""
    lease.unbind()
    cancelled = lease.cancellations
    for _ in range(cancelled):
        task.uncancel()
    if cancelled and not isinstance(error, asyncio.CancelledError):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if task.cancelling() > before:
                task.cancel()
                task.uncancel()
