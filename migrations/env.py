"""Runs the migrations on the connection that ``deerflow_runs.store.migrate`` hands over, or prints them as SQL.

One transaction for each migration, on SQLite too: an interrupted upgrade stands at a revision, never inside one.
"""

from typing import Any

from alembic import context

attributes = context.config.attributes
options: dict[str, Any] = {
    "version_table": "dr_alembic_version",
    "transaction_per_migration": True,
    "transactional_ddl": True,
}

if context.is_offline_mode():
    context.configure(dialect_name=attributes["dialect"], literal_binds=True, **options)
else:
    context.configure(connection=attributes["connection"], **options)

with context.begin_transaction():
    context.run_migrations()
