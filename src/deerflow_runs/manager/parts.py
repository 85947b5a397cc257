"""What a running manager consists of, how the parts are joined, and in which order they begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import UsageError
from deerflow_runs.manager.admitting import Admitting
from deerflow_runs.manager.answers import Stats
from deerflow_runs.manager.attaching import Attaching
from deerflow_runs.manager.cancelling import Cancelling
from deerflow_runs.manager.deliveries import Deliveries
from deerflow_runs.manager.drain import Drain
from deerflow_runs.manager.erasing import Erasing
from deerflow_runs.manager.executor import Executor
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.heartbeat import Heartbeat
from deerflow_runs.manager.hooks import Hooks
from deerflow_runs.manager.joining import Joining
from deerflow_runs.manager.listening import Listening
from deerflow_runs.manager.reading import Reading
from deerflow_runs.manager.reconciler import Reconciler
from deerflow_runs.manager.registry import Phase, Registry
from deerflow_runs.manager.reporting import Reporting
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.tasks import Tasks
from deerflow_runs.model import RunKey
from deerflow_runs.observe import Event
from deerflow_runs.protocol.drain import Step
from deerflow_runs.store.sql import SqlRunStore


@final
@dataclass(frozen=True, slots=True)
class Setup:
    """What a manager was made with; it outlives nothing but the manager."""

    store: SqlRunStore
    session: WorkerSession
    executors: Mapping[str, Executor]
    capabilities: frozenset[str]
    config: RunsConfig
    clock: Clock
    observe: Callable[[Event], None]
    hooks: Hooks


@final
class Parts:
    """All parts of one running manager. Made in the event loop to which they belong."""

    def __init__(self, setup: Setup) -> None:
        self._loop = asyncio.get_running_loop()
        self._claiming: asyncio.Task[None] | None = None
        self._delivering: asyncio.Task[None] | None = None
        self.tasks: Final = Tasks()
        spawn = self.tasks.spawn
        self.ground: Final = Ground(
            store=setup.store,
            session=setup.session,
            registry=Registry(setup.config.max_concurrent_runs),
            config=setup.config,
            clock=setup.clock,
            observe=self._observed,
            capabilities=setup.capabilities,
        )
        ground = self.ground
        self._tell = setup.observe
        patience = setup.config.hook_timeout.total_seconds()
        self.deliveries: Final = Deliveries(ground, setup.hooks, patience=patience, margin=patience / 2)
        self.granting: Final = Granting(ground, setup.executors)
        self.attaching: Final = Attaching(ground, spawn, self._withdraw)
        self.joining: Final = Joining(ground)
        self.reading: Final = Reading(ground)
        self.reporting: Final = Reporting(ground)
        self.admitting: Final = Admitting(
            ground, self.granting, hooks=setup.hooks.deliveries(), spawn=spawn, withdraw=self._withdraw
        )
        self.cancelling: Final = Cancelling(ground, self.admitting, self.attaching, self.joining, spawn)
        self.erasing: Final = Erasing(ground, self.admitting, self.cancelling)
        self.reconciler: Final = Reconciler(ground, self.granting)
        self.listening: Final = Listening(ground, self.attaching, self.reconciler, spawn)
        self._drain = Drain(
            ground,
            self.granting,
            {Step.RUNS: self._stop_claiming, Step.EVENT_LOG: self._stop_delivering, Step.SESSION: self._close_session},
        )
        self.heartbeat: Final = Heartbeat(
            setup.session, setup.store.session_line, setup.config, setup.clock, self.listening.hear, self._observed
        )

    async def _withdraw(self, key: RunKey) -> None:
        await self.cancelling.withdraw(key)

    def begin(self) -> None:
        """Start what goes on by itself."""
        self._claiming = self.tasks.spawn(self.reconciler.run(), "reconciler")
        self._delivering = self.tasks.spawn(self.deliveries.run(), "deliveries")

    def _observed(self, event: Event) -> None:
        """Told in the heartbeat's thread as well, which never tells of an end."""
        self._tell(event)
        self.deliveries.observe(event)

    async def leave(self, budget: float) -> None:
        """Everything in the order of a drain (O35). Returns when it is over; see ``Drain.carry_out``. Who asks again
        is in a hurry."""
        if self._drain.begun:
            self._drain.hurry()
        await self._drain.begin(budget).carry_out()

    def hurry(self) -> None:
        """Somebody waits for the drain."""
        self._drain.hurry()

    async def _stop_claiming(self, _: float) -> None:
        await _stopped(self._claiming)

    async def _stop_delivering(self, seconds: float) -> None:
        await self.deliveries.close(seconds)
        await _stopped(self._delivering)
        await self.tasks.finished()

    async def _close_session(self, seconds: float) -> None:
        await self.heartbeat.stop(seconds)
        await self.tasks.stop()

    def require_loop(self) -> None:
        """Refuse a call from another event loop, which would wait for ever or corrupt the registry."""
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("this manager belongs to another event loop; call it there, or make one for this loop")

    def stats(self) -> Stats:
        """See ``RunManager.stats``."""
        session, registry = self.ground.session, self.ground.registry
        held = registry.all()
        return Stats(
            worker_id=session.worker_id,
            state=session.state,
            trusted=session.trusted(),
            trust_left=session.trust.remaining(session.now()),
            mode=self.heartbeat.mode,
            held=len(held),
            unattached=sum(1 for one in held if one.phase is Phase.UNATTACHED),
            settling=sum(1 for one in held if one.phase is Phase.SETTLING),
            expected=len(registry.waiting()),
            lingering=sum(1 for _ in registry.lingering()),
            free_slots=registry.free_slots,
        )


async def _stopped(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end; what it ended with has been told by itself."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
