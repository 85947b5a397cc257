"""The page ``docs/configuration.md``: every setting, every relation and the presets, from ``config``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import pairwise
from textwrap import dedent
from typing import Final, get_args

from deerflow_runs.config import PRESETS, RELATIONS, SECTIONS, RunsConfig, about, shown
from deerflow_runs.protocol.trust import BEATS_PER_TIMEOUT, BEATS_PER_TRUST


def page() -> str:
    """The text of the page."""
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
