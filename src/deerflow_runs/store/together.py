"""The same event on many runs at once, each with its own actor and its own facts: one statement on PostgreSQL.

Made from the very guards and effects of the single statement, with the bound parameters replaced by the columns of a
record set, so there is no second reading of the table. Rows that are locked or refused do not come back; they are
asked again alone, and nobody waits for somebody else's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    Boolean,
    Connection,
    FromClause,
    Integer,
    Text,
    bindparam,
    cast,
    column,
    func,
    null,
    select,
    update,
)
from sqlalchemy.sql.visitors import replacement_traverse

from deerflow_runs.model import Json, Run, RunId
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store.base import Settlement
from deerflow_runs.store.clauses import R, Shape, assignments, at_key, guards, key_parameters, parameters
from deerflow_runs.store.consequences import followers
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.rows import narrow, to_run
from deerflow_runs.store.schema import JsonText, runs
from deerflow_runs.store.statement import Statement, binds_of
from deerflow_runs.store.texts import encode

Expression = TypeVar("Expression")

TOGETHER: Final = frozenset(
    {
        RunEvent.START,
        RunEvent.SETTLE_SUCCESS,
        RunEvent.SETTLE_ERROR,
        RunEvent.SETTLE_TIMEOUT,
        RunEvent.SETTLE_CANCELLED,
        RunEvent.HAND_OVER,
    }
)
"""Starts, settles and hand-overs (a drain brings hundreds at once), never admissions: one that waits for an uncommitted
row would make all others wait with it."""

THREADS_OWN: Final = ("p_outcome", "p_values", "p_interrupts")
"""What an ending says about its thread; it travels with the ended row to the statements that follow."""


def apply_together(
    connection: Connection, dialect: Dialect, event: RunEvent, shape: Shape, asked: Sequence[Settlement]
) -> dict[RunId, Run]:
    """Let ``event`` happen to those runs that allow it at once; the answer holds exactly them.

    An ending counts only while nobody waits behind the run and no cancel is recorded (O7's fast path).
    """
    made = _statement(event, dialect, shape)
    records: list[Json] = [_record(made.types, one) for one in asked]
    rows = made.statement.run(connection, {"p_records": encode(records)})
    return {run.run_id: run for run in map(to_run, rows)}


def _record(types: Mapping[str, Any], one: Settlement) -> dict[str, Any]:
    bag = parameters(one.by, one.given) | key_parameters(one.key)
    return {name: _field(kind, bag[name]) for name, kind in types.items()}


def _field(kind: Any, value: Any) -> Any:
    return encode(value) if isinstance(kind, JsonText) and value is not None else value


class _Made:
    """A statement and the types of the record's fields."""

    def __init__(self, statement: Statement, types: Mapping[str, Any]) -> None:
        self.statement = statement
        self.types = types


@cache
def _statement(event: RunEvent, dialect: Dialect, shape: Shape) -> _Made:
    rule = TRANSITIONS[event]
    alone = (~R.queue_behind, R.cancel_action.is_(null())) if rule.ends else ()
    where = [at_key(), guards(rule, dialect), *alone]
    values = assignments(rule, dialect, shape)
    ending = followers(event, runs, select(R.run_id), dialect)
    types = _types([*where, *values.values(), *ending])
    wanted = _records(types)
    replaced = _replacing(types, wanted)
    allowed = select(R.run_id).select_from(runs, wanted).where(*map(replaced, where)).order_by(R.run_id)
    # In one order and without waiting: two such statements can never hold what the other needs.
    free = allowed.with_for_update(skip_locked=True, of=runs, key_share=True).correlate(None).scalar_subquery()
    change = (
        update(runs)
        .where(R.run_id == wanted.c.p_run, R.run_id == func.any(func.array(free)))
        .values({name: replaced(value) for name, value in values.items()})
    )
    extra = [wanted.c[name] for name in THREADS_OWN if name in types]
    changed = change.returning(*narrow(), *extra)
    if not rule.ends:
        return _Made(Statement.of(changed), types)
    ended = changed.cte("ended")
    answer = select(ended)
    for number, follower in enumerate(followers(event, ended, select(ended.c.run_id), dialect)):
        answer = answer.add_cte(_replacing(types, ended)(follower).cte(f"follower_{number}"))
    return _Made(Statement.of(answer), types)


def _types(expressions: Sequence[Any]) -> dict[str, Any]:
    """The parameters that the expressions name, each with its type."""
    named = [bind for bind in binds_of(*expressions) if bind.key.startswith("p_")]
    return {bind.key: bind.type for bind in sorted(named, key=lambda bind: bind.key)}


def _records(types: Mapping[str, Any]) -> FromClause:
    columns = [column(name, _sql_type(kind)) for name, kind in types.items()]
    read = func.json_to_recordset(cast(bindparam("p_records", type_=Text), JSON))
    return read.table_valued(*columns).render_derived("wanted", with_types=True)


def _sql_type(kind: Any) -> Any:
    return next((plain() for plain in (BigInteger, Integer, Boolean) if isinstance(kind, plain)), Text())


def _replacing(types: Mapping[str, Any], source: FromClause) -> Callable[[Any], Any]:
    """Take every parameter of ``types`` from a column of ``source`` instead."""

    def column_for(element: Any, **_: Any) -> Any:
        named = isinstance(element, BindParameter) and element.key in types
        return source.c[element.key] if named else None

    return lambda expression: replacement_traverse(expression, {}, column_for)
