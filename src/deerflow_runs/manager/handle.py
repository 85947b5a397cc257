"""``RunHandle``: a submitted run as its caller keeps it. It stays valid after the run's end and holds nothing open."""

from __future__ import annotations

from typing import final

from deerflow_runs.manager.answers import AdmittedRun, CancelResult
from deerflow_runs.manager.cancelling import Cancelling
from deerflow_runs.manager.joining import Joining
from deerflow_runs.manager.mistakes import word
from deerflow_runs.model import EVERYONE, CancelAction, Run, RunId, RunKey, ThreadId


@final
class RunHandle:
    """Join and cancel one run. ``admitted`` is the row as it came in; it does not change."""

    def __init__(self, admitted: AdmittedRun, joining: Joining, cancelling: Cancelling) -> None:
        self.admitted = admitted
        self._joining = joining
        self._cancelling = cancelling

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id} on {self.thread_id}{', reused' if self.reused else ''}>"

    @property
    def key(self) -> RunKey:
        """Where the run is found."""
        return self.admitted.run.key

    @property
    def run_id(self) -> RunId:
        """Its id."""
        return self.admitted.run.run_id

    @property
    def thread_id(self) -> ThreadId:
        """Its thread."""
        return self.admitted.run.thread_id

    @property
    def reused(self) -> bool:
        """Whether an earlier request with the same idempotency key had let it in."""
        return self.admitted.reused

    async def join(self, timeout: float | None = None) -> Run:
        """Wait for the run's end; its last row. Raises ``TimeoutError`` after ``timeout`` seconds, and ``LookupError``
        if the row was removed meanwhile. Safe to cancel."""
        run = await self._joining.join(self.key, scope=EVERYONE, timeout=timeout)
        if run is None:
            raise LookupError(f"run {self.run_id} was removed")
        return run

    async def cancel(
        self, action: CancelAction | str = CancelAction.INTERRUPT, *, wait: bool = False, timeout: float | None = None
    ) -> CancelResult:
        """See ``RunManager.cancel``."""
        chosen = word(CancelAction, action, "action")
        return await self._cancelling.cancel(self.key, chosen, wait=wait, timeout=timeout, scope=EVERYONE)
