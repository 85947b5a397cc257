"""What the workers of these tests carry out: runs that write recorded steps, and runs that do not let go.

Everything durable goes through ``write_step`` and so through the fence; what is begun is also noted in a file, which
survives kill -9 and tells the judge of work that was never recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from deerflow_runs import Run, RunId, RunKey, SqlRunStore, StoreUnavailable
from deerflow_runs.manager.lease import RunLease, WriteRefused
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.model import Micros
from deerflow_runs.testing.invariants import StepLogged
from deerflow_runs.testing.recording import steps_of, write_step

T = TypeVar("T")

RESTORED: Final = "restored"
"""The step that a restore records."""

LATE: Final = "late"
"""The step that a body tries to record after it should have stopped."""

Report = Callable[[RunKey, str], Awaitable[bool]]
"""Tells the manager that a run has written a checkpoint; False: the run is lost."""


def now() -> Micros:
    """The wall clock that the database has too."""
    return Micros(time.time_ns() // 1000)


class StepsLog:
    """Every step that was begun, a line each, written at once."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def begun(self, lease: RunLease, step: str, asked_at: Micros) -> None:
        """It begins now; ``asked_at`` is from before the lease was asked."""
        known = {"run_id": lease.run_id, "epoch": lease.epoch, "step": step, "asked_at": asked_at, "started_at": now()}
        os.write(self._descriptor, json.dumps(known).encode() + b"\n")


def steps_logged(path: Path) -> list[StepLogged]:
    """What a log says. A line that was not finished is not there."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [_logged(json.loads(line)) for line in lines]


def _logged(line: Mapping[str, Any]) -> StepLogged:
    return StepLogged(**{**line, "run_id": RunId(line["run_id"])})


class Plain:
    """What all these executors have in common: their payload is a JSON object, and a restore records that it was."""

    payload_version: int = 1

    def __init__(self, store: SqlRunStore, log: StepsLog, report: Report) -> None:
        self._store = store
        self._log = log
        self._report = report

    def encode(self, payload: Any) -> Mapping[str, Any]:
        return dict(payload or {})

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:
        return stored

    async def heads(self, run: Run) -> Mapping[str, str]:
        return {}

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        raise NotImplementedError

    async def restore(self, lease: RunLease) -> None:
        await self._record(lease, RESTORED)

    async def _record(self, lease: RunLease, step: str) -> None:
        """Until it is recorded, by this try or by one whose answer was lost; raises when the run is lost."""
        while True:
            await lease.check()
            epoch = lease.epoch
            with contextlib.suppress(StoreUnavailable):
                if step in await steps_of(self._store, lease.key) or await write_step(self._store, lease, step):
                    return
                if lease.trusted() and lease.epoch == epoch:
                    lease.fence("its write was refused")
                    raise WriteRefused(lease.run_id)
            await asyncio.sleep(0.05)


class Steps(Plain):
    """``steps`` asynchronous steps, each ``pause`` seconds long. What is recorded is not done again."""

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        for number in range(payload.get("steps", 3)):
            await self._step(lease, f"step-{number}", payload.get("pause", 0.05))
        return None

    async def _step(self, lease: RunLease, step: str, pause: float) -> None:
        if step in await _answered(lambda: steps_of(self._store, lease.key)):
            return
        asked_at = now()
        await lease.check()
        self._log.begun(lease, step, asked_at)
        await asyncio.sleep(pause)
        await self._record(lease, step)
        await _answered(lambda: self._report(lease.key, step))


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the store answers."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            return await ask()
        await asyncio.sleep(0.05)


class Block(Plain):
    """Sleeps for ``seconds`` in a thread, which nobody can stop, and then wants to write."""

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        loop = asyncio.get_running_loop()

        def work() -> bool:
            time.sleep(payload["seconds"])
            return asyncio.run_coroutine_threadsafe(write_step(self._store, lease, LATE), loop).result()

        await asyncio.to_thread(work)
        return None


class Spin(Plain):
    """Computes for ``seconds`` without giving the event loop back, and then records it."""

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        end = time.monotonic() + payload["seconds"]
        while time.monotonic() < end:
            sum(range(1000))
        await self._record(lease, "spun")
        return None


class Stubborn(Plain):
    """Swallows every cancellation for ``seconds``, and then wants to write."""

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        end = time.monotonic() + payload["seconds"]
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        await write_step(self._store, lease, LATE)
        await self._report(lease.key, LATE)
        return None


EXECUTORS: Final[Mapping[str, type[Plain]]] = {"steps": Steps, "block": Block, "spin": Spin, "stubborn": Stubborn}
