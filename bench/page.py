"""The page ``docs/performance.md``, from the committed results and the figures' own words: ``python -m bench.page``.

Numbers come from ``bench/results/`` alone, so the same results always write the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from types import ModuleType
from typing import Final

from bench.figures import FIGURES
from bench.results import Line, Record, saved
from deerflow_runs import docs

NOTHING: Final = "–"


def page(find: Callable[[str], Record | None] = saved) -> str:
    """The text of the page, with the results that ``find`` has for the names of figures."""
    records = {name: record for name in FIGURES if (record := find(name)) is not None}
    figures = (part for name, figure in FIGURES.items() for part in _figure(name, figure, records.get(name)))
    return "\n".join([_OPENING, *_summary(records), *_places(records), *figures, ""])


def main(words: Sequence[str]) -> int:
    """Write the page, or with ``--check`` compare it."""
    return docs.main(words, pages={"performance.md": page})


_OPENING: Final = """\
<!-- Generated from bench/results/ by `python3 dev.py docs`; measure anew with `python3 dev.py bench`. -->

# Performance

Every number on this page was measured by a script of this repository, on real databases and, where it matters, with
real processes. To repeat all of it, or a part, or all of it hastily:

```sh
python3 dev.py bench
python3 dev.py bench foreign_cancel beat
python3 dev.py bench --quick
```

A result is the middle one of several rounds; their span stands behind it. Counts are exact. A target is a number that
was written down before anything was measured, and a result that misses it says so. On another machine times and rates
differ; ratios and counts should not. The words are explained in [concepts](concepts.md)."""


def _summary(records: Mapping[str, Record]) -> Iterator[str]:
    judged = [(name, line) for name, record in records.items() for line in record.measured.lines if line.target]
    missed = [(name, line) for name, line in judged if not line.met]
    yield f"\nOf {len(judged)} targets {len(judged) - len(missed)} are met."
    if missed:
        yield "\nMissed:\n"
    for name, line in missed:
        yield f"- [{FIGURES[name].TITLE}](#{_anchor(FIGURES[name].TITLE)}): {line.what}, {_result(line)}"


def _places(records: Mapping[str, Record]) -> Iterator[str]:
    """Where and with what; one place is told once."""
    yield "\n## Where\n"
    places: dict[str, list[str]] = {}
    for name, record in records.items():
        places.setdefault(_place(record), []).append(name)
    for place, names in places.items():
        whose = "" if len(places) == 1 else f" ({', '.join(names)})"
        yield f"- {place}{whose}"
    if not places:
        yield "Nothing has been measured yet."


def _place(record: Record) -> str:
    machine, versions = record.machine, record.versions
    return "; ".join(
        (
            f"{machine['processors']} processors ({machine['processor']}), {machine['memory_gib']} GiB of memory",
            f"{machine['system']}, Python {versions['python']}, SQLite {versions['sqlite']}",
            f"PostgreSQL {versions['postgres']} with fsync",
            f"deerflow_runs {versions['deerflow_runs']}",
        )
    )


def _figure(name: str, figure: ModuleType, record: Record | None) -> Iterator[str]:
    yield f"\n## {figure.TITLE}\n\n{cleandoc(figure.__doc__ or '')}\n"
    if record is None:
        yield "Not measured yet."
        return
    yield "| what | result | rounds | target | |\n| --- | --: | --: | --: | --- |"
    yield from (_row(line) for line in record.measured.lines)
    if record.measured.notes:
        yield "\n" + " ".join(record.measured.notes)
    before, after = record.load
    yield (
        f"\nScript: [`bench/figures/{name}.py`](../bench/figures/{name}.py) at commit `{record.commit}`, seed"
        f" {record.seed}; load of the machine {before:g} before, {after:g} after."
    )


def _row(line: Line) -> str:
    span = NOTHING if line.rounds == 1 else f"{_number(line.low)} to {_number(line.high)} of {line.rounds}"
    target = NOTHING if line.target is None else f"{line.target.sense} {_with_unit(line.target.limit, line.unit)}"
    verdict = {None: "", True: "met", False: "**missed**"}[line.met]
    return _joined((line.what, _result(line), span, target, verdict))


def _result(line: Line) -> str:
    return _with_unit(line.value, line.unit)


def _with_unit(number: float, unit: str) -> str:
    return f"{_number(number)} {unit}".rstrip()


def _number(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() or abs(number) >= 1000 else f"{number:.3g}"


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


def _joined(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
