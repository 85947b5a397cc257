"""A worker process: one ``RunManager`` on a store of its own, told through a pipe what to do.

It answers every command, leaves in order at SIGTERM, and dies with whoever holds the other end of the pipe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

from deerflow_runs import CancelAction, Event, RunKey, RunsConfig, SqlRunStore, store_at
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.model import Micros
from tests.processes.worker_executors import EXECUTORS, Steps, StepsLog

STEP: Final = struct.Struct("q")
"""How a step of the clock is written down: microseconds."""


@dataclass(frozen=True)
class Plan:
    """What a worker is made of. ``logs`` is a folder; the worker's files there begin with its ``name``.

    ``clock``: a file that says by how much the store's clock is wrong, for SQLite, where the host's clock is the
    store's.
    """

    name: str
    dsn: str
    logs: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    executors: Sequence[str] = tuple(EXECUTORS)
    connections: int = 3
    clock: Path | None = None

    @property
    def events(self) -> Path:
        """A JSON object for every observed event, a line each."""
        return self.logs / f"{self.name}.events"

    @property
    def steps(self) -> Path:
        """See ``StepsLog``."""
        return self.logs / f"{self.name}.steps"

    @property
    def complaints(self) -> Path:
        """What the process said on its standard error."""
        return self.logs / f"{self.name}.stderr"


class EventsLog:
    """An observer that writes down everything at once, from whichever thread."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def observed(self, event: Event) -> None:
        told = {"event": type(event).__name__, "told_at": round(time.time(), 3), **event.as_json()}
        os.write(self._descriptor, json.dumps(told).encode() + b"\n")


def stepped_clock(path: Path) -> Callable[[], Micros]:
    """The host's clock, wrong by what the file says at that moment; all processes see a step at the same instant."""
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), STEP.size, access=mmap.ACCESS_READ)
    return lambda: Micros(time.time_ns() // 1000 + STEP.unpack_from(shared)[0])


def work(pipe: Pipe, plan: Plan) -> None:
    """The process."""
    complaints = os.open(plan.complaints, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(complaints, 2)
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    asyncio.run(Program(pipe, plan).main())


class Program:
    """One worker. Every public coroutine method but ``main`` is a command."""

    def __init__(self, pipe: Pipe, plan: Plan) -> None:
        self._pipe = pipe
        self._plan = plan
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        self._store = store_at(
            plan.dsn, connections=plan.connections, clock=stepped_clock(plan.clock) if plan.clock else None
        )
        self._log = StepsLog(plan.steps)
        self._manager = self._made(self._store)

    def _made(self, store: SqlRunStore) -> RunManager:
        async def report(key: RunKey, checkpoint: str) -> bool:
            return await manager.update_run_progress(key, checkpoint=checkpoint)

        manager = RunManager(
            store,
            executors={name: EXECUTORS[name](store, self._log, report) for name in self._plan.executors},
            config=RunsConfig.for_tests(**self._plan.settings),
            observers=[EventsLog(self._plan.events)],
        )
        return manager

    async def main(self) -> None:
        """Until it was told to leave."""
        loop = asyncio.get_running_loop()
        await self._store.open()
        await self._manager.start_heartbeat()
        loop.add_signal_handler(signal.SIGTERM, self._begin, self._leave())
        loop.add_reader(self._pipe.fileno(), self._heard)
        self._pipe.send((0, "ok", self._manager.worker_id))
        await self._left.wait()
        logging.shutdown()
        os._exit(0)  # threads of runs that nobody can stop are not waited for

    async def _leave(self, timeout: float | None = None) -> None:
        await self._manager.shutdown(timeout=timeout)
        await self._store.close()
        self._left.set()

    # --- Commands ---------------------------------------------------------------------------------------------------

    async def submit(self, thread: str, work: str, payload: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """The run's id, and whether it was there already. ``local``: the same steps, as a function of this process."""
        given: dict[str, Any] = dict(options)
        if "delay" in given:
            given["delay"] = timedelta(seconds=given["delay"])
        if work == "local":
            handle = await self._manager.submit(thread, self._local(payload), **given)
        else:
            handle = await self._manager.submit(thread, work, input=payload, **given)
        return handle.run_id, handle.reused

    def _local(self, payload: Mapping[str, Any]) -> Any:
        async def report(key: RunKey, checkpoint: str) -> bool:
            return await self._manager.update_run_progress(key, checkpoint=checkpoint)

        steps = Steps(self._store, self._log, report)

        async def function(lease: RunLease) -> Any:
            return await steps.run(lease, payload)

        return function

    async def cancel(self, key: RunKey, action: str, *, wait: bool, timeout: float | None) -> Any:
        """The outcome and the action in force."""
        result = await self._manager.cancel(key, CancelAction(action), wait=wait, timeout=timeout)
        return result.outcome.value, result.action and result.action.value

    async def join(self, key: RunKey, timeout: float) -> Any:
        """The last row."""
        return await self._manager.join(key, timeout=timeout)

    async def stats(self) -> Any:
        """As the manager says."""
        return self._manager.stats()

    async def leave(self, timeout: float | None) -> Any:
        """As at SIGTERM, and answer when it is over."""
        await self._leave(timeout)

    async def fork(self) -> Any:
        """A child that tries the manager and then stays; its id and what it was told."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, _refusals(self._manager).encode())
            os.close(writing)
            while True:
                signal.pause()
        os.close(writing)
        told = b""
        while part := os.read(reading, 4096):
            told += part
        os.close(reading)
        return child, told.decode().splitlines()

    # --- The pipe ---------------------------------------------------------------------------------------------------

    def _heard(self) -> None:
        try:
            while self._pipe.poll():
                number, command, arguments = self._pipe.recv()
                self._begin(self._answer(number, command, arguments))
        except (EOFError, ConnectionError):
            os._exit(1)  # nobody is interested any more

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, command: str, arguments: Mapping[str, Any]) -> None:
        try:
            answer = ("ok", await getattr(self, command)(**arguments))
        except Exception as error:  # noqa: BLE001 - whoever asked is told, whatever it is
            answer = ("error", (type(error).__name__, str(error)))
        self._pipe.send((number, *answer))


def _refusals(manager: RunManager) -> str:
    """What a child of a fork is told when it uses its parent's manager, a line for each try."""

    async def tries() -> list[str]:
        told = []
        for use in (
            lambda: manager.submit("child", "steps"),
            lambda: manager.join(RunKey("child", "none")),  # type: ignore[arg-type]
            manager.shutdown,
        ):
            try:
                await asyncio.wait_for(use(), 5)
                told.append("nothing")
            except Exception as error:  # noqa: BLE001 - the test reads which
                told.append(f"{type(error).__name__}: {error}".replace("\n", " "))
        return told

    return "\n".join(asyncio.Runner().run(tries()))
