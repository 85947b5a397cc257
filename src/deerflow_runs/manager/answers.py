"""What the manager's verbs answer, and how a run is named to them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

from deerflow_runs.errors import UsageError
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.model import CancelAction, Run, RunId, RunKey, SessionState, ThreadId, WorkerId
from deerflow_runs.store.signals import SignalMode


@final
@dataclass(frozen=True, slots=True)
class AdmittedRun:
    """A run that was let in, or (``reused``) one that this very request had let in before (O5): that one is carried
    out by whoever was told first, never a second time. ``run.status`` says whether it waits."""

    run: Run
    reused: bool = False

    @property
    def key(self) -> RunKey:
        """Where it is found."""
        return self.run.key

    @property
    def run_id(self) -> RunId:
        """Its id."""
        return self.run.run_id

    @property
    def thread_id(self) -> ThreadId:
        """Its thread."""
        return self.run.thread_id


@final
@dataclass(frozen=True, slots=True)
class Started:
    """The run is running in this process; ``lease`` goes with it until it is settled."""

    lease: RunLease


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """The run ended before it could start here: cancelled, displaced, or lost. Its body must not run."""

    run: Run | None


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """Its turn has not come within the time given. It keeps its place."""

    key: RunKey


Start = Started | Ended | Waiting


class CancelOutcome(StrEnum):
    """What became of a cancel (O21)."""

    CANCELLED = "cancelled"
    """The run has ended as interrupted."""
    REQUESTED = "requested"
    """It is recorded, or will be when the store is back if this worker holds the run; whoever holds it stops it,
    normally within milliseconds. A body that finishes first ends as the row then says."""
    TAKEN_OVER = "taken_over"
    """Its holder is gone: the run was ended, or is being restored, in its place."""
    NOT_CANCELLABLE = "not_cancellable"
    """The run has ended by itself; ``run`` says how."""
    NOT_ACTIVE_LOCALLY = "not_active_locally"
    """The store gives no answer and the run is not held here, so nothing was recorded. Ask again."""
    UNKNOWN = "unknown"
    """There is no such run, or it is another user's."""


@final
@dataclass(frozen=True, slots=True)
class CancelResult:
    """``action`` is the one in force: the first that was asked for. ``run`` is the row as last seen."""

    outcome: CancelOutcome
    action: CancelAction | None = None
    run: Run | None = None


@final
@dataclass(frozen=True, slots=True)
class Stats:
    """One worker at one moment. Durations in seconds.

    ``held`` runs take a slot each, ``unattached`` are held and nobody's work yet, ``expected`` wait for their turn,
    ``lingering`` are bodies that did not stop in time. ``trust_left`` is 0 while suspended. ``mode`` is how others are
    heard; POLLING means that a cancel from elsewhere may take a whole beat.
    """

    worker_id: WorkerId
    state: SessionState
    trusted: bool
    trust_left: float
    mode: SignalMode
    held: int
    unattached: int
    settling: int
    expected: int
    lingering: int
    free_slots: int


RunRef = "Run | RunKey | AdmittedRun | RunHandle | RunLease | Started"
"""How a run is named to a verb: its row, its key, or whatever another verb answered."""


def key_of(ref: Any) -> RunKey:
    """Where the run that ``ref`` names is found. Raises ``UsageError`` for what names none."""
    if isinstance(ref, RunKey):
        return ref
    if isinstance(ref, Started):
        return ref.lease.key
    key = getattr(ref, "key", None)
    if isinstance(key, RunKey):
        return key
    raise UsageError(
        f"a run is named by its RunKey(thread_id, run_id), its row, lease or handle, not by a {type(ref).__name__}"
    )
