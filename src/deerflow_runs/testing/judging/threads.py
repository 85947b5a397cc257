"""Judges what may stand on one thread: I1, I7, I17 and the limits of I19; and I8, that everything comes to its end.

Order needed: that of the operations of one thread, which its active row, its unique index and the thread lock give.
I19 counts over threads: whoever counts sees what was committed before, and so stands behind it here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from deerflow_runs.model import Run, RunStatus, Strategy, ThreadId
from deerflow_runs.protocol.decision import is_due
from deerflow_runs.testing.invariants import Expected, Violation
from deerflow_runs.testing.judging.base import Judge, World, fault, place
from deerflow_runs.testing.recorded import Change, RunChanged

DISPLACING: Final = frozenset({Strategy.INTERRUPT, Strategy.ROLLBACK})
"""Who comes like this ends all who wait in the same transaction, but only after it has taken its place (O3)."""


@final
class Slots(Judge):
    """I1: one active operation on a thread, at every change."""

    def saw(self, change: Change) -> Iterator[Violation]:
        """Count after every change."""
        if isinstance(change, RunChanged) and len(active := self.world.active(change.run.thread_id)) > 1:
            yield fault("I1", change.run, f"is active beside {[run for run in active if run != change.run]}", change)


@final
class Queues(Judge):
    """I7: a run that was never for later waits behind an active one, at every commit. I17: its turn comes in order.

    That delayed runs come to life in time is not judged from times; ``quiet`` says that they did (I8).
    """

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge promotions and first starts."""
        if not isinstance(change, RunChanged) or change.after is None:
            return
        waiting = self.world.queued(change.after.thread_id)
        if change.promoted:
            yield from _passed_over(change, change.after, _first_in_queue(change.after, waiting), "was promoted")
        if change.started and (change.before is None or change.before.turn is None) and not change.after.delayed:
            came_first = [run for run in waiting if not run.delayed and run.seq < change.after.seq]
            yield from _passed_over(change, change.after, came_first, "started")

    def committed(self, changes: tuple[Change, ...]) -> Iterator[Violation]:
        """Look at the threads that a transaction has touched."""
        touched = {one.run.thread_id: one for one in changes if isinstance(one, RunChanged)}
        for thread_id, last in touched.items():
            if not self.world.active(thread_id):
                idle = [run for run in self.world.queued(thread_id) if not run.delayed]
                yield from (fault("I7", run, "waits on an idle thread", last) for run in idle)


def _first_in_queue(run: Run, waiting: list[Run]) -> list[Run]:
    """Those whose turn it was before a run that was promoted. The clock may have been set back since it was admitted:
    a run that was not due when its row was changed has no turn yet."""
    return [other for other in waiting if place(other) < place(run) and is_due(other, run.updated_at)]


def _passed_over(change: RunChanged, run: Run, earlier: list[Run], how: str) -> Iterator[Violation]:
    if earlier:
        yield fault("I17", run, f"{how} before {earlier}", change)


@final
class Limits(Judge):
    """I19: limits hold whenever somebody is let in. Waiting runs come to their turn whatever a user's limit says."""

    def committed(self, changes: tuple[Change, ...]) -> Iterator[Violation]:
        """Count where a transaction has let somebody in."""
        for change in changes:
            if isinstance(change, RunChanged) and change.after is not None and not change.run.reservation:
                yield from self._counted(change, change.after)

    def _counted(self, change: RunChanged, run: Run) -> Iterator[Violation]:
        expected, arrived = self.expected, change.before is None
        queues_up = arrived and run.status is RunStatus.QUEUED and run.strategy not in DISPLACING
        if queues_up and expected.max_queued is not None:
            yield from _over("max_queued", expected.max_queued, len(self.world.queued(run.thread_id)), change)
        if arrived and run.active and run.user_id is not None and expected.max_active_per_user is not None:
            theirs = [other for other in self.world.open_runs() if other.active and other.user_id == run.user_id]
            yield from _over("max_active_per_user", expected.max_active_per_user, len(theirs), change)
        if change.started and expected.max_running is not None:
            mine = [other for other in self.world.open_runs() if other.owner_worker_id == run.owner_worker_id]
            running = [other for other in mine if other.status is RunStatus.RUNNING]
            yield from _over("max_running", expected.max_running, len(running), change)


def _over(name: str, limit: int, count: int, change: RunChanged) -> Iterator[Violation]:
    if count > limit:
        yield fault("I19", change.run, f"came in as number {count} where {name} is {limit}", change)


@final
class Quiet(Judge):
    """I8: where the test says that the end was quiet, everything that was let in has ended."""

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._last: dict[ThreadId, RunChanged] = {}

    def saw(self, change: Change) -> Iterator[Violation]:
        """Remember the last change of every thread, to show it."""
        if isinstance(change, RunChanged):
            self._last[change.run.thread_id] = change
        yield from ()

    def over(self) -> Iterator[Violation]:
        """Whoever is still there."""
        if not self.expected.quiet:
            return
        for run in self.world.open_runs():
            if run.run_id not in self.expected.may_remain:
                yield fault("I8", run, f"never ended: {run}", self._last[run.thread_id])
