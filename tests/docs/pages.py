"""What a page of documentation holds that can be wrong: fenced blocks of code, and links to other files.

Reads Markdown only as far as our pages use it. Running what was found is the business of the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is the number of its first line of code in the page."""

    language: str
    line: int
    code: str


def pages() -> list[Path]:
    """README and everything under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(found["language"], text.count("\n", 0, found.start("code")) + 1, found["code"])


def broken_links(page: Path) -> Iterator[str]:
    """Links to files or headings of this repository that are not there."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in _LINK.finditer(text):
        target = page.parent / found["path"] if found["path"] else page
        anchored = found["anchor"] and target.suffix == ".md"
        if not target.exists() or (anchored and found["anchor"] not in _anchors(target)):
            yield found.group().removeprefix("]")


def _anchors(page: Path) -> set[str]:
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def examples() -> list[Path]:
    """The programs under examples/."""
    return sorted((ROOT / "examples").rglob("*.py"))
