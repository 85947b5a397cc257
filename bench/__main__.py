"""``python -m bench``: measure figures, say what was found, and keep it."""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from bench import machine
from bench.context import Bench
from bench.figures import FIGURES
from bench.results import Line, Measured, Record
from deerflow_runs.testing.postgres import PostgresCluster

SEED: Final = 20260
CALM: Final = 2.0
"""The load above which it is worth waiting a little."""

PATIENCE: Final = 240.0
LOOK: Final = 10.0


def main(words: Sequence[str]) -> int:
    """Measure; 1 if a figure could not be."""
    parser = argparse.ArgumentParser(prog="dev.py bench", description=inspect.getdoc(sys.modules["bench"]))
    parser.add_argument("--quick", action="store_true", help="all of it in about four minutes, kept apart")
    parser.add_argument("--seed", type=int, default=SEED, help="what chance begins with")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"figures, else all: {', '.join(FIGURES)}")
    given = parser.parse_args(words)
    if unknown := [name for name in given.names if name not in FIGURES]:
        parser.error(f"there is no figure {', '.join(unknown)}")
    if not given.quick:
        _until_calm()
    folder = Path(tempfile.mkdtemp(prefix="deerflow-runs-bench-"))
    try:
        with PostgresCluster(durable=True) as cluster:
            done = [
                _measured(name, FIGURES[name], cluster, folder, quick=given.quick, seed=given.seed)
                for name in given.names or FIGURES
            ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(done) else 1


def _measured(name: str, figure: ModuleType, cluster: PostgresCluster, folder: Path, *, quick: bool, seed: int) -> bool:
    """Measure one and keep it; False: it could not be."""
    print(f"\n{figure.TITLE} ({name})", flush=True)
    before, began = machine.load(), time.monotonic()
    try:
        measured: Measured = figure.measure(Bench(cluster, folder, quick=quick, seed=seed))
    except Exception:  # noqa: BLE001 - whatever became of this figure, the next one is measured
        traceback.print_exc()
        return False
    [(version,)] = cluster.execute("SHOW server_version")
    record = Record(
        name=name,
        quick=quick,
        seed=seed,
        commit=machine.commit(),
        machine=machine.facts(),
        versions=machine.versions(version),
        load=(before, machine.load()),
        measured=measured,
    )
    for one in measured.lines:
        print(f"  {_told(one)}")
    print(f"  ({time.monotonic() - began:.0f} s; {record.save().relative_to(machine.ROOT)})", flush=True)
    return True


def _told(one: Line) -> str:
    span = f" ({one.low:g} to {one.high:g})" if one.rounds > 1 else ""
    verdict = ""
    if one.target is not None:
        verdict = f"   {'met' if one.met else 'MISSED'}: {one.target.sense} {one.target.limit:g}"
    return f"{one.what}: {one.value:g} {one.unit}{span}{verdict}"


def _until_calm() -> None:
    """Others may be busy on this machine; what they still do then is in the record."""
    until = time.monotonic() + PATIENCE
    while machine.load() > CALM and time.monotonic() < until:
        time.sleep(LOOK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
