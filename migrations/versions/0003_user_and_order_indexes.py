"""Indexes of ``dr_runs`` by user, and by order of admission on a thread.

Revision 0003 follows 0002 and only adds. Every step may be repeated, so an interrupted upgrade is finished by running
it again. PostgreSQL builds the indexes concurrently: an upgrade never stops the workers from writing. Frozen once
released.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INDEXES: list[tuple[str, list[str], str]] = [
    ("ix_dr_runs_user", ["user_id", "active", "thread_id"], "user_id IS NOT NULL AND created_at >= 0"),
    ("ix_dr_runs_thread_seq", ["thread_id", "seq"], "created_at >= 0"),
]


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        _create_indexes(concurrently=False)
        return
    with op.get_context().autocommit_block():
        _drop_half_built_indexes()
        _create_indexes(concurrently=True)


def _create_indexes(*, concurrently: bool) -> None:
    for name, columns, where in INDEXES:
        op.create_index(
            name,
            "dr_runs",
            columns,
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
    known = {name for name, *_ in INDEXES}
    for name in known & set(names.scalars()):
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
