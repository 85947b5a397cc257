"""Judges worker sessions: I12 (the dead stay dead), I10 and I13 (the living are not declared dead).

Order needed: that of one row. Times are not asked: which sessions were healthy is what the test knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.testing.invariants import Expected, Violation
from deerflow_runs.testing.judging.base import Judge, World, fault
from deerflow_runs.testing.recorded import Change, SessionChanged


@final
class Deaths(Judge):
    """I12, and I10 (through an outage or a step of a clock: I13) for the sessions that the test calls healthy.

    A healthy session may close itself, which is a proven death; only a verdict over it is a fault. A wrong proof (a
    lock that was free although its holder lives) looks like a close and is not seen here.
    """

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._opened: dict[WorkerId, SessionChanged] = {}

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge every change of a session."""
        if not isinstance(change, SessionChanged):
            return
        before, after = change.before, change.after
        if before is None and after is not None:
            yield from self._came(change, after)
        elif before is not None and after is None:
            if before.state is not SessionState.DEAD:
                yield fault("I12", None, f"{before.worker_id} was forgotten while it lived", change)
        elif before is not None and after is not None:
            yield from self._changed(change, before, after)

    def _came(self, change: SessionChanged, session: Session) -> Iterator[Violation]:
        first = self._opened.setdefault(session.worker_id, change)
        # A tombstone for a session that was forgotten (O26) uses its id, but brings nobody to life.
        if first is not change and session.state is not SessionState.DEAD:
            yield fault("I12", None, f"the id {session.worker_id} was used again", first, change)

    def _changed(self, change: SessionChanged, before: Session, after: Session) -> Iterator[Violation]:
        if before.state is SessionState.DEAD:
            if replace(before, proven=after.proven) != after:
                yield fault("I12", None, f"{after.worker_id} was dead and changed", change)
        elif after.state is SessionState.DEAD and not after.proven and after.worker_id in self.expected.healthy:
            name = "I13" if self.expected.outage else "I10"
            yield fault(name, None, f"{after.worker_id} was healthy and declared dead", change)
