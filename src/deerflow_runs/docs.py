"""Writes the generated pages of ``docs/``: ``python -m deerflow_runs.docs [--check]``.

A page is a function without arguments that returns its text; ``PAGES`` names them all. What a page says comes from
the code alone, so the same code always writes the same bytes. Needs a checkout: an installed package has no ``docs/``.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType
from typing import Final, get_args

from deerflow_runs.config import PRESETS, RELATIONS, SECTIONS, RunsConfig, about, shown
from deerflow_runs.protocol.trust import BEATS_PER_TIMEOUT, BEATS_PER_TRUST

# ---- docs/configuration.md -----------------------------------------------------------------------------------------


def configuration() -> str:
    """Every setting, every relation and the presets, from ``config``."""
    return "\n".join([_OPENING, *_sections(), _RELATIONS_OPENING, *_relations(), _PRESETS_OPENING, *_presets(), ""])


_OPENING: Final = """\
<!-- Generated from src/deerflow_runs/config.py by `python3 dev.py docs`; change that file, not this one. -->

# Configuration

All settings of a worker are fields of one frozen model, `RunsConfig`. A setting that is left out has its default.

```python
from datetime import timedelta

from deerflow_runs.config import RunsConfig

config = RunsConfig(lease=timedelta(seconds=30), max_concurrent_runs=20)
assert config.margin == timedelta(seconds=3)
```

Durations are `timedelta` values; a number of seconds and text such as `"15 s"`, `"500 ms"` or `"24 h"` are accepted
too. `RunsConfig.from_mapping` takes what was read from a file. A value out of bounds, settings that contradict each
other, or a name that does not exist raise `InvalidConfig`, which names the setting and says what to change.
`config.changed(…)` gives a checked copy with other values, and derives anew what follows from another setting.

The unit is that of a plain number. Rules (O1 …) and invariants (I1 …) are those that the code and its tests cite."""

_RELATIONS_OPENING: Final = f"""
## Relations

These hold in every configuration. The answer to a beat is waited for as long as {BEATS_PER_TIMEOUT:g} beats last, never
longer than half of the trust that remains; that and two late beats make the {BEATS_PER_TRUST:g}.

| relation | why | rules |
| --- | --- | --- |"""

_PRESETS_OPENING: Final = """
## Presets

`RunsConfig.for_small_setups()` is for one process on one file with few users. `RunsConfig.for_tests()` is for tests
only: with so short a lease a busy machine loses leases. Both take settings as arguments, which win.

| preset | settings that differ from the defaults |
| --- | --- |"""


def _sections() -> Iterator[str]:
    explained = _docstrings()
    for name, field in RunsConfig.model_fields.items():
        if name in SECTIONS:
            yield f"\n## {SECTIONS[name]}\n"
            yield "| setting | default | unit | bounds | what it does | rules |\n| --- | --- | --- | --- | --- | --- |"
        known = about(name)
        cells = (f"`{name}`", _default(name), known.unit, _bounds(name, field.annotation), explained[name], known.rule)
        yield _row(cells)


def _default(name: str) -> str:
    value, known = getattr(RunsConfig(), name), about(name)
    if value is None:
        return known.absent
    text = f"`{value.value}`" if isinstance(value, Enum) else shown(value, known.unit)
    return f"{text} ({known.derived})" if known.derived else text


def _bounds(name: str, annotation: object) -> str:
    known = about(name)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    range_ = f"{shown(known.least, known.unit)} to {shown(known.most, known.unit)}"
    return f"{range_}, or none" if type(None) in get_args(annotation) else range_


def _docstrings() -> Mapping[str, str]:
    """What is written below each setting in the source."""
    source = ast.parse(dedent(inspect.getsource(RunsConfig))).body[0]
    body = source.body if isinstance(source, ast.ClassDef) else []
    return {
        setting.target.id: " ".join(ast.literal_eval(text.value).split())
        for setting, text in pairwise(body)
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name) and isinstance(text, ast.Expr)
    }


def _relations() -> Iterator[str]:
    return (_row((f"`{relation.says}`", relation.why, relation.rule)) for relation in RELATIONS)


def _presets() -> Iterator[str]:
    for preset, settings in PRESETS.items():
        listed = (f"`{name}` {shown(value, about(name).unit)}" for name, value in settings.items())
        yield _row((f"`{preset}`", " · ".join(listed)))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- all pages -----------------------------------------------------------------------------------------------------

PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType({"configuration.md": configuration})
"""The generated pages, by their path below ``docs/``."""

CHECKOUT: Final = Path(__file__).resolve().parents[2]
DIFFERENCES_SHOWN: Final = 30


def main(words: Sequence[str], *, docs: Path = CHECKOUT / "docs") -> int:
    """Write the pages, or with ``--check`` compare them; 1 if a page is stale, 2 outside a checkout."""
    parser = argparse.ArgumentParser(prog="deerflow_runs.docs", description=inspect.getdoc(main))
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a page is stale")
    check = parser.parse_args(words).check
    if not (docs.parent / "pyproject.toml").exists():
        print(f"{docs.parent} is not a checkout of deerflow-runs: there are no pages to write", file=sys.stderr)
        return 2
    stale = {docs / name: text for name, page in PAGES.items() if (text := page()) != _text_of(docs / name)}
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
