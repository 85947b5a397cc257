"""Events of a worker that looks after the others: who is dead, what became of their runs, and what nobody can take."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Literal, final

from deerflow_runs.model import WorkerId
from deerflow_runs.observe.base import About, ErrorCode, Event, EventOfRun, Failures
from deerflow_runs.protocol.judge import How

RecoveredHow = Literal["ended", "resumed", "freed", "released"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDeclaredDead(Event):
    """A worker declared another one dead (O24, O27); its runs are recovered next. Once for each session that dies.

    After a crash that is as it should be. If the judged worker lives, it was cut off: look at its beats.
    """

    level = logging.WARNING
    counted_by = "how"

    judged: Annotated[WorkerId, About("the session that is dead; `worker_id` is the one that judged")]
    how: Annotated[How, About("what the verdict rests on")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecovered(EventOfRun):
    """A worker dealt with a run whose owner or home is dead (O29, O31). Once for each time that its worker dies."""

    level = logging.WARNING
    counted_by = "how"

    how: Annotated[
        RecoveredHow,
        About(
            "`ended`: it is over; `resumed`: it waits for a worker; `freed`: it may run elsewhere; "
            "`released`: it was a reservation"
        ),
    ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunPromoted(EventOfRun):
    """A queued run has got its thread, without the help of whoever ended the run before it. Once for each such run."""

    level = logging.DEBUG


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunWaitsFor(EventOfRun):
    """No live worker can take this run (O31). Told by whoever looked, when the reason is new.

    Start a worker that has what is missing, or cancel the run.
    """

    level = logging.WARNING

    missing: Annotated[tuple[str, ...], About("the capabilities that the best placed worker lacks")]
    message: Annotated[str, About("the same as a sentence; it may name a home session")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFailed(Event):
    """A sweep was broken off by an error and comes again after a pause, for ever. Told every time."""

    level = logging.WARNING

    error: ErrorCode
    failures: Failures


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEnded(Event):
    """A worker has looked after the others once, about every `sweep`. Where it stops, nobody is recovered."""

    level = logging.DEBUG

    changed: Annotated[int, About("sessions and runs that were changed by it", "count")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFailed(Event):
    """Asking for work ended in an error and comes again after a pause, for ever. Told every time."""

    level = logging.WARNING

    error: ErrorCode
    failures: Failures


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDegraded(Event):
    """The store did not answer a read, so a worker answered from what it holds itself. Told for each such answer.

    Runs of other workers are missing in it.
    """

    level = logging.WARNING

    error: ErrorCode
