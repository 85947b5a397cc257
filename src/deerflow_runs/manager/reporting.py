"""What a run tells of itself on the way: progress, usage, its model. Fenced like every other write (O14)."""

from __future__ import annotations

from typing import assert_never, final

from deerflow_runs.errors import UsageError
from deerflow_runs.manager.fencing import fence
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import current_lease
from deerflow_runs.manager.registry import Held
from deerflow_runs.model import NO_USAGE, RunKey, Usage
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
        if _left_behind(held):
            return False
        while await held.lease.until_trusted():
            lease, epoch = held.lease, held.lease.epoch
            given = Given(checkpoint=checkpoint, usage=usage or NO_USAGE, model_name=model_name)
            decision = await self._ground.store.apply(key, RunEvent.PROGRESS, self._ground.actor(epoch), given)
            match decision:
                case Applied():
                    return True
                case Refused(Refusal.LOST) if held.lease.epoch != epoch or lease.worker_id != self._ground.worker_id:
                    continue  # taken back meanwhile, or about to be: asked again under the new epoch (O13)
                case Refused(Refusal.LOST):
                    fence(self._ground, held, "its progress was refused")
                    return False
                case Refused():
                    return False
                case _:
                    assert_never(decision)
        return False


def _left_behind(held: Held) -> bool:
    """Whether a body asks that did not stop in time: the run goes on without it, under a lease that it does not have,
    and nothing of it is stored (O4)."""
    try:
        asking = current_lease()
    except UsageError:
        return False  # somebody outside of the run, on its behalf
    return asking.run_id == held.run.run_id and asking is not held.lease
