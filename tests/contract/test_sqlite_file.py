"""A path that cannot be a SQLite database is refused by name, before anything is made there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deerflow_runs.errors import InvalidDsn
from deerflow_runs.store.opening import store_at
from tests.rules import rule


def folder(at: Path) -> Path:
    return at


def in_no_folder(at: Path) -> Path:
    return at / "missing" / "runs.db"


def other_file(at: Path) -> Path:
    (at / "notes.txt").write_text("these are my notes, and they are no database")
    return at / "notes.txt"


@rule("P071")
@pytest.mark.parametrize("migrate", [True, False], ids=["migrate", "as it is"])
@pytest.mark.parametrize(
    ("made", "told"),
    [(folder, "is a folder"), (in_no_folder, "does not exist"), (other_file, "is not a SQLite database")],
    ids=["folder", "no folder", "other file"],
)
async def test_a_path_that_is_no_database_is_named_with_the_remedy(
    made: Callable[[Path], Path], told: str, tmp_path: Path, *, migrate: bool
) -> None:
    path = made(tmp_path)
    store = store_at(path, migrate=migrate)
    with pytest.raises(InvalidDsn, match=told) as refused:
        await store.open()
    assert str(tmp_path) in str(refused.value)
    assert not (tmp_path / "missing").exists()


async def test_an_empty_file_is_a_database_that_is_still_to_be_made(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    path.touch()
    async with store_at(path, migrate=True):
        pass
