"""What follows from an ending, in the same transaction (O28): the thread's outcome, the receipt, the outbox, and the
pending writes that were kept for a rollback.

Each is a statement over the ended rows, wherever these come from; how they are put together stands in ``endings``.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Delete,
    FromClause,
    Insert,
    Text,
    Update,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)

from deerflow_runs.model import ACTIVE, OperationKind, RunStatus, ThreadOutcome
from deerflow_runs.protocol.lifecycle import TRANSITIONS, Into, RunEvent
from deerflow_runs.store.clauses import (
    word,
)
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.schema import JsonText, base_writes, outbox, threads
from deerflow_runs.store.schema import events as event_log

Change = Insert | Update | Delete


def followers(event: RunEvent, ended: FromClause, ids: Any, dialect: Dialect) -> list[Change]:
    """The further changes of an ending. ``ended`` are the ended runs' rows, ``ids`` their ids."""
    if event is RunEvent.REMOVE:
        return [delete(table).where(table.c.run_id.in_(ids)) for table in (base_writes, outbox, event_log)]
    if TRANSITIONS[event].target is Into.GONE or not TRANSITIONS[event].ends:
        return []
    base = delete(base_writes).where(base_writes.c.run_id.in_(ids))
    return [_outcome(event, ended, dialect), _receipts(ended, dialect), _deliveries(ended, dialect), base]


def _outcome(event: RunEvent, ended: FromClause, dialect: Dialect) -> Update:
    """The thread is left as its last ended run left it. A run that never started has left nothing; only where the
    rule ends what was active does a run that could not be started count."""
    counts = [] if TRANSITIONS[event].sources <= ACTIVE else [ended.c.turn.is_not(null())]
    failed = ended.c.status.in_([word(RunStatus.ERROR), word(RunStatus.TIMEOUT)])
    otherwise = func.coalesce(bindparam("p_outcome", type_=threads.c.outcome.type), word(ThreadOutcome.IDLE))
    return (
        update(threads)
        .where(threads.c.thread_id == ended.c.thread_id, *counts)
        .values(
            outcome=case((failed, word(ThreadOutcome.ERROR)), else_=otherwise),
            error=case((failed, ended.c.error), else_=null()),
            updated_at=dialect.now,
            values=func.coalesce(bindparam("p_values", type_=JsonText), threads.c["values"]),
            interrupts=func.coalesce(bindparam("p_interrupts", type_=JsonText), word("{}")),
        )
    )


RECEIPT: Final = (
    "thread_id",
    "status",
    "stop_reason",
    "settled_by",
    "epoch",
    "attempt",
    "last_checkpoint",
    "model_name",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "llm_calls",
    "message_count",
    "settled_at",
)
"""What a receipt says about an ended run."""


def _receipts(ended: FromClause, dialect: Dialect) -> Insert:
    """One receipt a run. It is a record and not a delivery: written as delivered, kept as long as its run."""
    payload = dialect.json_object({name: ended.c[name] for name in RECEIPT})
    return _into_outbox(word("receipt"), payload, dialect.now, ended, ended, dialect)


def _deliveries(ended: FromClause, dialect: Dialect) -> Insert:
    """Whatever the run wants done at its end, by any worker that has the handler (O28)."""
    wanted = dialect.pairs(ended.c.deliveries)
    return _into_outbox(wanted.c.key, cast(wanted.c.value, Text), null(), ended, (ended, wanted), dialect)


def _into_outbox(
    kind: ColumnElement[str],
    payload: ColumnElement[str],
    delivered_at: ColumnElement[Any],
    ended: FromClause,
    source: Any,
    dialect: Dialect,
) -> Insert:
    names = ["run_id", "kind", "payload", "attempts", "not_before", "delivered_at"]
    sources = source if isinstance(source, tuple) else (source,)
    is_run = ended.c.operation_kind == word(OperationKind.RUN)
    rows = select(ended.c.run_id, kind, payload, literal_column("0"), dialect.now, delivered_at).where(is_run)
    return insert(outbox).from_select(names, rows.select_from(*sources))
