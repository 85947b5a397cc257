"""Events of a worker that leaves (O35): one budget, a fixed order of steps, and how long each of them took."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, final

from deerflow_runs.observe.base import About, Event
from deerflow_runs.protocol.drain import Step


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBegun(Event):
    """A worker admits and claims nothing more, and stops what it holds. Once, at the signal or at `shutdown()`."""

    budget: Annotated[float, About("what all steps together may take", "seconds")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStepEnded(Event):
    """A step of the drain is over, done or out of time. Once for each step, in their order."""

    counted_by = "step"

    step: Annotated[Step, About("the step")]
    seconds: Annotated[float, About("how long it took", "seconds")]
    runs: Annotated[int, About("runs that this worker still held after it", "count")]
    error: Annotated[str | None, About("what last went wrong in it: an error's type and code")] = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHurried(Event):
    """Another signal or a cancellation arrived: half of the time that is left is split anew. Told each time."""

    level = logging.WARNING


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded(Event):
    """The drain is over and the worker may exit. Once; where it is missing, the worker was killed while it drained."""

    seconds: Annotated[float, About("how long it took in all", "seconds")]
