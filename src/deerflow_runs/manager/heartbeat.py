"""The heartbeat's thread: it starts, carries messages between its loop and the main loop, and ends (O10).

What the thread does all day stands in ``pulse``. Of the manager it knows no more than the session, and what it has to
say goes to the main loop as a message; nothing here touches runs, locks of the manager, or its connections.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, final

from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import UsageError
from deerflow_runs.manager.messages import (
    DrainWanted,
    Heard,
    Message,
    Reconnected,
    SessionReplaced,
    TrustEnded,
    TrustRegained,
    WorkWanted,
)
from deerflow_runs.manager.pulse import Pulse
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.waiting import OBEDIENCE
from deerflow_runs.observe import Event
from deerflow_runs.protocol.trust import BEATS_PER_TIMEOUT, BootSeconds
from deerflow_runs.store.base import SessionLine
from deerflow_runs.store.shield import fate_of
from deerflow_runs.store.signals import SignalMode

__all__ = [
    "DrainWanted",
    "Heard",
    "Heartbeat",
    "Message",
    "Reconnected",
    "SessionReplaced",
    "TrustEnded",
    "TrustRegained",
    "WorkWanted",
]

logger = logging.getLogger("deerflow_runs.heartbeat")

AT_EXIT: Final = 2.0
"""Seconds that the end of the interpreter waits for a heartbeat that nobody stopped."""


@final
class Heartbeat:
    """Keeps ``session`` alive from a daemon thread with a loop and a ``line`` of its own.

    ``post`` is called in the loop in which ``start`` was awaited, one message after the other; ``observe`` is called in
    the heartbeat's thread as well and must not raise. Works in the process in which it was made only.
    """

    def __init__(
        self,
        session: WorkerSession,
        line: Callable[[], SessionLine],
        config: RunsConfig,
        clock: Clock,
        post: Callable[[Message], None],
        observe: Callable[[Event], None],
    ) -> None:
        self._session = session
        self._line = line
        self._config = config
        self._clock = clock
        self._post = post
        self._observe = observe
        self._pid = os.getpid()
        self._thread: _Thread | None = None

    # --- Asked from any thread ----------------------------------------------------------------------------------------

    @property
    def mode(self) -> SignalMode:
        """How signals reach this worker now (O33)."""
        return (self._pulse and self._pulse.mode) or SignalMode.POLLING

    @property
    def beats(self) -> int:
        """How many beats were confirmed."""
        return self._pulse.beats if self._pulse else 0

    @property
    def failures(self) -> int:
        """How many attempts have failed since the last confirmed beat."""
        return self._pulse.failures if self._pulse else 0

    @property
    def last_confirmed_at(self) -> BootSeconds | None:
        """When the last confirmed beat was answered."""
        return self._pulse.last_confirmed_at if self._pulse else None

    @property
    def lateness(self) -> float:
        """The longest by which the thread was ever late, in seconds. Lease minus margin must be longer (O9)."""
        return self._pulse.lateness if self._pulse else 0.0

    def beat_now(self) -> None:
        """Renew the session now rather than at its time."""
        self._check_process()
        if self._thread is not None:
            self._thread.call(self._thread.pulse.beat_now)

    # --- Start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the session; returns once it is trusted. Raises what the store says, and may then be tried again.

        Cancelling it leaves neither a thread nor a session behind, and takes until both are gone.
        """
        self._check_process()
        if self._thread is not None:
            raise UsageError("this heartbeat was started before")
        thread = _Thread(self._new_pulse, asyncio.get_running_loop(), self._post)
        thread.start()
        self._thread = thread
        try:
            await asyncio.wait({asyncio.wrap_future(thread.opened)})
        except asyncio.CancelledError:
            thread.stop(2 * BEATS_PER_TIMEOUT * self._config.terms().beat)
            await self._gone(thread)
            raise
        if (error := thread.opened.result()) is not None:
            await self._gone(thread)
            raise error

    async def stop(self, timeout: float) -> None:
        """Close the session, so that it is dead and proven, and end the thread: within ``timeout`` seconds if the
        store answers, and soon after them if it does not. May be repeated and cancelled; the thread ends all the same.
        """
        self._check_process()
        if self._thread is None:
            return
        self._thread.stop(timeout)
        over = asyncio.wrap_future(self._thread.ended)
        limit = asyncio.create_task(self._clock.sleep(timeout + 3 * OBEDIENCE))
        try:
            await asyncio.wait({over, limit}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            limit.cancel()
        if over.done():
            self._thread.join()
        else:
            logger.warning("the heartbeat's thread did not end in time; it ends with the process")

    # --- Inside -------------------------------------------------------------------------------------------------------

    @property
    def _pulse(self) -> Pulse | None:
        return self._thread.pulse if self._thread is not None else None

    async def _gone(self, thread: _Thread) -> None:
        """However often the caller is cancelled: what follows must not find half a session."""
        try:
            await fate_of(asyncio.wrap_future(thread.ended))
        finally:
            thread.join()
            self._thread = None

    def _new_pulse(self, post: Callable[[Message], None], ping: Callable[[], None]) -> Pulse:
        return Pulse(self._session, self._line, self._config, self._clock, post=post, observe=self._observe, ping=ping)

    def _check_process(self) -> None:
        """A fork copies this object, but neither its thread nor the right to its connection."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"this manager was made in process {self._pid} and cannot be used in process {os.getpid()}; "
                "make a new one after the fork"
            )


@final
class _Thread:
    """One thread and the way from its loop to the main loop and back. ``opened`` and ``ended`` can be awaited in any
    loop; ``opened`` holds the error if there was one."""

    def __init__(
        self,
        make_pulse: Callable[[Callable[[Message], None], Callable[[], None]], Pulse],
        main: asyncio.AbstractEventLoop,
        deliver: Callable[[Message], None],
    ) -> None:
        self.opened: Future[BaseException | None] = Future()
        self.ended: Future[None] = Future()
        for future in (self.opened, self.ended):
            future.set_running_or_notify_cancel()  # nobody who waits can cancel them
        self.pulse = make_pulse(self._post, self._ping)
        self._pid = os.getpid()
        self._main = main
        self._deliver = deliver
        self._waiting: set[Message] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="deerflow-runs-heartbeat", daemon=True)

    def start(self) -> None:
        """A daemon, or a program that forgot to stop it could never end."""
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread to give
            self._loop.close()
            raise
        atexit.register(self._at_exit)

    def stop(self, seconds: float) -> None:
        """Any thread."""
        self.call(self.pulse.stop, seconds)

    def join(self) -> None:
        """Once it has ``ended``: it has nothing left to do."""
        self._thread.join(AT_EXIT)

    def call(self, function: Callable[..., None], *arguments: float) -> None:
        """Any thread: do it in the heartbeat's loop; nothing happens once that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        error: BaseException | None = UsageError("the heartbeat was stopped while it started")
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self.pulse.live(lambda: self.opened.set_result(None)))
        except BaseException as raised:
            error = raised
            if self.opened.done():
                logger.exception("the heartbeat's thread ended by an error")
        finally:
            if not self.opened.done():
                self.opened.set_result(error)
            atexit.unregister(self._at_exit)
            self.ended.set_result(None)

    def _post(self, message: Message) -> None:
        """What is said again and again is said once while the main loop has not come to it, however long that takes."""
        if message in self._waiting:
            return
        if isinstance(message, Heard | WorkWanted):
            self._waiting.add(message)
        self._to_main(lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        """Main loop. Forgotten before it is heeded: what happens from here on is worth another one."""
        self._waiting.discard(message)
        self._deliver(message)

    def _ping(self) -> None:
        self._to_main(lambda: self.call(self.pulse.answered))

    def _to_main(self, function: Callable[[], None]) -> None:
        """A closed main loop has no runs any more: the session ends too."""
        try:
            self._main.call_soon_threadsafe(function)
        except RuntimeError:
            self.pulse.stop(AT_EXIT)

    def _at_exit(self) -> None:
        if self._loop.is_closed() or self._pid != os.getpid():
            return
        self.stop(AT_EXIT)
        self._thread.join(AT_EXIT)
