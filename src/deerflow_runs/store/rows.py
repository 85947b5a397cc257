"""Rows of the database ↔ values of the model, in one place; no statement is built here but their column lists.

A row that cannot be read is its own error: lists skip it and say so, a single read raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Row
from sqlalchemy.sql import ColumnCollection

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnDisconnect,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.store.schema import runs

UNREAD: Final = frozenset({"active", "idempotency_scope"})
"""Columns that serve the database only."""

HEAVY: Final = frozenset({"kwargs"})
"""What may be megabytes: read by claims, admissions and single reads, never by endings, sweeps and lists."""


def narrow(columns: ColumnCollection[str, Any] | None = None) -> list[Any]:
    """The run's columns without its stored input."""
    source = runs.c if columns is None else columns
    return [source[column.name] for column in runs.c if column.name not in UNREAD | HEAVY]


def whole(columns: ColumnCollection[str, Any] | None = None) -> list[Any]:
    """The run's columns with its stored input."""
    source = runs.c if columns is None else columns
    return [source[column.name] for column in runs.c if column.name not in UNREAD]


def to_run(row: Row[Any]) -> Run:
    """A run from a row of ``narrow()`` or ``whole()`` columns, whatever else the row holds."""
    return run_from(row._asdict())


def run_from(data: Mapping[str, Any]) -> Run:
    """The same from the values by their columns' names."""
    return Run(
        run_id=RunId(data["run_id"]),
        thread_id=ThreadId(data["thread_id"]),
        kind=OperationKind(data["operation_kind"]),
        status=RunStatus(data["status"]),
        seq=data["seq"],
        due_at=Micros(data["due_at"]),
        turn=data["turn"],
        executor=data["executor"],
        payload_version=data["payload_version"],
        kwargs=data.get("kwargs"),
        assistant_id=data["assistant_id"],
        user_id=data["user_id"],
        model_name=data["model_name"],
        metadata=data["metadata"],
        strategy=Strategy(data["multitask_strategy"]),
        on_disconnect=OnDisconnect(data["on_disconnect"]),
        on_orphan=OnOrphan(data["on_orphan"]),
        home_worker_id=_worker(data["home_worker_id"]),
        required_capabilities=frozenset(data["required_capabilities"]),
        idempotency_key=data["idempotency_key"],
        payload_digest=data["payload_digest"],
        owner_worker_id=_worker(data["owner_worker_id"]),
        epoch=data["epoch"],
        attempt=data["attempt"],
        max_attempts=data["max_attempts"],
        progress_epoch=data["progress_epoch"],
        granted_at=_instant(data["granted_at"]),
        not_before=Micros(data["not_before"]),
        queue_behind=bool(data["queue_behind"]),
        cancel_action=CancelAction(data["cancel_action"]) if data["cancel_action"] else None,
        cancel_requested_at=_instant(data["cancel_requested_at"]),
        base_known=bool(data["base_known"]),
        base_heads=data["base_heads"],
        run_timeout=_instant(data["run_timeout"]),
        temporary=bool(data["temporary"]),
        waits_for=data["waits_for"],
        error=data["error"],
        stop_reason=data["stop_reason"],
        settled_by=_worker(data["settled_by"]),
        superseded_by=RunId(data["superseded_by"]) if data["superseded_by"] else None,
        progress_at=_instant(data["progress_at"]),
        last_checkpoint=data["last_checkpoint"],
        deliveries=data["deliveries"],
        usage=_usage(data),
        created_at=Micros(data["created_at"]),
        started_at=_instant(data["started_at"]),
        settled_at=_instant(data["settled_at"]),
        updated_at=Micros(data["updated_at"]),
    )


def _usage(data: Mapping[str, Any]) -> Usage:
    return Usage(
        input_tokens=data["input_tokens"],
        output_tokens=data["output_tokens"],
        total_tokens=data["total_tokens"],
        llm_calls=data["llm_calls"],
        message_count=data["message_count"],
        by_model=data["tokens_by_model"],
        by_caller=data["tokens_by_caller"],
        first_human_message=data["first_human_message"],
        last_ai_message=data["last_ai_message"],
    )


def to_session(row: Row[Any]) -> Session:
    """A session from a whole row of ``dr_workers``."""
    data: Mapping[str, Any] = row._asdict()
    return Session(
        worker_id=WorkerId(data["worker_id"]),
        state=SessionState(data["state"]),
        beat=data["beat"],
        lease=Micros(data["lease"]),
        beat_interval=Micros(data["beat_interval"]),
        expires_at=Micros(data["expires_at"]),
        hinted=bool(data["hinted"]),
        started_at=Micros(data["started_at"]),
        dead_at=_instant(data["dead_at"]),
        proven=bool(data["proven"]),
        host=data["host"],
        boot_id=data["boot_id"],
        pid=data["pid"],
        version=data["version"],
        labels=data["labels"],
        capabilities=frozenset(data["capabilities"]),
    )


def _worker(value: str | None) -> WorkerId | None:
    return None if value is None else WorkerId(value)


def _instant(value: int | None) -> Micros | None:
    return None if value is None else Micros(value)
