"""Watches over the main loop from the heartbeat's thread, so that a wedged worker does not look healthy (O11).

What a reading means is decided in ``protocol.trust``; here a ping is sent, an answer heard, and all stacks are logged.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import final

from deerflow_runs import observe as events
from deerflow_runs.clock import Clock
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.protocol.trust import BootSeconds, Terms, Watch

logger = logging.getLogger("deerflow_runs.heartbeat")


@final
class LoopWatch:
    """At most one ping in flight. Belongs to the heartbeat's loop; ``answered`` must be called there.

    ``ping`` asks the main loop to answer; ``recovered`` is called when a loop that was thought wedged has answered.
    """

    def __init__(
        self,
        terms: Terms,
        session: WorkerSession,
        clock: Clock,
        *,
        ping: Callable[[], None],
        recovered: Callable[[], None],
        observe: Callable[[events.Event], None],
    ) -> None:
        self.lateness = 0.0
        self._watch = Watch(terms)
        self._session = session
        self._clock = clock
        self._ping = ping
        self._recovered = recovered
        self._observe = observe

    @property
    def renew(self) -> bool:
        """Whether the session may be renewed now."""
        return not self._watch.stalled

    def answered(self) -> None:
        """The main loop has answered the ping."""
        was_stalled = self._watch.stalled
        self._watch = self._watch.answered()
        if was_stalled:
            self._observe(events.LoopRecovered(worker_id=self._session.worker_id))
            self._recovered()

    async def watch(self) -> None:
        """Take a reading once a beat, for ever."""
        while True:
            due = BootSeconds(self._session.now() + self._watch.terms.beat)
            await self._clock.sleep(self._watch.terms.beat)
            self._read(due, self._session.now())

    def _read(self, due: BootSeconds, now: BootSeconds) -> None:
        self.lateness = max(self.lateness, now - due)
        asked_at = self._watch.asked_at
        reading = self._watch.reading(due=due, now=now)
        self._watch = reading.watch
        if reading.dump:
            silent = now - (now if asked_at is None else asked_at)
            logger.error("the main loop has not answered for %.1f s; all stacks:\n%s", silent, all_stacks())
            self._observe(events.LoopStalled(worker_id=self._session.worker_id, seconds=silent))
        if reading.ping:
            self._ping()


def all_stacks() -> str:
    """Where every thread of the process is now. Lines of code only: a local variable may hold a secret."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001 - public in all but name; faulthandler writes to descriptors only
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames.items()
    )
