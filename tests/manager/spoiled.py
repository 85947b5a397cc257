"""What the tests of flaws and public cases share: managers that nobody hurries, bodies that wait for the test, and a
store before which every question may be held up or fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, final
from weakref import WeakSet

from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.executor import LocalExecutor
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.manager.registry import Held
from deerflow_runs.model import EVERYONE, Run, RunKey
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.flaky_line import Faults, Gate
from deerflow_runs.testing.flaky_store import FlakyStore
from tests.manager.lone import Lone, lone_worker

PATIENCE = 60.0
"""Seconds after which a test that hangs has failed; nothing is asserted of it."""


@final
class Body:
    """A run's code that waits until the test lets it go on, and counts how often it was begun."""

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.begun: list[RunLease] = []
        self.running = asyncio.Event()
        self.go_on = asyncio.Event()
        self._outcome = outcome

    async def __call__(self, lease: RunLease) -> Outcome | None:
        self.begun.append(lease)
        self.running.set()
        await self.go_on.wait()
        return self._outcome


@final
class Stubborn:
    """A run's code that swallows every cancellation until the test lets it go, or its manager is left: a test that
    fails must not leave a task behind that never ends."""

    at_large: ClassVar[WeakSet[Stubborn]] = WeakSet()

    def __init__(self) -> None:
        self.at_large.add(self)
        self.running = asyncio.Event()
        self.told = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self, lease: RunLease) -> None:
        self.running.set()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.told.set()


@final
class Echo:
    """A named executor: its runs end at once with their input as their values."""

    payload_version = 1

    def __init__(self) -> None:
        self.ran: list[str] = []

    def encode(self, payload: Any) -> Mapping[str, Any]:
        return {"said": payload}

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:
        return stored["said"]

    async def heads(self, run: Run) -> Mapping[str, str]:
        return {}

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        self.ran.append(lease.run_id)
        return Outcome(values={"said": payload})

    async def restore(self, lease: RunLease) -> None:
        pass


def calm(**settings: Any) -> RunsConfig:
    """Settings under which a busy machine loses nothing."""
    return RunsConfig(**{"drain": "5 s", **settings})


@asynccontextmanager
async def manager_on(store: SqlRunStore, faults: Faults | None = None, **given: Any) -> AsyncIterator[RunManager]:
    """A worker of its own; ``faults`` spoils what it asks."""
    asked = store if faults is None else FlakyStore.around(store, faults)
    async with RunManager(asked, **{"config": calm(), **given}) as manager:
        try:
            yield manager
        finally:
            for body in Stubborn.at_large:
                body.let_go.set()
            if faults is not None:
                faults.mend()


async def lone_on(store: SqlRunStore, faults: Faults) -> Lone:
    """A worker without heartbeat and reconciler, whose questions ``faults`` spoils."""
    return await lone_worker(FlakyStore.around(store, faults), clock=ManualClock())


async def carried_out(one: Lone, body: Any, **asked: Any) -> Run | None:
    """A run from its admission to its end, however much time that takes."""
    return await over(one, one.granting.take_up(await one.admits(**asked), LocalExecutor(body)))


async def over(one: Lone, held: Held) -> Run | None:
    """Let time pass, with beats, until a held run has left its process; its last row if it ended there."""
    clock = one.ground.clock
    assert isinstance(clock, ManualClock)
    while not held.over.is_set():
        await one.beat()
        await clock.advance(0.2)
    return held.ended


async def row_of(store: SqlRunStore, key: RunKey) -> Run:
    """A run as the store has it now."""
    run = await store.get(key, scope=EVERYONE)
    assert run is not None
    return run


def gated(faults: Faults, question: str, *, answered: bool = False) -> Gate:
    """The next question of this kind stands still, before it reaches the store or (``answered``) on its way back."""
    gate = Gate()
    faults.once(question, gate.after if answered else gate.before)
    return gate


async def until(holds: Callable[[], bool]) -> None:
    """Return when it holds, which nobody tells us: looked at with every turn of the loop."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)
