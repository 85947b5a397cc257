"""How the code of a run ended in this process, as a value. What its row then says is decided by the store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import final

from deerflow_runs.manager.executor import Drained, NeedsCapability
from deerflow_runs.manager.lease import RunLease, StopCause
from deerflow_runs.manager.outcome import SUCCEEDED, Outcome
from deerflow_runs.model import CancelAction


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """By itself, with an outcome; also when a stop had been asked for and came too late."""

    outcome: Outcome


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """With an error of its own; ``error`` is what is stored."""

    error: str


@final
@dataclass(frozen=True, slots=True)
class Stopped:
    """Because it was told to, or because its caller is gone (``cause`` None)."""

    cause: StopCause | None
    action: CancelAction | None = None


@final
@dataclass(frozen=True, slots=True)
class Deferred:
    """It needs what this worker does not have."""

    names: frozenset[str]


BodyEnd = Finished | Failed | Stopped | Deferred


def body_end(lease: RunLease, result: object, error: BaseException | None) -> BodyEnd:
    """How a body ended. What it returns counts if it is an ``Outcome``; anything else is a plain success.

    Asks the lease before the type of the error: a library may turn a cancellation into anything (O18).
    """
    if lease.fenced:
        return Stopped(StopCause.LOST)
    if error is None:
        return Finished(result if isinstance(result, Outcome) else SUCCEEDED)
    if isinstance(error, NeedsCapability):
        return Deferred(error.names)
    if isinstance(error, Drained):
        return Stopped(StopCause.DRAIN)
    if lease.stop_cause is not None or isinstance(error, asyncio.CancelledError):
        return Stopped(lease.stop_cause, lease.cancel_action)
    return Failed(error_text(error))


def error_text(error: BaseException) -> str:
    """What a run's row says of its error: the type and the message, on one line if it was one."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
