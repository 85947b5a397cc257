"""The heartbeat's work on its own event loop: beat, hear signals, tell the main loop, and go on whatever happens.

How often, how long and what an answer means is decided in ``protocol.trust``; the connection is ``lifeline``'s. Nothing
here knows threads (``heartbeat`` does) or runs: the cost of a beat is the same for one and for ten thousand.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final, assert_never, final

from deerflow_runs import observe as events
from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import DeerflowRunsError, StoreUnavailable
from deerflow_runs.manager import messages
from deerflow_runs.manager.lifeline import Lifeline
from deerflow_runs.manager.loop_watch import LoopWatch
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.telling import TrustTeller
from deerflow_runs.manager.waiting import GivenUp, ended, first_of
from deerflow_runs.model import WorkerId
from deerflow_runs.protocol.trust import BEATS_PER_TIMEOUT, BootSeconds, next_beat
from deerflow_runs.store.base import CancelRequest, NotLive, Renewed, SessionLine
from deerflow_runs.store.signals import Signal, SignalMode

logger = logging.getLogger("deerflow_runs.heartbeat")

PROBE_EVERY: Final = 10
"""Beats between two questions whether signals still arrive (O33)."""

PROBE_PATIENCE: Final = 1.5
"""Seconds that such a question gets at least: a line waits a second for a signal of its own."""


@final
class Pulse:
    """One session after the other, one connection at a time, one beat in flight. Belongs to one event loop.

    ``post`` and ``observe`` must not raise. ``ping`` asks the main loop to answer by ``answered``, called here.
    """

    def __init__(
        self,
        session: WorkerSession,
        line: Callable[[], SessionLine],
        config: RunsConfig,
        clock: Clock,
        *,
        post: Callable[[messages.Message], None],
        observe: Callable[[events.Event], None],
        ping: Callable[[], None],
        unit: Callable[[], float] = random.random,
    ) -> None:
        self.beats = 0
        self.failures = 0
        self.last_confirmed_at: BootSeconds | None = None
        self.mode: SignalMode | None = None
        self._session = session
        self._terms = config.terms()
        self._clock = clock
        self._post = post
        self._observe = observe
        self._unit = unit
        self._last_turn = session.now()
        self._until_probe = 0
        self._lifeline = Lifeline(session, line, self._terms, clock, observe)
        self._nudged = asyncio.Event()
        self._stopping = asyncio.Event()
        self._budget = 0.0
        self._teller = TrustTeller(session, clock, post, observe)
        self._watch = LoopWatch(self._terms, session, clock, ping=ping, recovered=self.beat_now, observe=observe)

    # --- Asked of it --------------------------------------------------------------------------------------------------

    @property
    def lateness(self) -> float:
        """The longest by which this loop ever woke too late, in seconds: a lease must outlast it (O9)."""
        return self._watch.lateness

    def beat_now(self) -> None:
        """Do not wait for the time of the next beat."""
        self._nudged.set()

    def answered(self) -> None:
        """The main loop has answered a ping (O11)."""
        self._watch.answered()

    def stop(self, seconds: float) -> None:
        """Let ``live`` come to its end within so many seconds: no beat follows the one in flight."""
        self._budget = seconds
        self._stopping.set()
        self._nudged.set()

    async def live(self, opened: Callable[[], None]) -> None:
        """Open a session, say so once it is trusted, and keep it until ``stop``; then close it and the connection.

        Raises only what kept the first session from being opened. Whatever happens later is told as an event.
        """
        working = asyncio.create_task(self._work(opened), name="heartbeat")
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            await first_of(self._clock, self._budget / 2, working)
            if not working.done():
                self._lifeline.broken()
                await ended(self._clock, working)
        await self._lifeline.close(self._last_patience())
        if working.done() and not working.cancelled():
            working.result()

    def _last_patience(self) -> float:
        """Half of the budget is for what is under way, a quarter each for a connection and the last word."""
        return self._budget / 4 if self._stopping.is_set() else BEATS_PER_TIMEOUT * self._terms.beat

    async def _work(self, opened: Callable[[], None]) -> None:
        await self._begin()
        opened()
        beside = [
            asyncio.create_task(self._for_ever(self._teller.watch), name="heartbeat-trust"),
            asyncio.create_task(self._for_ever(self._watch.watch), name="heartbeat-loop-watch"),
        ]
        try:
            await self._beat_for_ever()
        finally:
            await ended(self._clock, *beside)

    async def _begin(self) -> None:
        """Raises what the store says."""
        try:
            await self._lifeline.open()
            if not self._session.trusted():  # the answer took longer than the lease
                await self._beat()
        except GivenUp as error:
            self._lifeline.broken(error)
            raise StoreUnavailable(str(error)) from error
        except BaseException:
            self._lifeline.broken()
            raise
        if not self._session.trusted():
            raise StoreUnavailable(f"the store answers too slowly for a lease of {self._terms.lease:g} s")
        self._observe(events.SessionOpened(worker_id=self._session.worker_id))
        self._last_turn = self._asked_at()
        try:
            await self._probe()
        except DeerflowRunsError as error:  # no reason not to begin
            self._failed(error)

    async def _for_ever(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await watch()
            except Exception:  # a defect here must not end the beats beside it
                logger.exception("the heartbeat goes on after an error in %s", watch.__qualname__)
            await self._clock.sleep(self._terms.beat)

    # --- Beats --------------------------------------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._next()
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the session needs its next beat
                self._failed(error)

    async def _next(self) -> None:
        """Wait for the time of the next beat, and send it."""
        pause = next_beat(self._terms, failures=self.failures, unit=self._unit())
        if self._lifeline.connected:
            await self._listen(BootSeconds(self._last_turn + pause))
        else:
            await self._rest(pause)
        if self._stopping.is_set():
            return
        if not self._lifeline.connected:
            await self._connect_again()
        if self._watch.renew:
            await self._beat()
        else:
            self._last_turn = self._session.now()

    async def _beat(self) -> None:
        """O9: the clock is read before the renewal is sent."""
        self._last_turn = sent_at = self._session.now()
        worker_id, state = self._session.worker_id, self._session.state
        answer = await self._lifeline.ask(self._lifeline.line.renew(worker_id, state=state))
        match answer:
            case Renewed():
                self._confirmed(answer, sent_at)
                await self._probe()
            case NotLive():
                self._lifeline.refused()
                self._teller.look()
                await self._connect_again()
            case _:
                assert_never(answer)

    def _confirmed(self, answer: Renewed, sent_at: BootSeconds) -> None:
        now, before = self._session.now(), self._session.trust
        self._session.confirmed(answer, sent_at=sent_at, answered_at=now)
        self.failures = 0
        self.beats += 1
        self.last_confirmed_at = now
        self._teller.look(before)
        self._heard(answer.requests)

    def _failed(self, error: Exception) -> None:
        """The line is connected anew before it is used again."""
        self._lifeline.broken(error)
        self.failures += 1
        self._session.failed()
        told = events.BeatFailed(
            worker_id=self._session.worker_id, error=events.error_code(error), failures=self.failures
        )
        logger.debug("a beat failed", exc_info=error)
        self._observe(told)

    async def _connect_again(self) -> None:
        """O19, O32: what was missed meanwhile must be read again, by the next beat here and by the main loop."""
        self._until_probe = 0
        previous = await self._lifeline.connect_again()
        if previous is not None:
            self._replaced(previous)
        self._post(messages.Reconnected())

    def _replaced(self, previous: WorkerId) -> None:
        """O13. The next beat counts from the first request for the session, as trust does: it may be due at once."""
        self.failures = 0
        self._last_turn = self._asked_at()
        self._observe(events.SessionReplaced(worker_id=self._session.worker_id, previous=previous))
        self._post(messages.SessionReplaced(previous))
        self._teller.look()

    def _asked_at(self) -> BootSeconds:
        """When the session that has just been opened was asked for."""
        return BootSeconds(self._session.trust.ends - (self._terms.lease - self._terms.margin))

    # --- Between beats ------------------------------------------------------------------------------------------------

    async def _rest(self, seconds: float) -> None:
        nudged = asyncio.create_task(self._nudged.wait())
        await first_of(self._clock, seconds, nudged)
        await ended(self._clock, nudged)
        self._nudged.clear()

    async def _listen(self, due: BootSeconds) -> None:
        """Heed signals until ``due``, or until somebody wants a beat now."""
        while (left := due - self._session.now()) > 0 and not self._nudged.is_set():
            for signal in await self._signals(left):
                await self._heed(signal)
        self._nudged.clear()

    async def _signals(self, seconds: float) -> frozenset[Signal]:
        waiting = asyncio.create_task(self._lifeline.line.wait(seconds))
        nudged = asyncio.create_task(self._nudged.wait())
        await first_of(self._clock, seconds, waiting, nudged)
        if not await ended(self._clock, waiting, nudged):
            raise GivenUp(seconds, ended=False)
        return frozenset() if waiting.cancelled() else waiting.result()

    async def _heed(self, signal: Signal) -> None:
        """O33: a signal is a hint; what it hints at is read from the store."""
        match signal:
            case Signal.CANCEL:
                self._heard(await self._lifeline.ask(self._lifeline.line.requests(self._session.worker_id)))
            case Signal.WORK:
                self._post(messages.WorkWanted())
            case Signal.DRAIN:
                self._post(messages.DrainWanted())
            case _:
                assert_never(signal)

    def _heard(self, requests: tuple[CancelRequest, ...]) -> None:
        if requests:
            self._post(messages.Heard(requests))

    async def _probe(self) -> None:
        """O33: signals that do not arrive are worse than none, so they are tried at the start and now and then."""
        line = self._lifeline.line
        if self._until_probe == 0 and line.mode in (SignalMode.NOTIFY, SignalMode.POLLING):
            await self._lifeline.ask(line.probe(), at_least=PROBE_PATIENCE)
        self._until_probe = (self._until_probe or PROBE_EVERY) - 1
        if line.mode is not self.mode:
            self.mode = line.mode
            self._observe(events.SignalModeChanged(worker_id=self._session.worker_id, mode=line.mode.value))
