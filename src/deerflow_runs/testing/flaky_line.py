"""Lets a real session line fail as a test wishes: late, lost or no answers, errors, and lines deaf to cancellation.

Everything that is not spoiled goes to the line inside. Nothing here waits for time to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from enum import StrEnum
from typing import Any, TypeVar, final

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.store.base import CancelRequest, Renewal, SessionLine
from deerflow_runs.store.shield import fate_of
from deerflow_runs.store.signals import Signal, SignalMode

T = TypeVar("T")
Ask = Callable[[], Awaitable[Any]]
Fault = Callable[[Ask], Awaitable[Any]]


class Verb(StrEnum):
    """What can be asked of a line."""

    CONNECT = "connect"
    OPEN_SESSION = "open_session"
    RENEW = "renew"
    REQUESTS = "requests"
    CLOSE_SESSION = "close_session"
    WAIT = "wait"
    PROBE = "probe"
    CLOSE = "close"


@final
class Gate:
    """Where a question stands still until ``open`` is called, from any thread. ``deaf``: cancelling it is no help."""

    def __init__(self, *, deaf: bool = False) -> None:
        self._deaf = deaf
        self._reached: Future[None] = Future()
        self._opened: Future[None] = Future()
        for future in (self._reached, self._opened):
            future.set_running_or_notify_cancel()

    async def reached(self) -> None:
        """Wait until a question stands here."""
        await asyncio.wrap_future(self._reached)

    def open(self) -> None:
        """Let it go on; repeating this changes nothing."""
        with contextlib.suppress(InvalidStateError):
            self._opened.set_result(None)

    async def before(self, ask: Ask) -> Any:
        """The fault of a question that has not reached the store yet."""
        await self._stand()
        return await ask()

    async def after(self, ask: Ask) -> Any:
        """The fault of an answer that is under way."""
        answer = await ask()
        await self._stand()
        return answer

    async def _stand(self) -> None:
        if not self._reached.done():
            self._reached.set_result(None)
        opened = asyncio.wrap_future(self._opened)
        await (fate_of(opened) if self._deaf else opened)


def failing(error: Exception | None = None) -> Fault:
    """The store is never asked; ``StoreUnavailable`` unless another error is given."""

    async def fault(_: Ask) -> Any:
        raise error or StoreUnavailable("the test has cut this line")

    return fault


async def losing(ask: Ask) -> Any:
    """The store does what it was asked, and the answer is lost."""
    await ask()
    raise StoreUnavailable("the test has lost this answer")


@final
class Faults:
    """What goes wrong with the lines of one test, and what was asked of them. Set it up before it is needed. A store's
    questions have other names, see ``FlakyStore``.

    ``mode``: what the lines pretend, where it is not None.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most_at_once = 0
        self.mode: SignalMode | None = None
        self._next: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._busy = 0

    def once(self, verb: str, fault: Fault, *, times: int = 1) -> None:
        """Spoil the next questions of this kind."""
        self._next[verb].extend([fault] * times)

    def always(self, fault: Fault, *verbs: str) -> None:
        """Spoil every question of these kinds, or of all kinds but ``close``, until ``mend``."""
        self._always |= dict.fromkeys(verbs or set(Verb) - {Verb.CLOSE}, fault)

    def mend(self) -> None:
        """Nothing goes wrong any more."""
        self._next.clear()
        self._always.clear()

    def count(self, verb: str) -> int:
        """How often this was asked so far."""
        return self.asked.count(verb)

    async def through(self, verb: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask, with what has been arranged for it."""
        self.asked.append(verb)
        self._busy += 1
        self.most_at_once = max(self.most_at_once, self._busy)
        try:
            fault = self._next[verb].popleft() if self._next[verb] else self._always.get(verb)
            answer: T = await (ask() if fault is None else fault(ask))
            return answer
        finally:
            self._busy -= 1


@final
class FlakyLine:
    """A ``SessionLine`` around another one; several may share their ``Faults``."""

    def __init__(self, line: SessionLine, faults: Faults) -> None:
        self._line = line
        self._faults = faults

    @property
    def mode(self) -> SignalMode:
        """See ``SessionLine.mode``."""
        return self._line.mode if self._faults.mode is None else self._faults.mode

    @property
    def hinted(self) -> bool:
        """See ``SessionLine.hinted``."""
        return self._line.hinted

    async def connect(self, worker_id: WorkerId) -> None:
        """See ``SessionLine.connect``."""
        await self._faults.through(Verb.CONNECT, lambda: self._line.connect(worker_id))

    async def open_session(self, session: Session) -> Session:
        """See ``SessionLine.open_session``."""
        return await self._faults.through(Verb.OPEN_SESSION, lambda: self._line.open_session(session))

    async def renew(self, worker_id: WorkerId, *, state: SessionState) -> Renewal:
        """See ``SessionLine.renew``."""
        return await self._faults.through(Verb.RENEW, lambda: self._line.renew(worker_id, state=state))

    async def requests(self, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
        """See ``SessionLine.requests``."""
        return await self._faults.through(Verb.REQUESTS, lambda: self._line.requests(worker_id))

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``SessionLine.close_session``."""
        return await self._faults.through(Verb.CLOSE_SESSION, lambda: self._line.close_session(worker_id))

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """See ``SessionLine.wait``."""
        return await self._faults.through(Verb.WAIT, lambda: self._line.wait(seconds))

    async def probe(self) -> bool:
        """See ``SessionLine.probe``."""
        return await self._faults.through(Verb.PROBE, self._line.probe)

    async def close(self) -> None:
        """See ``SessionLine.close``."""
        await self._faults.through(Verb.CLOSE, self._line.close)
