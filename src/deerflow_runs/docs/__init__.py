"""Writes the generated pages of ``docs/``: ``python -m deerflow_runs.docs [--check]``.

A page is a function without arguments that returns its text; ``PAGES`` names them all. What a page says comes from
the code alone, so the same code always writes the same bytes. Needs a checkout: an installed package has no ``docs/``.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from deerflow_runs.docs import configuration, lifecycle, observability

PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "configuration.md": configuration.page,
        "lifecycle.md": lifecycle.page,
        "observability.md": observability.page,
    }
)
"""The generated pages, by their path below ``docs/``."""

CHECKOUT: Final = Path(__file__).resolve().parents[3]
DIFFERENCES_SHOWN: Final = 30


def main(
    words: Sequence[str],
    *,
    docs: Path = CHECKOUT / "docs",
    pages: Mapping[str, Callable[[], str]] = PAGES,
) -> int:
    """Write the pages, or with ``--check`` compare them; 1 if a page is stale, 2 outside a checkout."""
    parser = argparse.ArgumentParser(prog="deerflow_runs.docs", description=inspect.getdoc(main))
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a page is stale")
    check = parser.parse_args(words).check
    if not (docs.parent / "pyproject.toml").exists():
        print(f"{docs.parent} is not a checkout of deerflow-runs: there are no pages to write", file=sys.stderr)
        return 2
    stale = {docs / name: text for name, page in pages.items() if (text := page()) != _text_of(docs / name)}
    return _complain(stale) if check else _write(stale)


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _write(stale: Mapping[Path, str]) -> int:
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def _complain(stale: Mapping[Path, str]) -> int:
    for path, text in stale.items():
        print(f"{path} is stale; write it anew with: python3 dev.py docs")
        for line in _differences(_text_of(path) or "", text):
            print(f"    {line}")
    return 1 if stale else 0


def _differences(before: str, after: str) -> Iterator[str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "as it is", "as it should be", n=0))
    yield from (line.rstrip() for line in lines[:DIFFERENCES_SHOWN])
    if len(lines) > DIFFERENCES_SHOWN:
        yield f"… and {len(lines) - DIFFERENCES_SHOWN} more lines"
