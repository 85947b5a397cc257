"""What every judge is given: the database as it stands after each recorded change, and a way to say what is wrong.

No invariant is judged here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import final

from deerflow_runs.model import Run, RunId, RunStatus, Session, ThreadId, WorkerId
from deerflow_runs.testing.invariants import Expected, Violation
from deerflow_runs.testing.recorded import Change, RunChanged, SessionChanged

Life = tuple[RunId, int]
"""One life of a run id: a removed run's id may be given again, its ``seq`` never is."""


def life_of(run: Run) -> Life:
    """Which life of its id this is."""
    return (run.run_id, run.seq)


@final
@dataclass(slots=True)
class World:
    """All rows as they stand after the last change that was replayed."""

    runs: dict[RunId, Run] = field(default_factory=dict)
    threads: defaultdict[ThreadId, dict[RunId, Run]] = field(default_factory=lambda: defaultdict(dict))
    sessions: dict[WorkerId, Session] = field(default_factory=dict)

    def replay(self, change: Change) -> None:
        """Let the change happen. Ended runs stay known, but their threads forget them."""
        if isinstance(change, RunChanged):
            self._run(change)
        elif isinstance(change, SessionChanged):
            self._session(change)

    def _run(self, change: RunChanged) -> None:
        run = change.run
        if change.after is None:
            self.runs.pop(run.run_id, None)
        else:
            self.runs[run.run_id] = run
        if change.after is None or run.terminal:
            self.threads[run.thread_id].pop(run.run_id, None)
        else:
            self.threads[run.thread_id][run.run_id] = run

    def _session(self, change: SessionChanged) -> None:
        if change.after is None:
            self.sessions.pop(change.session.worker_id, None)
        else:
            self.sessions[change.session.worker_id] = change.after

    def active(self, thread_id: ThreadId) -> list[Run]:
        """What holds the thread."""
        return [run for run in self.threads[thread_id].values() if run.active]

    def queued(self, thread_id: ThreadId) -> list[Run]:
        """What waits on the thread, in the order in which it is due."""
        waiting = [run for run in self.threads[thread_id].values() if run.status is RunStatus.QUEUED]
        return sorted(waiting, key=place)

    def open_runs(self) -> Iterator[Run]:
        """What has not ended."""
        return (run for thread in self.threads.values() for run in thread.values())


def place(run: Run) -> tuple[int, int]:
    """Where a run stands in its thread's queue."""
    return (run.due_at, run.seq)


class Judge:
    """Judges some invariants while a history is replayed into ``world``; every hook may be left out."""

    def __init__(self, expected: Expected, world: World) -> None:
        self.expected = expected
        self.world = world

    def saw(self, change: Change) -> Iterable[Violation]:
        """One change happened; the world is as it stands after it."""
        del change
        return ()

    def committed(self, changes: tuple[Change, ...]) -> Iterable[Violation]:
        """One transaction is complete."""
        del changes
        return ()

    def over(self) -> Iterable[Violation]:
        """Nothing more was recorded."""
        return ()


def fault(invariant: str, about: Run | RunId | None, message: str, *changes: Change) -> Violation:
    """A violation, of a run if it is about one."""
    return Violation(invariant, about.run_id if isinstance(about, Run) else about, message, changes)
