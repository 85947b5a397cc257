"""Searching threads: by user, content, status and id, in an order and a part of it. Temporary ones are in no list.

What a thread is stands in ``threads``; nothing here changes one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final, assert_never, final

from sqlalchemy import BigInteger, ColumnElement, Connection, Select, bindparam, case, func, select, union_all

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import Scope
from deerflow_runs.store.clauses import R, word
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.lenient import as_text, read_or_skip
from deerflow_runs.store.pages import IS_RUN
from deerflow_runs.store.scopes import in_scope, restricted, scope_parameters
from deerflow_runs.store.statement import Statement
from deerflow_runs.store.texts import encode
from deerflow_runs.store.threads import T, Thread, ThreadStatus, busy, to_thread
from deerflow_runs.store.values import BODY_BYTES, METADATA_BYTES, storable

MOST: Final = 1000
FARTHEST: Final = 2**31 - 1


class ThreadSort(StrEnum):
    """What a search may be ordered by."""

    THREAD_ID = "thread_id"
    STATUS = "status"
    CREATED_AT = "created_at"
    UPDATED_AT = "updated_at"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadQuery:
    """What is asked for; what is None does not restrict. ``metadata`` and ``values`` must be contained in the thread's.

    Raises ``InvalidValue`` for what no thread could hold, and for a part outside 1–1000 rows.
    """

    metadata: Mapping[str, Any] | None = None
    values: Mapping[str, Any] | None = None
    status: ThreadStatus | None = None
    ids: Collection[str] | None = None
    sort_by: ThreadSort = ThreadSort.UPDATED_AT
    descending: bool = True
    limit: int = 10
    offset: int = 0

    def __post_init__(self) -> None:
        for name, limit_bytes in (("metadata", METADATA_BYTES), ("values", BODY_BYTES)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, storable(getattr(self, name), name, limit_bytes=limit_bytes))
        if not 1 <= self.limit <= MOST:
            raise InvalidValue("limit", f"must be between 1 and {MOST}")
        if not 0 <= self.offset <= FARTHEST:
            raise InvalidValue("offset", f"must be between 0 and {FARTHEST}")
        if self.ids is not None and len(self.ids) > MOST:
            raise InvalidValue("ids", f"holds {len(self.ids)} ids, and {MOST} are allowed")


@final
@dataclass(frozen=True, slots=True)
class ThreadPage:
    """A part of the answer. ``more`` says that it goes on; ``unreadable`` names rows that were left out."""

    threads: tuple[Thread, ...]
    more: bool = False
    unreadable: tuple[str, ...] = ()


def search(connection: Connection, dialect: Dialect, query: ThreadQuery, *, scope: Scope) -> ThreadPage:
    """The threads of a query, in its order; equal ones by id, so that parts neither overlap nor leave gaps."""
    bag = _parameters(query, scope) | {"p_limit": query.limit + 1, "p_offset": query.offset}
    rows = (
        _search(dialect, QueryShape.of(query, scope), query.sort_by, descending=query.descending)
        .run(connection, bag)
        .all()
    )
    part = rows[: query.limit]
    read = {row.thread_id: read_or_skip(to_thread, row, "thread_id") for row in part}
    found = tuple(thread for thread in read.values() if thread is not None)
    return ThreadPage(found, len(rows) > query.limit, tuple(name for name, thread in read.items() if thread is None))


def count(connection: Connection, dialect: Dialect, query: ThreadQuery, *, scope: Scope) -> int:
    """How many threads a query finds, whatever part of them it asks for."""
    found = _count(dialect, QueryShape.of(query, scope)).run(connection, _parameters(query, scope))
    return int(found.scalar_one())


# --- Statements -----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class QueryShape:
    """Which conditions a query has: they decide the statement's text."""

    mine: bool
    metadata: bool
    values: bool
    ids: bool
    status: ThreadStatus | None

    @classmethod
    def of(cls, query: ThreadQuery, scope: Scope) -> QueryShape:
        """The shape of a query."""
        return cls(restricted(scope), bool(query.metadata), bool(query.values), query.ids is not None, query.status)


def _parameters(query: ThreadQuery, scope: Scope) -> dict[str, Any]:
    wanted = {"p_metadata": encode(dict(query.metadata or {})), "p_values": encode(dict(query.values or {}))}
    return scope_parameters(scope) | wanted | {"p_ids": list(query.ids or ())}


@cache
def _search(dialect: Dialect, shape: QueryShape, sort_by: ThreadSort, *, descending: bool) -> Statement:
    keys = (_sort_key(sort_by), T.thread_id)
    found = select(*as_text(list(T)), busy().label("busy")).where(*_conditions(dialect, shape))
    ordered = found.order_by(*(key.desc() if descending else key for key in keys))
    part = ordered.limit(bindparam("p_limit", type_=BigInteger)).offset(bindparam("p_offset", type_=BigInteger))
    return Statement.of(part)


@cache
def _count(dialect: Dialect, shape: QueryShape) -> Statement:
    return Statement.of(select(func.count()).select_from(T.thread_id.table).where(*_conditions(dialect, shape)))


def _sort_key(sort_by: ThreadSort) -> ColumnElement[Any]:
    if sort_by is ThreadSort.STATUS:
        return case((busy(), word(ThreadStatus.BUSY)), else_=T.outcome)
    return T[sort_by.value]


def _conditions(dialect: Dialect, shape: QueryShape) -> list[ColumnElement[bool]]:
    return [
        ~T.temporary,
        *in_scope(T.user_id, mine=shape.mine),
        *([T.thread_id.in_(bindparam("p_ids", expanding=True))] if shape.ids else []),
        *_has_status(shape.status),
        *([dialect.matches(T.metadata, "p_metadata")] if shape.metadata else []),
        *([dialect.matches(T["values"], "p_values")] if shape.values else []),
    ]


def _has_status(status: ThreadStatus | None) -> list[ColumnElement[bool]]:
    match status:
        case None:
            return []
        case ThreadStatus.BUSY:
            # From the few open runs to their threads, not from every thread to its runs.
            return [T.thread_id.in_(_busy_threads())]
        case ThreadStatus.IDLE | ThreadStatus.INTERRUPTED | ThreadStatus.ERROR:
            return [T.outcome == word(status), ~busy()]
        case _:
            assert_never(status)


def _busy_threads() -> Any:
    held: Select[Any] = select(R.thread_id).where(R.active, IS_RUN)
    awaited: Select[Any] = select(R.thread_id).where(R.status == word("queued"))
    return union_all(held, awaited)
