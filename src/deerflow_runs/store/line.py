"""Where session lines come from: for each kind of database one way to make them, to signal, and to look at hints.

The lines themselves stand in ``line_postgres``, ``line_sqlite`` and ``line_memory``. No rule of the protocol is known
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from deerflow_runs.model import Session, WorkerId
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store.base import SessionLine
from deerflow_runs.store.signals import Signal


class Lines(Protocol):
    """What one store offers beside its units of work. Nothing is connected by making one."""

    def line(self) -> SessionLine:
        """A new line, not connected."""

    async def send(self, signal: Signal, to: WorkerId | None) -> None:
        """See ``RunStore.send``."""

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:
        """See ``RunStore.signs``."""

    async def close(self) -> None:
        """Finish the signals that are still under way; lines are closed by those who opened them."""
