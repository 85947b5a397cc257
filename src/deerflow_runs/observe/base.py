"""What every observed event is: a frozen value that says what was carried out, by which worker, to which run.

The classes themselves stand in ``sessions``, ``runs``, ``recovery`` and ``drain``. No input, no result and no message
of an error is ever a field of one: events end in logs and on screens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, final

from deerflow_runs.model import RunId, ThreadId, WorkerId


@final
@dataclass(frozen=True, slots=True)
class About:
    """What a field means, and the unit of a number; ``docs/observability.md`` is written from it."""

    text: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a worker did or noticed; ``worker_id`` is the session that tells of it, never the one told of.

    ``level`` is the level of the log line. A run that goes well leaves one line at INFO or above: the one of its end.
    """

    level: ClassVar[int] = logging.INFO

    worker_id: Annotated[WorkerId, About("the session that tells of it")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOfRun(Event):
    """An event about one run, or one reservation where the name says so."""

    run_id: Annotated[RunId, About("the run, or the reservation")]
    thread_id: Annotated[ThreadId, About("its thread")]


# ---- fields that mean the same wherever they occur -------------------------------------------------------------------

ErrorCode = Annotated[str, About("type of the error and its code if it has one (see `error_code`), never its message")]
Failures = Annotated[int, About("failures in a row, this one included", "count")]
Epoch = Annotated[int, About("the fencing token in force after it", "count")]
Attempt = Annotated[int, About("number of the attempt, from 1", "count")]
SuspendedFor = Annotated[float, About("time since trust ended", "seconds")]

CODES: Final = ("sqlstate", "sqlite_errorname")
"""Where drivers keep the code of an error."""


def error_code(error: BaseException) -> str:
    """The error in the words an event may carry: its type and, if it or its cause has one, the database's code.

    The message stays out: it may hold an input, an address or a password.
    """
    causes = (error, getattr(error, "orig", None), error.__cause__)
    deeper = getattr(error.__cause__, "orig", None)
    found = (getattr(cause, name, None) for cause in (*causes, deeper) for name in CODES)
    code = next((code for code in found if isinstance(code, str)), None)
    return f"{type(error).__name__} {code}" if code else type(error).__name__
