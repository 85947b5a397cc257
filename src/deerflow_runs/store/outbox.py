"""What the endings of runs leave to be done: taken by any worker that has the handler, until one says it is done.

At least once: a row comes back when its taker is not heard of for a lease, so a handler may see it again. Rows are
written by the endings themselves (``endings``); how one is delivered is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

from sqlalchemy import BigInteger, Connection, Select, and_, bindparam, func, literal_column, null, select, update

from deerflow_runs.model import Micros, RunId, RunKey, RunStatus, Scope, ThreadId, Usage, WorkerId
from deerflow_runs.store.base import OutboxKind
from deerflow_runs.store.clauses import R, at_key, key_parameters, word
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.lenient import as_text, read_or_skip
from deerflow_runs.store.schema import outbox, runs
from deerflow_runs.store.scopes import in_scope, restricted, scope_parameters
from deerflow_runs.store.statement import Statement

BOX: Final = outbox.c
UNDELIVERED: Final = BOX.delivered_at.is_(null())
THIS: Final = and_(
    BOX.run_id == bindparam("p_run"),
    BOX.kind == bindparam("p_kind"),
    func.coalesce(BOX.delivered_at, literal_column("0")) == literal_column("0"),
)
"""One undelivered row by its key. Said in another way than the partial index says it: PostgreSQL would read all that
is undelivered, instead of the one row."""


@final
@dataclass(frozen=True, slots=True)
class Delivery:
    """One thing to be done for an ended run. ``attempt`` says how often it was taken, this time included: it tells
    one taker from the next."""

    key: RunKey
    kind: str
    payload: Any
    attempt: int


@final
@dataclass(frozen=True, slots=True)
class Receipt:
    """What remains of an ending for whoever counts or bills. ``usage`` holds the sums; the run knows more."""

    key: RunKey
    status: RunStatus
    stop_reason: str | None
    settled_by: WorkerId | None
    epoch: int
    attempt: int
    last_checkpoint: str | None
    model_name: str | None
    usage: Usage
    settled_at: Micros


# --- Deliveries -----------------------------------------------------------------------------------------------------


def take(
    connection: Connection, dialect: Dialect, kinds: Collection[str], limit: int, lease: Micros
) -> tuple[Delivery, ...]:
    """Take up to ``limit`` deliveries that are due, the longest waiting first; nobody else sees them for ``lease``.

    A lost reply costs one lease of waiting. A row that cannot be read is left out, and comes back as often.
    """
    if not kinds:
        return ()
    bag = {"p_kinds": sorted(kinds), "p_limit": limit, "p_lease": lease}
    rows = _taking(dialect).run(connection, bag).all()
    if not dialect.writes_in_ctes and rows:
        # SQLite: chosen and changed one after the other, in a transaction that lets nobody in between.
        mark = [{"p_run": row.run_id, "p_kind": row.kind, "p_lease": lease} for row in rows]
        connection.execute(_mark(dialect), mark)
    read = (read_or_skip(_delivery, row, "run_id") for row in sorted(rows, key=lambda row: (row.since, row.run_id)))
    return tuple(delivery for delivery in read if delivery is not None)


@cache
def _taking(dialect: Dialect) -> Statement:
    return Statement.of(_choose_and_mark(dialect) if dialect.writes_in_ctes else _chosen(dialect))


def _columns() -> list[Any]:
    thread: Select[Any] = select(R.thread_id).where(R.run_id == BOX.run_id)
    return [
        BOX.run_id,
        BOX.kind,
        *as_text([BOX.payload]),
        thread.correlate(outbox).scalar_subquery().label("thread_id"),
    ]


def _due(dialect: Dialect) -> Any:
    return and_(UNDELIVERED, BOX.kind.in_(bindparam("p_kinds", expanding=True)), BOX.not_before <= dialect.now)


def _marks(dialect: Dialect) -> dict[str, Any]:
    hidden_until = dialect.now + bindparam("p_lease", type_=BigInteger)
    return {"attempts": BOX.attempts + literal_column("1"), "not_before": hidden_until}


def _choose_and_mark(dialect: Dialect) -> Any:
    chosen = select(BOX.run_id, BOX.kind, BOX.not_before).where(_due(dialect)).order_by(BOX.not_before, BOX.run_id)
    limited = chosen.limit(bindparam("p_limit", type_=BigInteger)).with_for_update(skip_locked=True)
    # A common table expression runs once, and ANY keeps the planner to the primary key: most rows are old receipts.
    due = limited.cte("due")
    ids = func.any(func.array(select(due.c.run_id).scalar_subquery()))
    marked = update(outbox).where(BOX.run_id == ids, BOX.run_id == due.c.run_id, BOX.kind == due.c.kind)
    attempt = BOX.attempts.label("attempt")
    return marked.values(_marks(dialect)).returning(*_columns(), attempt, due.c.not_before.label("since"))


def _chosen(dialect: Dialect) -> Any:
    next_attempt = (BOX.attempts + literal_column("1")).label("attempt")
    found = select(*_columns(), next_attempt, BOX.not_before.label("since")).where(_due(dialect))
    return found.order_by(BOX.not_before, BOX.run_id).limit(bindparam("p_limit", type_=BigInteger))


@cache
def _mark(dialect: Dialect) -> Any:
    return update(outbox).where(THIS).values(_marks(dialect))


def _delivery(data: Mapping[str, Any]) -> Delivery:
    key = RunKey(ThreadId(data["thread_id"]), RunId(data["run_id"]))
    return Delivery(key, data["kind"], data["payload"], data["attempt"])


def delivered(connection: Connection, dialect: Dialect, delivery: Delivery) -> bool:
    """It is done, whoever holds it by now; False: it was done before, or its run is gone."""
    return _delivered(dialect).run(connection, _key(delivery)).one_or_none() is not None


@cache
def _delivered(dialect: Dialect) -> Statement:
    return Statement.of(update(outbox).where(THIS).values(delivered_at=dialect.now).returning(BOX.run_id))


def postponed(connection: Connection, dialect: Dialect, delivery: Delivery, backoff: Micros) -> bool:
    """It failed, and is due again after ``backoff``; False: somebody else has taken it since, or it is done."""
    bag = _key(delivery) | {"p_attempt": delivery.attempt, "p_backoff": backoff}
    return _postponed(dialect).run(connection, bag).one_or_none() is not None


@cache
def _postponed(dialect: Dialect) -> Statement:
    later = dialect.now + bindparam("p_backoff", type_=BigInteger)
    # Only the last taker may move it: another's hold must not be cut short.
    mine = and_(THIS, BOX.attempts == bindparam("p_attempt"))
    return Statement.of(update(outbox).where(mine).values(not_before=later).returning(BOX.run_id))


def _key(delivery: Delivery) -> dict[str, Any]:
    return {"p_run": delivery.key.run_id, "p_kind": delivery.kind}


def pending(connection: Connection, dialect: Dialect) -> dict[str, int]:
    """How many deliveries of each kind are still to be made, due or not."""
    return {row["kind"]: row["number"] for row in _pending(dialect).run(connection, {}).mappings()}


@cache
def _pending(_: Dialect) -> Statement:
    return Statement.of(select(BOX.kind, func.count().label("number")).where(UNDELIVERED).group_by(BOX.kind))


# --- Receipts -------------------------------------------------------------------------------------------------------


def receipt(connection: Connection, dialect: Dialect, key: RunKey, *, scope: Scope) -> Receipt | None:
    """The receipt of an ended run; it is kept as long as the run. None for a run that is open, missing or foreign."""
    bag = key_parameters(key) | scope_parameters(scope)
    payload = _receipt(dialect, mine=restricted(scope)).run(connection, bag).scalar_one_or_none()
    return None if payload is None else _to_receipt(key, payload)


@cache
def _receipt(_: Dialect, *, mine: bool) -> Statement:
    both = runs.join(outbox, BOX.run_id == R.run_id)
    found = select(BOX.payload).select_from(both).where(at_key(), BOX.kind == word(OutboxKind.RECEIPT))
    return Statement.of(found.where(*in_scope(R.user_id, mine=mine)))


def _to_receipt(key: RunKey, payload: Mapping[str, Any]) -> Receipt:
    counted = ("input_tokens", "output_tokens", "total_tokens", "llm_calls", "message_count")
    return Receipt(
        key=key,
        status=RunStatus(payload["status"]),
        stop_reason=payload["stop_reason"],
        settled_by=None if payload["settled_by"] is None else WorkerId(payload["settled_by"]),
        epoch=payload["epoch"],
        attempt=payload["attempt"],
        last_checkpoint=payload["last_checkpoint"],
        model_name=payload["model_name"],
        usage=Usage(**{name: payload[name] for name in counted}),
        settled_at=Micros(payload["settled_at"]),
    )
