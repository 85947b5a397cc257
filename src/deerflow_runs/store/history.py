"""What a thread's past adds up to: which runs regenerations and edits hide, and what all of them cost.

Decisions on plain values only; ``reads`` fetches what they are made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

from deerflow_runs.model import TERMINAL, RunId, RunStatus
from deerflow_runs.store.base import TokenTotals

SOURCE: Final = "regenerate_from_run_id"
"""The key of a run's metadata that names the run it does over."""

REPLAY: Final = "replay_kind"
EDIT: Final = "edit"

UNKNOWN_MODEL: Final = "unknown"


# --- Regenerations and edits ----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that does another one over: with other luck (a regeneration) or with other words (an edit)."""

    run_id: RunId
    source: RunId
    edit: bool
    status: RunStatus

    @classmethod
    def of(cls, run_id: RunId, status: RunStatus, metadata: Mapping[str, Any]) -> Self | None:
        """None if the run does nothing over; metadata is the caller's and may hold anything under these keys."""
        source = metadata.get(SOURCE)
        if not isinstance(source, str) or source == run_id:
            return None
        return cls(run_id, RunId(source), metadata.get(REPLAY) == EDIT, status)

    @property
    def failed(self) -> bool:
        """Over without success."""
        return self.status in TERMINAL and self.status is not RunStatus.SUCCESS

    @property
    def decides(self) -> bool:
        """Whether it can speak for its source: an edit as soon as it exists, a regeneration once it has ended."""
        return self.edit or self.status in TERMINAL


def hidden_runs(attempts: Iterable[Attempt]) -> frozenset[RunId]:
    """Which runs a thread's history leaves out (B188–B190), given all attempts on it, newest first.

    The newest attempt on a source decides for it: a failure brings the source back. An edit that failed left nothing
    to be seen, so it is hidden itself.
    """
    hidden: set[RunId] = set()
    decided: set[tuple[RunId, bool]] = set()
    for attempt in attempts:
        if attempt.edit and attempt.failed:
            hidden.add(attempt.run_id)
        if attempt.decides and (attempt.source, attempt.edit) not in decided:
            decided.add((attempt.source, attempt.edit))
            if not attempt.failed:
                hidden.add(attempt.source)
    return frozenset(hidden)


# --- Tokens ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Spending:
    """What one run used up. ``by_model`` and ``by_caller`` are as the run reported them, or empty."""

    model_name: str | None
    input_tokens: int
    output_tokens: int
    total_tokens: int
    by_model: Mapping[str, Any]
    by_caller: Mapping[str, Any]

    def per_model(self) -> Mapping[str, int]:
        """B198: a run that did not say which models it used is counted under its own, or as unknown."""
        if self.by_model:
            return numbers(self.by_model)
        if self.model_name is None and self.total_tokens == 0:
            return {}
        return {self.model_name or UNKNOWN_MODEL: self.total_tokens}


def numbers(reported: Mapping[str, Any]) -> Mapping[str, int]:
    """What counts; an executor may report anything."""
    return {name: int(value) if _is_number(value) else 0 for name, value in reported.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def add_up(spendings: Iterable[Spending]) -> TokenTotals:
    """The sums over runs. A run of several models counts once for each in ``runs_by_model`` (B197)."""
    sums: Counter[str] = Counter()
    by_model: Counter[str] = Counter()
    by_caller: Counter[str] = Counter()
    runs_by_model: Counter[str] = Counter()
    for spent in spendings:
        sums.update(runs=1, input=spent.input_tokens, output=spent.output_tokens, total=spent.total_tokens)
        per_model = spent.per_model()
        by_model.update(per_model)
        runs_by_model.update(per_model.keys())
        by_caller.update(numbers(spent.by_caller))
    return TokenTotals(
        runs=sums["runs"],
        input_tokens=sums["input"],
        output_tokens=sums["output"],
        total_tokens=sums["total"],
        by_model=dict(by_model),
        by_caller=dict(by_caller),
        runs_by_model=dict(runs_by_model),
    )
