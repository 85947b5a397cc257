"""A session line over the model store: nothing to connect, and signals travel within the process.

It keeps no promise of its own: what it answers is the model's answer. Beside real lines it is held against the same
checks (``tests/lines/test_lines.py``); it takes no time, so a manual clock owns all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.store.base import CancelRequest, Renewal
from deerflow_runs.store.signals import Hub, Inbox, Signal, SignalMode
from deerflow_runs.testing.model_store import ModelStore


@final
class ModelLines:
    """Makes lines to one model store, and carries signals between them."""

    def __init__(self, store: ModelStore) -> None:
        self.store = store
        self._hub = Hub()

    def session_line(self) -> ModelLine:
        """A new line, not connected."""
        return ModelLine(self.store, self._hub)

    async def send(self, signal: Signal, to: WorkerId | None = None) -> None:
        """To one worker, or (None) to all."""
        self._hub.send(signal, to)


@final
class ModelLine:
    """A ``SessionLine``. It belongs to one event loop; the store behind it has no locks, so let threads take turns."""

    def __init__(self, store: ModelStore, hub: Hub) -> None:
        self._store = store
        self._hub = hub
        self._inbox: Inbox | None = None

    @property
    def mode(self) -> SignalMode:
        """See ``SessionLine.mode``."""
        return SignalMode.IN_PROCESS

    @property
    def hinted(self) -> bool:
        """See ``SessionLine.hinted``."""
        return False

    async def connect(self, worker_id: WorkerId) -> None:
        """See ``SessionLine.connect``."""
        await self.close()
        self._inbox = Inbox(worker_id)
        self._hub.join(self._inbox)

    async def open_session(self, session: Session) -> Session:
        """See ``SessionLine.open_session``."""
        self._connected()
        return await self._store.open_session(replace(session, hinted=False))

    async def renew(self, worker_id: WorkerId, *, state: SessionState) -> Renewal:
        """See ``SessionLine.renew``."""
        self._connected()
        await self._store.now()  # the model's clock moves when it is asked
        return await self._store.renew(worker_id, state=state)

    async def requests(self, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
        """See ``SessionLine.requests``."""
        self._connected()
        owned = await self._store.owned(worker_id)
        return tuple(CancelRequest(run.key, run.epoch, run.cancel_action) for run in owned if run.cancel_action)

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``SessionLine.close_session``."""
        self._connected()
        return await self._store.close_session(worker_id)

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """See ``SessionLine.wait``."""
        return await self._connected().wait(seconds)

    async def probe(self) -> bool:
        """See ``SessionLine.probe``."""
        self._connected()
        return True

    async def close(self) -> None:
        """See ``SessionLine.close``."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            self._hub.leave(inbox)

    def _connected(self) -> Inbox:
        if self._inbox is None:
            raise StoreUnavailable("the session line is not connected")
        return self._inbox
