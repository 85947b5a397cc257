"""The store's two smaller faces: threads and the outbox, each over the same units of work.

Reached as ``store.threads`` and ``store.outbox``; what they do stands in ``threads``, ``thread_search`` and ``outbox``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, final

from sqlalchemy import Connection

from deerflow_runs.model import Micros, RunKey, Scope, ThreadId
from deerflow_runs.protocol.decision import Actor, Refused
from deerflow_runs.store import outbox, thread_search, threads
from deerflow_runs.store.incoming import check_ids
from deerflow_runs.store.outbox import Delivery, Receipt
from deerflow_runs.store.thread_search import ThreadPage, ThreadQuery
from deerflow_runs.store.threads import NewThread, Thread, ThreadChange, ThreadDeleted
from deerflow_runs.store.units import Unit, Units


class _Face:
    """Binds a module's functions to units of work."""

    def __init__(self, units: Units) -> None:
        self._units = units

    def _unit(self, function: Any, *arguments: Any, **named: Any) -> Unit[Any]:
        return partial(_run, function, self._units.dialect, arguments, named)


def _run(function: Any, dialect: Any, arguments: tuple[Any, ...], named: dict[str, Any], connection: Connection) -> Any:
    return function(connection, dialect, *arguments, **named)


@final
class SqlThreads(_Face):
    """Rows of threads: metadata, values, and how the last run left them. Whether a thread is busy is never stored."""

    async def create(self, new: NewThread) -> Thread | None:
        """Make a thread; None: the id is taken."""
        made: Thread | None = await self._units.once(self._unit(threads.create, new))
        return made

    async def get(self, thread_id: ThreadId, *, scope: Scope) -> Thread | None:
        """One thread; a foreign one reads as missing."""
        check_ids(thread_id=thread_id)
        found: Thread | None = await self._units.read(self._unit(threads.get, thread_id, scope=scope))
        return found

    async def update(self, thread_id: ThreadId, change: ThreadChange, *, scope: Scope) -> Thread | None:
        """Change a thread; None: there is none, or it is foreign."""
        check_ids(thread_id=thread_id)
        unit = self._unit(threads.update, thread_id, change, scope=scope)
        changed: Thread | None = await self._units.transaction(unit)
        return changed

    async def delete(self, key: RunKey, by: Actor, *, scope: Scope) -> ThreadDeleted | Refused:
        """Remove a thread with all that hangs on it, and release ``key``, the delete reservation that ``by`` holds."""
        unit = self._unit(threads.delete, key, by, scope=scope)
        deleted: ThreadDeleted | Refused = await self._units.transaction(unit)
        return deleted

    async def search(self, query: ThreadQuery, *, scope: Scope) -> ThreadPage:
        """The threads of a query, in its order."""
        page: ThreadPage = await self._units.read(self._unit(thread_search.search, query, scope=scope))
        return page

    async def count(self, query: ThreadQuery, *, scope: Scope) -> int:
        """How many threads a query finds."""
        number: int = await self._units.read(self._unit(thread_search.count, query, scope=scope))
        return number


@final
class SqlOutbox(_Face):
    """What endings left to be done: taken by any worker that has the handler, delivered at least once (O28)."""

    async def take(self, kinds: Collection[str], limit: int, lease: Micros) -> tuple[Delivery, ...]:
        """Take deliveries that are due; nobody else sees them for ``lease`` microseconds."""
        taken: tuple[Delivery, ...] = await self._units.once(self._unit(outbox.take, kinds, limit, lease))
        return taken

    async def delivered(self, delivery: Delivery) -> bool:
        """It is done; False: it was done before, or its run is gone."""
        done: bool = await self._units.once(self._unit(outbox.delivered, delivery))
        return done

    async def postponed(self, delivery: Delivery, backoff: Micros) -> bool:
        """It failed, and is due again after ``backoff`` microseconds; False: somebody else has taken it since."""
        postponed: bool = await self._units.once(self._unit(outbox.postponed, delivery, backoff))
        return postponed

    async def pending(self) -> dict[str, int]:
        """How many deliveries of each kind are still to be made."""
        numbers: dict[str, int] = await self._units.read(self._unit(outbox.pending))
        return numbers

    async def receipt(self, key: RunKey, *, scope: Scope) -> Receipt | None:
        """The receipt of an ended run; None for one that is open, missing or foreign."""
        found: Receipt | None = await self._units.read(self._unit(outbox.receipt, key, scope=scope))
        return found
