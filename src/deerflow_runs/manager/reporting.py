"""What a run tells of itself on the way: progress, usage, its model. Fenced like every other write (O14)."""

from __future__ import annotations

from typing import final

from deerflow_runs.errors import UsageError
from deerflow_runs.manager.ground import Ground
from deerflow_runs.model import NO_USAGE, RunKey, Usage
from deerflow_runs.observe import RunFenced
from deerflow_runs.protocol.decision import Applied, Given, Refused
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent


@final
class Reporting:
    """Writes progress of runs that are held here."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def progress(self, key: RunKey, checkpoint: str | None, usage: Usage | None, model_name: str | None) -> bool:
        """See ``RunManager.update_run_progress``. Waits while the run is suspended: nothing is written then (I11)."""
        held = self._ground.registry.get(key.run_id)
        if held is None:
            return False
        if held.key != key:
            raise UsageError(f"run {key.run_id} is on another thread")
        lease = held.lease
        if not await lease.until_trusted():
            return False
        epoch = lease.epoch
        given = Given(checkpoint=checkpoint, usage=usage or NO_USAGE, model_name=model_name)
        decision = await self._ground.store.apply(key, RunEvent.PROGRESS, self._ground.actor(epoch), given)
        match decision:
            case Applied():
                return True
            case Refused(Refusal.LOST) if lease.epoch == epoch and not lease.fenced:
                lease.fence("its progress was refused")
                self._ground.observe(
                    RunFenced(
                        worker_id=self._ground.worker_id,
                        run_id=key.run_id,
                        thread_id=key.thread_id,
                        epoch=epoch,
                        reason="its progress was refused",
                    )
                )
                return False
            case Refused():
                return False
