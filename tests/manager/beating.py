"""A heartbeat's pulse in the test's own loop: a model store, lines that can be spoiled, and a clock the test owns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, final

from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.messages import Message
from deerflow_runs.manager.pulse import Pulse
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import CancelAction, Micros, Run, Session, SessionState, WorkerId, micros
from deerflow_runs.observe import Event
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import SessionLine
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.contract.stage import Stage
from deerflow_runs.testing.flaky_line import Faults, FlakyLine, Gate
from deerflow_runs.testing.model_line import ModelLines
from deerflow_runs.testing.model_store import ModelStore

T = TypeVar("T")

STEP = 0.05
"""Seconds by which time moves at most before everybody has acted: an answer is noticed so late, never later."""

DEADLINE = 13.5
"""Seconds of trust that a session has from its last beat, by the default configuration."""


@final
class Beating:
    """One pulse and all that is around it. Seconds are counted from the opening; unless a test says otherwise beats
    come every 2.5 s and the main loop answers its pings at once."""

    def __init__(self, *, unit: float = 0.5, step: float = STEP, **settings: Any) -> None:
        self.clock = ManualClock()
        self._step = step
        self.begun_at = self.clock.boot_time()
        self.store = ModelStore()
        self.stage = Stage(self.store)
        self.lines = ModelLines(self.store)
        self.faults = Faults()
        self.gates: list[Gate] = []
        self.made: list[SessionLine] = []
        self.config = RunsConfig(**settings)
        template = Session(WorkerId(""), host="host", capabilities=frozenset({"gpu"}))
        self.session = WorkerSession(template, self.config, self.clock)
        self.posted: list[Message] = []
        self.events: list[Event] = []
        self.pings = 0
        self.answering = True
        self.pulse = Pulse(
            self.session,
            self._line,
            self.config,
            self.clock,
            post=self.posted.append,
            observe=self.events.append,
            ping=self._pinged,
            unit=lambda: unit,
        )
        self._living: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()

    # --- From begin to end --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def living(self) -> AsyncIterator[Beating]:
        """Begun, and ended by force whatever the test has left behind."""
        await self.begins()
        try:
            yield self
        finally:
            await self.is_killed()

    async def begins(self) -> None:
        """The session is open; no time passes meanwhile. Raises what keeps it from opening."""
        self._living = asyncio.create_task(self.pulse.live(self._opened.set))
        await self.settles()
        if self._living.done():
            await self._living
        assert self._opened.is_set()

    async def ends(self, seconds: float = 8.0) -> None:
        """Asked to stop; comes back when it has, or when the time is over."""
        assert self._living is not None
        self.pulse.stop(seconds)
        await self.passes(0)
        for _ in range(int(2 * seconds / STEP)):
            if self._living.done():
                return await self._living
            await self.passes(STEP)
        raise AssertionError("the pulse did not end")

    async def is_killed(self) -> None:
        """As with the process: nothing is closed."""
        assert self._living is not None
        for gate in self.gates:
            gate.open()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @property
    def ended(self) -> bool:
        """Whether everything is over."""
        return self._living is not None and self._living.done()

    # --- Time ---------------------------------------------------------------------------------------------------------

    @property
    def at(self) -> float:
        """Seconds since the opening."""
        return round(self.clock.boot_time() - self.begun_at, 6)

    async def passes(self, seconds: float) -> None:
        """Time goes on, for this worker and for the store."""
        await self.settles()
        left = micros(seconds)
        while left > 0:
            step = Micros(min(left, micros(self._step)))
            self.store.world.advance(step)
            await self.clock.advance(step / 1_000_000)
            await self.settles()
            left = Micros(left - step)

    async def until(self, seconds: float) -> None:
        """Time goes on to this moment after the opening."""
        await self.passes(seconds - self.at)

    async def freezes(self, seconds: float) -> None:
        """The whole process stands still, and the store goes on."""
        self.store.world.advance(micros(seconds))
        self.clock.jump(seconds)
        await self.settles()

    async def settles(self) -> None:
        """Everybody acts who can without time passing."""
        for _ in range(60):
            await asyncio.sleep(0)

    # --- What happens around it ---------------------------------------------------------------------------------------

    def loop_answers(self) -> None:
        """The main loop gets to the ping that has been waiting for it."""
        self.answering = True
        self.pulse.answered()

    async def is_declared_dead(self) -> None:
        """A judge got it wrong, or this worker was away for too long."""
        session = await self.row()
        assert await self.store.declare_dead(Verdict(session.worker_id, session.beat, How.PROOF, Micros(0)))

    async def owns(self, run_id: str) -> Run:
        """A run of this session, on a thread of its own."""
        return await self.stage.starts(run_id, f"thread-of-{run_id}", worker_id=self.session.worker_id)

    async def somebody_cancels(self, run: Run) -> None:
        """Recorded in the store; no signal is sent."""
        asked, somebody = Given(action=CancelAction.INTERRUPT), Actor(WorkerId("somebody"))
        await self.stage.happens(RunEvent.REQUEST_CANCEL, run, asked, by=somebody)

    def gate(self, *, deaf: bool = False) -> Gate:
        """A place where questions stand still, at the latest until the end of the test."""
        self.gates.append(Gate(deaf=deaf))
        return self.gates[-1]

    # --- What is seen of it -------------------------------------------------------------------------------------------

    async def row(self, worker_id: WorkerId | None = None) -> Session:
        """A session as the store has it; the present one unless another is named."""
        return await self.stage.session(worker_id or self.session.worker_id)

    async def states(self) -> list[SessionState]:
        """Of all sessions that ever were, oldest first."""
        return [one.state for one in await self.store.sessions()]

    def told(self, kind: type[T]) -> list[T]:
        """The messages and the events of a kind."""
        return [one for one in (*self.posted, *self.events) if isinstance(one, kind)]

    def deadline(self) -> float:
        """Seconds from the opening to the end of trust, as things stand."""
        return round(self.session.trust.ends - self.begun_at, 6)

    def _line(self) -> SessionLine:
        self.made.append(FlakyLine(self.lines.session_line(), self.faults))
        return self.made[-1]

    def _pinged(self) -> None:
        self.pings += 1
        if self.answering:
            self.pulse.answered()
