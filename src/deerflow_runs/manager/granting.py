"""What becomes of a run that the store has just granted to this process: somebody's work, or restored, or kept for a
caller who will come for it.

One place for all ways in: admitted, claimed, seized. Nothing here awaits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, final

from deerflow_runs.manager.body import BodyEnd, Stopped
from deerflow_runs.manager.executor import Executor
from deerflow_runs.manager.fencing import fence
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.lease import RunLease, StopCause
from deerflow_runs.manager.life import Life
from deerflow_runs.manager.registry import Held, Phase
from deerflow_runs.model import Run, SessionState


@final
class Granting:
    """Takes granted runs up. Every life is a task of its own, kept here until it is over."""

    def __init__(self, ground: Ground, executors: Mapping[str, Executor]) -> None:
        self._ground = ground
        self._executors = executors
        self._lives: set[asyncio.Task[None]] = set()

    def executor_of(self, run: Run) -> Executor | None:
        """Who carries the run out by its name; None for a run of a local function."""
        return self._executors.get(run.executor) if run.executor is not None else None

    def take_up(self, run: Run, executor: Executor | None = None) -> Held:
        """Hold a run that was admitted for, or claimed by, this session, and begin its life if its code is here.

        Without, it stays unattached: its caller attaches, or a sweep gives it back (O12). An answer that was overtaken,
        as that of an admission by a claim, brings no more than the code of what is held already. What is granted to a
        worker that leaves does not start (O35).
        """
        held = self._ground.registry.get(run.run_id)
        if held is None or held.lease.epoch < run.epoch:
            held = self._hold(run, executor or self.executor_of(run))
            if self._ground.session.state is SessionState.DRAINING and not run.reservation:
                held.lease.stop(StopCause.DRAIN)
        held.executor = held.executor or executor
        if held.phase is not Phase.UNATTACHED or run.reservation:
            return held
        if held.executor is not None:
            self._begin(held, Life(self._ground, held).carry_out())
        elif held.lease.stop_cause is not None:
            self.end(held, Stopped(held.lease.stop_cause, held.lease.cancel_action))
        return held

    def end(self, held: Held, end: BodyEnd) -> None:
        """End a run that was granted and is nobody's work."""
        self._begin(held, Life(self._ground, held).carry_out_end(end))

    def restore(self, run: Run) -> Held:
        """Hold a run that was seized from a holder that is gone or overdue: nothing but its restore runs here (O4)."""
        held = self._hold(run, self.executor_of(run))
        self._begin(held, Life(self._ground, held).carry_out_restore())
        return held

    def begin(self, held: Held, life: Coroutine[Any, Any, None]) -> None:
        """Let ``life`` see a held run to its end."""
        self._begin(held, life)

    def lives(self) -> frozenset[asyncio.Task[None]]:
        """The lives that are not over."""
        return frozenset(self._lives)

    def _hold(self, run: Run, executor: Executor | None) -> Held:
        ground = self._ground
        before = ground.registry.get(run.run_id)
        if before is not None and before.phase is not Phase.SETTLING:  # one that ends hears it from its own question
            fence(ground, before, "it was granted anew")
        held = Held(RunLease(run, ground.session), since=ground.clock.boot_time(), executor=executor)
        ground.registry.hold(held)
        return held

    def _begin(self, held: Held, life: Coroutine[Any, Any, None]) -> None:
        if held.phase is Phase.UNATTACHED:
            held.phase = Phase.STARTING
        held.life = asyncio.get_running_loop().create_task(life, name=f"life of {held.run.run_id}")
        self._lives.add(held.life)
        held.life.add_done_callback(self._lives.discard)
