"""The heartbeat's work on its own event loop: open the session, renew it, hear signals, reconnect, replace, close.

How often, how long and what an answer means is decided in ``protocol.trust``. Nothing here knows threads or the main
loop (``heartbeat`` does), and nothing here knows runs: the cost of a beat is the same for one and for ten thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, assert_never, final

from deerflow_runs import observe as events
from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import DeerflowRunsError, StoreUnavailable, UsageError
from deerflow_runs.manager import messages
from deerflow_runs.manager.loop_watch import LoopWatch
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.telling import TrustTeller
from deerflow_runs.manager.waiting import OBEDIENCE, GivenUp, ended, first_of, within
from deerflow_runs.model import Session, WorkerId
from deerflow_runs.protocol.trust import BEATS_PER_TIMEOUT, BootSeconds, beat_timeout, next_beat
from deerflow_runs.store.base import CancelRequest, NotLive, Renewed, SessionLine
from deerflow_runs.store.signals import Signal, SignalMode

logger = logging.getLogger("deerflow_runs.heartbeat")

T = TypeVar("T")

PROBE_EVERY: Final = 10
"""Beats between two questions whether signals still arrive (O33)."""

PROBE_PATIENCE: Final = 1.5
"""Seconds that such a question gets at least: a line waits a second for a signal of its own."""

FIRST_PATIENCE: Final = 10.0
"""Seconds that each step of the first opening may take, or a lease if that is longer: there is no trust to lose yet."""


@final
@dataclass(frozen=True, slots=True)
class _Opening:
    """A session that is to be opened. ``asked_at``: when it was asked for first; from then on its row may exist."""

    session: Session
    asked_at: BootSeconds | None = None


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
        self._make_line = line
        self._line: SessionLine | None = None
        self._connected = False
        self._terms = config.terms()
        self._clock = clock
        self._post = post
        self._observe = observe
        self._unit = unit
        self._opening: _Opening | None = None
        self._is_open = False
        self._last_turn = session.now()
        self._until_probe = 0
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
            self._connected = self._connected and working.done()
            await ended(self._clock, working)
        await self._close()
        if working.done() and not working.cancelled():
            working.result()

    async def _work(self, opened: Callable[[], None]) -> None:
        await self._open_first()
        opened()
        beside = [
            asyncio.create_task(self._for_ever(self._teller.watch), name="heartbeat-trust"),
            asyncio.create_task(self._for_ever(self._watch.watch), name="heartbeat-loop-watch"),
        ]
        try:
            await self._beat_for_ever()
        finally:
            await ended(self._clock, *beside)

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
        if self._connected:
            await self._listen(BootSeconds(self._last_turn + pause))
        else:
            await self._rest(pause)
        if self._stopping.is_set():
            return
        if not self._connected:
            await self._connect_again()
        if self._watch.renew:
            await self._beat()
        else:
            self._last_turn = self._session.now()

    async def _beat(self) -> None:
        """O9: the clock is read before the renewal is sent."""
        self._last_turn = sent_at = self._session.now()
        line = self._present_line()
        answer = await self._in_time(line.renew(self._session.worker_id, state=self._session.state))
        match answer:
            case Renewed():
                self._confirmed(answer, sent_at)
                await self._probe(line)
            case NotLive():
                self._is_open = False
                self._session.refused()
                self._teller.look()
                self._opening = _Opening(self._session.fresh())
                await self._replace(self._opening)
            case _:
                assert_never(answer)

    def _confirmed(self, answer: Renewed, sent_at: BootSeconds) -> None:
        now = self._session.now()
        self._session.confirmed(answer, sent_at=sent_at, answered_at=now)
        self.failures = 0
        self.beats += 1
        self.last_confirmed_at = now
        self._teller.look()
        self._heard(answer.requests)

    def _failed(self, error: Exception) -> None:
        """The line may be in any state: it is connected anew before it is used again."""
        self._connected = False
        if isinstance(error, GivenUp) and not error.ended:
            self._line = None  # somebody is still inside
        self.failures += 1
        self._session.failed()
        told = events.BeatFailed(
            worker_id=self._session.worker_id, error=events.error_code(error), failures=self.failures
        )
        logger.debug("a beat failed", exc_info=error)
        self._observe(told)

    async def _in_time(self, question: Coroutine[Any, Any, T]) -> T:
        """O10: never longer than what leaves trust enough for another attempt."""
        return await within(self._clock, beat_timeout(self._session.trust, self._session.now()), question)

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
        waiting = asyncio.create_task(self._present_line().wait(seconds))
        nudged = asyncio.create_task(self._nudged.wait())
        await first_of(self._clock, seconds, waiting, nudged)
        if not await ended(self._clock, waiting, nudged):
            raise GivenUp(seconds, ended=False)
        return frozenset() if waiting.cancelled() else waiting.result()

    async def _heed(self, signal: Signal) -> None:
        """O33: a signal is a hint; what it hints at is read from the store."""
        match signal:
            case Signal.CANCEL:
                self._heard(await self._in_time(self._present_line().requests(self._session.worker_id)))
            case Signal.WORK:
                self._post(messages.WorkWanted())
            case Signal.DRAIN:
                self._post(messages.DrainWanted())
            case _:
                assert_never(signal)

    def _heard(self, requests: tuple[CancelRequest, ...]) -> None:
        if requests:
            self._post(messages.Heard(requests))

    async def _probe(self, line: SessionLine) -> None:
        """O33: signals that do not arrive are worse than none, so they are tried at the start and now and then."""
        if self._until_probe == 0 and line.mode in (SignalMode.NOTIFY, SignalMode.POLLING):
            limit = beat_timeout(self._session.trust, self._session.now())
            await within(self._clock, max(limit, PROBE_PATIENCE), line.probe())
        self._until_probe = (self._until_probe or PROBE_EVERY) - 1
        if line.mode is not self.mode:
            self.mode = line.mode
            self._observe(events.SignalModeChanged(worker_id=self._session.worker_id, mode=line.mode.value))

    # --- Connections and sessions -------------------------------------------------------------------------------------

    def _present_line(self) -> SessionLine:
        if self._line is None:
            self._line = self._make_line()
        return self._line

    async def _open_first(self) -> None:
        """Raises what the store says. A row that may exist by then is closed with everything else, in ``_close``."""
        patience = max(self._terms.lease, FIRST_PATIENCE)
        opening = self._opening = _Opening(self._session.session)
        try:
            await within(self._clock, patience, self._present_line().connect(opening.session.worker_id))
            self._connected = True
            await self._open(opening, patience)
            if not self._session.trusted():
                await self._beat()
        except GivenUp as error:
            self._connected = False
            raise StoreUnavailable(str(error)) from error
        except BaseException:
            self._connected = False
            raise
        if not self._session.trusted():
            raise StoreUnavailable(f"the store answers too slowly for a lease of {self._terms.lease:g} s")
        self._observe(events.SessionOpened(worker_id=self._session.worker_id))
        await self._probe(self._present_line())

    async def _connect_again(self) -> None:
        """O19, O32: what was missed meanwhile must be read again, by the next beat here and by the main loop."""
        self._until_probe = 0
        if self._opening is not None:
            await self._replace(self._opening)
            return
        await self._in_time(self._present_line().connect(self._session.worker_id))
        self._connected = True
        self._post(messages.Reconnected())

    async def _replace(self, opening: _Opening) -> None:
        """O13: a session that is not live never comes back; a new one takes its place, under a connection of its own,
        because channel and hint belong to an id."""
        previous = self._session.worker_id
        self._connected = False
        await self._in_time(self._present_line().connect(opening.session.worker_id))
        limit = beat_timeout(self._session.trust, self._session.now())
        await self._open(opening, limit)
        self._connected = True
        self.failures = 0
        self._observe(events.SessionReplaced(worker_id=self._session.worker_id, previous=previous))
        self._post(messages.SessionReplaced(previous))
        self._teller.look()
        self._post(messages.Reconnected())
        if not self._session.trusted():
            self._nudged.set()

    async def _open(self, opening: _Opening, seconds: float) -> None:
        """A repeat under the same id is answered by the row of the first request, whose lease runs since then."""
        asked_at = opening.asked_at if opening.asked_at is not None else self._session.now()
        self._opening = replace(opening, asked_at=asked_at)
        try:
            session = await within(self._clock, seconds, self._present_line().open_session(opening.session))
        except UsageError:  # it was opened, and has died, before we heard of it (I12)
            self._opening = _Opening(self._session.fresh())
            raise
        self._session.opened(session, sent_at=asked_at, answered_at=self._session.now())
        self._last_turn = asked_at
        self._opening = None
        self._is_open = True

    async def _close(self) -> None:
        """O35: a session that leaves says so, and nobody waits for its expiry. If the store is away, expiry does it."""
        limit = self._budget / 4 if self._stopping.is_set() else BEATS_PER_TIMEOUT * self._terms.beat
        try:
            for worker_id in self._rows():
                if not self._connected:
                    await within(self._clock, limit, self._present_line().connect(worker_id))
                    self._connected = True
                if await within(self._clock, limit, self._present_line().close_session(worker_id)):
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
