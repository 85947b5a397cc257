"""What a figure is given to measure with: databases, workers, chance, and how much patience there is."""

from __future__ import annotations

import random
import secrets
import shutil
import sqlite3
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, final

from bench.workers import Worker
from deerflow_runs.store.migrate import upgrade
from deerflow_runs.testing.postgres import PostgresCluster

T = TypeVar("T")

TEMPLATE: Final = "bench_template"


@final
class Bench:
    """One measurement of one figure. Every database is fresh, migrated, and on disk with the durability of the default
    settings of its kind."""

    def __init__(self, cluster: PostgresCluster, folder: Path, *, quick: bool, seed: int) -> None:
        self.quick = quick
        self.random = random.Random(seed)
        self._cluster = cluster
        self._folder = folder

    def pick(self, patient: T, quick: T) -> T:
        """The first, or the second when there is little time."""
        return quick if self.quick else patient

    def postgres(self) -> str:
        """The address of a new database on the server of this session."""
        template = self._cluster.ensure_template(TEMPLATE, upgrade)
        return self._cluster.create_database(f"bench_{secrets.token_hex(6)}", template=template)

    def sqlite(self) -> str:
        """The address of a new file."""
        path = self._folder / f"{secrets.token_hex(6)}.db"
        shutil.copyfile(self._sqlite_template, path)
        return f"sqlite:///{path}"

    def fresh(self, kind: str) -> str:
        """The address of a new database of this kind."""
        return self.postgres() if kind == "Postgres" else self.sqlite()

    def own_cluster(self) -> PostgresCluster:
        """A server that may be killed; use it in a ``with`` block."""
        return PostgresCluster(durable=True)

    def worker(self, dsn: str, **settings: Any) -> Worker:
        """A worker process; use it in a ``with`` block, which begins when its session is open."""
        return Worker(dsn, settings)

    @cached_property
    def _sqlite_template(self) -> Path:
        path = self._folder / "template.db"
        upgrade(f"sqlite:///{path}")
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # everything into the one file that is copied
        connection.close()
        return path
