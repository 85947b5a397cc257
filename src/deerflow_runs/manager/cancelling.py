"""Cancelling a run, wherever it is and whoever holds it (O19–O22): recorded first, then whoever holds it is told.

What a cancel may do to a run is the table's; the answers are values.
"""

from __future__ import annotations

import asyncio
from typing import Final, assert_never, final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.manager.admitting import Admitting, Spawn
from deerflow_runs.manager.answers import CancelOutcome, CancelResult
from deerflow_runs.manager.attaching import Attaching
from deerflow_runs.manager.body import Stopped
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.joining import Joining
from deerflow_runs.manager.lease import StopCause
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.manager.scoping import visible
from deerflow_runs.model import EVERYONE, CancelAction, Run, RunKey, RunStatus, Scope, micros
from deerflow_runs.observe import CancelRequested, RunForced
from deerflow_runs.protocol.decision import Applied, Decision, Given, Refused
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent

TRIES: Final = 5
"""How often a run may change its status under a cancel before the question goes unanswered."""

PATIENCE: Final = 0.5
"""Seconds for which a local abort waits for the store to record the cancel. Longer would make a hung store a reason
not to stop (O19)."""


@final
class Cancelling:
    """The cancel verb. Belongs to the main loop."""

    def __init__(
        self, ground: Ground, admitting: Admitting, attaching: Attaching, joining: Joining, spawn: Spawn
    ) -> None:
        self._ground = ground
        self._admitting = admitting
        self._attaching = attaching
        self._joining = joining
        self._spawn = spawn

    async def cancel(
        self, key: RunKey, action: CancelAction, *, wait: bool, timeout: float | None, scope: Scope
    ) -> CancelResult:
        """See ``RunManager.cancel``."""
        result = await self._requested(key, action, scope)
        if result.action is not None:
            self._ground.observe(
                CancelRequested(
                    worker_id=self._ground.worker_id,
                    run_id=key.run_id,
                    thread_id=key.thread_id,
                    action=result.action,
                    outcome=result.outcome.value,
                )
            )
        if wait and result.outcome in (CancelOutcome.REQUESTED, CancelOutcome.TAKEN_OVER):
            return await self._waited(result, key, timeout, scope)
        return result

    async def _waited(self, result: CancelResult, key: RunKey, timeout: float | None, scope: Scope) -> CancelResult:
        bound = timeout if timeout is not None else 2 * self._ground.config.cancel_grace.total_seconds()
        try:
            run = await self._joining.join(key, scope=scope, timeout=bound)
        except TimeoutError:
            return result
        if run is None or result.outcome is CancelOutcome.TAKEN_OVER:
            return CancelResult(result.outcome, result.action, run or result.run)
        return CancelResult(CancelOutcome.CANCELLED, run.cancel_action, run)

    # --- Asking for it ----------------------------------------------------------------------------------------------

    async def _requested(self, key: RunKey, action: CancelAction, scope: Scope) -> CancelResult:
        held = self._ground.registry.get(key.run_id)
        if held is not None and held.key == key and not held.run.reservation:
            if not visible(held.run, scope):
                return CancelResult(CancelOutcome.UNKNOWN)
            if held.phase is not Phase.SETTLING:
                return await self._cancel_held(held, action)
        try:
            return await self._cancel_stored(key, action, scope)
        except StoreUnavailable:
            return CancelResult(CancelOutcome.NOT_ACTIVE_LOCALLY)

    async def _cancel_held(self, held: Held, action: CancelAction) -> CancelResult:
        """Recorded first, so that the action is the row's; but a store that does not answer keeps nobody from stopping
        (F37): the life of the run records it once the store is back."""
        recording = self._spawn(self._record(held.key, action), "cancel request")
        done, _ = await asyncio.wait({recording}, timeout=PATIENCE)
        decision = recording.result() if done else None
        if isinstance(decision, Refused):
            return await self._cancel_stored(held.key, action, EVERYONE)
        in_force = decision.run.cancel_action if decision is not None else action
        held.lease.stop(StopCause.CANCEL, in_force)
        self._attaching.end_if_unattached(held)
        return CancelResult(CancelOutcome.REQUESTED, in_force, decision.run if decision else held.run)

    async def _record(self, key: RunKey, action: CancelAction) -> Decision | None:
        """None: the store gave no answer."""
        try:
            return await self._ground.store.apply(
                key, RunEvent.REQUEST_CANCEL, self._ground.actor(), Given(action=action)
            )
        except StoreUnavailable:
            return None

    async def _cancel_stored(self, key: RunKey, action: CancelAction, scope: Scope) -> CancelResult:
        store, by, given = self._ground.store, self._ground.actor(), Given(action=action)
        if scope is not EVERYONE and await store.get(key, scope=scope) is None:
            return CancelResult(CancelOutcome.UNKNOWN)
        for _ in range(TRIES):
            requested = await store.apply(key, RunEvent.REQUEST_CANCEL, by, given)
            if isinstance(requested, Applied):
                return await self._take_effect(requested.run)
            if requested.reason is not Refusal.WRONG_STATUS:
                return _refused(requested)
            ended = await store.apply(key, RunEvent.CANCEL_QUEUED, by, given)
            if isinstance(ended, Applied):
                self._ground.registry.give_up(key.run_id)
                return CancelResult(CancelOutcome.CANCELLED, ended.run.cancel_action, ended.run)
        raise StoreUnavailable(f"run {key.run_id} kept changing under a cancel; repeat it")

    async def _take_effect(self, run: Run) -> CancelResult:
        """The request is recorded. Who holds the run is told, first of all, since to find out that nobody does takes
        longer; one that nobody holds is ended here and now (O4)."""
        action = run.cancel_action
        assert action is not None
        if await self._admitting.stop_holder(run, action):
            return CancelResult(CancelOutcome.TAKEN_OVER, action, run)
        if not run.rollback_owed and (forced := await self._forced(run)) is not None:
            outcome = CancelOutcome.CANCELLED if run.vacant else CancelOutcome.TAKEN_OVER
            return CancelResult(outcome, forced.cancel_action, forced)
        return CancelResult(CancelOutcome.REQUESTED, action, run)

    async def _forced(self, run: Run) -> Run | None:
        ground = self._ground
        held = ground.registry.get(run.run_id)
        if held is not None and held.lease.epoch == run.epoch:
            return None  # its own life ends it
        grace = Given(cancel_grace=micros(ground.config.cancel_grace.total_seconds()))
        decision = await ground.store.apply(run.key, RunEvent.FORCE, ground.actor(), grace)
        match decision:
            case Applied(ended):
                ground.registry.give_up(run.run_id)
                ground.observe(RunForced(worker_id=ground.worker_id, run_id=run.run_id, thread_id=run.thread_id))
                if ended.queue_behind:
                    await ground.work_appeared()
                return ended
            case Refused():
                return None
            case _:
                assert_never(decision)

    # --- Nobody wants it --------------------------------------------------------------------------------------------

    async def withdraw(self, key: RunKey) -> None:
        """End a run whose caller is gone before it came for it (O6)."""
        held = self._ground.registry.get(key.run_id)
        if held is not None:
            await self._attaching.end_unattached(held, Stopped(None))
        else:
            self._ground.registry.give_up(key.run_id)
            await self._cancel_stored(key, CancelAction.INTERRUPT, EVERYONE)


def _refused(refused: Refused) -> CancelResult:
    run = refused.run
    match refused.reason:
        case Refusal.TERMINAL:
            interrupted = run is not None and run.status is RunStatus.INTERRUPTED
            outcome = CancelOutcome.CANCELLED if interrupted else CancelOutcome.NOT_CANCELLABLE
            return CancelResult(outcome, run.cancel_action if run else None, run)
        case _:
            return CancelResult(CancelOutcome.UNKNOWN)
