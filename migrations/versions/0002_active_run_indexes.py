"""The unique and partial indexes of ``dr_runs``, after ending what they would not allow.

Revision 0002 follows 0001. Every step may be repeated, so an interrupted upgrade is finished by running it again.
PostgreSQL builds the indexes concurrently: an upgrade never stops the workers from writing. Frozen once released.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

PARTIAL_INDEXES: list[tuple[str, list[str], str, bool]] = [
    ("uq_dr_runs_active_thread", ["thread_id"], "active", True),
    ("uq_dr_runs_idempotency", ["idempotency_scope", "idempotency_key"], "idempotency_key IS NOT NULL", True),
    ("ix_dr_runs_owner", ["owner_worker_id"], "active AND owner_worker_id IS NOT NULL", False),
    ("ix_dr_runs_owner_cancelled", ["owner_worker_id"], "active AND cancel_requested_at IS NOT NULL", False),
    ("ix_dr_runs_queue", ["thread_id", "due_at", "seq"], "status = 'queued'", False),
    ("ix_dr_runs_vacant", ["not_before"], "active AND owner_worker_id IS NULL", False),
    ("ix_dr_runs_settled", ["settled_at"], "settled_at IS NOT NULL", False),
]

NOW = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)",
}
"""The store's clock in microseconds."""

# One per thread may stay: the one whose owner's session is live (better still: has not expired), else the newest.
SURPLUS = """
    SELECT run_id FROM (
        SELECT r.run_id, row_number() OVER (
            PARTITION BY r.thread_id
            ORDER BY
                CASE WHEN w.worker_id IS NULL OR w.state = 'dead' THEN 2 WHEN w.expires_at < {now} THEN 1 ELSE 0 END,
                r.created_at DESC, r.seq DESC, r.run_id DESC
        ) AS place
        FROM dr_runs AS r LEFT JOIN dr_workers AS w ON w.worker_id = r.owner_worker_id
        WHERE r.active
    ) AS ranked
    WHERE place > 1
"""

# A reservation leaves no trace when it ends, whoever ends it.
RELEASE = "DELETE FROM dr_runs WHERE operation_kind <> 'run' AND active AND run_id IN ({surplus})"

# ``active`` is asked again for whoever ended while the statement waited for its row: terminal is final (I5). The new
# epoch fences the owner, should it still be there (O14). A restore that is owed cannot be carried out any more (I16).
END = """
    UPDATE dr_runs SET
        status = 'error',
        stop_reason = CASE
            WHEN cancel_action = 'rollback' AND turn IS NOT NULL THEN 'rollback_failed' ELSE 'orphan_recovered'
        END,
        error = 'Another operation was active on the same thread; the upgrade of the database kept that one.',
        epoch = epoch + 1,
        waits_for = NULL,
        settled_by = 'migration:0002',
        settled_at = {now},
        updated_at = {now}
    WHERE active AND run_id IN ({surplus})
"""

RECEIPT = [
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
]
JSON_OBJECT = {"sqlite": "json_object({pairs})", "postgresql": "CAST(json_build_object({pairs}) AS TEXT)"}
DELIVERIES = {
    "sqlite": "json_each(r.deliveries) AS d",
    "postgresql": "json_each(CAST(r.deliveries AS JSON)) AS d (key, value)",
}

# As at every end of a run (O28). Its thread's outcome is left to the run that is kept.
WRITE_RECEIPT = """
    INSERT INTO dr_outbox (run_id, kind, payload, attempts, not_before, delivered_at)
    SELECT run_id, 'receipt', {receipt}, 0, {now}, {now} FROM dr_runs WHERE settled_by = 'migration:0002'
    ON CONFLICT DO NOTHING
"""
ASK_FOR_DELIVERIES = """
    INSERT INTO dr_outbox (run_id, kind, payload, attempts, not_before)
    SELECT r.run_id, d.key, CAST(d.value AS TEXT), 0, {now} FROM dr_runs AS r, {deliveries}
    WHERE r.settled_by = 'migration:0002'
    ON CONFLICT DO NOTHING
"""
FORGET_BASE = """
    DELETE FROM dr_base_writes
    WHERE run_id IN (SELECT run_id FROM dr_runs WHERE settled_by = 'migration:0002')
"""

# I14: the key belongs to the run that had it first.
FORGET_KEY = """
    UPDATE dr_runs SET idempotency_key = NULL
    WHERE run_id IN (
        SELECT run_id FROM (
            SELECT run_id, row_number() OVER (
                PARTITION BY idempotency_scope, idempotency_key ORDER BY created_at, seq, run_id
            ) AS place
            FROM dr_runs WHERE idempotency_key IS NOT NULL
        ) AS ranked
        WHERE place > 1
    )
"""


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    for statement in (RELEASE, END, WRITE_RECEIPT, ASK_FOR_DELIVERIES, FORGET_BASE, FORGET_KEY):
        op.execute(_in(dialect, statement))
    if dialect == "sqlite":
        _create_indexes(concurrently=False)
        return
    with op.get_context().autocommit_block():
        _drop_half_built_indexes()
        _create_indexes(concurrently=True)


def _in(dialect: str, statement: str) -> str:
    pairs = ", ".join(f"'{name}', {name}" for name in RECEIPT)
    return statement.format(
        now=NOW[dialect],
        surplus=SURPLUS.format(now=NOW[dialect]),
        receipt=JSON_OBJECT[dialect].format(pairs=pairs),
        deliveries=DELIVERIES[dialect],
    )


def _create_indexes(*, concurrently: bool) -> None:
    for name, columns, where, unique in PARTIAL_INDEXES:
        op.create_index(
            name,
            "dr_runs",
            columns,
            unique=unique,
            if_not_exists=True,
            postgresql_where=sa.text(where),
            postgresql_concurrently=concurrently,
            sqlite_where=sa.text(where),
        )


def _drop_half_built_indexes() -> None:
    """A concurrent build that was broken off leaves an invalid index, which ``IF NOT EXISTS`` takes for a good one."""
    if op.get_context().as_sql:
        return
    names = op.get_bind().execute(
        sa.text(
            "SELECT c.relname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid "
            "WHERE i.indrelid = to_regclass('dr_runs') AND NOT i.indisvalid"
        )
    )
    known = {name for name, *_ in PARTIAL_INDEXES}
    for name in known & set(names.scalars()):
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
