"""Whether a path can be a SQLite database, asked before SQLite says it in its own words, which name no path (P071)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deerflow_runs.errors import InvalidDsn

HEADER: Final = b"SQLite format 3\0"
"""The first bytes of every database file that is not empty."""


def require_usable(path: Path) -> None:
    """Raise ``InvalidDsn`` for a folder, a file in a folder that does not exist, and a file that is something else."""
    if path.is_dir():
        raise InvalidDsn(f"{path} is a folder; name a file in it, such as {path / 'runs.db'}")
    if not path.parent.is_dir():
        raise InvalidDsn(f"the folder {path.parent} does not exist; make it first")
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            begins = file.read(len(HEADER))
    except PermissionError:
        raise InvalidDsn(f"{path} may not be read by this user") from None
    if begins and begins != HEADER:
        raise InvalidDsn(f"{path} is not a SQLite database; name another file")
