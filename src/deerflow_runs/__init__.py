"""Decides who owns a chat run: one active run per thread, across any number of workers, on SQLite or PostgreSQL."""

from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import (
    DeerflowRunsError,
    IdempotencyMismatch,
    InvalidConfig,
    InvalidDsn,
    InvalidValue,
    QueueFull,
    SchemaMismatch,
    StoreUnavailable,
    ThreadBusy,
    UsageError,
    UserBusy,
)
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    OnDisconnect,
    OneUser,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Session,
    StopReason,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.observe import Counters, Event, LogObserver, Observer
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore

__version__ = "0.1.0.dev0"

__all__ = [
    "EVERYONE",
    "CancelAction",
    "Counters",
    "DeerflowRunsError",
    "Event",
    "IdempotencyMismatch",
    "InvalidConfig",
    "InvalidDsn",
    "InvalidValue",
    "LogObserver",
    "Observer",
    "OnDisconnect",
    "OnOrphan",
    "OneUser",
    "OperationKind",
    "QueueFull",
    "Run",
    "RunId",
    "RunKey",
    "RunStatus",
    "RunsConfig",
    "SchemaMismatch",
    "Session",
    "SqlRunStore",
    "StopReason",
    "StoreUnavailable",
    "Strategy",
    "ThreadBusy",
    "ThreadId",
    "Usage",
    "UsageError",
    "UserBusy",
    "WorkerId",
    "store_at",
]
