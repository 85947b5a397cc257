"""What carries out a run: the ``Executor`` protocol, what it answers, and plain async functions as executors.

A named executor travels: its payload is stored, and any worker that has it may run or resume the run. A function is
local: only the process that was given it can run it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, final

from deerflow_runs.errors import InvalidValue
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.outcome import Outcome
from deerflow_runs.model import Run

CAPABILITY: Final = "executor:"
"""What precedes an executor's name in the capability that its runs require."""


class NeedsCapability(Exception):
    """Raised by an executor that cannot go on here: the run is deferred to a worker that has what it names. No attempt
    is spent. Only before the run has recorded anything at its present epoch."""

    def __init__(self, *names: str) -> None:
        if not names:
            raise ValueError("name at least one capability")
        super().__init__(f"needs {', '.join(names)}")
        self.names = frozenset(names)


class Drained(Exception):
    """Raised by an executor that has stopped between two steps because its worker is about to leave: another one goes
    on from there. One that finishes meanwhile returns as always."""


class Executor(Protocol):
    """Carries out the runs of one name. One object serves many runs at once.

    Derive from it and write ``run``; the rest has a meaning for payloads that are JSON objects and for runs that leave
    nothing behind. ``payload_version`` is stored with every run: a worker of another release is given the version that
    was written.
    """

    payload_version: int = 1

    def encode(self, payload: Any) -> Mapping[str, Any]:
        """The payload as JSON, before admission. Raises ``InvalidValue`` naming the path of what cannot travel."""
        if payload is None:
            return {}
        if not isinstance(payload, Mapping):
            raise InvalidValue("input", "must be an object")
        return payload

    def decode(self, stored: Mapping[str, Any], version: int) -> Any:
        """What ``encode`` of that version made of; on whoever claims the run."""
        if version != self.payload_version:
            raise InvalidValue("payload_version", f"is {version}, and this worker reads {self.payload_version}")
        return stored

    async def heads(self, run: Run) -> Mapping[str, str]:  # noqa: ARG002 - for those who write checkpoints
        """The thread's checkpoints before the run's first step: namespace to id. Asked once, before the first start."""
        return {}

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:
        """Carry it out; None is a plain success. Cancelled when the run is to stop; ``lease.stop_cause`` says why."""

    async def restore(self, lease: RunLease) -> None:
        """Put back the state before the run and remove what it wrote (O4). Fenced by ``lease``, safe to repeat."""


RunFunction = Callable[[RunLease], Awaitable[Any]]
"""Answers an ``Outcome``; anything else, and nothing, is a plain success."""
RestoreFunction = Callable[[RunLease], Awaitable[None]]


@final
class LocalExecutor(Executor):
    """A function of this process as the executor of one run. Without ``restore`` there is nothing to put back."""

    def __init__(self, function: RunFunction, restore: RestoreFunction | None = None) -> None:
        self._function = function
        self._restore = restore

    async def run(self, lease: RunLease, payload: Any) -> Outcome | None:  # noqa: ARG002 - the function has its input
        """Call it."""
        result = await self._function(lease)
        return result if isinstance(result, Outcome) else None

    async def restore(self, lease: RunLease) -> None:
        """Call what was given for it, if anything was."""
        if self._restore is not None:
            await self._restore(lease)


async def _nothing(lease: RunLease) -> None:
    """The body of a run whose code is somewhere else."""


NOTHING_TO_RESTORE: Final = LocalExecutor(_nothing)
"""For a run without an executor, seized from a process that is gone: it left nothing that could be put back."""
