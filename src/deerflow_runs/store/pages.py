"""A place in a thread's list, the rows that follow it, and what a list is searched for.

A page is a decision about rows that come in batches, so nothing here is a page; ``reads`` makes those.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from sqlalchemy import BigInteger, ColumnElement, Connection, Row, Text, and_, bindparam, literal_column, select, tuple_

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import OperationKind
from deerflow_runs.store.clauses import R, word
from deerflow_runs.store.sqlite_connection import contains
from deerflow_runs.store.statement import Statement
from deerflow_runs.store.texts import encode
from deerflow_runs.store.values import METADATA_BYTES, storable, text

IS_RUN: Final = R.operation_kind == word(OperationKind.RUN)
HERE: Final = R.thread_id == bindparam("p_thread")
ALL_HERE: Final = and_(HERE, R.seq >= literal_column("0"))
"""For who wants ended runs too: it names the predicate of the list's index (``schema.LISTED``)."""


# --- Places ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A place in a thread's list, between two runs: what follows is older than this."""

    created_at: int
    run_id: str

    def cursor(self) -> str:
        """As callers get it: opaque, and safe in a URL."""
        return base64.urlsafe_b64encode(f"{self.created_at}:{self.run_id}".encode()).decode().rstrip("=")

    @classmethod
    def of(cls, cursor: str) -> Position:
        """The place a cursor means, or ``InvalidValue``: a cursor that was made up must not silently skip runs."""
        try:
            decoded = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4)).decode()
            created_at, _, run_id = decoded.partition(":")
            position = cls(int(created_at), text(run_id, "after", nonempty=True))
        except (binascii.Error, ValueError):
            raise InvalidValue("after", "is not a cursor of this list; use what the page before answered") from None
        if position.cursor() != cursor or not 0 <= position.created_at < BEGINNING.created_at:
            raise InvalidValue("after", "is not a cursor of this list; use what the page before answered")
        return position

    def parameters(self) -> dict[str, Any]:
        """For ``older``."""
        return {"p_created_at": self.created_at, "p_older_than": self.run_id}


BEGINNING: Final = Position(2**63 - 1, "")
"""Before the newest run there can be."""


# --- Rows after a place ---------------------------------------------------------------------------------------------


def newest_first(
    connection: Connection, statement: Statement, bag: Mapping[str, Any], start: Position, batch: int
) -> Iterator[Row[Any]]:
    """The rows of a statement that selects ``created_at`` and ``run_id``, fetched in batches as they are wanted."""
    position = start
    while True:
        rows = statement.run(connection, {**bag, **position.parameters(), "p_limit": batch}).all()
        yield from rows
        if len(rows) < batch:
            return
        position = Position(rows[-1].created_at, rows[-1].run_id)


def in_order(columns: list[Any], *where: ColumnElement[bool]) -> Statement:
    """The statement for ``newest_first``: such runs of a thread, after a place. The list's index has this order."""
    created_at, run_id = bindparam("p_created_at", type_=BigInteger), bindparam("p_older_than", type_=Text)
    older = tuple_(R.created_at, R.run_id) < tuple_(created_at, run_id)
    found = select(*columns).where(ALL_HERE, IS_RUN, older, *where).order_by(R.created_at.desc(), R.run_id.desc())
    return Statement.of(found.limit(bindparam("p_limit", type_=BigInteger)))


# --- What is searched for -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """Metadata that a run must contain, and texts that stand in every metadata which contains it."""

    json: str | None
    needles: tuple[str, ...] = ()

    def matches(self, stored: str) -> bool:
        """Whether the stored metadata contains it."""
        return self.json is None or bool(contains(stored, self.json))

    def parameters(self) -> dict[str, Any]:
        """Patterns for LIKE, which may find more than is wanted but never less."""
        escaped = (needle.replace("/", "//").replace("%", "/%").replace("_", "/_") for needle in self.needles)
        return {f"p_needle_{n}": f"%{needle}%" for n, needle in enumerate(escaped)}


NEEDLES: Final = 8
NEEDLE_CHARACTERS: Final = 200


def wanted_of(metadata: Mapping[str, object] | None) -> Wanted:
    """From what a caller asks for; ``InvalidValue`` for what no row could hold."""
    if not metadata:
        return Wanted(None)
    value = storable(metadata, "metadata", limit_bytes=METADATA_BYTES)
    texts = sorted({encode(one) for one in _texts(value)}, key=len, reverse=True)
    return Wanted(encode(value), tuple([one for one in texts if len(one) <= NEEDLE_CHARACTERS][:NEEDLES]))


def _texts(value: Any) -> Iterator[str]:
    """Every key and every text in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
