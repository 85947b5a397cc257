"""The life of one held run: start, body, ending (O18–O20, O29, O35).

The outer task, which is never cancelled by a cancel of the run, starts it, watches its body and writes its one end.
What an end means is the store's row to say; here it is only asked for, again and again, while the run is ours. When a
run is granted is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, assert_never, final

from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.manager.body import BodyEnd, Deferred, Failed, Finished, Stopped, body_end, error_text
from deerflow_runs.manager.executor import NOTHING_TO_RESTORE, Executor
from deerflow_runs.manager.faults import log_fault
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease, StopCause, enter
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.manager.waiting import pause_after
from deerflow_runs.model import EVERYONE, MICROS_PER_SECOND, CancelAction, Run, RunStatus, StopReason, micros
from deerflow_runs.observe import (
    LingeringEnded,
    RestoreFailed,
    RunDeferred,
    RunFenced,
    RunGivenBack,
    RunHandedOver,
    RunLingers,
    RunRestored,
    RunSeized,
    RunSettled,
    RunStarted,
    SettleRetried,
    error_code,
)
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Applied, Decision, Given, Refused
from deerflow_runs.protocol.drain import Parting, parting
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent

INSIST_EVERY: Final = 1.0
"""Seconds between two cancellations of a body that was told to stop."""


SETTLING: Final = {
    RunStatus.SUCCESS: RunEvent.SETTLE_SUCCESS,
    RunStatus.ERROR: RunEvent.SETTLE_ERROR,
    RunStatus.TIMEOUT: RunEvent.SETTLE_TIMEOUT,
    RunStatus.INTERRUPTED: RunEvent.SETTLE_CANCELLED,
}


@final
class Life:
    """Sees one held run to its end in this process. ``carry_out`` does everything; a host that runs the body in a task
    of its own calls ``start`` and ``part``. ``abandoned`` is done when the body had to be left behind."""

    def __init__(self, ground: Ground, held: Held) -> None:
        self._ground = ground
        self._held = held
        self.abandoned: Final[asyncio.Future[Stopped]] = asyncio.get_running_loop().create_future()
        self._insisting: asyncio.Task[None] | None = None

    @property
    def _lease(self) -> RunLease:
        """The present one: a seizure, or a body that is left behind, is answered with a new lease."""
        return self._held.lease

    async def carry_out(self) -> None:
        """From the grant to the end. What cannot be told to the store is given back by a sweep (O12)."""
        try:
            if await self.start():
                await self.part(await self._body())
        except Exception as error:  # noqa: BLE001 - a task of its own: nobody else would hear of it
            self._broken(error)
        finally:
            self.leave()

    async def carry_out_end(self, end: BodyEnd) -> None:
        """The end of a run that never had a body here."""
        try:
            await self.part(end)
        except Exception as error:  # noqa: BLE001 - a task of its own: nobody else would hear of it
            self._broken(error)
        finally:
            self.leave()

    async def carry_out_restore(self) -> None:
        """The rest of a life that somebody else began: its rollback, and its end. For a run that was just seized."""
        try:
            self._held.phase = Phase.SETTLING
            self._lease.end()
            if not await self.restore():
                await self._roll_back()
        except Exception as error:  # noqa: BLE001 - a task of its own: nobody else would hear of it
            self._broken(error)
        finally:
            self.leave()

    def _broken(self, error: Exception) -> None:
        """Not the run's code but what carries it out has failed."""
        log_fault(f"what carries out run {self._lease.run_id}", error)
        self._lose(f"{type(error).__name__} here")

    # --- Start ------------------------------------------------------------------------------------------------------

    async def start(self) -> bool:
        """Let the run begin; False: it has ended or is lost, and its body must not run (O6, O20)."""
        held, lease = self._held, self._lease
        held.phase = Phase.STARTING
        given = NOTHING_GIVEN
        if held.executor is not None and lease.run.turn is None:
            try:
                given = Given(base_heads=await held.executor.heads(lease.run))
            except Exception as error:  # noqa: BLE001 - an executor's own failure is the run's
                self._log(error)
                await self.part(Failed(error_text(error)))
                return False
        decision = await self._ask(RunEvent.START, given, unless_stopped=True)
        match decision:
            case Applied(run):
                self._started(run)
                return True
            case Refused():
                await self._refused(decision)
                return False
            case None:
                await self.part(Stopped(lease.stop_cause, lease.cancel_action))
                return False
            case _:
                assert_never(decision)

    def _started(self, run: Run) -> None:
        self._lease.saw(run)
        self._held.phase = Phase.RUNNING
        if run.run_timeout is not None and run.started_at is not None:
            spent = run.updated_at - run.started_at  # both by the store's clock
            left = (run.run_timeout - spent) / MICROS_PER_SECOND
            self._held.deadline = self._ground.clock.boot_time() + left
        self._ground.observe(RunStarted(**self._names(), epoch=run.epoch, attempt=run.attempt))

    # --- Body -------------------------------------------------------------------------------------------------------

    async def _body(self) -> BodyEnd:
        lease, body = self._lease, self._in_context(self._run_body)
        self.bind(body)
        await asyncio.wait({body, self.abandoned}, return_when=asyncio.FIRST_COMPLETED)
        if not body.done():
            return self.abandoned.result()
        error = asyncio.CancelledError() if body.cancelled() else body.exception()
        end = body_end(lease, None if error else body.result(), error)
        if error is not None and isinstance(end, Failed):
            self._log(error)
        return end

    def _log(self, error: BaseException) -> None:
        """The code of a run in the background has no caller to whom it could be raised."""
        lease = self._lease
        log_fault(f"{lease.run.executor or 'the function'} of run {lease.run_id} on {lease.thread_id}", error)

    async def _run_body(self) -> Outcome | None:
        executor, run = self._held.executor, self._lease.run
        if executor is None:
            raise UsageError(f"no executor {run.executor!r} is registered with this manager")
        payload = executor.decode(await self._stored_input(run), run.payload_version)
        return await executor.run(self._lease, payload)

    async def _stored_input(self, run: Run) -> Mapping[str, Any]:
        """Whoever admitted the run has it already, and a function needs none; a claim does not bring it along (O26)."""
        failures = 0
        while run.kwargs is None and run.executor is not None:
            try:
                return ((await self._ground.store.get(run.key, scope=EVERYONE)) or run).kwargs or {}
            except StoreUnavailable as error:
                failures += 1
                self._ground.observe(SettleRetried(**self._names(), error=error_code(error), failures=failures))
                await self._ground.clock.sleep(pause_after(failures))
        return run.kwargs or {}

    def _in_context(self, work: Any) -> asyncio.Task[Any]:
        """A task of its own with a copy of this one's context: nothing leaks to a sibling or back."""
        context = contextvars.copy_context()
        context.run(enter, self._lease)
        name = f"run {self._lease.run_id}"
        return asyncio.get_running_loop().create_task(work(), name=name, context=context)

    def bind(self, body: asyncio.Task[Any]) -> None:
        """``body`` runs the run's code. When it is told to stop, it is told again until it does, and left behind after
        the grace of a cancel (O4)."""
        if self._insisting is not None:  # it was told before anybody knew the task
            self._insisting.cancel()
            self._insisting = None
        self._lease.bind(body, partial(self._told_to_stop, body))

    def watch(self) -> None:
        """The run's code is a caller's, in whichever task: one that does not come back after it was told to stop is not
        waited for longer than a body."""
        self._lease.bind(None, partial(self._told_to_stop, None))

    def _told_to_stop(self, body: asyncio.Task[Any] | None) -> None:
        if self._insisting is None:
            name = f"stopping {self._lease.run_id}"
            self._insisting = asyncio.get_running_loop().create_task(self._insist(body), name=name)

    async def _insist(self, body: asyncio.Task[Any] | None) -> None:
        clock = self._ground.clock
        until = clock.boot_time() + self._ground.config.cancel_grace.total_seconds()
        while not _over(body) and (left := until - clock.boot_time()) > 0:
            await clock.sleep(min(INSIST_EVERY, left))
            self._lease.insist()
        if not _over(body) and not self.abandoned.done():
            self._leave_behind(body)

    def _leave_behind(self, body: asyncio.Task[Any] | None) -> None:
        """It swallows every cancellation. Its run goes on without it; its gate is closed: nothing of it is stored."""
        if body is not None:
            self._count_lingering(body)
        end = Stopped(self._lease.stop_cause, self._lease.cancel_action)
        self._fresh_lease(self._lease.run)
        self.abandoned.set_result(end)

    def _count_lingering(self, body: asyncio.Task[Any]) -> None:
        ground, names = self._ground, self._names()
        ground.registry.lingers(body)
        ground.observe(RunLingers(**names, seconds=ground.config.cancel_grace.total_seconds()))
        body.add_done_callback(lambda _: ground.observe(LingeringEnded(**names)))

    def _fresh_lease(self, run: Run) -> None:
        """Go on under a lease that the body does not have; its own is closed for good."""
        before = self._held.lease
        self._held.lease = RunLease(before.run, self._ground.session)
        self._held.lease.saw(run)
        self._held.lease.end()
        if before.fence_reason is not None:
            self._held.lease.fence(before.fence_reason)
        before.close()

    # --- Ending -----------------------------------------------------------------------------------------------------

    async def part(self, end: BodyEnd) -> None:
        """Write the run's one end, or give it to somebody else. What the row says in the end is the store's answer."""
        self._held.phase = Phase.SETTLING
        self._held.deadline = None
        self._lease.end()
        match end:
            case Finished(outcome):
                await self._settle(SETTLING[outcome.status], outcome.given())
            case Failed(error):
                await self._settle(RunEvent.SETTLE_ERROR, Given(error=error))
            case Deferred(names):
                await self._defer(names)
            case Stopped(cause, action):
                await self._stopped(cause, action)
            case _:
                assert_never(end)

    async def _stopped(self, cause: StopCause | None, action: CancelAction | None) -> None:
        match cause:
            case None:
                await self._settle(RunEvent.SETTLE_CANCELLED, Given(stop_reason=StopReason.CALLER_GONE.value))
            case StopCause.CANCEL:
                await self._cancelled(action)
            case StopCause.TIMEOUT:
                given = Given(stop_reason=StopReason.TIMEOUT.value, error="the run's time was up")
                await self._settle(RunEvent.SETTLE_TIMEOUT, given)
            case StopCause.DRAIN:
                await self._leave_with_worker()
            case StopCause.SUSPENDED:
                await self.give_back(StopReason.ORPHAN_RECOVERED.value)
            case StopCause.LOST:
                pass
            case _:
                assert_never(cause)

    async def _cancelled(self, action: CancelAction | None) -> None:
        """The first action that the row recorded is what happens; a cancel that the store never heard of is recorded
        now (O19)."""
        if action is not None:
            recorded = await self._ask(RunEvent.REQUEST_CANCEL, Given(action=action))
            if isinstance(recorded, Applied) and recorded.run.rollback_owed:
                await self._roll_back()
                return
        await self._settle(RunEvent.SETTLE_CANCELLED, NOTHING_GIVEN)

    async def _leave_with_worker(self) -> None:
        """O35: another worker goes on from the last finished step, or nobody can. Hundreds of lives may come here at
        once: the drain writes for all of them, and what it did not write is written here."""
        if self._held.together is not None:
            self._held.stopped.set()
            await self._held.together.wait()
            if self._held.over.is_set():
                return
        if parting(self._lease.run, me=self._lease.worker_id) is Parting.HAND_OVER:
            await self._move(RunEvent.HAND_OVER, NOTHING_GIVEN)
        else:
            await self._settle(RunEvent.SETTLE_CANCELLED, Given(stop_reason=StopReason.SHUTDOWN.value))

    async def _defer(self, names: frozenset[str]) -> None:
        decision = await self._ask(RunEvent.DEFER, Given(requirements=names))
        if isinstance(decision, Refused) and decision.reason in (Refusal.RECORDED, Refusal.NOTHING_NEW):
            text = f"NeedsCapability: needs {', '.join(sorted(names))}, and cannot be deferred any more"
            await self._settle(RunEvent.SETTLE_ERROR, Given(error=text))
        elif await self._happened(decision) is not None:
            self._ground.observe(RunDeferred(**self._names(), requirements=tuple(sorted(names))))
            await self._ground.work_appeared()

    async def give_back(self, reason: str) -> None:
        """This process cannot go on with it: as if it had died with the run (O12, O30)."""
        config = self._ground.config
        pause = Given(
            backoff=micros(config.backoff_min.total_seconds()),
            backoff_limit=micros(config.backoff_max.total_seconds()),
            stop_reason=reason,
        )
        decision = await self._ask(RunEvent.GIVE_BACK_RESUME, pause)
        if isinstance(decision, Refused) and decision.reason is Refusal.OTHER_POLICY:
            decision = await self._ask(RunEvent.GIVE_BACK_FAIL, pause)
        if (run := await self._happened(decision)) is not None:
            self._ground.observe(RunGivenBack(**self._names(), status=run.status))
            await self._after(run)

    async def _move(self, event: RunEvent, given: Given) -> None:
        if await self._happened(await self._ask(event, given)) is not None:
            self._ground.observe(RunHandedOver(**self._names()))
            await self._ground.work_appeared()

    async def _settle(self, event: RunEvent, given: Given) -> None:
        limit = self._ground.config.max_error_text
        if given.error is not None:
            given = replace(given, error=given.error.encode(errors="replace")[:limit].decode(errors="ignore"))
        if (run := await self._happened(await self._ask(event, given))) is not None:
            await self._ended(run)

    async def _happened(self, decision: Decision | None) -> Run | None:
        """The row, if it happened. Otherwise what the refusal demands instead has been done, or the run is lost."""
        match decision:
            case Applied(run):
                return run
            case Refused():
                await self._refused(decision)
                return None
            case None:
                return None
            case _:
                assert_never(decision)

    async def _ended(self, run: Run) -> None:
        self._held.ended = run
        begun = run.started_at if run.started_at is not None else run.created_at
        seconds = ((run.settled_at or run.updated_at) - begun) / MICROS_PER_SECOND
        event = RunSettled(
            **self._names(), epoch=run.epoch, status=run.status, stop_reason=run.stop_reason, seconds=seconds
        )
        self._ground.observe(event)
        await self._after(run)

    async def _after(self, run: Run) -> None:
        """Whoever waited behind it has been promoted in the same transaction (O28); somebody should take it up."""
        if run.queue_behind or run.vacant:
            await self._ground.work_appeared()

    async def _refused(self, decision: Refused) -> None:
        """The row said no. What must happen instead follows from the reason, never from what was asked for."""
        match decision.reason:
            case Refusal.ROLLBACK_OWED:
                await self._roll_back()
            case Refusal.CANCEL_RECORDED:
                run = decision.run
                await (self._roll_back() if run is not None and run.rollback_owed else self._settle_cancel())
            case Refusal.NOTHING_OWED:
                await self._settle_cancel()
            case Refusal.LOST | Refusal.TERMINAL | Refusal.UNKNOWN:
                if decision.run is not None and decision.run.terminal:
                    self._held.ended = decision.run
                self._lose(decision.reason.value)
            case reason:
                raise UsageError(f"run {self._lease.run_id} cannot end here: {reason.value}")

    async def _settle_cancel(self) -> None:
        await self._settle(RunEvent.SETTLE_CANCELLED, NOTHING_GIVEN)

    def _lose(self, reason: str) -> None:
        if not self._lease.fenced:
            epoch = self._lease.epoch
            self._lease.fence(f"the store answered: {reason}")
            self._ground.observe(RunFenced(**self._names(), epoch=epoch, reason=reason))

    # --- Rollback ---------------------------------------------------------------------------------------------------

    async def _roll_back(self) -> None:
        """O4: seize, which fences this holder's own writes in flight; restore; settle. A failed restore is tried again
        under a new epoch until the attempts are used up."""
        failures = 0
        while True:
            seized = await self._ask(RunEvent.SEIZE, self._seizure())
            if not isinstance(seized, Applied):
                if isinstance(seized, Refused):
                    await self._refused(replace(seized, reason=_lost_or(seized.reason)))
                return
            self._fresh_lease(seized.run)
            self._ground.observe(RunSeized(**self._names(), epoch=seized.run.epoch, attempt=seized.run.attempt))
            if await self.restore():
                return
            failures += 1
            await self._ground.clock.sleep(pause_after(failures))

    def _seizure(self) -> Given:
        return Given(cancel_grace=micros(self._ground.config.cancel_grace.total_seconds()))

    async def restore(self) -> bool:
        """Put the state before the run back and end it. For a run that is seized; True: there is nothing left to do."""
        run = self._lease.run
        if run.attempt > run.max_attempts:
            text = f"the state before the run could not be restored in {run.max_attempts} attempts"
            await self._settle(RunEvent.SETTLE_ROLLBACK_FAILED, Given(error=text))
            return True
        error = await self._restored_by(self._held.executor or NOTHING_TO_RESTORE)
        if error is not None:
            self._log(error)
            self._ground.observe(RestoreFailed(**self._names(), error=type(error).__name__))
            return self._lease.fenced
        self._ground.observe(RunRestored(**self._names()))
        await self._settle(RunEvent.SETTLE_CANCELLED, Given(restored=True))
        return True

    async def _restored_by(self, executor: Executor) -> BaseException | None:
        """What went wrong, whatever it was: the rollback is still owed then. A loss stops it, and its cancellation is
        not this task's."""
        restoring = self._in_context(partial(executor.restore, self._lease))
        self._lease.bind(restoring, _nothing_else)
        try:
            await asyncio.wait({restoring})
        except asyncio.CancelledError:
            restoring.cancel()
            raise
        finally:
            self._lease.unbind()
        return asyncio.CancelledError() if restoring.cancelled() else restoring.exception()

    # --- Asking -----------------------------------------------------------------------------------------------------

    async def _ask(self, event: RunEvent, given: Given, *, unless_stopped: bool = False) -> Decision | None:
        """Ask until there is an answer, for as long as the run is ours: while it is suspended nothing is sent (O12),
        and what the store answered to an epoch that was meanwhile taken back is asked again. None: the run is lost, or
        was told to stop before it began.

        Every write is safe to repeat (O8), so a lost reply is only another question.
        """
        ground, failures = self._ground, 0
        while await self._trusted(unless_stopped=unless_stopped):
            lease = self._lease
            epoch = lease.epoch
            try:
                decision = await ground.store.apply(lease.key, event, ground.actor(epoch), given)
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001 - the run ends some day, whatever is wrong with the store today
                failures += 1
                ground.observe(SettleRetried(**self._names(), error=error_code(error), failures=failures))
                await ground.clock.sleep(pause_after(failures))
                continue
            lost = isinstance(decision, Refused) and decision.reason is Refusal.LOST
            if lost and (lease.epoch != epoch or lease.worker_id != ground.worker_id):
                continue
            return decision
        return None

    async def _trusted(self, *, unless_stopped: bool) -> bool:
        if not unless_stopped:
            return await self._lease.until_trusted()
        try:
            await self._lease.check()
        except asyncio.CancelledError:
            if self._lease.stop_cause is None:
                raise
            return False
        return True

    def leave(self) -> None:
        """The run has left this process: its slot is free."""
        if self._insisting is not None:
            self._insisting.cancel()
        self._ground.registry.let_go(self._held)

    def _names(self) -> dict[str, Any]:
        lease = self._lease
        return {"worker_id": self._ground.worker_id, "run_id": lease.run_id, "thread_id": lease.thread_id}


def _over(body: asyncio.Task[Any] | None) -> bool:
    """Whether it is known to be; of a caller's code nothing is."""
    return body is not None and body.done()


def _nothing_else() -> None:
    """What else happens when a restore is told to stop."""


def _lost_or(reason: Refusal) -> Refusal:
    """A seizure that finds somebody else at work ends this holder's part."""
    return Refusal.LOST if reason in (Refusal.HELD, Refusal.NOT_CAPABLE) else reason
