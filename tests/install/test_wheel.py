"""What a user gets: the wheel, with every extra, in an empty environment that has never seen this checkout."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deerflow_runs.testing.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[2]

# Runs in the empty environment: first the import alone, then an upgrade of each database named on the command line.
USE_IT = """
import json, sys
import deerflow_runs
loaded = sorted({"alembic", "fastapi", "langgraph", "langchain_core"} & sys.modules.keys())
from deerflow_runs.store import schema
from deerflow_runs.store.migrate import upgrade
for dsn in sys.argv[1:]:
    upgrade(dsn)
print(json.dumps({"file": deerflow_runs.__file__, "loaded": loaded, "tables": sorted(schema.metadata.tables)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with the tools of this environment."""
    target = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target), cwd=ROOT)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture
def empty_database(postgres_cluster: PostgresServer) -> Iterator[str]:
    name = f"wheel_{os.getpid()}"
    yield postgres_cluster.create_database(name)
    postgres_cluster.drop_database(name)


def test_the_wheel_holds_the_package_its_migrations_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for needed in ("deerflow_runs/py.typed", "deerflow_runs/migrations/env.py"):
        assert needed in names
    assert any(name.startswith("deerflow_runs/migrations/versions/0001") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"deerflow_runs"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.timeout(900)  # downloads and installs, on a machine that may be busy
def test_the_installed_wheel_imports_lightly_and_migrates_both_databases(
    wheel: Path, tmp_path: Path, postgres_cluster: PostgresServer, empty_database: str
) -> None:
    python = _empty_environment(tmp_path / "env", wheel)
    file = tmp_path / "runs.db"
    facts = json.loads(_run(python, "-I", "-c", USE_IT, f"sqlite:///{file}", empty_database, cwd=tmp_path))
    assert Path(facts["file"]).is_relative_to(tmp_path)
    assert facts["loaded"] == []
    assert facts["tables"]
    assert set(facts["tables"]) <= _tables_in_file(file) & _tables_on_server(postgres_cluster, empty_database)


def _empty_environment(where: Path, wheel: Path) -> str:
    """Make an environment, install the wheel with ``[all]`` at the locked versions, return its Python."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    venv.create(where, with_pip=uv is None, symlinks=os.name != "nt")
    python = str(where / ("Scripts" if os.name == "nt" else "bin") / "python")
    installer = [python, "-m", "pip", "install"] if uv is None else [uv, "pip", "install", "--python", python]
    _run(*installer, "-q", "-c", str(ROOT / "requirements.lock"), f"{wheel}[all]", cwd=where)
    return python


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])} ...\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _tables_in_file(path: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def _tables_on_server(server: PostgresServer, url: str) -> set[str]:
    rows = server.execute("SELECT tablename::text FROM pg_tables", database=url.rsplit("/", 1)[1])
    return {name for (name,) in rows}
