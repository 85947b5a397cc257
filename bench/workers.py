"""Worker processes: each one ``RunManager`` that is asked, one question at a time, to carry out a coroutine function.

What is asked of it is a function of a figure's module; this module knows only processes and what all workers observe.
Instants are ``time.monotonic()``, which on Linux is the same clock in every process of a machine.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, final

from deerflow_runs import Event, OnOrphan, Run, RunId, RunsConfig, SqlRunStore, store_at
from deerflow_runs.manager.handle import RunHandle
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.manager.outcome import Outcome

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE: Final = 300.0
"""Seconds after which something must be wrong."""

LOOK: Final = 0.005
"""Seconds between two looks at what was observed."""

WAIT: Final = "wait"
"""The executor of every worker: see ``Waits``."""


@final
@dataclass(frozen=True)
class Plan:
    """What a worker is made of. ``settings`` differ from the defaults."""

    dsn: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@final
class Inside:
    """A worker, seen from inside its process."""

    def __init__(self, plan: Plan) -> None:
        self.began_at = time.monotonic()
        self.seen: list[tuple[float, Event]] = []
        self.begun: list[tuple[RunId, float]] = []
        self.stopped: dict[RunId, float] = {}
        self.finished: list[tuple[RunId, float]] = []
        self.handles: list[RunHandle] = []
        self.store: SqlRunStore = store_at(plan.dsn)
        config = RunsConfig(**plan.settings)
        self.manager = RunManager(self.store, executors={WAIT: Waits(self)}, config=config, observers=[self])

    def observed(self, event: Event) -> None:
        self.seen.append((time.monotonic(), event))

    def times_of(self, kind: type[Event]) -> list[float]:
        """When events of this kind were told."""
        return [at for at, event in self.seen if isinstance(event, kind)]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Look until it does."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"in vain: {holds.__qualname__}; {self.manager.stats()}")
            await asyncio.sleep(LOOK)

    async def body(self, lease: RunLease, seconds: float) -> None:
        """What every run here does: wait, and note when it began and how it ended."""
        self.begun.append((lease.run_id, time.monotonic()))
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.stopped[lease.run_id] = time.monotonic()
            raise
        self.finished.append((lease.run_id, time.monotonic()))


@final
class Waits:
    """Waits for as many seconds as the payload says: a run that costs its worker nothing but its being there."""

    payload_version: int = 1

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    def encode(self, payload: Any) -> Mapping[str, Any]:
        return {"seconds": float(payload)}

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:  # noqa: ARG002 - the protocol's signature
        return stored["seconds"]

    async def heads(self, run: Run) -> Mapping[str, str]:  # noqa: ARG002
        return {}

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        await self._inside.body(lease, payload)
        return None

    async def restore(self, lease: RunLease) -> None:
        pass


# --- From outside ---------------------------------------------------------------------------------------------------


@final
class Worker:
    """One process; it is killed at the end of the block."""

    def __init__(self, dsn: str, settings: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.started_at = time.monotonic()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, Plan(dsn, settings)), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        self.answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def ask(self, work: Callable[Concatenate[Inside, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function of some module, carried out in there, answers."""
        self.begin(work, *args, **kwargs)
        answer: T = self.answer()
        return answer

    def begin(self, work: Callable[Concatenate[Inside, P], Awaitable[Any]], *args: P.args, **kwargs: P.kwargs) -> None:
        """The same without waiting; the answer must be fetched before the next question."""
        self._pipe.send((work, args, kwargs))

    def answer(self) -> Any:
        """What the last question was answered with. Raises ``RuntimeError`` with the trace of what went wrong."""
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError("a worker does not answer")
        good, answer = self._pipe.recv()
        if not good:
            raise RuntimeError(answer)
        return answer

    def kill(self) -> float:
        """kill -9; when."""
        at = time.monotonic()
        self._process.kill()
        self._process.join()
        return at


def _work(pipe: Pipe, plan: Plan) -> None:
    logging.basicConfig(level=logging.ERROR)
    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(_serve(pipe, plan))
    os._exit(0)  # a thread may still wait for the pipe


async def _serve(pipe: Pipe, plan: Plan) -> None:
    inside = Inside(plan)
    await inside.store.open()
    await inside.manager.start_heartbeat()
    pipe.send((True, None))
    while True:
        work, args, kwargs = await asyncio.to_thread(pipe.recv)
        try:
            answer = True, await work(inside, *args, **kwargs)
        except Exception:  # noqa: BLE001 - whoever asked is told all of it
            answer = False, traceback.format_exc()
        pipe.send(answer)


# --- What several figures ask ---------------------------------------------------------------------------------------


async def begin_runs(
    inside: Inside, count: int, seconds: float, *, local: bool = False, on_orphan: OnOrphan | None = None
) -> list[Any]:
    """So many runs on as many threads, once all of them are under way; their keys."""

    async def function(lease: RunLease) -> None:
        await inside.body(lease, seconds)

    before, number = len(inside.begun), len(inside.handles)
    for first in range(0, count, 50):
        asked = [
            inside.manager.submit(f"t-{os.getpid()}-{number + one}", function)
            if local
            else inside.manager.submit(f"t-{os.getpid()}-{number + one}", WAIT, input=seconds, on_orphan=on_orphan)
            for one in range(first, min(first + 50, count))
        ]
        inside.handles += await asyncio.gather(*asked)
    await inside.until(lambda: len(inside.begun) >= before + count)
    return [handle.key for handle in inside.handles[number:]]
