"""The runs that this process holds or waits for, indexed by thread. Synchronous: it changes and answers, and whoever
asked does what follows. Nothing here awaits, so nothing here is ever half changed, and there is no lock.

An entry leaves with the end of its run: memory does not grow with what is over. What callers keep (a handle) lives on
without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, final

from deerflow_runs.manager.executor import Executor
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.model import Run, RunId, RunKey, ThreadId, WorkerId


class Phase(Enum):
    """How far a held run has come in this process."""

    UNATTACHED = "unattached"
    """Granted, and nobody has taken it up: given back after ``attach_deadline``."""
    STARTING = "starting"
    RUNNING = "running"
    SETTLING = "settling"
    """Its body is over; a cancel does not reach it any more, the store's row decides (O20)."""


@final
@dataclass(slots=True, eq=False)
class Held:
    """A run, or reservation, that the store has granted to this process.

    ``since`` and ``deadline`` are boot times: of the grant, and when the run's time is up. ``life`` is the task that
    sees it to its end. ``over`` is set when it has left this process, ``ended`` then is its last row if it ended here.
    A drain that will write the end of all runs that it stops gives them ``together``, which it sets when it has tried;
    ``stopped`` tells it that the body is over.
    """

    lease: RunLease
    since: float
    executor: Executor | None = None
    phase: Phase = Phase.UNATTACHED
    deadline: float | None = None
    life: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: Run | None = None
    together: asyncio.Event | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def run(self) -> Run:
        """The row as this process last saw it."""
        return self.lease.run

    @property
    def key(self) -> RunKey:
        """Where it is found."""
        return self.lease.key


@final
@dataclass(slots=True, eq=False)
class Expected:
    """A run that waits for its turn or for a slot and whose code is here. ``granted`` is set once it is held, and
    cancelled once it is given up. ``home`` is the session at which it waits, as far as is known here."""

    key: RunKey
    executor: Executor | None
    granted: asyncio.Future[Held]
    home: WorkerId | None = None

    @property
    def open(self) -> bool:
        """Neither granted nor given up."""
        return not self.granted.done()


@final
class Registry:
    """What is held (``slots`` of them at once), what is expected, and what lingers.

    The whole mutable state: three dictionaries, two sets and a number.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._arriving = 0
        self._held: dict[RunId, Held] = {}
        self._reservations: set[RunId] = set()
        self._by_thread: dict[ThreadId, dict[RunId, Held]] = {}
        self._expected: dict[RunId, Expected] = {}
        self._lingering: set[asyncio.Task[Any]] = set()
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    # --- Held -------------------------------------------------------------------------------------------------------

    def hold(self, held: Held) -> None:
        """It was granted. Whoever expected it is told."""
        self._held[held.run.run_id] = held
        if held.run.reservation:
            self._reservations.add(held.run.run_id)
        self._by_thread.setdefault(held.run.thread_id, {})[held.run.run_id] = held
        expected = self._expected.pop(held.run.run_id, None)
        if expected is not None:
            held.executor = held.executor or expected.executor
            if expected.open:
                expected.granted.set_result(held)

    def let_go(self, held: Held) -> None:
        """It has ended, or it is somebody else's now. Repeating it is harmless; a newer grant of the same run stays."""
        if self._held.get(held.run.run_id) is held:
            del self._held[held.run.run_id]
            self._reservations.discard(held.run.run_id)
            on_thread = self._by_thread[held.run.thread_id]
            del on_thread[held.run.run_id]
            if not on_thread:
                del self._by_thread[held.run.thread_id]
        held.lease.close()
        held.over.set()
        held.stopped.set()
        self._freed.set()

    def get(self, run_id: RunId) -> Held | None:
        """The held run of this id."""
        return self._held.get(run_id)

    def of_thread(self, thread_id: ThreadId) -> tuple[Held, ...]:
        """What is held on a thread: one at most that is active, and one that is being settled over its successor."""
        return tuple(self._by_thread.get(thread_id, {}).values())

    def all(self) -> tuple[Held, ...]:
        """Everything that is held, in order of the grants."""
        return tuple(self._held.values())

    def unattached(self, *, before: float) -> tuple[Held, ...]:
        """What was granted before that boot time and is still nobody's work (O12)."""
        return tuple(one for one in self._held.values() if one.phase is Phase.UNATTACHED and one.since <= before)

    def overdue(self, now: float) -> tuple[Held, ...]:
        """Whose time is up."""
        return tuple(one for one in self._held.values() if one.deadline is not None and one.deadline <= now)

    @property
    def next_deadline(self) -> float | None:
        """The boot time at which the next run's time is up."""
        return min((one.deadline for one in self._held.values() if one.deadline is not None), default=None)

    @property
    def free_slots(self) -> int:
        """How many more runs this process may hold. Reservations take none: they are short, and hold no model. Asked at
        every admission, so nothing is counted here."""
        runs = len(self._held) - len(self._reservations)
        return max(0, self._slots - runs - self._arriving)

    def take_slot(self) -> bool:
        """Keep a slot free for a run that is being admitted; False: there is none. Give it back with ``arrived``."""
        if self.free_slots == 0:
            return False
        self._arriving += 1
        return True

    def arrived(self) -> None:
        """The admission for which a slot was kept has been answered."""
        self._arriving -= 1
        self._freed.set()

    async def slot_freed(self) -> None:
        """Wait until something was let go since the last call."""
        await self._freed.wait()
        self._freed.clear()

    # --- Expected ---------------------------------------------------------------------------------------------------

    def expect(self, key: RunKey, executor: Executor | None, *, home: WorkerId | None = None) -> Expected:
        """A run that waits; the same answer for the same run."""
        known = self._expected.get(key.run_id)
        if known is None:
            known = Expected(key, executor, asyncio.get_running_loop().create_future(), home)
            self._expected[key.run_id] = known
        return known

    def expected(self, run_id: RunId) -> Expected | None:
        """The expectation of this id."""
        return self._expected.get(run_id)

    def waiting(self) -> tuple[Expected, ...]:
        """Everything that is expected."""
        return tuple(self._expected.values())

    def give_up(self, run_id: RunId) -> None:
        """It will not be granted here: it ended while it waited, or nobody wants it any more."""
        expected = self._expected.pop(run_id, None)
        if expected is not None and expected.open:
            expected.granted.cancel()

    # --- Lingering --------------------------------------------------------------------------------------------------

    def lingers(self, body: asyncio.Task[Any]) -> None:
        """A body that did not stop in time: its run goes on without it, and it is counted until it ends (O4)."""
        self._lingering.add(body)
        body.add_done_callback(self._lingering.discard)

    def lingering(self) -> Iterator[asyncio.Task[Any]]:
        """Bodies that still run although their runs do not."""
        return iter(tuple(self._lingering))
