"""A worker without a heartbeat: ground, granting and reconciler over a store that others use too, and a clock the test
owns. What its session is told of beats, the test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar, final

from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.executor import NeedsCapability
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.manager.reconciler import Reconciler
from deerflow_runs.manager.registry import Held, Registry
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import Run, RunId, Session, WorkerId
from deerflow_runs.observe import Event
from deerflow_runs.store.base import Renewed
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.contract.stage import Stage
from tests.contract.lives import executed

E = TypeVar("E", bound=Event)

AGENT: Final = "agent"
"""The executor that every worker has, and the capability that its runs require."""
NEEDS_AGENT: Final = frozenset({"executor:agent"})


@final
class Patient:
    """An executor whose runs last until they are let go or stopped."""

    payload_version = 1

    def __init__(self) -> None:
        self.begun: list[RunLease] = []
        self.payloads: list[Any] = []
        self.restored: list[RunId] = []
        self.go_on = asyncio.Event()
        self._changed = asyncio.Event()

    def encode(self, payload: Any) -> Mapping[str, Any]:
        return dict(payload)

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:
        return dict(stored)

    async def heads(self, run: Run) -> Mapping[str, str]:
        return {}

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        if "needs" in payload:
            raise NeedsCapability(payload["needs"])
        self.begun.append(lease)
        self.payloads.append(payload)
        self._changed.set()
        await self.go_on.wait()
        return None

    async def restore(self, lease: RunLease) -> None:
        self.restored.append(lease.run_id)

    async def until_begun(self, count: int) -> None:
        """Return when so many bodies have begun."""
        while len(self.begun) < count:
            self._changed.clear()
            await self._changed.wait()


@final
class Worker:
    """One worker on ``store``. Seconds are those of its own clock; the store has another one."""

    def __init__(self, store: SqlRunStore, name: str = "worker", *, unit: float = 0.5, **settings: Any) -> None:
        self.store = store
        self.stage = Stage(store)
        self.clock = ManualClock()
        self.config = RunsConfig(**settings)
        self.events: list[Event] = []
        self.agent = Patient()
        self.capabilities = NEEDS_AGENT
        template = Session(WorkerId(""), host=name, capabilities=self.capabilities)
        self.session = WorkerSession(template, self.config, self.clock)
        self.registry = Registry(self.config.max_concurrent_runs)
        self.ground = Ground(
            store=store,
            session=self.session,
            registry=self.registry,
            config=self.config,
            clock=self.clock,
            observe=self._observed,
            capabilities=self.capabilities,
        )
        self.granting = Granting(self.ground, {AGENT: self.agent})
        self.reconciler = Reconciler(self.ground, self.granting, unit=lambda: unit)
        self.also: Callable[[Event], object] = lambda _: None
        self._heard = asyncio.Event()

    @property
    def me(self) -> WorkerId:
        return self.session.worker_id

    # --- Its session ------------------------------------------------------------------------------------------------

    async def opens(self) -> WorkerId:
        """A session as the heartbeat opens it, the first or the next one; the id of the one before."""
        before, sent_at = self.me, self.session.now()
        opened = await self.store.open_session(self.session.fresh())
        self.session.opened(opened, sent_at=sent_at, answered_at=self.session.now())
        return before

    async def beats(self) -> None:
        """One beat that is accepted at once."""
        sent_at = self.session.now()
        renewed = await self.store.renew(self.me, state=self.session.state)
        assert isinstance(renewed, Renewed)
        self.session.confirmed(renewed, sent_at=sent_at, answered_at=self.session.now())

    async def lives(self, seconds: float) -> None:
        """Time goes on, and it beats all the while."""
        while seconds > 0:
            step = min(seconds, self.config.beat.total_seconds())
            await self.clock.advance(step)
            await self.beats()
            seconds -= step

    # --- Its runs ---------------------------------------------------------------------------------------------------

    def holds(self, run: Run) -> Held:
        """A run that was granted to this session and for which nobody has come yet."""
        held = Held(RunLease(run, self.session), since=self.clock.boot_time())
        self.registry.hold(held)
        return held

    async def starts(self, run: Run) -> Held:
        """A run that was granted to this session is carried out here; back when its body runs."""
        begun = len(self.agent.begun)
        held = self.granting.take_up(run)
        await self.agent.until_begun(begun + 1)
        return held

    async def admits(self, run_id: str, thread_id: str | None = None, **asked: Any) -> Run:
        """A run that this session asks for: its own if it gets in, and of an executor that every worker has."""
        usual = {"worker_id": self.me, "executor": AGENT, "required_capabilities": NEEDS_AGENT}
        return await self.stage.arrives(run_id, thread_id or thread_of(run_id), **usual | asked)

    async def row(self, run: Run) -> Run:
        """A run as the store has it now."""
        return await self.stage.now(run)

    # --- What it tells ----------------------------------------------------------------------------------------------

    def told(self, kind: type[E]) -> list[E]:
        """The events of a kind, so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when it holds; looked at after every event."""
        while not holds():
            self._heard.clear()
            await self._heard.wait()

    async def until_told(self, kind: type[E], count: int = 1) -> list[E]:
        """Return when so many events of a kind were told."""
        await self.until(lambda: len(self.told(kind)) >= count)
        return self.told(kind)

    def _observed(self, event: Event) -> None:
        self.events.append(event)
        self.also(event)
        self._heard.set()

    # --- Its end ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its reconciler runs meanwhile."""
        task = asyncio.create_task(self.reconciler.run(), name="reconciler")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def until_idle(self) -> None:
        """While it runs: its sweeps, its claims and its look at deadlines all wait for the time to pass."""
        await self.clock.until_sleeping(3)

    async def is_killed(self) -> None:
        """As with the process: nothing is ended in order."""
        while lives := self.granting.lives():
            for life in lives:
                life.cancel()
            await asyncio.wait(lives)


@asynccontextmanager
async def store_without_hints(dsn: str) -> AsyncIterator[SqlRunStore]:
    """A store whose kernel knows none of its sessions: they are made up, and nobody holds a lock for them."""
    units = open_units(parse_dsn(dsn))
    async with SqlRunStore(units) as store:
        yield store


@asynccontextmanager
async def without_runs(units: Units) -> AsyncIterator[None]:
    """Every question about runs fails meanwhile."""
    await executed(units, "ALTER TABLE dr_runs RENAME TO dr_runs_away")
    try:
        yield
    finally:
        await executed(units, "ALTER TABLE dr_runs_away RENAME TO dr_runs")


def thread_of(run_id: str) -> str:
    """Every run of these tests has a thread of its own, unless the test says otherwise."""
    return f"thread-of-{run_id}"
