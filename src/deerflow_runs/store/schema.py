"""Tables and indexes, once, for SQLite and PostgreSQL (ownership.md §2). No statement lives here.

Nothing refers to ``dr_runs`` by a foreign key: the check would lock the run's row at every event; a removal deletes
the dependent rows in its own transaction. Instants are integer microseconds of the store's clock. JSON is kept as text
in both databases: PostgreSQL's own JSON types would reorder keys and turn ``1e22`` into an integer, and what a caller
stored must come back as it was.
"""

from __future__ import annotations

from typing import Any, Final, final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Computed,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)

from deerflow_runs.store.values import decode, encode

ACTIVE_STATUSES: Final = "status IN ('pending', 'running')"
"""The generated column's expression. Guards by key speak of ``status`` themselves and never of ``active``: a guard
that repeats an index predicate makes PostgreSQL scan the partial index, whose cost grows with history."""

ACTIVE: Final = text("active")
ACTIVE_OWNED: Final = text("active AND owner_worker_id IS NOT NULL")
ACTIVE_CANCELLED: Final = text("active AND cancel_requested_at IS NOT NULL")
ACTIVE_VACANT: Final = text("active AND owner_worker_id IS NULL")
QUEUED: Final = text("status = 'queued'")
ENDED: Final = text("settled_at IS NOT NULL")
KEYED: Final = text("idempotency_key IS NOT NULL")
LISTED: Final = text("seq >= 0")
OF_USERS: Final = text("user_id IS NOT NULL AND created_at >= 0")
NUMBERED: Final = text("created_at >= 0")
"""Predicates of the partial indexes: one constant each, used by the index and by whoever must infer it."""


