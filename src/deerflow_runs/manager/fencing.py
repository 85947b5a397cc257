"""How a holder in this process is told that a run is not its own any more (O18). Who found out, and how, is said by the
caller; nothing is asked here."""

from __future__ import annotations

from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.observe import RunFenced


def fence(ground: Ground, held: Held, reason: str) -> None:
    """Close its gate first, then tell of it. What nobody had come for leaves at once; everything else leaves with the
    end of its own task. A reservation tells of its loss itself."""
    lease, epoch = held.lease, held.lease.epoch
    if lease.fenced or held.over.is_set():
        return
    lease.fence(reason)
    if not held.run.reservation:
        event = RunFenced(
            worker_id=ground.worker_id,
            run_id=held.run.run_id,
            thread_id=held.run.thread_id,
            epoch=epoch,
            reason=reason,
        )
        ground.observe(event)
    if held.phase is Phase.UNATTACHED:
        ground.registry.let_go(held)
