"""``RunLease``: what a run's own code is given to hold, and the one gate through which its effects pass.

The gate is computed from the session's trust whenever it is asked, never kept as a flag (O9). A lease does not talk to
the store: whoever learns of a loss tells it, and it stops the run (O18).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from contextvars import Token as ContextToken
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, final

from deerflow_runs.errors import DeerflowRunsError, UsageError
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import CancelAction, Run, RunId, RunKey, ThreadId, WorkerId

__all__ = [
    "OwnershipLost",
    "RunLease",
    "RunStopped",
    "StopCause",
    "Token",
    "WriteRefused",
    "check",
    "check_in_thread",
    "current_lease",
]

THREAD_PAUSE: Final = 0.05
"""Seconds between two looks of a thread that waits while its run is suspended."""


class StopCause(Enum):
    """Why a run's body was told to stop. The first cause stands, but a loss overrides every other."""

    CANCEL = "cancel"
    TIMEOUT = "timeout"
    DRAIN = "drain"
    SUSPENDED = "suspended"
    """Suspended for longer than ``max_suspend``: aborted locally, to be given back (O12)."""
    LOST = "lost"
    """Fenced: another holder may be writing. Nothing of this copy is stored any more."""


class RunStopped(asyncio.CancelledError):
    """The run is to stop now. Raised by ``check()``; the body's task is cancelled as well, so not catching it is right.

    ``cause`` says why.
    """

    def __init__(self, run_id: str, cause: StopCause) -> None:
        super().__init__(f"run {run_id} stops: {cause.value}")
        self.run_id = run_id
        self.cause = cause


@final
class OwnershipLost(RunStopped):
    """This process no longer holds the run: stop, and write nothing (O17, O18)."""

    def __init__(self, run_id: str, reason: str) -> None:
        RunStopped.__init__(self, run_id, StopCause.LOST)
        self.args = (f"run {run_id} is no longer held here: {reason}",)
        self.reason = reason


