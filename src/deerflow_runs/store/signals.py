"""Wake-ups between workers: what may be said, how it travels, and who waits for it (O33).

A signal is only ever a hint that it is worth looking: nothing is lost with one, and nothing is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from enum import StrEnum
from typing import final

from deerflow_runs.model import WorkerId


class Signal(StrEnum):
    """Rare events only, never one for each beat, checkpoint or token (O33)."""

    CANCEL = "cancel"
    """A run of the addressed worker was cancelled, forced or seized."""
    WORK = "work"
    """Something is there to be taken."""
    DRAIN = "drain"
    """The addressed worker is to drain."""


class SignalMode(StrEnum):
    """How a worker hears of what others did, at the latest with its next beat."""

    NOTIFY = "notify"
    """PostgreSQL: LISTEN, and a NOTIFY to ourselves has come back."""
    DATA_VERSION = "data_version"
    """SQLite: any commit of anybody, seen within about 50 ms; every signal but DRAIN is then possible."""
    IN_PROCESS = "in_process"
    """A database in memory: everybody is in this process."""
    POLLING = "polling"
    """Nothing is heard, as behind a transaction pooler: look with every beat."""


def written(signal: Signal, to: WorkerId | None) -> str:
    """As it travels in a NOTIFY."""
    return f"{signal.value} {to or ''}"


def read(payload: str) -> tuple[Signal, WorkerId | None] | None:
    """What ``written`` has made; None for what a newer version may say."""
    word, _, to = payload.partition(" ")
    try:
        return Signal(word), WorkerId(to) if to else None
    except ValueError:
        return None


@final
class Inbox:
    """The signals for one worker. Belongs to the event loop in which it was made; ``put`` comes from any thread."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._heard: set[Signal] = set()

    def hear(self, signal: Signal, to: WorkerId | None) -> None:
        """Keep a signal until somebody waits, if it is for this worker or for everybody."""
        if to in {None, self.worker_id}:
            self._heard.add(signal)
            self._woken.set()

    def put(self, signal: Signal, to: WorkerId | None) -> None:
        """The same from any thread; nothing happens once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.hear, signal, to)

    def wake(self) -> None:
        """End the present wait, or the next, without a signal."""
        self._woken.set()

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """The signals since the last wait; empty when the time is over. Whoever cancels it loses none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        heard = frozenset(self._heard)
        self._heard.clear()
        self._woken.clear()
        return heard


@final
class Hub:
    """Carries signals between the workers of one process that share one store object. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inboxes: list[Inbox] = []

    def join(self, inbox: Inbox) -> None:
        """From now on signals reach this inbox."""
        with self._lock:
            self._inboxes.append(inbox)

    def leave(self, inbox: Inbox) -> None:
        """No more signals; repeating it is harmless."""
        with self._lock:
            self._inboxes = [one for one in self._inboxes if one is not inbox]

    def send(self, signal: Signal, to: WorkerId | None) -> None:
        """To one worker, or (None) to all."""
        with self._lock:
            inboxes = list(self._inboxes)
        for inbox in inboxes:
            inbox.put(signal, to)
