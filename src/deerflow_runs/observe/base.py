"""What every observed event is: a frozen value that says what was carried out, by which worker, to which run.

The classes themselves stand in ``sessions``, ``runs``, ``recovery`` and ``drain``. No input, no result and no message
of an error is ever a field of one: events end in logs and on screens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, ClassVar, Final, final

from deerflow_runs.model import Json, RunId, ThreadId, WorkerId


@final
@dataclass(frozen=True, slots=True)
class About:
    """What a field means, and the unit of a number; ``docs/observability.md`` is written from it."""

    text: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a worker did or noticed; ``worker_id`` is the session that tells of it, never the one told of.

    ``level`` is the level of the log line. A run that goes well leaves one line at INFO: the one of its end.
    ``counted_by`` names the field by whose values the event is counted; such a field has few values.
    """

    level: ClassVar[int] = logging.INFO
    counted_by: ClassVar[str | None] = None

    worker_id: Annotated[WorkerId, About("the session that tells of it")]

    def as_json(self) -> dict[str, Json]:
        """Its fields in their order, in the types of JSON: enums by their value."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOfRun(Event):
    """An event about one run, or one reservation where the name says so."""

    run_id: Annotated[RunId, About("the run, or the reservation")]
    thread_id: Annotated[ThreadId, About("its thread")]


def _plain(value: object) -> Json:
    match value:
        case Enum():
            return _plain(value.value)
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return [_plain(item) for item in value]
        case _:
            raise TypeError(f"an event cannot hold a {type(value).__name__}")


# ---- fields that mean the same wherever they occur -------------------------------------------------------------------

ErrorCode = Annotated[str, About("type of the error, with the database's code if it has one; never its message")]
Failures = Annotated[int, About("failures in a row, this one included", "count")]
Epoch = Annotated[int, About("the fencing token in force after it", "number")]
Attempt = Annotated[int, About("number of the attempt, from 1", "number")]
SuspendedFor = Annotated[float, About("time since trust ended", "seconds")]

CODES: Final = ("sqlstate", "sqlite_errorname")
"""Where drivers keep the code of an error."""


def error_code(error: BaseException) -> str:
    """The error in the words an event may carry: its type and, if it or its cause has one, the database's code.

    The message stays out: it may hold an input, an address or a password.
    """
    code = _code(error) or _code(error.__cause__)
    return f"{type(error).__name__} {code}" if code else type(error).__name__


def _code(error: BaseException | None) -> str | None:
    """Of the driver's own error, which may stand behind another one."""
    found = (getattr(source, name, None) for source in (error, getattr(error, "orig", None)) for name in CODES)
    return next((code for code in found if isinstance(code, str)), None)
