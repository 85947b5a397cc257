"""The session line of a database that lives in this process: through the store's own units, without a hint.

Nobody outside the process can judge such a session, and nothing outside can be woken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store import sessions
from deerflow_runs.store.base import CancelRequest, Renewal
from deerflow_runs.store.hints import boot_id
from deerflow_runs.store.signals import Hub, Inbox, Signal, SignalMode
from deerflow_runs.store.units import Units


@final
class MemoryLines:
    """``Lines`` over the units of a store whose database only this process can reach."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._hub = Hub()

    @property
    def proves(self) -> bool:
        """See ``Lines.proves``."""
        return False

    def line(self) -> MemoryLine:
        """See ``Lines.line``."""
        return MemoryLine(self._units, self._hub)

    async def send(self, signal: Signal, to: WorkerId | None) -> None:
        """See ``Lines.send``."""
        self._hub.send(signal, to)

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:  # noqa: ARG002 - there are none
        """See ``Lines.signs``."""
        return {}

    async def close(self) -> None:
        """See ``Lines.close``."""


@final
class MemoryLine:
    """``SessionLine`` without a connection of its own; it works as long as the store is open."""

    def __init__(self, units: Units, hub: Hub) -> None:
        self._units = units
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
        told = replace(session, hinted=False, boot_id=session.boot_id or boot_id())
        opening = partial(sessions.open_session, dialect=self._units.dialect, session=told)
        return await self._units.transaction(opening)

    async def renew(self, worker_id: WorkerId, *, state: SessionState) -> Renewal:
        """See ``SessionLine.renew``."""
        beat = partial(sessions.renew, dialect=self._units.dialect, worker_id=worker_id, hinted=False, state=state)
        return await self._units.once(beat)

    async def requests(self, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
        """See ``SessionLine.requests``."""
        return await self._units.read(partial(sessions.requests, worker_id=worker_id))

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``SessionLine.close_session``."""
        closing = partial(sessions.close_session, dialect=self._units.dialect, worker_id=worker_id)
        return await self._units.transaction(closing)

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """See ``SessionLine.wait``."""
        if self._inbox is None:
            raise StoreUnavailable("the session line is not connected")
        return await self._inbox.wait(seconds)

    async def probe(self) -> bool:
        """See ``SessionLine.probe``."""
        return True

    async def close(self) -> None:
        """See ``SessionLine.close``."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            self._hub.leave(inbox)
