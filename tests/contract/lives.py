"""Runs brought to where a test wants them, through the store's own verbs. Nothing here asserts anything about rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

from sqlalchemy import Connection, text
from sqlalchemy.util import await_only

from deerflow_runs.model import Micros, OperationKind, Run, RunId, Strategy, ThreadId, WorkerId, micros
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted, OwnershipStore
from deerflow_runs.store.units import Unit, Units

T = TypeVar("T")

ME: Final = WorkerId("host:me")
OTHER: Final = WorkerId("host:other")
THREAD: Final = ThreadId("thread")
HOUR: Final = micros(3600)


async def admitted(store: OwnershipStore, run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that holds its thread, or waits there if it asks for that."""
    asked: Mapping[str, Any] = {"worker_id": ME} | given
    answer = await store.admit(Newcomer(run_id=RunId(run_id), thread_id=ThreadId(thread_id), **asked))
    assert isinstance(answer, Admitted), answer
    return answer.run


async def waiting(store: OwnershipStore, run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that waits: behind another one, or for its time."""
    return await admitted(store, run_id, thread_id, strategy=Strategy.ENQUEUE, **given)


async def delayed(
    store: OwnershipStore, run_id: str, thread_id: str = THREAD, *, delay: Micros = HOUR, **given: Any
) -> Run:
    """A run that is not due yet."""
    return await waiting(store, run_id, thread_id, delay=delay, **given)


async def reserved(store: OwnershipStore, run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A reservation that holds its thread."""
    return await admitted(store, run_id, thread_id, **{"kind": OperationKind.CHECKPOINT_WRITE} | given)


async def started(store: OwnershipStore, run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that runs."""
    return await happened(store, await admitted(store, run_id, thread_id, **given), RunEvent.START)


async def ended(
    store: OwnershipStore,
    run_id: str,
    thread_id: str = THREAD,
    *,
    how: RunEvent = RunEvent.SETTLE_SUCCESS,
    with_: Given = NOTHING_GIVEN,
    **given: Any,
) -> Run:
    """A run that is over."""
    return await happened(store, await started(store, run_id, thread_id, **given), how, with_)


async def happened(store: OwnershipStore, run: Run, event: RunEvent, given: Given = NOTHING_GIVEN) -> Run:
    """The run after an event that its owner brought about (that we did, where nobody owns it)."""
    decision = await store.apply(run.key, event, Actor(run.owner_worker_id or ME, run.epoch), given)
    assert isinstance(decision, Applied), decision
    return decision.run


def names(runs: Any) -> list[str]:
    """The ids of runs, in their order."""
    return [run.run_id for run in runs]


async def asked(units: Units, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The answer of a module function that reads."""
    return await units.read(lambda connection: function(connection, units.dialect, *arguments, **named))


async def done(units: Units, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The answer of a module function that writes, in a transaction."""
    return await units.transaction(lambda connection: function(connection, units.dialect, *arguments, **named))


async def executed(units: Units, sql: str, **parameters: Any) -> None:
    """What no verb of the store would do: rows that somebody else has spoilt."""
    await units.transaction(lambda connection: connection.execute(text(sql), parameters))


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """Holds a unit of PostgreSQL up at its end, before its transaction commits, until the test lets it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def after(self, unit: Unit[T]) -> Unit[T]:
        """The same unit, held up."""

        def held(connection: Connection) -> T:
            answer = unit(connection)
            self.reached.set()
            await_only(self.go_on.wait())
            return answer

        return held


async def until_somebody_waits(units: Units) -> None:
    """Return once a connection to this database waits for a lock."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    while not await units.read(lambda connection: connection.scalar(waiting)):
        pass
