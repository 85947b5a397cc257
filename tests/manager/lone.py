"""A worker without reconciler and heartbeat, on a real store: a live session, a registry, and what it told of itself.

Its session is opened and confirmed by hand, so a test decides when trust ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.executor import CAPABILITY, Executor
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.registry import Held, Registry
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.whoami import this_process
from deerflow_runs.model import OnOrphan, Run, RunId, Strategy, ThreadId
from deerflow_runs.observe import Event
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.store.base import Admitted, Renewed
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.clock import ManualClock


@dataclass
class Lone:
    """One worker. ``told`` is everything it observed, in order."""

    ground: Ground
    granting: Granting
    told: list[Event] = field(default_factory=list)

    @property
    def store(self) -> SqlRunStore:
        return self.ground.store

    async def beat(self) -> None:
        """One confirmed beat."""
        session = self.ground.session
        sent_at = session.now()
        renewal = await self.store.renew(session.worker_id)
        assert isinstance(renewal, Renewed)
        session.confirmed(renewal, sent_at=sent_at, answered_at=session.now())

    async def admits(self, run_id: str = "run", thread_id: str = "thread", **asked: Any) -> Run:
        """A run of this worker's, admitted without the manager's admission."""
        newcomer = Newcomer(
            run_id=RunId(run_id),
            thread_id=ThreadId(thread_id),
            worker_id=self.ground.worker_id,
            **({"strategy": Strategy.REJECT, "on_orphan": OnOrphan.FAIL} | asked),
        )
        answer = await self.store.admit(newcomer)
        assert isinstance(answer, Admitted), answer
        return answer.run

    def names(self) -> list[str]:
        """What was told, by name."""
        return [type(event).__name__ for event in self.told]


async def lone_worker(
    store: SqlRunStore,
    *,
    executors: Mapping[str, Executor] | None = None,
    capabilities: frozenset[str] = frozenset(),
    clock: Clock | None = None,
    config: RunsConfig | None = None,
) -> Lone:
    """A worker whose session is open and trusted."""
    config, clock = config or RunsConfig.for_tests(), clock or ManualClock()
    able = frozenset(CAPABILITY + name for name in executors or {}) | capabilities
    session = WorkerSession(this_process(able, {}), config, clock)
    told: list[Event] = []
    ground = Ground(
        store=store,
        session=session,
        registry=Registry(config.max_concurrent_runs),
        config=config,
        clock=clock,
        observe=told.append,
        capabilities=able,
    )
    sent_at = session.now()
    opened = await store.open_session(session.fresh())
    session.opened(opened, sent_at=sent_at, answered_at=session.now())
    return Lone(ground, Granting(ground, executors or {}), told)


async def over(held: Held) -> Run | None:
    """Wait until a held run has left its process; its last row if it ended there."""
    await held.over.wait()
    return held.ended
