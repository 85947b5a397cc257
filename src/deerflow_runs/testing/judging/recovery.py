"""Judges how a run comes from one worker to another: I9 (how often), I18 (in a drain), I10 (not from the living).

Order needed: that of one row, and for what is asked of its owner that of the session's row, whose change is committed
before anybody acts upon it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from deerflow_runs.model import Run, SessionState, WorkerId
from deerflow_runs.testing.invariants import Expected, Violation
from deerflow_runs.testing.judging.base import Judge, Life, World, fault, life_of
from deerflow_runs.testing.recorded import Change, RunChanged


@final
class Attempts(Judge):
    """I9, counted here and not read from ``attempt``: epochs that were lost one after the other without a checkpoint.

    An epoch is lost when the run was taken from its owner to be resumed and its owner was dead, or its attempt was
    counted. Hand-overs of the living, deferrals and take-backs lose none. Restores are no attempts of the run.
    """

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._lost: dict[Life, list[RunChanged]] = {}

    def saw(self, change: Change) -> Iterator[Violation]:
        """Count what was lost, and forgive it after progress."""
        if not isinstance(change, RunChanged) or change.before is None or change.after is None:
            return
        before, after = change.before, change.after
        if after.epoch == before.epoch:
            return
        lost = self._lost.setdefault(life_of(after), [])
        if before.progress_epoch == before.epoch:
            lost.clear()
        elif change.vacated and _charged(before, after, self.world):
            lost.append(change)
            if len(lost) >= after.max_attempts:
                message = f"was resumed after {len(lost)} lost epochs, with {after.max_attempts} attempts"
                yield fault("I9", after, message, *lost)


def _charged(before: Run, after: Run, world: World) -> bool:
    return after.attempt > before.attempt or _state(world, before.owner_worker_id) is SessionState.DEAD


@final
class Drains(Judge):
    """I18: what a draining session lets go of has lost no attempt. That no finished step is done again is I20.

    A run that it owned and never attached to is given back like any other and does cost one (O12): a test in which
    that can happen during a drain suspends I18.
    """

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge every run that leaves a draining owner."""
        if not isinstance(change, RunChanged) or change.before is None or change.after is None or not change.vacated:
            return
        draining = _state(self.world, change.owner_before) is SessionState.DRAINING
        if draining and change.after.attempt > change.before.attempt:
            yield fault("I18", change.after, f"lost an attempt in the drain of {change.owner_before}", change)


@final
class Takings(Judge):
    """I10, seen from the run: nobody takes over, or ends, what a session holds that is not dead, unless a cancel allows
    it. Who made a run vacant no row tells; but where the test says that its owner was healthy, and there was no outage,
    nobody had a reason to count an attempt."""

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge what passes from one owner to another, or ends by another's hand."""
        if not isinstance(change, RunChanged) or change.before is None or change.after is None:
            return
        before, after, owner = change.before, change.after, change.owner_before
        if owner is None or before.cancel_action is not None or _state(self.world, owner) in (None, SessionState.DEAD):
            return
        if after.active and after.owner_worker_id not in (None, owner):
            yield fault("I10", after, f"was taken from {owner}, which was not dead", change)
        elif after.terminal and after.settled_by != owner:
            yield fault("I10", after, f"was ended by {after.settled_by} while {owner} was not dead", change)
        elif after.attempt > before.attempt and owner in self.expected.healthy and not self.expected.outage:
            yield fault("I10", after, f"lost an attempt although {owner} was healthy", change)


def _state(world: World, worker_id: WorkerId | None) -> SessionState | None:
    session = world.sessions.get(worker_id) if worker_id is not None else None
    return session.state if session is not None else None
