"""Events as log lines of the standard library. Where lines go, and which, is for the host to configure."""

from __future__ import annotations

import logging
from typing import Final, final

from deerflow_runs.model import Json
from deerflow_runs.observe.base import Event

LOGGER: Final = "deerflow_runs.events"

TAKEN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "event", "message"}
"""Names that a log record uses itself; a field of such a name gets an underscore behind it."""


@final
class LogObserver:
    """Writes one line for every event, at the level of its class, to the logger ``deerflow_runs.events``.

    The line names the event and its fields. ``extra`` carries them as attributes of the record: ``event`` is the name,
    each field has its own.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(LOGGER)

    def observed(self, event: Event) -> None:
        """Write the line, if its level is enabled."""
        if self._logger.isEnabledFor(event.level):
            template, words = _phrase(event)
            self._logger.log(event.level, template, *words, extra=_extra(event))


def line(event: Event) -> str:
    """The text of the line."""
    template, words = _phrase(event)
    return template % words


def _phrase(event: Event) -> tuple[str, tuple[str, ...]]:
    """The same template for every event of a class: tools that collect lines group by it."""
    fields = event.as_json()
    template = " ".join([type(event).__name__, *(f"{name}=%s" for name in fields)])
    return template, tuple(_word(value) for value in fields.values())


def _word(value: Json) -> str:
    """One word of a line. Ids come from callers: what could break a line or pass for another field is quoted."""
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.3f}"
        case list():
            return "[" + ",".join(_word(item) for item in value) + "]"
        case str() if not value or not value.isprintable() or any(sign in value for sign in " =\"'"):
            return ascii(value)
        case _:
            return str(value)


def _extra(event: Event) -> dict[str, Json]:
    fields = {f"{name}_" if name in TAKEN else name: value for name, value in event.as_json().items()}
    return {"event": type(event).__name__, **fields}
