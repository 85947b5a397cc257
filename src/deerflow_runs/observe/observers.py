"""Who may listen to what a worker tells, and how several listeners are kept from disturbing it and each other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable
from typing import Protocol, final

from deerflow_runs.observe.base import Event

logger = logging.getLogger("deerflow_runs.observe")


class Observer(Protocol):
    """Something that is told every event of a worker, as it happens."""

    def observed(self, event: Event) -> None:
        """Take ``event``, and return at once: the worker waits meanwhile.

        Called on the manager's loop and also in the heartbeat's thread, perhaps at the same time. What it raises is
        logged and goes no further.
        """


@final
class Observers:
    """Several observers as one, told in their order; one that raises disturbs neither a run nor the others.

    What an observer raises is logged with its traceback, once for each observer and type of error.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self._known: set[tuple[int, type[BaseException]]] = set()
        self._lock = threading.Lock()

    def observed(self, event: Event) -> None:
        """Tell them all."""
        for place, observer in enumerate(self._observers):
            try:
                observer.observed(event)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the border to code that is not ours
                self._complain(place, observer, event, error)

    def _complain(self, place: int, observer: Observer, event: Event, error: BaseException) -> None:
        kind = (place, type(error))
        with self._lock:
            if kind in self._known:
                return
            self._known.add(kind)
        with contextlib.suppress(Exception):  # the host's logging may be what is broken
            logger.error(
                "observer %s failed at %s; its further errors of this kind are not logged",
                type(observer).__qualname__,
                type(event).__name__,
                exc_info=error,
            )
