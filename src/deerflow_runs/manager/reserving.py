"""Taking a thread for something that is no run: a checkpoint write, an artifact write, a delete (behaviours §4).

A reservation excludes runs and other reservations on every worker while its block lasts, and is never displaced.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, final

from deerflow_runs.errors import ReservationLost, StoreUnavailable, UsageError
from deerflow_runs.manager.admitting import Admitting, Spawn
from deerflow_runs.manager.attaching import take_back_cancellations
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.manager.waiting import pause_after
from deerflow_runs.model import OperationKind
from deerflow_runs.observe import ReservationLost as LostReservation
from deerflow_runs.observe import ReservationReleased, ReservationTaken
from deerflow_runs.protocol.decision import Actor, Applied
from deerflow_runs.protocol.lifecycle import RunEvent

RELEASE_TRIES = 5
"""How often a release is tried before it is left to the sweeps: this worker's own gives it back (O12)."""


@final
class Reservation:
    """``async with manager.reserve_thread_operation(thread, kind) as lease``: nothing else runs on the thread.

    Entering raises ``ThreadBusy`` and does not run the block; while the worker is suspended it waits. If this worker
    loses the thread, the block is cancelled and leaving it raises ``ReservationLost``; any other error or cancellation
    passes unchanged, also over a release that fails.
    """

    def __init__(
        self,
        ground: Ground,
        admitting: Admitting,
        spawn: Spawn,
        *,
        thread_id: str,
        kind: OperationKind,
        user_id: str | None,
    ) -> None:
        if kind is OperationKind.RUN:
            raise UsageError("a run is admitted with create_or_reject() or submit(), not reserved")
        self._ground = ground
        self._admitting = admitting
        self._spawn = spawn
        self._thread_id = thread_id
        self._kind = kind
        self._user_id = user_id
        self._held: Held | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> RunLease:
        run = await self._admitting.reserve(self._thread_id, self._kind, self._user_id)
        held = self._ground.registry.get(run.run_id)
        if held is None:  # granted, and lost before we came to it
            raise ReservationLost(thread_id=self._thread_id, kind=self._kind.value)
        held.phase = Phase.RUNNING
        await self._until_trusted(held)
        self._held, self._task = held, asyncio.current_task()
        assert self._task is not None, "a coroutine runs in a task"
        self._cancelling = self._task.cancelling()
        held.lease.bind(self._task, lambda: None)
        self._ground.observe(ReservationTaken(**self._names(held), kind=self._kind))
        return held.lease

    async def _until_trusted(self, held: Held) -> None:
        """A block that began without trust could go on beside whoever was granted the thread meanwhile (I11)."""
        try:
            trusted = await held.lease.until_trusted()
        except asyncio.CancelledError:
            _ = self._spawn(self._release(held), f"release of {held.run.run_id}")
            raise
        if not trusted:
            self._ground.registry.let_go(held)
            self._ground.observe(LostReservation(**self._names(held), kind=self._kind))
            raise ReservationLost(thread_id=self._thread_id, kind=self._kind.value)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        held, task = self._held, self._task
        assert held is not None
        assert task is not None
        lease = held.lease
        held.phase = Phase.SETTLING
        lost = lease.fenced
        await take_back_cancellations(lease, task, error, before=self._cancelling)
        await asyncio.shield(self._spawn(self._release(held), f"release of {held.run.run_id}"))
        if lost and (error is None or isinstance(error, asyncio.CancelledError)):
            self._ground.observe(LostReservation(**self._names(held), kind=self._kind))
            raise ReservationLost(thread_id=self._thread_id, kind=self._kind.value) from error
        return False

    async def _release(self, held: Held) -> None:
        """Never raises: the body's own error must not be hidden, and what is not released here a sweep gives back."""
        ground, lease = self._ground, held.lease
        try:
            for failures in range(1, RELEASE_TRIES + 1):
                if lease.fenced:
                    return
                asked_as, epoch = lease.worker_id, lease.epoch
                try:
                    decision = await ground.store.apply(lease.key, RunEvent.RELEASE, Actor(asked_as, epoch=epoch))
                except StoreUnavailable:
                    await ground.clock.sleep(pause_after(failures))
                    continue
                if isinstance(decision, Applied):
                    ground.observe(ReservationReleased(**self._names(held), kind=self._kind))
                    await ground.work_appeared()
                    return
                if lease.worker_id == ground.worker_id and (lease.worker_id, lease.epoch) == (asked_as, epoch):
                    return  # nobody's, or another's
                await ground.clock.sleep(pause_after(failures))  # it is being taken back (O13)
        finally:
            ground.registry.let_go(held)

    def _names(self, held: Held) -> dict[str, Any]:
        return {
            "worker_id": self._ground.worker_id,
            "run_id": held.run.run_id,
            "thread_id": held.run.thread_id,
        }
