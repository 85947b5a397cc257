"""Events of a run under its owner: admission, claim, start, end, cancel, fence, and what it leaves behind."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, final

from deerflow_runs.model import CancelAction, OperationKind, RunId, RunStatus, Strategy, WorkerId
from deerflow_runs.observe.base import About, Attempt, Epoch, ErrorCode, EventOfRun, Failures, SuspendedFor

# ---- admission -----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunAdmitted(EventOfRun):
    """A new run was stored, by the worker that was asked. Once for each run."""

    level = logging.DEBUG
    counted_by = "status"

    status: Annotated[RunStatus, About("`pending` if it holds its thread, `queued` if it waits for it")]
    strategy: Annotated[Strategy, About("what it asked for if its thread was held")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunReused(EventOfRun):
    """A request was answered with a run that exists, because of its idempotency key (O5). Once for each repetition."""

    level = logging.DEBUG


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunDenied(EventOfRun):
    """A run was not admitted because its thread is held or a limit is reached; nothing was stored. Once per request.

    Many of them mean that callers do not wait, or should ask with strategy `enqueue`.
    """

    level = logging.DEBUG

    holder: Annotated[RunId | None, About("the operation that stands in the way; none if a limit is reached")]
    owner: Annotated[WorkerId | None, About("the session that owns the holder; none if it waits for one")]
    retry_after: Annotated[int, About("how long the caller was told to wait", "seconds")]


# ---- from claim to end ---------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaimed(EventOfRun):
    """A worker took up a run that waited for one; it starts next. Once for each grant of a run to a worker."""

    level = logging.DEBUG

    epoch: Epoch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(EventOfRun):
    """A run's executor is about to be called by its owner, the start being stored. Once for each grant."""

    level = logging.DEBUG

    epoch: Epoch
    attempt: Attempt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettled(EventOfRun):
    """A run has ended, and its owner has stored how. Once for each run that its owner ends.

    The end of a run that others end is told by `RunForced`, `RunRecovered` or, while it is queued, `CancelRequested`.
    """

    counted_by = "status"

    epoch: Epoch
    status: Annotated[RunStatus, About("how it ended")]
    stop_reason: Annotated[str | None, About("why it ended other than by itself")]
    seconds: Annotated[float, About("how long this worker held it", "seconds")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRetried(EventOfRun):
    """A run is over but its end could not be stored; its owner tries again, for as long as the run is its own.

    Told at every try. The result is kept in memory: bring the store back before the worker is stopped.
    """

    level = logging.WARNING

    error: ErrorCode
    failures: Failures


# ---- cancel --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(EventOfRun):
    """A worker was asked to cancel a run, its own or another's, and has answered. Once for each request."""

    level = logging.DEBUG
    counted_by = "outcome"

    action: Annotated[CancelAction, About("the action in force, which is the first one asked for")]
    outcome: Annotated[str, About("what was answered, a word of `CancelOutcome`")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelHeard(EventOfRun):
    """The owner of a run learnt of its cancel and stops it. Once for each run that is stopped by it."""

    level = logging.DEBUG
    counted_by = "action"

    action: Annotated[CancelAction, About("the action in force")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunForced(EventOfRun):
    """A worker that does not hold a cancelled run has ended it (O4). Once for each such run.

    Nobody held it, its owner was dead, or it did not stop within `cancel_grace`; in that case its owner tells
    `RunLingers`.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeized(EventOfRun):
    """A worker took a cancelled run in order to put back the state before it (O4). Once for each try."""

    level = logging.DEBUG

    epoch: Epoch
    attempt: Attempt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRestored(EventOfRun):
    """The state before a run was put back by whoever holds it; its end is stored next. Once for each rollback."""

    level = logging.DEBUG


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(EventOfRun):
    """The state before a run could not be put back; it is tried again until the attempts are used up.

    Told at every try. After the last one the run ends as an error with stop_reason `rollback_failed`: what the run
    wrote is then still there.
    """

    level = logging.ERROR

    error: ErrorCode


# ---- loss, and leaving without an end ------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunFenced(EventOfRun):
    """This worker does not own the run any more: it stops it, and writes and publishes nothing of it (O18).

    Once for each lease. What the run did outside may happen twice, unless the other side drops repeats.
    """

    level = logging.WARNING

    epoch: Annotated[int, About("the fencing token that is worth nothing now", "number")]
    reason: Annotated[str, About("what gave it away, in our words")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunAborted(EventOfRun):
    """A suspended run was stopped, because trust did not come back within `max_suspend` (O12). Once for each lease.

    It is given back once the store answers.
    """

    level = logging.WARNING

    suspended_for: SuspendedFor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunTakenBack(EventOfRun):
    """A run goes on where it is, under the worker's new session (O13). Once for each run after `SessionReplaced`."""

    epoch: Epoch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunGivenBack(EventOfRun):
    """A worker that cannot go on with a run has put it back; once per grant. One more attempt counts, as for a crash.

    It was suspended for too long, or nothing in this process held it for `attach_deadline`.
    """

    level = logging.WARNING
    counted_by = "status"

    status: Annotated[RunStatus, About("`pending` if it waits for another worker, or how it ended")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandedOver(EventOfRun):
    """A worker that drains has left a run to the others, which go on after its last finished step. Once per grant."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunDeferred(EventOfRun):
    """A run asked for capabilities that its owner lacks, and waits for a worker that has them. Once per grant."""

    requirements: Annotated[tuple[str, ...], About("the capabilities it needs now")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunLingers(EventOfRun):
    """A run's task goes on after it was cancelled; the worker is done with it and no write of it counts. Once per task.

    It swallows cancellation or blocks: only the end of its process stops it.
    """

    level = logging.WARNING

    seconds: Annotated[float, About("time since it was first told to stop", "seconds")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LingeringEnded(EventOfRun):
    """The task of an abandoned run has ended after all. Once for each `RunLingers` that ended before its process."""


# ---- reservations --------------------------------------------------------------------------------------------------

Reserved = Annotated[OperationKind, About("what the thread is reserved for")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationTaken(EventOfRun):
    """A thread was reserved: no run starts on it until the reservation is released. Once for each reservation."""

    level = logging.DEBUG
    counted_by = "kind"

    kind: Reserved


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationReleased(EventOfRun):
    """The worker that took a reservation has released it. Once for each reservation that was not lost."""

    level = logging.DEBUG
    counted_by = "kind"

    kind: Reserved


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationLost(EventOfRun):
    """The holder of a reservation found that it is its own no longer, and stopped its work. Once per reservation."""

    level = logging.WARNING
    counted_by = "kind"

    kind: Reserved


# ---- deliveries ----------------------------------------------------------------------------------------------------

Hook = Annotated[str, About("what is delivered, such as the name of a hook")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryMade(EventOfRun):
    """A hook was told of a run's end, by some worker that has the hook. At least once for each end."""

    level = logging.DEBUG
    counted_by = "kind"

    kind: Hook
    attempt: Attempt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFailed(EventOfRun):
    """A hook raised, or took too long; the delivery is made again later, perhaps by another worker. At every try."""

    level = logging.WARNING
    counted_by = "kind"

    kind: Hook
    attempt: Attempt
    error: ErrorCode
