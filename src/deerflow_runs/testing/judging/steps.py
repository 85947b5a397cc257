"""Judges the steps that executors wrote and logged: I2 and I3 (the fence), I11 (trust), I20 (nothing done again).

Order needed: of a run's row and the writes under its fence, which the guard's lock gives; I11 alone compares times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import final

from deerflow_runs.model import Micros, Run, RunId, SessionState, ThreadId, WorkerId
from deerflow_runs.testing.invariants import Expected, StepLogged, Violation
from deerflow_runs.testing.judging.base import Judge, Life, World, fault, life_of
from deerflow_runs.testing.recorded import Change, RunChanged, SessionChanged, StepWritten


@final
class Writes(Judge):
    """I2: nothing is written under an epoch that is not the run's own now. I3: a thread's writes never go back."""

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._last: dict[ThreadId, tuple[tuple[int, int], StepWritten]] = {}
        self._turns: dict[ThreadId, tuple[int, RunChanged]] = {}

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge steps, progress and turns."""
        if isinstance(change, StepWritten):
            yield from _fenced(change, self.world.runs.get(change.key.run_id))
            yield from self._in_order(change, self.world.runs.get(change.key.run_id))
        elif isinstance(change, RunChanged) and change.before is not None and change.after is not None:
            yield from _progress(change, change.before, change.after)
            yield from self._turn(change, change.before, change.after)
            if change.started and change.after.turn is None:
                yield fault("I3", change.after, "runs without a turn", change)

    def _in_order(self, step: StepWritten, run: Run | None) -> Iterator[Violation]:
        turn = run.turn if step.turn is None and run is not None else step.turn
        if turn is None:
            return
        before, last = self._last.get(step.key.thread_id, ((turn, step.epoch), step))
        if (turn, step.epoch) < before:
            yield fault("I3", step.key.run_id, "wrote after a later turn or epoch had written", last, step)
        else:
            self._last[step.key.thread_id] = ((turn, step.epoch), step)

    def _turn(self, change: RunChanged, before: Run, after: Run) -> Iterator[Violation]:
        if before.turn == after.turn:
            return
        if before.turn is not None or after.turn is None:
            yield fault("I3", after, f"had turn {before.turn} and has {after.turn}", change)
            return
        last, theirs = self._turns.get(after.thread_id, (after.turn - 1, change))
        if after.turn <= last:
            yield fault("I3", after, f"drew turn {after.turn} after {last}", theirs, change)
        self._turns[after.thread_id] = (max(last, after.turn), change)


def _fenced(step: StepWritten, run: Run | None) -> Iterator[Violation]:
    if run is None or not run.active:
        yield fault("I2", step.key.run_id, f"wrote when it could not be held: {run}", step)
    elif step.epoch != run.epoch:
        yield fault("I2", run, f"wrote under epoch {step.epoch} while epoch {run.epoch} was granted", step)
    elif step.turn is not None and step.turn != run.turn:
        yield fault("I3", run, f"wrote as turn {step.turn} and has turn {run.turn}", step)


def _progress(change: RunChanged, before: Run, after: Run) -> Iterator[Violation]:
    if after.progress_epoch not in (before.progress_epoch, before.epoch):
        yield fault("I2", after, f"progress of epoch {after.progress_epoch} was recorded at {before.epoch}", change)


@final
class Steps(Judge):
    """I20: a step is recorded once, and nobody does it again under a later epoch, as far as executors log."""

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._recorded: dict[tuple[Life, str], StepWritten] = {}
        self._latest: dict[tuple[RunId, str], StepWritten] = {}

    def saw(self, change: Change) -> Iterator[Violation]:
        """Remember what is recorded."""
        if not isinstance(change, StepWritten):
            return
        run_id, run = change.key.run_id, self.world.runs.get(change.key.run_id)
        life = life_of(run) if run is not None else (run_id, -1)
        first = self._recorded.setdefault((life, change.step), change)
        self._latest[run_id, change.step] = change
        if first is not change:
            yield fault("I20", run_id, f"recorded step {change.step} twice", first, change)

    def over(self) -> Iterator[Violation]:
        """Compare with the logs."""
        for logged in self.expected.steps:
            recorded = self._latest.get((logged.run_id, logged.step))
            if recorded is not None and logged.epoch > recorded.epoch:
                message = f"did step {logged.step} again under epoch {logged.epoch}"
                yield fault("I20", logged.run_id, message, recorded)


@final
class Trust(Judge):
    """I11: no step begins without trust, as far as can be told from outside.

    The session's lease in the store outlives the trust of its holder, so a step is faulted only if it was asked for
    and begun while even the lease was over: after it expired and before the next beat, or after the session was dead.
    """

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._holders: dict[tuple[RunId, int], WorkerId] = {}
        self._beats: defaultdict[WorkerId, list[SessionChanged]] = defaultdict(list)

    def saw(self, change: Change) -> Iterator[Violation]:
        """Remember who held what, and every beat."""
        if isinstance(change, RunChanged) and change.run.owner_worker_id is not None:
            self._holders[change.run.run_id, change.run.epoch] = change.run.owner_worker_id
        elif isinstance(change, SessionChanged):
            self._beats[change.session.worker_id].append(change)
        yield from ()

    def over(self) -> Iterator[Violation]:
        """Compare with the logs."""
        for step in self.expected.steps:
            holder = self._holders.get((step.run_id, step.epoch))
            if holder is None:
                yield fault("I11", step.run_id, f"did step {step.step} under epoch {step.epoch}, which nobody held")
            elif (found := self._without_trust(step, holder)) is not None:
                yield fault("I11", step.run_id, f"began step {step.step} without trust: {step}", found)

    def _without_trust(self, step: StepLogged, holder: WorkerId) -> SessionChanged | None:
        if step.asked_at is None or step.started_at is None:
            return None
        last = max((one for one in self._beats[holder] if one.at <= step.asked_at), key=_number, default=None)
        if last is None:
            return None
        renewed = any(step.asked_at < one.at <= step.started_at and _alive(one) for one in self._beats[holder])
        return last if _over_at(last, step.asked_at) and not renewed else None


def _number(change: SessionChanged) -> int:
    return change.number


def _alive(change: SessionChanged) -> bool:
    return change.after is not None and change.after.state is not SessionState.DEAD


def _over_at(change: SessionChanged, at: Micros) -> bool:
    """A lease that has run out by itself, or whose session has died."""
    return not _alive(change) or change.session.expires_at < at
