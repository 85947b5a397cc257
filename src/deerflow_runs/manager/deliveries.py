"""Calls what a host registered for the ends of runs: ``on_settled`` and ``on_recovered``, at least once for each end.

The rows are written by the endings themselves, in their transaction, so an end is told also when its own worker died
between the two: any worker with the hooks takes the row when the taker's lease is over. What a hook does is the host's;
nothing here touches a run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.manager.faults import log_fault
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.hooks import ON_RECOVERED, ON_SETTLED, WANTED, Hook, Hooks
from deerflow_runs.manager.waiting import ended, first_of
from deerflow_runs.model import EVERYONE, Run, StopReason, micros
from deerflow_runs.observe import DeliveryFailed, DeliveryMade, Event, RunForced, RunGivenBack, RunRecovered, RunSettled
from deerflow_runs.observe.base import error_code
from deerflow_runs.store.base import OutboxKind
from deerflow_runs.store.outbox import Delivery

logger = logging.getLogger("deerflow_runs.deliveries")


AT_ONCE: Final = 8
"""Hooks under way at a time, and rows taken at a time: what is taken is begun at once, within its lease."""

PATIENCE: Final = 60.0
"""Seconds that a hook may take."""

MARGIN: Final = 30.0
"""Seconds by which a row is hidden from others for longer than its hook may take."""

POLL: Final = 5.0
"""Seconds between two looks while nothing wakes them, give or take a fifth."""

FIRST_BACKOFF: Final = 1.0
LAST_BACKOFF: Final = 600.0
"""Seconds before what failed is tried again; the ceiling doubles with every attempt."""

ENDINGS: Final = (RunSettled, RunForced, RunRecovered, RunGivenBack)
"""Events after which there may be something to deliver."""


def recovered(run: Run) -> bool:
    """Whether a take-over ended the run, and not the worker that carried it out: see the reason, and who wrote it."""
    taken_over = run.stop_reason in (StopReason.ORPHAN_RECOVERED, StopReason.POISON)
    return taken_over and run.settled_by != run.owner_worker_id


@final
class Deliveries:
    """Tells this worker's hooks of ended runs. Belongs to the main loop; ``run`` it in a task of its own.

    A run that a take-over ended goes to ``on_recovered`` if this worker has it, everything else (and that too, if it
    has not) to ``on_settled``.
    """

    def __init__(
        self,
        ground: Ground,
        hooks: Hooks,
        *,
        patience: float = PATIENCE,
        margin: float = MARGIN,
        unit: Callable[[], float] = random.random,
    ) -> None:
        self._ground = ground
        self._hooks = hooks
        self._patience = patience
        self._lease = micros(patience + margin)
        self._unit = unit
        self._woken = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    # --- From begin to end ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever, until ``close``; without hooks there is nothing to do. Cancelled, it leaves what is under way to
        ``close``."""
        failures = 0
        while self._hooks and not self._closing.is_set():
            self._woken.clear()
            free = AT_ONCE - len(self._under_way)
            try:
                taken = await self._take(free)
                failures = 0
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the store today, ends are still to be told
                taken, failures = (), failures + 1
                logger.warning("no deliveries could be taken: %s", error_code(error))
            for delivery in taken:
                await (self._postpone(delivery, 0.0) if self._closing.is_set() else self._begin(delivery))
            if failures or len(taken) < free or free == 0:
                await self._pause(failures)

    async def _take(self, free: int) -> tuple[Delivery, ...]:
        return await self._ground.store.outbox.take((OutboxKind.HOOK,), free, self._lease) if free else ()

    async def _pause(self, failures: int) -> None:
        """Until something is woken, a hook is done while all were busy, or it is time to look again."""
        seconds = min(POLL * 2.0 ** min(failures, 4), 60.0) * (0.8 + 0.4 * self._unit())
        woken = asyncio.create_task(self._woken.wait())
        await first_of(self._ground.clock, seconds, woken)
        woken.cancel()

    def wake(self) -> None:
        """There may be something to deliver."""
        self._woken.set()

    def observe(self, event: Event) -> None:
        """Be woken by every event that tells of an end on this worker."""
        if isinstance(event, ENDINGS):
            self.wake()

    async def close(self, seconds: float) -> None:
        """Take nothing more, and let what is under way finish within so many seconds. What is broken off is due again
        at once, for another worker or the next start."""
        self._closing.set()
        self.wake()
        if self._under_way:
            all_done = asyncio.create_task(_all_done(self._under_way))
            await first_of(self._ground.clock, seconds, all_done)
            all_done.cancel()
            await ended(self._ground.clock, *self._under_way)

    # --- One delivery -----------------------------------------------------------------------------------------------

    async def _begin(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._deliver(delivery), name=f"hook of {delivery.key.run_id}")
        self._under_way.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A slot is free: look whether more waits only if there could be."""
        if len(self._under_way) == AT_ONCE:
            self.wake()
        self._under_way.discard(task)

    async def _deliver(self, delivery: Delivery) -> None:
        """Never raises: what was not delivered comes back."""
        kind = ON_SETTLED
        try:
            run = await self._ground.store.get(delivery.key, scope=EVERYONE)
            if run is None:
                await self._ground.store.outbox.delivered(delivery)
                return
            kind = ON_RECOVERED if recovered(run) and self._hooks.on_recovered is not None else ON_SETTLED
            hook = self._hooks.on_recovered if kind == ON_RECOVERED else self._hooks.on_settled
            if hook is None:
                await self._left_to_others(delivery, run)
                return
            await self._call(hook, run)
            await self._ground.store.outbox.delivered(delivery)
        except asyncio.CancelledError:
            await asyncio.shield(self._postpone(delivery, 0.0))
            raise
        except Exception as error:  # noqa: BLE001 - a host's hook may raise anything, and the next end must be told
            if not isinstance(error, StoreUnavailable):
                log_fault(f"{kind} for run {delivery.key.run_id}", error)
            self._ground.observe(DeliveryFailed(**self._names(delivery, kind), error=error_code(error)))
            await self._postpone(delivery, self._backoff(delivery.attempt))
        else:
            self._ground.observe(DeliveryMade(**self._names(delivery, kind)))

    async def _left_to_others(self, delivery: Delivery, run: Run) -> None:
        """This worker has no hook for such an end: who does, if anybody, was said at admission."""
        wanted = delivery.payload.get(WANTED, ()) if isinstance(delivery.payload, Mapping) else ()
        if ON_SETTLED in wanted or (recovered(run) and ON_RECOVERED in wanted):
            await self._postpone(delivery, self._backoff(delivery.attempt))
        else:
            await self._ground.store.outbox.delivered(delivery)

    async def _call(self, hook: Hook, run: Run) -> None:
        """Call it with a time limit. One that swallows its cancellation keeps its slot until it ends, so that they
        cannot pile up."""
        task = asyncio.ensure_future(hook(run))
        await first_of(self._ground.clock, self._patience, task)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise TimeoutError(f"the hook took more than {self._patience:g} s")
        if task.cancelled():
            raise InterruptedError("the hook was cancelled from within")
        task.result()

    async def _postpone(self, delivery: Delivery, seconds: float) -> None:
        """Without an answer the row comes back all the same, when its lease is over."""
        try:
            await self._ground.store.outbox.postponed(delivery, micros(seconds))
        except Exception as error:  # noqa: BLE001 - told, and mended by the lease
            self._ground.observe(DeliveryFailed(**self._names(delivery, ON_SETTLED), error=error_code(error)))

    def _backoff(self, attempt: int) -> float:
        ceiling = min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempt - 1, 20))
        return ceiling * (0.5 + 0.5 * self._unit())

    def _names(self, delivery: Delivery, kind: str) -> dict[str, Any]:
        return {
            "worker_id": self._ground.worker_id,
            "run_id": delivery.key.run_id,
            "thread_id": delivery.key.thread_id,
            "kind": kind,
            "attempt": delivery.attempt,
        }


async def _all_done(tasks: set[asyncio.Task[None]]) -> None:
    while tasks:
        await asyncio.wait(set(tasks))
