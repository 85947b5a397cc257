"""Tells when trust in the session ends and when it is back (O12).

Nobody's right to act depends on it: trust itself is computed when it is asked for, in ``session`` (O9). The heartbeat
lets it look after every change; a timer of its own looks at the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final

from deerflow_runs import observe as events
from deerflow_runs.clock import Clock
from deerflow_runs.manager import messages
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.protocol.trust import Trust


@final
class TrustTeller:
    """Says "ended" once for every time that trust ends, and "regained" once for every time that it is back.

    Belongs to one event loop.
    """

    def __init__(
        self,
        session: WorkerSession,
        clock: Clock,
        post: Callable[[messages.Message], None],
        observe: Callable[[events.Event], None],
    ) -> None:
        self._session = session
        self._clock = clock
        self._post = post
        self._observe = observe
        self._ended_at: float | None = None
        self._regained = asyncio.Event()

    def look(self, before: Trust | None = None) -> None:
        """Compare what is true now with what was told last.

        ``before`` is trust as it was before a change that was just made. If it had run out by now, somebody may have
        found the gate shut, and waits to hear that it is open: both is told, however short the time between.
        """
        trust, now = self._session.trust, self._session.now()
        past = before or trust
        if self._ended_at is None and not past.trusted(now):
            self._ended_at = past.ends
            self._regained.clear()
            self._observe(events.TrustEnded(worker_id=self._session.worker_id))
            self._post(messages.TrustEnded())
        if self._ended_at is not None and trust.trusted(now):
            suspended_for = now - self._ended_at
            self._ended_at = None
            self._regained.set()
            self._observe(events.TrustRegained(worker_id=self._session.worker_id, suspended_for=suspended_for))
            self._post(messages.TrustRegained(suspended_for))

    async def watch(self) -> None:
        """Look at the deadline, wherever it has moved to meanwhile, and again when trust is back; for ever."""
        while True:
            await self._clock.sleep(self._session.trust.remaining(self._session.now()))
            self.look()
            if self._ended_at is not None:
                await self._regained.wait()
