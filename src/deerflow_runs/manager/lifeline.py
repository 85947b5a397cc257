"""The session's own connection, and how sessions come and go on it: open, reconnect, replace, close.

One line at a time; what was cancelled or failed is connected anew before it is used again. When to do any of it is
decided in ``pulse``, and what it means for trust in ``session``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, final

from deerflow_runs import observe as events
from deerflow_runs.clock import Clock
from deerflow_runs.errors import DeerflowRunsError, UsageError
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.waiting import OBEDIENCE, GivenUp, within
from deerflow_runs.model import Session, WorkerId
from deerflow_runs.protocol.trust import BootSeconds, Terms, beat_timeout
from deerflow_runs.store.base import SessionLine

logger = logging.getLogger("deerflow_runs.heartbeat")

T = TypeVar("T")

FIRST_PATIENCE: Final = 10.0
"""Seconds that each step of the first opening may take, or a lease if that is longer: there is no trust to lose yet."""


@final
@dataclass(frozen=True, slots=True)
class _Opening:
    """A session that is to be opened. ``asked_at``: when it was asked for first; from then on its row may exist."""

    session: Session
    asked_at: BootSeconds | None = None


@final
class Lifeline:
    """Belongs to the heartbeat's event loop. ``connected`` says that the line can be asked as it is."""

    def __init__(
        self,
        session: WorkerSession,
        make_line: Callable[[], SessionLine],
        terms: Terms,
        clock: Clock,
        observe: Callable[[events.Event], None],
    ) -> None:
        self.connected = False
        self._session = session
        self._make_line = make_line
        self._line: SessionLine | None = None
        self._terms = terms
        self._clock = clock
        self._observe = observe
        self._opening: _Opening | None = None
        self._is_open = False

    @property
    def line(self) -> SessionLine:
        """The present line; a new one where the last was left behind."""
        if self._line is None:
            self._line = self._make_line()
        return self._line

    async def ask(self, question: Coroutine[Any, Any, T], *, at_least: float = 0.0) -> T:
        """O10: never wait longer than what leaves trust enough for another attempt, but ``at_least`` so many seconds.
        Raises ``GivenUp``, and what the line raises."""
        limit = beat_timeout(self._session.trust, self._session.now())
        return await within(self._clock, max(limit, at_least), question)

    def broken(self, error: BaseException | None = None) -> None:
        """The line may be in any state."""
        self.connected = False
        if isinstance(error, GivenUp) and not error.ended:
            self._line = None  # somebody is still inside

    # --- Sessions -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """The first session, under an id that no attempt before had. Raises what the store says; a row that exists by
        then all the same is closed by ``close``."""
        patience = max(self._terms.lease, FIRST_PATIENCE)
        self._opening = _Opening(self._session.fresh())
        await self._open(self._opening, patience)

    async def connect_again(self) -> WorkerId | None:
        """A new connection; if the session is to be replaced, also a new session: then the id of the previous one."""
        if self._opening is not None:
            return await self._replace(self._opening)
        await self.ask(self.line.connect(self._session.worker_id))
        self.connected = True
        return None

    def refused(self) -> None:
        """O13: the session was answered "not live" and never comes back. The next connection brings another one."""
        self._is_open = False
        self._session.refused()
        self._opening = _Opening(self._session.fresh())
        self.broken()

    async def _replace(self, opening: _Opening) -> WorkerId:
        previous = self._session.worker_id
        await self._open(opening, beat_timeout(self._session.trust, self._session.now()))
        return previous

    async def _open(self, opening: _Opening, seconds: float) -> None:
        """Under a connection of its own, because channel and hint belong to an id. A repeat under the same id is
        answered by the row of the first request, whose lease runs since then."""
        await within(self._clock, seconds, self.line.connect(opening.session.worker_id))
        asked_at = opening.asked_at if opening.asked_at is not None else self._session.now()
        self._opening = replace(opening, asked_at=asked_at)
        try:
            session = await within(self._clock, seconds, self.line.open_session(opening.session))
        except UsageError:  # it was opened, and has died, before we heard of it (I12)
            self._opening = _Opening(self._session.fresh())
            raise
        self._session.opened(session, sent_at=asked_at, answered_at=self._session.now())
        self._opening = None
        self._is_open = self.connected = True

    # --- The end ------------------------------------------------------------------------------------------------------

    async def close(self, seconds: float) -> None:
        """O35: a session that leaves says so, and nobody waits for its expiry. If the store is away, expiry does it.
        Each step takes ``seconds`` at most."""
        self._session.closing()
        try:
            for worker_id in self._rows():
                if not self.connected:
                    await within(self._clock, seconds, self.line.connect(worker_id))
                    self.connected = True
                if await within(self._clock, seconds, self.line.close_session(worker_id)):
                    self._observe(events.SessionClosed(worker_id=worker_id))
        except DeerflowRunsError as error:
            logger.warning("the session could not be closed and will expire: %s", events.error_code(error))
        finally:
            if self._line is not None:
                with contextlib.suppress(GivenUp):
                    await within(self._clock, OBEDIENCE, self._line.close())

    def _rows(self) -> Iterator[WorkerId]:
        """The sessions that may be live at the store, by all that is known here."""
        if self._is_open:
            yield self._session.worker_id
        if self._opening is not None and self._opening.asked_at is not None:
            yield self._opening.session.worker_id