@final
class WriteRefused(DeerflowRunsError):
    """A durable write was refused because the run's epoch has passed to another holder; nothing of it was stored.

    An ordinary exception on purpose: LangGraph drops a cancellation that a background write raises (O18). The lease
    was fenced before this was raised.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(f"a write of run {run_id} was refused: another holder has the run")
        self.run_id = run_id


@final
@dataclass(frozen=True, slots=True, order=True)
class Token:
    """The order of writers on a thread: a newer token takes over at once whatever an older one still holds (O15).

    ``turn`` is 0 until the run has started for the first time.
    """

    turn: int
    epoch: int


@final
class RunLease:
    """One grant of a run to this process, from its start to its end, over every take-back (the epoch then moves).

    Safe to ask from any thread. ``check()`` belongs before every step and every effect; ``token`` fences what a run
    holds elsewhere.
    """

    def __init__(self, run: Run, session: WorkerSession) -> None:
        self._run = run
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._home_thread = threading.get_ident()
        self._fence_reason: str | None = None
        self._cause: StopCause | None = None
        self._action: CancelAction | None = None
        self._closed = False
        self._draining = False
        self._ending = False
        self._cancels = 0
        self.outcome: Outcome | None = None
        self._on_stop: Callable[[], None] | None = None
        self._body: asyncio.Task[Any] | None = None
        self._turns: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        state = f"fenced: {self._fence_reason}" if self.fenced else "trusted" if self.trusted() else "suspended"
        return f"<RunLease {self.run_id} epoch {self.epoch}, {state}>"

    # --- What it is -------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The row as this process last saw it."""
        return self._run

    @property
    def key(self) -> RunKey:
        """Where the run is found."""
        return self._run.key

    @property
    def run_id(self) -> RunId:
        """The run's id."""
        return self._run.run_id

    @property
    def thread_id(self) -> ThreadId:
        """The run's thread."""
        return self._run.thread_id

    @property
    def worker_id(self) -> WorkerId:
        """The session under which the run is held; another one than the manager's until the run was taken back."""
        return self._run.owner_worker_id or self._session.worker_id

    @property
    def epoch(self) -> int:
        """The fencing token's second part: it moves when the run is taken back or seized."""
        return self._run.epoch

    @property
    def token(self) -> Token:
        """What this holder's writes are ordered by."""
        return Token(self._run.turn or 0, self._run.epoch)

    @property
    def fenced(self) -> bool:
        """Whether the run is known to be lost. Final."""
        return self._fence_reason is not None

    @property
    def fence_reason(self) -> str | None:
        """Why it is lost; None while it is not."""
        return self._fence_reason

    @property
    def stop_cause(self) -> StopCause | None:
        """Why the body was told to stop; None while it may go on."""
        return self._cause

    @property
    def cancel_action(self) -> CancelAction | None:
        """The action of the cancel that this process has heard of."""
        return self._action

    @property
    def draining(self) -> bool:
        """Whether the worker is about to leave: stop after the present step if you can, by raising ``Drained``."""
        return self._draining

    async def until_draining(self) -> None:
        """Wait until ``draining``."""
        while not self._draining:
            await self._turn()

    def report(self, outcome: Outcome) -> None:
        """What the run is to end as if its body returns normally; for a body that is a block and returns nothing."""
        self.outcome = outcome

    @property
    def cancellations(self) -> int:
        """How often this lease has cancelled its body: what ``Task.uncancel`` must undo."""
        return self._cancels

    def idempotency_key(self, step: str) -> str:
        """For effects that cannot be fenced: ``run:epoch:step``, the same for a repeat of this step by this holder.

        The next holder of the run has another epoch, and so another key: who wants to drop its repeats too looks at the
        run and the step only."""
        return f"{self.run_id}:{self.epoch}:{step}"

    # --- The gate ---------------------------------------------------------------------------------------------------

    def trusted(self) -> bool:
        """Whether something new may start or be written now (I11). Costs no query."""
        open_here = self._fence_reason is None and not self._closed
        return open_here and self._session.trusted(self._run.owner_worker_id)

    async def check(self) -> None:
        """Return at once while the run is held and trusted. Raises ``OwnershipLost`` or ``RunStopped`` when it is over;
        waits while it is suspended (O12, O17). Safe to cancel."""
        while not self._clear():
            await self._turn()

    def check_in_thread(self) -> None:
        """The same for synchronous code in a thread of its own, which it blocks while the run is suspended."""
        if threading.get_ident() == self._home_thread:
            raise UsageError("on the event loop use `await lease.check()`; check_in_thread() would block it")
        while not self._clear():
            time.sleep(THREAD_PAUSE)

    def _clear(self) -> bool:
        if self._fence_reason is not None:
            raise OwnershipLost(self.run_id, self._fence_reason)
        if self._cause is not None:
            raise RunStopped(self.run_id, self._cause)
        if self._closed:
            raise OwnershipLost(self.run_id, "it has ended")
        return self.trusted()

    async def until_trusted(self) -> bool:
        """Wait until the run is trusted; False: it is fenced or over. For whoever ends it: a stop does not matter."""
        while not self.trusted():
            if self.fenced or self._closed:
                return False
            await self._turn()
        return True

    async def until_over(self) -> None:
        """Wait until nothing more can come of it here: it is lost, has ended, or has left."""
        while not (self.fenced or self._closed):
            await self._turn()

    async def _turn(self) -> None:
        """Until something about this lease or its session's trust has changed."""
        turn = self._loop.create_future()
        self._turns.add(turn)
        try:
            await turn
        finally:
            self._turns.discard(turn)

    # --- What happens to it -----------------------------------------------------------------------------------------

    def fence(self, reason: str) -> None:
        """The run is lost. The flag comes first, so that nothing passes the gate while the task is being stopped
        (O18). Safe from any thread, and to repeat."""
        if self._fence_reason is None and not self._closed:
            self._fence_reason = reason
            self._cause = StopCause.LOST
            self._stop_from_anywhere()

    def stop(self, cause: StopCause, action: CancelAction | None = None) -> None:
        """Tell the body to stop. The first cause stands (O19: and the first action). Main loop only."""
        if self._closed or self._ending or self._cause is not None:
            return
        self._cause = cause
        self._action = action
        self._stop_body()

    def insist(self) -> None:
        """Cancel a body that was told to stop and has not ended: it may have swallowed the first cancellation."""
        if self._cause is not None and self._body is not None and not self._body.done():
            self._cancels += 1
            self._body.cancel()

    def end(self) -> None:
        """The run is being ended, or restored: nothing but its loss stops what is done for that. A cancel, a drain or
        a time that is up would leave it half done, and have nothing to stop any more."""
        self._ending = True

    def ask_to_drain(self) -> None:
        """The worker is about to leave: a body that can stop between two steps should (O35)."""
        self._draining = True
        self.wake()

    def wake(self) -> None:
        """Something changed: whoever waits looks again. Main loop only."""
        for turn in self._turns:
            if not turn.done():
                turn.set_result(None)

    def saw(self, run: Run) -> None:
        """The row has changed by this holder's own doing: started, taken back, seized. Opens the gate again. Few
        statements send the input back; it never changes."""
        self._run = run if run.kwargs is not None else replace(run, kwargs=self._run.kwargs)
        self.wake()

    def bind(self, body: asyncio.Task[Any] | None, on_stop: Callable[[], None]) -> None:
        """``body`` runs the run's code from now on, or (None) a caller whose task nobody here knows; ``on_stop`` is
        called in the main loop when it was told to stop. One that was told before it began is told at once."""
        self._body, self._on_stop = body, on_stop
        if self._cause is not None:
            self._stop_body()

    def unbind(self) -> None:
        """The body is over: no more cancellation reaches its task."""
        self._body = self._on_stop = None

    def close(self) -> None:
        """The run has ended or left this process: no effect passes any more."""
        self._closed = True
        self._body = self._on_stop = None
        self.wake()

    def _stop_body(self) -> None:
        self.wake()
        if self._body is not None and not self._body.done():
            self._cancels += 1
            self._body.cancel()
        if self._on_stop is not None:
            self._on_stop()

    def _stop_from_anywhere(self) -> None:
        if threading.get_ident() == self._home_thread:
            self._stop_body()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to be stopped
            self._loop.call_soon_threadsafe(self._stop_body)


# --- The run in whose body the caller stands ------------------------------------------------------------------------

_CURRENT: ContextVar[RunLease | None] = ContextVar("deerflow_runs_lease", default=None)


def current_lease() -> RunLease:
    """The lease of the run in whose body the caller stands: in its task, its children, and threads that got a copy of
    its context (``asyncio.to_thread``). Raises ``UsageError`` anywhere else."""
    lease = _CURRENT.get()
    if lease is None:
        raise UsageError("no run is under way here; call this from inside a run's own code")
    return lease


async def check() -> None:
    """``RunLease.check()`` of the run in whose body the caller stands."""
    await current_lease().check()


def check_in_thread() -> None:
    """``RunLease.check_in_thread()`` of the run in whose body the caller stands."""
    current_lease().check_in_thread()


def enter(lease: RunLease) -> ContextToken[RunLease | None]:
    """Make it the current lease of this context, until ``leave``."""
    return _CURRENT.set(lease)


def leave(token: ContextToken[RunLease | None]) -> None:
    """Undo ``enter``."""
    _CURRENT.reset(token)
