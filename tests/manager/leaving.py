"""A worker that is about to leave, on a store whose questions are counted, under a clock that moves only while nothing
is being asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, final

from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.manager.drain import Closer, Drain
from deerflow_runs.manager.executor import Drained, Executor, LocalExecutor
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.registry import Held, Registry
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import EVERYONE, Run, RunId, RunKey, Session, ThreadId, WorkerId
from deerflow_runs.observe import Event
from deerflow_runs.protocol.drain import Step
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Unit, Units
from deerflow_runs.testing.clock import ManualClock
from tests.contract.lives import admitted

T = TypeVar("T")
E = TypeVar("E", bound=Event)

STEP: Final = 0.05
TURNS: Final = 40
"""Of the event loop without a question under way, after which nothing happens any more unless time passes."""


@final
class Watched:
    """Units that count what is asked of them, and how much of it has no answer yet. Once ``silent`` there is none until
    the test is over."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.asked = 0
        self.under_way = 0
        self.silent = False
        self.over = asyncio.Event()

    @property
    def dialect(self) -> Dialect:
        return self._units.dialect

    async def once(self, unit: Unit[T]) -> T:
        answer: T = await self._counted(self._units.once(unit))
        return answer

    async def transaction(self, unit: Unit[T]) -> T:
        answer: T = await self._counted(self._units.transaction(unit))
        return answer

    async def read(self, unit: Unit[T]) -> T:
        answer: T = await self._counted(self._units.read(unit))
        return answer

    async def open(self) -> None:
        await self._units.open()

    async def close(self) -> None:
        await self._units.close()

    async def _counted(self, question: Any) -> Any:
        if self.silent:
            question.close()
            await self.over.wait()
            raise StoreUnavailable("the test is over")
        self.asked += 1
        self.under_way += 1
        try:
            return await question
        finally:
            self.under_way -= 1


