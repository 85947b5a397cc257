"""What every part of a manager stands on: store, session, registry, settings, clock, and the ways to be heard.

One frozen value instead of six arguments everywhere. No behaviour but waking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.registry import Registry
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import WorkerId
from deerflow_runs.observe import Event
from deerflow_runs.protocol.decision import Actor
from deerflow_runs.store.signals import Signal
from deerflow_runs.store.sql import SqlRunStore


@final
class _Telling:
    """Tells all workers that there is work, once for any number of callers who say so meanwhile: a drain hands a
    thousand runs over at once."""

    def __init__(self) -> None:
        self._wanted = self._under_way = False

    async def tell(self, store: SqlRunStore) -> None:
        """Return when it was told after this call began, or when somebody else is about to."""
        self._wanted = True
        if self._under_way:
            return
        self._under_way = True
        try:
            while self._wanted:
                self._wanted = False
                await store.send(Signal.WORK)
        finally:
            self._under_way = False


@final
@dataclass(frozen=True, slots=True)
class Ground:
    """Shared by all parts of one manager; belongs to its main loop. ``work`` is set when there may be runs to claim."""

    store: SqlRunStore
    session: WorkerSession
    registry: Registry
    config: RunsConfig
    clock: Clock
    observe: Callable[[Event], None]
    capabilities: frozenset[str]
    work: asyncio.Event = field(default_factory=asyncio.Event)
    _telling: _Telling = field(default_factory=_Telling, init=False, repr=False)

    @property
    def worker_id(self) -> WorkerId:
        """The present session."""
        return self.session.worker_id

    def actor(self, epoch: int | None = None) -> Actor:
        """This manager as it asks the store for something."""
        return Actor(self.session.worker_id, epoch=epoch, capabilities=self.capabilities)

    async def work_appeared(self) -> None:
        """A run may have become vacant: look here, and tell the others. A signal is a hint; the sweeps are the promise
        (O33). What appears while one is being sent goes with one more."""
        self.work.set()
        await self._telling.tell(self.store)

    async def wake_owner(self, owner: WorkerId | None) -> None:
        """A cancel was recorded on a run of ``owner``: it should read its requests now (O19)."""
        if owner is not None:
            await self.store.send(Signal.CANCEL, to=owner)
