"""How a run ended by itself, as whoever carried it out says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, final

from deerflow_runs.model import NO_USAGE, RunStatus, ThreadOutcome, Usage
from deerflow_runs.protocol.decision import Given

SETTLES: Final = frozenset({RunStatus.SUCCESS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.INTERRUPTED})


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended by itself. ``interrupted`` as a status means that it waits for a human (its ``thread_outcome`` is
    then ``interrupted`` too, unless given); ``values`` and ``interrupts`` go to the thread's row, ``checkpoint`` is the
    id of the last one written."""

    status: RunStatus = RunStatus.SUCCESS
    error: str | None = field(default=None, repr=False)
    stop_reason: str | None = None
    usage: Usage = field(default=NO_USAGE, repr=False)
    values: Any = field(default=None, repr=False)
    interrupts: Any = field(default=None, repr=False)
    thread_outcome: ThreadOutcome | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.status not in SETTLES:
            raise ValueError(f"an outcome's status is one of {', '.join(sorted(SETTLES))}, not {self.status}")

    def given(self) -> Given:
        """As the store takes it."""
        waits = ThreadOutcome.INTERRUPTED if self.status is RunStatus.INTERRUPTED else None
        return Given(
            stop_reason=self.stop_reason,
            error=self.error,
            usage=self.usage,
            outcome=self.thread_outcome or waits,
            values=self.values,
            interrupts=self.interrupts,
            checkpoint=self.checkpoint,
        )


SUCCEEDED: Final = Outcome()