@final
class Leaver:
    """One worker with its session open and nothing that beats for it."""

    def __init__(self, units: Watched, closers: Mapping[Step, Closer], settings: Mapping[str, Any]) -> None:
        self.units = units
        self.store = SqlRunStore(units)
        self.clock = ManualClock()
        self.events: list[Event] = []
        self.closed: list[Step] = []
        self.agent = Stepping()
        self.stubborn = Stubborn()
        config = RunsConfig(**settings)
        self.session = WorkerSession(Session(WorkerId(""), host="leaver"), config, self.clock)
        self.registry = Registry(config.max_concurrent_runs)
        self.ground = Ground(
            store=self.store,
            session=self.session,
            registry=self.registry,
            config=config,
            clock=self.clock,
            observe=self.events.append,
            capabilities=frozenset({"executor:agent"}),
        )
        self.granting = Granting(self.ground, {"agent": self.agent})
        ours: dict[Step, Closer] = {step: self._closer(step) for step in Step}
        self.drain = Drain(self.ground, self.granting, {**ours, Step.SESSION: self._close_session, **closers})

    @property
    def me(self) -> WorkerId:
        return self.session.worker_id

    async def opens(self) -> None:
        opened = await self.store.open_session(self.session.fresh())
        self.session.opened(opened, sent_at=self.session.now(), answered_at=self.session.now())

    def _closer(self, step: Step) -> Closer:
        async def close(seconds: float) -> None:
            self.closed.append(step)

        return close

    async def _close_session(self, seconds: float) -> None:
        self.closed.append(Step.SESSION)
        await self.store.close_session(self.me)

    # --- Runs -------------------------------------------------------------------------------------------------------

    async def admits(self, run_id: str, thread_id: str | None = None, **given: Any) -> Run:
        """A run of local code on a thread of its own, unless another is named."""
        asked: dict[str, Any] = {"worker_id": self.me, "pinned": True} | given
        return await admitted(self.store, run_id, thread_id or f"thread-of-{run_id}", **asked)

    async def begins(self, run_id: str, body: Executor, **given: Any) -> Held:
        """The same, with its body under way."""
        held = self.granting.take_up(await self.admits(run_id, **given), body)
        await self.is_quiet()
        return held

    async def begins_agent(self, run_id: str) -> Held:
        """A run that others could go on with, its body under way here."""
        return await self.begins(run_id, self.agent, **AGENT)

    async def row(self, run_id: str, thread_id: str | None = None) -> Run:
        """As the store has it."""
        key = RunKey(ThreadId(thread_id or f"thread-of-{run_id}"), RunId(run_id))
        run = await self.store.get(key, scope=EVERYONE)
        assert run is not None
        return run

    async def end_of(self, run_id: str, thread_id: str | None = None) -> tuple[str, str | None]:
        """Status and reason."""
        run = await self.row(run_id, thread_id)
        return run.status.value, run.stop_reason

    # --- Time -------------------------------------------------------------------------------------------------------

    async def is_quiet(self) -> None:
        """Let everything happen that needs no time."""
        calm = 0
        while calm < TURNS:
            await asyncio.sleep(0)
            calm = 0 if self.units.under_way else calm + 1

    async def passes(self, seconds: float) -> None:
        """Let so much time pass, everybody acting in between."""
        end = self.clock.boot_time() + seconds
        while self.clock.boot_time() < end:
            await self.is_quiet()
            await self.clock.advance(STEP)
        await self.is_quiet()

    async def leaves(self, budget: float = 10.0) -> float:
        """Begin to leave, and let time pass until it is over. Seconds that it took."""
        begun_at = self.clock.boot_time()
        leaving = asyncio.create_task(self.drain.begin(budget).carry_out())
        await self.is_quiet()
        while not leaving.done():
            await self.clock.advance(STEP)
            await self.is_quiet()
        await leaving
        return self.clock.boot_time() - begun_at

    def told(self, kind: type[E]) -> list[E]:
        """The events of a kind, so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def is_killed(self) -> None:
        """Leave no task behind, however the test ended."""
        self.units.over.set()
        self.stubborn.mercy.set()
        for life in (lives := self.granting.lives()):
            life.cancel()
        if lives:
            await asyncio.wait(lives)


AGENT: Final[Mapping[str, Any]] = {
    "pinned": False,
    "on_orphan": "resume",
    "executor": "agent",
    "required_capabilities": frozenset({"executor:agent"}),
}


class Stepping:
    """An executor that stops between two steps when it is asked to."""

    payload_version = 1

    def __init__(self) -> None:
        self.restored: list[RunId] = []

    def encode(self, payload: Any) -> Mapping[str, Any]:
        return dict(payload)

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:
        return dict(stored)

    async def heads(self, run: Run) -> Mapping[str, str]:
        return {}

    async def run(self, lease: RunLease, payload: Any) -> None:
        await lease.until_draining()
        raise Drained

    async def restore(self, lease: RunLease) -> None:
        self.restored.append(lease.run_id)


def polite() -> LocalExecutor:
    """A body that goes on for ever and ends when it is cancelled."""
    return LocalExecutor(_for_ever)


async def _for_ever(lease: RunLease) -> None:
    await asyncio.Event().wait()


@final
class Stubborn:
    """A body that no cancellation ends before the test is over."""

    def __init__(self) -> None:
        self.mercy = asyncio.Event()
        self.executor = LocalExecutor(self._body)

    async def _body(self, lease: RunLease) -> None:
        while not self.mercy.is_set():
            try:
                await self.mercy.wait()
            except asyncio.CancelledError:
                continue


@asynccontextmanager
async def leaver(units: Units, closers: Mapping[Step, Closer] | None = None, **settings: Any) -> AsyncIterator[Leaver]:
    """A worker whose session is open."""
    one = Leaver(Watched(units), closers or {}, settings)
    await one.opens()
    try:
        yield one
    finally:
        await one.is_killed()
