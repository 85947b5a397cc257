"""Writes ``docs/cases.md``: ``python -m tests.docs.cases [--check]``.

What each case says stands in ``cases.toml``; which tests show it is read from their ``rule`` markers. Lives with the
tests because the product's own pages know none.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deerflow_runs.docs import main as write_pages
from tests.docs.pages import ROOT

TESTS: Final = ROOT / "tests"
CASES: Final = TESTS / "docs" / "cases.toml"
STUDIED: Final = "bytedance/deer-flow"
"""The repository whose run manager was studied: the flaws are its, and bare numbers are issues of it."""

INTRODUCTION: Final = """\
# Cases

Others have built run managers before us, and told in public what went wrong. Each report below was made a case that is
tried on this library: **P** are reports from many projects, restated in our words with the place where they were made.
**F** are weaknesses of the run manager of bytedance/deer-flow (commit f1f4af99), found in its code and mostly shown by
running it; with each stand the later public issues that fit it. A case is shown by the tests whose `rule` marker names
it; what still needs a part that is not built says so.
"""


@dataclass(frozen=True)
class Case:
    """One line of the page."""

    name: str
    says: str
    source: str
    weight: str = ""
    needs: str = ""


def cases(path: Path = CASES) -> dict[str, list[Case]]:
    """All cases by kind (``reports`` and ``flaws``), in their order."""
    kinds: Mapping[str, Mapping[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {kind: [Case(name, **({"source": ""} | said)) for name, said in kinds[kind].items()] for kind in kinds}


def citations(folder: Path = TESTS) -> dict[str, list[Path]]:
    """Which test files name a rule, flaw or case, in their order."""
    cited: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for name in sorted(set(_named_in(ast.parse(path.read_text(encoding="utf-8"))))):
            cited.setdefault(name, []).append(path)
    return cited


def _named_in(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rule":
            yield from (word.value for word in node.args if isinstance(word, ast.Constant) and type(word.value) is str)


def page() -> str:
    """The page as the cases and the tests are now."""
    return "\n".join(_lines(cases(), citations())) + "\n"


def _lines(kinds: Mapping[str, Sequence[Case]], cited: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    yield INTRODUCTION
    everything = [case for kind in kinds.values() for case in kind]
    shown = sum(1 for case in everything if case.name in cited)
    part = sum(1 for case in everything if case.name in cited and case.needs)
    left = len(everything) - shown
    yield f"Of {len(everything)} cases {shown} are shown, {part} of them in part; {left} are to come."
    yield "\n## Public reports\n\n| case | reported in | symptom | shown by |\n| --- | --- | --- | --- |"
    yield from (_row(case.name, case.source, case.says, _tests(case, cited)) for case in kinds["reports"])
    yield "\n## Weaknesses of the manager that was studied\n"
    yield "Weight: H loses work or stops service, M is wrong or slow under load, L is a nuisance.\n"
    yield "| case | weight | public issues | symptom | shown by |\n| --- | --- | --- | --- | --- |"
    for case in kinds["flaws"]:
        source = f"{STUDIED} {case.source}" if case.source else STUDIED
        yield _row(case.name, case.weight, source, case.says, _tests(case, cited))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _tests(case: Case, cited: Mapping[str, Sequence[Path]]) -> str:
    files = ", ".join(_link(path) for path in cited.get(case.name, ()))
    if not files:
        return f"not yet: needs {case.needs}" if case.needs else "not yet"
    return f"{files}; the rest needs {case.needs}" if case.needs else files


def _link(path: Path) -> str:
    place = path.relative_to(TESTS).with_suffix("").as_posix()
    return f"[{place}](../{path.relative_to(ROOT).as_posix()})"


def unexplained(kinds: Mapping[str, Iterable[Case]], cited: Mapping[str, object]) -> list[str]:
    """Cases that no test shows and that wait for nothing."""
    return [case.name for kind in kinds.values() for case in kind if not case.needs and case.name not in cited]


def main(words: Sequence[str]) -> int:
    """Write the page, or with ``--check`` compare it; 1 if it is stale."""
    return write_pages(words, pages={"cases.md": page})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
