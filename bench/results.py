"""What a figure found, as values, and as the JSON that the page is written from. Nothing here measures anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, Final, final

RESULTS: Final = Path(__file__).resolve().parent / "results"
"""The committed results; those of ``--quick`` lie in a folder below that is not."""

QUICK: Final = RESULTS / "quick"


class Sense(StrEnum):
    """How a target is to be read."""

    AT_MOST = "≤"
    AT_LEAST = "≥"
    EXACTLY = "="


@final
@dataclass(frozen=True, slots=True)
class Target:
    """What a line must reach. ``worst``: the worst round must, not only the middle one."""

    limit: float
    sense: Sense = Sense.AT_MOST
    worst: bool = False

    def met_by(self, line: Line) -> bool:
        """Whether it was reached."""
        match self.sense:
            case Sense.AT_MOST:
                return (line.high if self.worst else line.value) <= self.limit
            case Sense.AT_LEAST:
                return (line.low if self.worst else line.value) >= self.limit
            case Sense.EXACTLY:
                return line.low == line.value == line.high == self.limit


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One number: ``value`` is the middle one of ``rounds``, which lie between ``low`` and ``high``."""

    what: str
    value: float
    unit: str
    low: float
    high: float
    rounds: int = 1
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None: it is only reported."""
        return None if self.target is None else self.target.met_by(self)


def line(what: str, values: Sequence[float] | float, unit: str, target: Target | None = None) -> Line:
    """The line of all rounds of one quantity, or of a single number."""
    rounds = [values] if isinstance(values, int | float) else list(values)
    return Line(
        what=what,
        value=_shortened(median(rounds)),
        unit=unit,
        low=_shortened(min(rounds)),
        high=_shortened(max(rounds)),
        rounds=len(rounds),
        target=target,
    )


def _shortened(number: float) -> float:
    """Four digits are more than a shared machine can repeat; whole numbers stay as they were counted."""
    return number if float(number).is_integer() else float(f"{number:.4g}")


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What one figure found. ``notes`` are sentences: what a reader must know to read the numbers rightly."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A figure's result with all that is needed to judge it: where, with what, and how busy the machine was."""

    name: str
    quick: bool
    seed: int
    commit: str
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    load: tuple[float, float]
    measured: Measured = field(repr=False)

    def text(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, sort_keys=True) + "\n"

    def save(self) -> Path:
        """Keep it; a quick one never replaces one that was measured with patience."""
        folder = QUICK if self.quick else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(self.text(), encoding="utf-8")
        return path


def saved(name: str, folder: Path = RESULTS) -> Record | None:
    """What was kept of a figure; None: nothing."""
    path = folder / f"{name}.json"
    return _record(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _record(kept: dict[str, Any]) -> Record:
    found = kept.pop("measured")
    lines = tuple(_line(one) for one in found["lines"])
    return Record(**{**kept, "load": tuple(kept["load"])}, measured=Measured(lines, tuple(found["notes"])))


def _line(kept: dict[str, Any]) -> Line:
    target = kept.pop("target")
    sense = None if target is None else Sense(target.pop("sense"))
    return Line(**kept, target=None if sense is None else Target(**target, sense=sense))