@final
class JsonText(TypeDecorator[Any]):
    """JSON as text; the value's shape was checked by ``values`` before. SQL NULL is Python's None."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else encode(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        return None if value is None else decode(value)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

ID: Final = String(255)
WORD: Final = String(64)


def _instant(name: str, *, nullable: bool = True) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


workers = Table(
    "dr_workers",
    metadata,
    Column("worker_id", ID, primary_key=True),
    Column("state", WORD, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("lease", BigInteger, nullable=False),
    Column("beat_interval", BigInteger, nullable=False),
    _instant("expires_at", nullable=False),
    Column("hinted", Boolean, nullable=False),
    _instant("started_at", nullable=False),
    _instant("dead_at"),
    Column("proven", Boolean, nullable=False, server_default=false()),
    Column("host", ID, nullable=False),
    Column("boot_id", ID, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("version", WORD, nullable=False),
    Column("labels", JsonText, nullable=False),
    Column("capabilities", JsonText, nullable=False),
    # Half-empty pages keep every renewal heap-only; nothing that a beat changes may ever be indexed.
    postgresql_with={"fillfactor": "50"},
)

runs = Table(
    "dr_runs",
    metadata,
    Column("run_id", ID, primary_key=True),
    Column("thread_id", ID, nullable=False),
    Column("operation_kind", WORD, nullable=False),
    Column("status", WORD, nullable=False),
    Column("active", Boolean, Computed(ACTIVE_STATUSES, persisted=True)),
    Column("seq", BigInteger, nullable=False),
    _instant("due_at", nullable=False),
    Column("turn", BigInteger),
    Column("executor", ID),
    Column("payload_version", Integer, nullable=False),
    Column("kwargs", JsonText, nullable=False),
    Column("assistant_id", ID),
    Column("user_id", ID),
    Column("model_name", String(128)),
    Column("metadata", JsonText, nullable=False),
    Column("multitask_strategy", WORD, nullable=False),
    Column("on_disconnect", WORD, nullable=False),
    Column("on_orphan", WORD, nullable=False),
    Column("home_worker_id", ID),
    Column("required_capabilities", JsonText, nullable=False),
    Column("idempotency_scope", String(600), nullable=False),
    Column("idempotency_key", ID),
    Column("payload_digest", WORD),
    Column("owner_worker_id", ID),
    Column("epoch", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("progress_epoch", BigInteger),
    _instant("granted_at"),
    _instant("not_before", nullable=False),
    Column("queue_behind", Boolean, nullable=False),
    Column("cancel_action", WORD),
    _instant("cancel_requested_at"),
    Column("base_known", Boolean, nullable=False),
    Column("base_heads", JsonText, nullable=False),
    Column("run_timeout", BigInteger),
    Column("temporary", Boolean, nullable=False),
    Column("waits_for", JsonText),
    Column("error", Text),
    Column("stop_reason", ID),
    Column("settled_by", ID),
    Column("superseded_by", ID),
    _instant("progress_at"),
    Column("last_checkpoint", ID),
    Column("deliveries", JsonText, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("total_tokens", BigInteger, nullable=False),
    Column("llm_calls", Integer, nullable=False),
    Column("message_count", Integer, nullable=False),
    Column("tokens_by_model", JsonText, nullable=False),
    Column("tokens_by_caller", JsonText, nullable=False),
    Column("first_human_message", Text),
    Column("last_ai_message", Text),
    _instant("created_at", nullable=False),
    _instant("started_at"),
    _instant("settled_at"),
    _instant("updated_at", nullable=False),
    # Room on the page for the two or three updates of a run's life.
    postgresql_with={"fillfactor": "80"},
)


def _partial(name: str, *columns: Any, where: Any, unique: bool = False) -> Index:
    return Index(name, *columns, unique=unique, postgresql_where=where, sqlite_where=where)


one_active_per_thread = _partial("uq_dr_runs_active_thread", runs.c.thread_id, where=ACTIVE, unique=True)
"""I1: the one index that admits one active operation per thread, whatever any worker believes."""

_partial("uq_dr_runs_idempotency", runs.c.idempotency_scope, runs.c.idempotency_key, where=KEYED, unique=True)
_partial("ix_dr_runs_owner", runs.c.owner_worker_id, where=ACTIVE_OWNED)
_partial("ix_dr_runs_owner_cancelled", runs.c.owner_worker_id, where=ACTIVE_CANCELLED)
_partial("ix_dr_runs_queue", runs.c.thread_id, runs.c.due_at, runs.c.seq, where=QUEUED)
_partial("ix_dr_runs_vacant", runs.c.not_before, where=ACTIVE_VACANT)
_partial("ix_dr_runs_settled", runs.c.settled_at, where=ENDED)
_partial("ix_dr_runs_thread", runs.c.thread_id, runs.c.created_at, runs.c.run_id, where=LISTED)
"""Holds every row, but serves only who says so. Asked for a thread's open runs PostgreSQL would take it whenever the
small indexes above have grown, and read through all that has ended: their being unique makes it expect one row."""

_partial("ix_dr_runs_user", runs.c.user_id, runs.c.active, runs.c.thread_id, where=OF_USERS)
_partial("ix_dr_runs_thread_seq", runs.c.thread_id, runs.c.seq, where=NUMBERED)
"""Hold (nearly) every row too, and serve only who says so, for the same reason. Nothing in them ever changes but
``active``, at whose change every index is written to anyhow."""

base_writes = Table(
    "dr_base_writes",
    metadata,
    Column("run_id", ID, primary_key=True),
    Column("namespace", Text, primary_key=True),
    Column("checkpoint_id", ID, primary_key=True),
    Column("task_id", ID, primary_key=True),
    Column("idx", Integer, primary_key=True),
    Column("channel", Text, nullable=False),
    Column("type", WORD),
    Column("value", LargeBinary),
    Column("task_path", Text, nullable=False, server_default=""),
)

threads = Table(
    "dr_threads",
    metadata,
    Column("thread_id", ID, primary_key=True),
    Column("user_id", ID),
    Column("metadata", JsonText, nullable=False),
    Column("config", JsonText, nullable=False),
    Column("outcome", WORD, nullable=False),
    Column("values", JsonText),
    Column("interrupts", JsonText, nullable=False),
    Column("error", Text),
    Column("temporary", Boolean, nullable=False),
    _instant("created_at", nullable=False),
    _instant("updated_at", nullable=False),
)
Index("ix_dr_threads_user", threads.c.user_id, threads.c.updated_at, threads.c.thread_id)

events = Table(
    "dr_events",
    metadata,
    Column("run_id", ID, primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("thread_id", ID, nullable=False),
    Column("event", ID, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("data", Text, nullable=False),
    Column("bytes", Integer, nullable=False),
    _instant("at", nullable=False),
)

outbox = Table(
    "dr_outbox",
    metadata,
    Column("run_id", ID, primary_key=True),
    Column("kind", WORD, primary_key=True),
    Column("payload", JsonText, nullable=False),
    Column("attempts", Integer, nullable=False),
    _instant("not_before", nullable=False),
    _instant("delivered_at"),
)
_partial("ix_dr_outbox_due", outbox.c.kind, outbox.c.not_before, where=text("delivered_at IS NULL"))

fence = Table(
    "dr_fence",
    metadata,
    Column("thread_id", ID, primary_key=True),
    Column("turn", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
)

meta = Table(
    "dr_meta",
    metadata,
    Column("name", WORD, primary_key=True),
    Column("number", BigInteger, nullable=False),
)
"""Schema facts (``min_reader``, ``payload_version``) and, on SQLite, the counters ``seq`` and ``turn``."""

SEQ: Final = Sequence("dr_seq", metadata=metadata, cache=1)
TURN: Final = Sequence("dr_turn", metadata=metadata, cache=1)
"""PostgreSQL only. Cached one at a time: a session that hoards numbers would put turns out of order (O15)."""
