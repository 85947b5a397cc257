"""Databases without any table of ours."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from deerflow_runs.testing.postgres import PostgresServer


@pytest.fixture
def empty_postgres(postgres_cluster: PostgresServer) -> Iterator[str]:
    """A database of this test alone."""
    name = f"dfr_empty_{secrets.token_hex(6)}"
    yield postgres_cluster.create_database(name)
    postgres_cluster.drop_database(name)


@pytest.fixture
def second_postgres(postgres_cluster: PostgresServer) -> Iterator[str]:
    """One more, to compare with."""
    name = f"dfr_second_{secrets.token_hex(6)}"
    yield postgres_cluster.create_database(name)
    postgres_cluster.drop_database(name)


@pytest.fixture
def empty_sqlite(tmp_path: Path) -> str:
    """The address of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'empty.db'}"


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest) -> str:
    """An empty database: the test runs once on each kind."""
    return cast("str", request.getfixturevalue(f"empty_{request.param}"))
