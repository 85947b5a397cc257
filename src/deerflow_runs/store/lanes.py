"""Threads that do what event loops ask for: a queue in front, the answers handed back to the loop that asked.

A lane knows neither SQL nor transactions: how jobs are carried out is the business of its workers (``writer``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, final

from deerflow_runs.errors import UsageError
from deerflow_runs.store.shield import Fate, fate_of
from deerflow_runs.store.units import Unit

T = TypeVar("T")


@final
class Job(Generic[T]):
    """A unit of work that waits for a thread. Made in the event loop that wants the answer.

    ``together`` says that its statements happen all or none, also when one of them fails.
    """

    def __init__(self, unit: Unit[T], *, together: bool) -> None:
        self.unit = unit
        self.together = together
        self.fate = Fate[T](withdraw=self.claim)
        self._untouched = [True]

    def claim(self) -> bool:
        """True for the first who asks: the thread that is about to run it, or the loop that withdraws it."""
        try:
            return self._untouched.pop()  # atomic
        except IndexError:
            return False

    @property
    def withdrawn(self) -> bool:
        """Whether it was claimed, by whomever; the thread asks before it has claimed anything."""
        return not self._untouched


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: with a value, or with an error."""

    job: Job[Any]
    value: Any = None
    error: BaseException | None = None

    def arrive(self) -> None:
        """Give it to whoever waits; runs in the loop that asked."""
        if self.error is None:
            self.job.fate.succeed(self.value)
        else:
            self.job.fate.fail(self.error)


def hand_over(outcomes: Iterable[Outcome]) -> None:
    """Wake each loop once, however many of its callers have an answer. A loop that is gone needs none."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_loop[outcome.job.fate.get_loop()].append(outcome)
    for loop, arrived in by_loop.items():
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_arrive, arrived)


def _arrive(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        outcome.arrive()


class Worker(Protocol):
    """Carries out jobs in a thread of its own."""

    @property
    def most(self) -> int:
        """How many jobs it takes at a time."""

    def serve(self, jobs: Sequence[Job[Any]]) -> None:
        """Carry them out and hand over their outcomes. Never raises."""

    def close(self) -> None:
        """Give up what it holds; runs in its thread, last."""


@final
class Lane:
    """One queue, and a daemon thread for each worker. Any event loop of the process that made it may ask."""

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self._queue: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._pid = os.getpid()
        self._open = True
        # Reentrant: stop() may be called by the garbage collector in the middle of ask().
        self._lock = threading.RLock()
        self._ends: list[Future[None]] = [Future() for _ in workers]
        work = zip(workers, self._ends, strict=True)
        self._threads = [
            threading.Thread(target=_run, args=(self._queue, *pair), name=name, daemon=True) for pair in work
        ]
        for thread in self._threads:
            thread.start()

    async def ask(self, unit: Unit[T], *, together: bool = False) -> T:
        """Have a unit carried out. A caller cancelled before it began withdraws it; afterwards, see ``Fate``."""
        self.require_same_process()
        job = Job(unit, together=together)
        with self._lock:
            if not self._open:
                raise UsageError("the store is closed")
            self._queue.put(job)
        return await job.fate

    def require_same_process(self) -> None:
        """The threads and the locks on the file stayed with the parent; refuse rather than wait for ever."""
        if self._pid != os.getpid():
            raise UsageError(
                "this store was opened before a fork and works in the parent only; open another one in the child"
            )

    def stop(self) -> None:
        """Take no more jobs and end the threads after those already taken. Harmless in a forked child and twice."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._open:
                self._open = False
                for _ in self._threads:
                    self._queue.put(None)

    async def close(self) -> None:
        """``stop()`` and wait for the threads. Safe to cancel, and to do from several loops."""
        self.stop()
        if self._pid == os.getpid():
            for end, thread in zip(self._ends, self._threads, strict=True):
                await fate_of(asyncio.wrap_future(end))
                thread.join()  # it has nothing left to do


def _run(queue: SimpleQueue[Job[Any] | None], worker: Worker, ended: Future[None]) -> None:
    """The thread. It knows neither lane nor store, so that a store nobody refers to can go and take it along."""
    while jobs := _take(queue, worker.most):
        worker.serve(jobs)
        del jobs  # while it waits, it keeps no caller's values alive
    try:
        worker.close()
    finally:
        ended.set_result(None)


def _take(queue: SimpleQueue[Job[Any] | None], most: int) -> list[Job[Any]]:
    """Wait for a job and take those that wait behind it. An empty list: it is time to stop."""
    first = queue.get()
    jobs = [] if first is None else [first]
    with contextlib.suppress(Empty):
        while jobs and len(jobs) < most:
            following = queue.get_nowait()
            if following is None:
                queue.put(None)  # for the next round
                break
            jobs.append(following)
    return jobs
