"""Lets a real store fail as a test wishes: late, lost or no answers, and errors. What is not spoiled goes through.

Questions are named by the verb (``"admit"``, ``"get"``), those of ``apply`` by the event (``RunEvent.START``). Nothing
here waits for time to pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, cast, final

from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import SessionLine
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.flaky_line import Faults, FlakyLine

NOT_SPOILED: Final = frozenset({"open", "close", "send"})
"""What is always passed on: the life of the store is the test's, and a signal never fails."""

QUESTIONS: Final = frozenset(
    name
    for name, _ in inspect.getmembers(SqlRunStore, inspect.iscoroutinefunction)
    if not name.startswith("_") and name not in NOT_SPOILED
) | {event.value for event in RunEvent}
"""Every question, by its name, for a store that is to answer nothing at all."""


@final
class FlakyStore:
    """Stands before ``store``. ``faults`` spoils what managers ask, ``lines`` the lines of their heartbeats."""

    def __init__(self, store: SqlRunStore, faults: Faults, *, lines: Faults | None = None) -> None:
        self._store = store
        self._faults = faults
        self._lines = lines

    @classmethod
    def around(cls, store: SqlRunStore, faults: Faults, *, lines: Faults | None = None) -> SqlRunStore:
        """One that passes for a store: it has all that the store has."""
        return cast("SqlRunStore", cls(store, faults, lines=lines))

    def session_line(self) -> SessionLine:
        """See ``RunStore.session_line``."""
        line = self._store.session_line()
        return line if self._lines is None else FlakyLine(line, self._lines)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._spoiled(name, found) if inspect.iscoroutinefunction(found) and name not in NOT_SPOILED else found

    def _spoiled(self, name: str, question: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def asked(*arguments: Any, **named: Any) -> Any:
            return await self._faults.through(_named(name, arguments, named), lambda: question(*arguments, **named))

        return asked


def _named(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})) -> str:
    """``apply`` is many questions: one for each event."""
    return str(named.get("event") or arguments[1]) if name == "apply" else name
