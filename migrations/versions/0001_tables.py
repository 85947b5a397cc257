"""Tables, counters and schema facts: everything but the indexes that duplicate active runs could break.

Revision 0001 is the first. Frozen once released: a later change of a table is a later migration.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(255)
WORD = sa.String(64)


def upgrade() -> None:
    _create_workers()
    _create_runs()
    _create_base_writes()
    _create_threads()
    _create_events()
    _create_outbox()
    _create_fence()
    _create_meta()


def _create_workers() -> None:
    op.create_table(
        "dr_workers",
        sa.Column("worker_id", ID, nullable=False),
        sa.Column("state", WORD, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("lease", sa.BigInteger, nullable=False),
        sa.Column("beat_interval", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("hinted", sa.Boolean, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("dead_at", sa.BigInteger),
        sa.Column("proven", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("host", ID, nullable=False),
        sa.Column("boot_id", ID, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("version", WORD, nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("capabilities", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("worker_id", name="pk_dr_workers"),
        postgresql_with={"fillfactor": "50"},
    )


def _create_runs() -> None:
    op.create_table(
        "dr_runs",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("thread_id", ID, nullable=False),
        sa.Column("operation_kind", WORD, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("active", sa.Boolean, sa.Computed("status IN ('pending', 'running')", persisted=True)),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("due_at", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.BigInteger),
        sa.Column("executor", ID),
        sa.Column("payload_version", sa.Integer, nullable=False),
        sa.Column("kwargs", sa.Text, nullable=False),
        sa.Column("assistant_id", ID),
        sa.Column("user_id", ID),
        sa.Column("model_name", sa.String(128)),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("multitask_strategy", WORD, nullable=False),
        sa.Column("on_disconnect", WORD, nullable=False),
        sa.Column("on_orphan", WORD, nullable=False),
        sa.Column("home_worker_id", ID),
        sa.Column("required_capabilities", sa.Text, nullable=False),
        sa.Column("idempotency_scope", sa.String(600), nullable=False),
        sa.Column("idempotency_key", ID),
        sa.Column("payload_digest", WORD),
        sa.Column("owner_worker_id", ID),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("progress_epoch", sa.BigInteger),
        sa.Column("granted_at", sa.BigInteger),
        sa.Column("not_before", sa.BigInteger, nullable=False),
        sa.Column("queue_behind", sa.Boolean, nullable=False),
        sa.Column("cancel_action", WORD),
        sa.Column("cancel_requested_at", sa.BigInteger),
        sa.Column("base_known", sa.Boolean, nullable=False),
        sa.Column("base_heads", sa.Text, nullable=False),
        sa.Column("run_timeout", sa.BigInteger),
        sa.Column("temporary", sa.Boolean, nullable=False),
        sa.Column("waits_for", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("stop_reason", ID),
        sa.Column("settled_by", ID),
        sa.Column("superseded_by", ID),
        sa.Column("progress_at", sa.BigInteger),
        sa.Column("last_checkpoint", ID),
        sa.Column("deliveries", sa.Text, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("total_tokens", sa.BigInteger, nullable=False),
        sa.Column("llm_calls", sa.Integer, nullable=False),
        sa.Column("message_count", sa.Integer, nullable=False),
        sa.Column("tokens_by_model", sa.Text, nullable=False),
        sa.Column("tokens_by_caller", sa.Text, nullable=False),
        sa.Column("first_human_message", sa.Text),
        sa.Column("last_ai_message", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("settled_at", sa.BigInteger),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_dr_runs"),
        postgresql_with={"fillfactor": "80"},
    )
    listed = sa.text("seq >= 0")
    op.create_index(
        "ix_dr_runs_thread",
        "dr_runs",
        ["thread_id", "created_at", "run_id"],
        postgresql_where=listed,
        sqlite_where=listed,
    )


def _create_base_writes() -> None:
    op.create_table(
        "dr_base_writes",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("task_id", ID, nullable=False),
        sa.Column("idx", sa.Integer, nullable=False),
        sa.Column("channel", sa.Text, nullable=False),
        sa.Column("type", WORD),
        sa.Column("value", sa.LargeBinary),
        sa.Column("task_path", sa.Text, nullable=False, server_default=""),
        sa.PrimaryKeyConstraint("run_id", "namespace", "checkpoint_id", "task_id", "idx", name="pk_dr_base_writes"),
    )


def _create_threads() -> None:
    op.create_table(
        "dr_threads",
        sa.Column("thread_id", ID, nullable=False),
        sa.Column("user_id", ID),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("outcome", WORD, nullable=False),
        sa.Column("values", sa.Text),
        sa.Column("interrupts", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("temporary", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("thread_id", name="pk_dr_threads"),
    )
    op.create_index("ix_dr_threads_user", "dr_threads", ["user_id", "updated_at", "thread_id"])


def _create_events() -> None:
    op.create_table(
        "dr_events",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("id", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("thread_id", ID, nullable=False),
        sa.Column("event", ID, nullable=False),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "id", name="pk_dr_events"),
    )


def _create_outbox() -> None:
    op.create_table(
        "dr_outbox",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("kind", WORD, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("not_before", sa.BigInteger, nullable=False),
        sa.Column("delivered_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("run_id", "kind", name="pk_dr_outbox"),
    )
    undelivered = sa.text("delivered_at IS NULL")
    op.create_index(
        "ix_dr_outbox_due",
        "dr_outbox",
        ["kind", "not_before"],
        postgresql_where=undelivered,
        sqlite_where=undelivered,
    )


def _create_fence() -> None:
    op.create_table(
        "dr_fence",
        sa.Column("thread_id", ID, nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("thread_id", name="pk_dr_fence"),
    )


def _create_meta() -> None:
    meta = op.create_table(
        "dr_meta",
        sa.Column("name", WORD, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_dr_meta"),
    )
    facts = {"min_reader": 1, "payload_version": 1}
    if op.get_context().dialect.name == "sqlite":
        facts |= {"seq": 0, "turn": 0}
    else:
        # Numbers that a session hoards would put turns out of order (O15).
        op.execute("CREATE SEQUENCE dr_seq CACHE 1")
        op.execute("CREATE SEQUENCE dr_turn CACHE 1")
    op.bulk_insert(meta, [{"name": name, "number": number} for name, number in facts.items()])
