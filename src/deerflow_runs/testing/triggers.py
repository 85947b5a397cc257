"""The tables and triggers of a recording database, as text for either dialect; executed by ``recording``.

Columns are named once, in ``RECORDED``. Nothing here reads what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

HISTORY: Final = "dr_history"
STEPS: Final = "dr_test_writes"

RUN_COLUMNS: Final = (
    "run_id",
    "thread_id",
    "operation_kind",
    "status",
    "seq",
    "due_at",
    "turn",
    "user_id",
    "multitask_strategy",
    "on_orphan",
    "home_worker_id",
    "required_capabilities",
    "idempotency_scope",
    "idempotency_key",
    "payload_digest",
    "owner_worker_id",
    "epoch",
    "attempt",
    "max_attempts",
    "progress_epoch",
    "granted_at",
    "not_before",
    "queue_behind",
    "cancel_action",
    "cancel_requested_at",
    "error",
    "stop_reason",
    "settled_by",
    "superseded_by",
    "last_checkpoint",
    "total_tokens",
    "created_at",
    "started_at",
    "settled_at",
    "updated_at",
)

RECORDED: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "dr_runs": RUN_COLUMNS,
        "dr_workers": (
            "worker_id",
            "state",
            "beat",
            "lease",
            "beat_interval",
            "expires_at",
            "hinted",
            "started_at",
            "dead_at",
            "proven",
            "pid",
        ),
        "dr_outbox": ("run_id", "kind", "attempts", "delivered_at"),
        STEPS: ("thread_id", "run_id", "epoch", "turn", "step", "value"),
    }
)
"""What is kept of each row: all that any judge asks for, and neither inputs nor results."""

EVENTS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "dr_runs": ("INSERT", "UPDATE", "DELETE"),
        "dr_workers": ("INSERT", "UPDATE", "DELETE"),
        "dr_outbox": ("INSERT", "UPDATE"),
        STEPS: ("INSERT",),
    }
)

_SQLITE_NOW: Final = (
    "CAST(strftime('%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%f', 'now'), 4, 3) AS INTEGER) * 1000"
)
"""Not ``dr_now()``: a connection that is not the store's, which tampers, does not know it."""

_POSTGRES_NOW: Final = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"


# --- SQLite ---------------------------------------------------------------------------------------------------------


def sqlite_statements() -> Iterator[str]:
    """Everything, in order. One writer at a time: ``id`` ascends in the order of commits."""
    yield (
        f"CREATE TABLE {HISTORY} (id INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, xact INTEGER,"
        " source TEXT NOT NULL, old TEXT, new TEXT)"
    )
    yield (
        f"CREATE TABLE {STEPS} (id INTEGER PRIMARY KEY AUTOINCREMENT, write_id TEXT NOT NULL UNIQUE,"
        " thread_id TEXT NOT NULL, run_id TEXT NOT NULL, epoch INTEGER NOT NULL, turn INTEGER, step TEXT NOT NULL,"
        " value TEXT)"
    )
    for table, events in EVENTS.items():
        yield from (_sqlite_trigger(table, event) for event in events)


def _sqlite_trigger(table: str, event: str) -> str:
    old = "NULL" if event == "INSERT" else _sqlite_row(table, "OLD")
    new = "NULL" if event == "DELETE" else _sqlite_row(table, "NEW")
    return (
        f"CREATE TRIGGER {table}_recorded_{event.lower()} AFTER {event} ON {table} BEGIN"  # noqa: S608 - constants
        f" INSERT INTO {HISTORY} (at, source, old, new) VALUES ({_SQLITE_NOW}, '{table}', {old}, {new}); END"
    )


def _sqlite_row(table: str, which: str) -> str:
    return f"json_object({_pairs(table, which)})"


def _pairs(table: str, which: str) -> str:
    return ", ".join(f"'{column}', {which}.{column}" for column in RECORDED[table])


# --- PostgreSQL -----------------------------------------------------------------------------------------------------


def postgres_statements() -> Iterator[str]:
    """Everything, in order, for a connection whose search path begins with the schema of our tables.

    The names inside the functions are found by the path that holds now: a tampering session may have another.
    """
    yield (
        f"CREATE TABLE {HISTORY} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at bigint NOT NULL,"
        " xact bigint NOT NULL, source text NOT NULL, old text, new text)"
    )
    yield (
        f"CREATE TABLE {STEPS} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, write_id text NOT NULL UNIQUE,"
        " thread_id text NOT NULL, run_id text NOT NULL, epoch bigint NOT NULL, turn bigint, step text NOT NULL,"
        " value text)"
    )
    for table, events in EVENTS.items():
        yield _postgres_function(table)
        yield (
            f"CREATE TRIGGER {table}_recorded AFTER {' OR '.join(events)} ON {table}"
            f" FOR EACH ROW EXECUTE FUNCTION {table}_recorded()"
        )


def _postgres_function(table: str) -> str:
    return (
        f"CREATE FUNCTION {table}_recorded() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$ BEGIN"  # noqa: S608 - constants
        f" INSERT INTO {HISTORY} (at, xact, source, old, new) VALUES ({_POSTGRES_NOW},"
        f" CAST(CAST(pg_current_xact_id() AS text) AS bigint), '{table}',"
        f" CASE WHEN TG_OP = 'INSERT' THEN NULL ELSE json_build_object({_pairs(table, 'OLD')}) END,"
        f" CASE WHEN TG_OP = 'DELETE' THEN NULL ELSE json_build_object({_pairs(table, 'NEW')}) END);"
        " RETURN NULL; END $$"
    )
