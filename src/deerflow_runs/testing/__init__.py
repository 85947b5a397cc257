"""Tools for testing what is built on ``deerflow_runs``; nothing in the product imports them."""

from __future__ import annotations

from deerflow_runs.testing.postgres import NoPostgres, PostgresCluster, PostgresServer, open_server

__all__ = ["NoPostgres", "PostgresCluster", "PostgresServer", "open_server"]
