"""Judges a recorded history against the invariants I1–I20 of ownership.md §13, after a test with real processes.

Public: ``check_history``, what a test may tell it (``Expected``) and what it answers (``Report``). The judges
themselves stand in ``judging``; none of them asks the product's own rules whether an edge was allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from deerflow_runs.model import Micros, RunId, WorkerId
from deerflow_runs.testing.history import HistoryBroken
from deerflow_runs.testing.recorded import Change, History

INVARIANTS: Final = tuple(f"I{number}" for number in range(1, 21))

GRANTS: Final = "grants"
"""The name under which a history is faulted in which nothing was ever granted: it proves nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogged:
    """A step that an executor's own log shows as begun, whether or not it was ever recorded.

    ``asked_at`` is read before ``lease.check()``, ``started_at`` after it, both by the clock that the database has too
    (microseconds since 1970 on one machine whose clock is left alone); without both, I11 is not judged for this step.
    """

    run_id: RunId
    epoch: int
    step: str
    asked_at: Micros | None = None
    started_at: Micros | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a test knows and no row tells.

    ``quiet``: nothing was under way when the history was read, so I8 is judged; ``may_remain`` are the runs that may
    be open all the same. ``healthy``: sessions that nobody had a reason to declare dead or to take a run from (I10; I13
    if there was an ``outage`` or a step of a clock). ``acknowledged``: runs whose admission a caller was told of (I15).
    ``answers``: idempotency key to the runs that callers were told of (I14). ``steps``: what executors logged (I11,
    I20). ``max_running`` per worker, ``max_queued`` per thread, ``max_active_per_user`` (I19). ``without``: names of
    invariants that this test's faults suspend (say why in the test).
    """

    quiet: bool = False
    may_remain: Collection[RunId] = ()
    healthy: Collection[WorkerId] = ()
    outage: bool = False
    acknowledged: Collection[RunId] = ()
    answers: Mapping[str, Collection[RunId]] = field(default_factory=dict)
    steps: Collection[StepLogged] = ()
    max_running: int | None = None
    max_queued: int | None = None
    max_active_per_user: int | None = None
    without: Collection[str] = ()


@final
@dataclass(frozen=True, slots=True)
class Violation:
    """One invariant broken: by which run, in words, and the changes that show it."""

    invariant: str
    run_id: RunId | None
    message: str
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        whose = "" if self.run_id is None else f" run {self.run_id}:"
        shown = "".join(f"\n    {change}" for change in self.changes)
        return f"{self.invariant}:{whose} {self.message}{shown}"


@final
@dataclass(frozen=True, slots=True)
class Report:
    """What came of it. ``not_judged`` says, for each invariant left out, what the test would have had to tell."""

    violations: tuple[Violation, ...]
    grants: int
    changes: int
    not_judged: Mapping[str, str] = field(default_factory=dict)

    @property
    def broken(self) -> frozenset[str]:
        """The names of the invariants that do not hold."""
        return frozenset(violation.invariant for violation in self.violations)

    def require(self) -> None:
        """Raise ``HistoryBroken`` with everything that was found, if anything was."""
        if self.violations:
            raise HistoryBroken("\n".join(str(violation) for violation in self.violations))

    def __str__(self) -> str:
        found = "".join(f"\n  {violation}" for violation in self.violations)
        return f"{self.grants} grants in {self.changes} changes, {len(self.violations)} violations{found}"


NOTHING_EXPECTED: Final = Expected()


def check_history(history: History, *, expected: Expected = NOTHING_EXPECTED) -> Report:
    """Judge every invariant that can be judged. A history without a single grant is faulted."""
    from deerflow_runs.testing.judging import judge

    return judge(history, expected)
