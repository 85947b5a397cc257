"""What the main loop does when the heartbeat's thread tells it something (O12, O13, O19).

Everything announced is read anew by whoever acts on it; a message that never came costs time and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import assert_never, final

from deerflow_runs.manager.admitting import Spawn
from deerflow_runs.manager.attaching import Attaching
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import StopCause
from deerflow_runs.manager.messages import (
    DrainWanted,
    Heard,
    Message,
    Reconnected,
    SessionReplaced,
    TrustEnded,
    TrustRegained,
    WorkWanted,
)
from deerflow_runs.manager.reconciler import Reconciler
from deerflow_runs.manager.registry import Phase
from deerflow_runs.model import WorkerId
from deerflow_runs.observe import CancelHeard, RunAborted
from deerflow_runs.protocol.trust import Standing
from deerflow_runs.store.base import CancelRequest


@final
class Listening:
    """Hears messages, in order, in the main loop. ``drain_wanted`` is set when somebody asked this worker to leave;
    what to do about it is the host's to decide."""

    def __init__(self, ground: Ground, attaching: Attaching, reconciler: Reconciler, spawn: Spawn) -> None:
        self._ground = ground
        self._attaching = attaching
        self._reconciler = reconciler
        self._spawn = spawn
        self._suspension: asyncio.Task[None] | None = None
        self.drain_wanted = asyncio.Event()

    def hear(self, message: Message) -> None:
        """Act on one message. Never waits and never raises."""
        match message:
            case Heard(requests):
                for request in requests:
                    self._cancel(request)
            case TrustEnded():
                self._suspension = self._spawn(self._abort_later(), "suspension")
            case TrustRegained():
                self._trusted_again()
                _ = self._spawn(self._reconciler.reconcile_owned(), "look at what is owned")
            case SessionReplaced(previous):
                _ = self._spawn(self._take_back(previous), "take back")
            case Reconnected():
                self._reconciler.reconnected()
                self._ground.work.set()
                _ = self._spawn(self._reconciler.reconcile_owned(), "look at what is owned")
            case WorkWanted():
                self._ground.work.set()
            case DrainWanted():
                self.drain_wanted.set()
            case _:
                assert_never(message)

    def _cancel(self, request: CancelRequest) -> None:
        """Heard again with every beat; the first time counts. One of an epoch that is not held here is another's."""
        held = self._ground.registry.get(request.key.run_id)
        if held is None or held.lease.epoch != request.epoch or held.phase is Phase.SETTLING:
            return
        if held.lease.stop_cause is None:
            key = request.key
            self._ground.observe(
                CancelHeard(
                    worker_id=self._ground.worker_id,
                    run_id=key.run_id,
                    thread_id=key.thread_id,
                    action=request.action,
                )
            )
            held.lease.stop(StopCause.CANCEL, request.action)
            self._attaching.end_if_unattached(held)

    async def _take_back(self, previous: WorkerId) -> None:
        await self._reconciler.take_back(previous)
        self._trusted_again()

    def _trusted_again(self) -> None:
        if self._suspension is not None and self._ground.session.trusted():
            self._suspension.cancel()
            self._suspension = None
        for held in self._ground.registry.all():
            held.lease.wake()

    async def _abort_later(self) -> None:
        """O12: bodies are not held for ever. A result that is in memory is kept: settling runs are left alone."""
        limit = self._ground.config.max_suspend.total_seconds()
        session, clock = self._ground.session, self._ground.clock
        while session.standing() is not Standing.ABORT:
            left = session.trust.ends + limit - clock.boot_time()
            await clock.sleep(max(left, 0.0))
            if session.trusted():
                return
        for held in self._ground.registry.all():
            if held.phase in (Phase.STARTING, Phase.RUNNING) and not held.lease.fenced:
                held.lease.stop(StopCause.SUSPENDED)
                run = held.run
                event = RunAborted(
                    worker_id=self._ground.worker_id,
                    run_id=run.run_id,
                    thread_id=run.thread_id,
                    suspended_for=clock.boot_time() - session.trust.ends,
                )
                self._ground.observe(event)
