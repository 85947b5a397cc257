"""How often each event happened, as plain numbers for a health page, a test, or any metrics library."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from deerflow_runs.observe.base import Event
from deerflow_runs.observe.runs import RunSettled

PLAIN: Final = ""
"""The value under which an event is counted that has no values to tell apart."""


@final
@dataclass(frozen=True, slots=True)
class Durations:
    """How long things took, in seconds: how many there were, all of them together, and the longest."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def with_another(self, seconds: float) -> Durations:
        """These and one more."""
        return Durations(self.count + 1, self.total + seconds, max(self.longest, seconds))


@final
@dataclass(frozen=True, slots=True)
class Counted:
    """What a worker has told so far. Numbers only grow, until the process ends.

    ``events`` maps the name of an event to its counts by value: ``events["RunSettled"]["success"]``. Events that are
    not counted by a field have their number under ``""``; what never happened is not there. ``settled`` is how long
    the runs were held that this worker has settled.
    """

    events: Mapping[str, Mapping[str, int]]
    settled: Durations

    def of(self, event: type[Event], value: str | None = None) -> int:
        """How often ``event`` happened; with a ``value``, how often with that value of ``event.counted_by``."""
        counts = self.events.get(event.__name__, {})
        return sum(counts.values()) if value is None else counts.get(value, 0)


@final
class Counters:
    """An observer that counts; any thread may tell it and any may ask it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, Counter[str]] = {}
        self._settled = Durations()

    def observed(self, event: Event) -> None:
        """Count it."""
        value = PLAIN if event.counted_by is None else str(event.as_json()[event.counted_by])
        with self._lock:
            self._events.setdefault(type(event).__name__, Counter())[value] += 1
            if isinstance(event, RunSettled):
                self._settled = self._settled.with_another(event.seconds)

    def snapshot(self) -> Counted:
        """All numbers as of one moment; a value that does not change any more."""
        with self._lock:
            events = {name: MappingProxyType(dict(counts)) for name, counts in self._events.items()}
            return Counted(MappingProxyType(events), self._settled)
