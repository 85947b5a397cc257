"""Reading many rows of which some may be unreadable: broken JSON, a word of a newer version, whatever was put there.

One such row must not spoil what is read with it, so JSON is fetched as text and read row by row. Which rows are read,
and what a row means, is decided by the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from sqlalchemy import Column, ColumnElement, Row, Text, type_coerce

from deerflow_runs.store.schema import JsonText, outbox, runs, threads
from deerflow_runs.store.values import decode

T = TypeVar("T")

_log = logging.getLogger(__name__)

UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a row raises when the row is not what its table promises."""

_JSON: Final = frozenset(
    column.name for table in (runs, threads, outbox) for column in table.c if isinstance(column.type, JsonText)
)


def as_text(columns: list[Column[Any]]) -> list[ColumnElement[Any]]:
    """The columns, JSON as the text that is stored: the database's driver would stop at the first broken one."""
    return [type_coerce(one, Text).label(one.name) if isinstance(one.type, JsonText) else one for one in columns]


def decoded(row: Row[Any]) -> Mapping[str, Any]:
    """The row's values by name, JSON read. Raises one of ``UNREADABLE``."""
    data: dict[str, Any] = row._asdict()
    return data | {name: decode(data[name]) for name in _JSON & data.keys() if data[name] is not None}


def read_or_skip(make: Callable[[Mapping[str, Any]], T], row: Row[Any], name: str) -> T | None:
    """What ``make`` makes of the row's values; None, and a line in the log, if they are unreadable.

    The line names the row by the column ``name`` and says nothing of its content.
    """
    try:
        return make(decoded(row))
    except UNREADABLE as error:
        _log.warning("%s %r cannot be read and is left out (%s)", name, row._mapping[name], type(error).__name__)
        return None


def object_or_empty(stored: str | None) -> Mapping[str, Any]:
    """The JSON object in a text; an empty one if there is none to be read."""
    try:
        value: Any = decode(stored) if stored is not None else None
    except UNREADABLE:
        value = None
    return value if isinstance(value, dict) else {}
