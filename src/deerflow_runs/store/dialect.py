"""Everything SQLite and PostgreSQL disagree about, in one frozen value for each.

Whoever builds statements asks here and never looks at a database's name. Nothing here knows a rule of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    String,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from deerflow_runs.store import schema
from deerflow_runs.store.database import DatabaseKind

Counter = str
"""``seq`` or ``turn``: see ``schema.SEQ`` and ``schema.TURN``."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """What differs. ``writes_in_ctes``: one statement may change several tables, so an ending is one round trip.

    ``now`` is the store's clock in microseconds; it moves inside a statement's transaction. ``contained(column, name)``
    says that every element of a JSON list column is in the JSON list bound as ``name``; ``united`` is the union of the
    two; ``json_object`` builds JSON text from columns; ``pairs`` turns a JSON object column into rows (key, value);
    ``later`` is the later of two instants, neither of them null.
    """

    kind: DatabaseKind
    now: ColumnElement[int]
    later: Callable[[ColumnElement[Any], ColumnElement[Any]], ColumnElement[int]]
    writes_in_ctes: bool
    insert: Callable[[Any], Any]
    counter: Callable[[Counter], ColumnElement[int]]
    contained: Callable[[ColumnElement[Any], str], ColumnElement[bool]]
    united: Callable[[ColumnElement[Any], str], ColumnElement[Any]]
    json_object: Callable[[Mapping[str, ColumnElement[Any]]], ColumnElement[str]]
    pairs: Callable[[ColumnElement[Any]], FromClause]
    matches: Callable[[ColumnElement[Any], str], ColumnElement[bool]]
    lock_threads: Callable[[Connection, Sequence[str]], None]
    lock_user: Callable[[Connection, str], None]
    drawn: Callable[[Connection, Counter], None]
    share_lock: Callable[[Select[Any]], Select[Any]]


def _json_text(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """The column as plain text: its JSON type must not encode what is text already."""
    return cast(column, Text)


# --- PostgreSQL -----------------------------------------------------------------------------------------------------


def _as_jsonb(value: ColumnElement[Any]) -> ColumnElement[Any]:
    return cast(value, postgresql.JSONB)


def _text_bind(name: str) -> ColumnElement[Any]:
    return bindparam(name, type_=Text)


def _postgres_contained(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    return _as_jsonb(_json_text(column)).op("<@", is_comparison=True)(_as_jsonb(_text_bind(name)))


def _postgres_united(column: ColumnElement[Any], name: str) -> ColumnElement[Any]:
    both = _as_jsonb(_json_text(column)).op("||")(_as_jsonb(_text_bind(name)))
    each = func.jsonb_array_elements(both).table_valued("value").alias("each_requirement")
    distinct = select(func.jsonb_agg(each.c.value.distinct())).scalar_subquery()
    return cast(func.coalesce(distinct, _as_jsonb(literal_column("'[]'"))), Text)


def _postgres_json_object(parts: Mapping[str, ColumnElement[Any]]) -> ColumnElement[str]:
    pairs = [piece for name, column in parts.items() for piece in (literal_column(f"'{name}'"), column)]
    return cast(func.json_build_object(*pairs), Text)


def _postgres_pairs(column: ColumnElement[Any]) -> FromClause:
    each = func.json_each(cast(_json_text(column), postgresql.JSON))
    return each.table_valued("key", "value", joins_implicitly=True).render_derived("delivery")


def _postgres_matches(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    return _as_jsonb(_json_text(column)).op("@>", is_comparison=True)(_as_jsonb(_text_bind(name)))


LOCK_THREADS: Final = text(
    "SELECT pg_advisory_xact_lock(key) FROM ("
    "SELECT DISTINCT hashtextextended(thread, 0) AS key FROM unnest(CAST(:threads AS text[])) AS thread ORDER BY key"
    ") AS keys"
)
"""O7: in a statement of its own, in one order for everybody; the statement after it has a fresh snapshot."""


def _postgres_lock(connection: Connection, threads: Sequence[str]) -> None:
    connection.execute(LOCK_THREADS, {"threads": list(threads)})


LOCK_USER: Final = text("SELECT pg_advisory_xact_lock(hashtextextended(CAST(:name AS text), 1))")
"""I19: the same for a user's admissions, before any thread's lock. Another seed: a user may be called as a thread."""


def _postgres_lock_user(connection: Connection, user_id: str) -> None:
    connection.execute(LOCK_USER, {"name": user_id})


def _postgres_counter(counter: Counter) -> ColumnElement[int]:
    return {"seq": schema.SEQ, "turn": schema.TURN}[counter].next_value()


def _nothing_drawn(connection: Connection, counter: Counter) -> None:
    """A sequence draws when the statement that uses it runs."""


POSTGRES: Final = Dialect(
    kind=DatabaseKind.POSTGRES,
    # clock_timestamp(), not now(): the latter stands still while a statement waits for a lock.
    now=literal_column("CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)", BigInteger),
    later=lambda one, other: func.greatest(one, other, type_=BigInteger),
    writes_in_ctes=True,
    insert=postgres_insert,
    counter=_postgres_counter,
    contained=_postgres_contained,
    united=_postgres_united,
    json_object=_postgres_json_object,
    pairs=_postgres_pairs,
    matches=_postgres_matches,
    lock_threads=_postgres_lock,
    lock_user=_postgres_lock_user,
    drawn=_nothing_drawn,
    # O14: the weakest lock that makes a take-over wait for the write it guards, and the other way round.
    share_lock=lambda statement: statement.with_for_update(read=True),
)


# --- SQLite ---------------------------------------------------------------------------------------------------------


def _sqlite_each(value: ColumnElement[Any], name: str) -> Any:
    return func.json_each(value).table_valued("value", name=name)


def _sqlite_contained(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    mine = _sqlite_each(_text_bind(name), "mine")
    wanted = _sqlite_each(_json_text(column), "wanted")
    missing: Select[Any] = (
        select(literal_column("1")).select_from(wanted).where(wanted.c.value.not_in(select(mine.c.value)))
    )
    return ~missing.exists()


def _sqlite_united(column: ColumnElement[Any], name: str) -> ColumnElement[Any]:
    old, new = _sqlite_each(_json_text(column), "old_requirement"), _sqlite_each(_text_bind(name), "new_requirement")
    both = select(old.c.value).union(select(new.c.value)).subquery("both_requirements")
    return select(func.json_group_array(both.c.value)).scalar_subquery()


def _sqlite_json_object(parts: Mapping[str, ColumnElement[Any]]) -> ColumnElement[str]:
    pairs = [piece for name, column in parts.items() for piece in (literal_column(f"'{name}'"), column)]
    return func.json_object(*pairs, type_=String)


def _sqlite_pairs(column: ColumnElement[Any]) -> FromClause:
    return func.json_each(_json_text(column)).table_valued("key", "value", name="delivery", joins_implicitly=True)


def _sqlite_matches(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    return func.dr_contains(_json_text(column), _text_bind(name)) == 1


def _nothing_to_lock(connection: Connection, names: str | Sequence[str]) -> None:
    """O7: BEGIN IMMEDIATE has made this transaction the only writer."""


_METER = update(schema.meta).where(schema.meta.c.name == bindparam("counter")).values(number=schema.meta.c.number + 1)


def _sqlite_counter(counter: Counter) -> ColumnElement[int]:
    """Not the row id: VACUUM may renumber it, and a removed last run would give its turn to the next."""
    next_one = select(schema.meta.c.number + 1).where(schema.meta.c.name == literal_column(f"'{counter}'"))
    return next_one.scalar_subquery()


def _sqlite_drawn(connection: Connection, counter: Counter) -> None:
    """Count on, only once a statement has used the number: what is refused leaves nothing to commit."""
    connection.execute(_METER, {"counter": counter})


SQLITE: Final = Dialect(
    kind=DatabaseKind.SQLITE,
    now=func.dr_now(type_=BigInteger),
    later=lambda one, other: func.max(one, other, type_=BigInteger),
    writes_in_ctes=False,
    insert=sqlite_insert,
    counter=_sqlite_counter,
    contained=_sqlite_contained,
    united=_sqlite_united,
    json_object=_sqlite_json_object,
    pairs=_sqlite_pairs,
    matches=_sqlite_matches,
    lock_threads=_nothing_to_lock,
    lock_user=_nothing_to_lock,
    drawn=_sqlite_drawn,
    share_lock=lambda statement: statement,
)
