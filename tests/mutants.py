"""Break one rule after the other and demand a red test: ``python -m tests.mutants [--quick] [--list] [names …]``.

Every mutation is applied to a copy of the project; the named tests run there and must fail, and they must pass without
it. A mutation that no longer fits its file, or breaks more than a rule (nothing could be collected), is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.mutations import AnyMutation, DropGuard, DropSql, Mutation, all_mutations, is_quick

ROOT = Path(__file__).resolve().parents[1]
PARALLEL = 2
PATIENCE = 300.0
"""Seconds after which tests that hang count as red."""

PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
WARM = ("pytest", "hypothesis", "pydantic.main", "sqlalchemy.dialects.postgresql.asyncpg", "asyncpg", *PLUGINS)
"""Loaded once, before the first copy of this process: most of what a test session costs."""

SESSION = 10
"""Added to pytest's exit codes, because a process that cannot even start its session exits with 1 too."""
PASSED, FAILED, STRANGE = SESSION + 0, SESSION + 1, 99


class Outcome(Enum):
    """What became of a mutation."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class Job:
    """Tests to run in a tree of their own; without a mutation they must be green."""

    tests: tuple[str, ...]
    mutation: AnyMutation | None = None


@dataclass(frozen=True)
class Result:
    """How a session ended: its exit code, None if it had to be stopped; and the end of what it printed."""

    job: Job
    code: int | None
    seconds: float
    said: str = ""


class DoesNotFit(Exception):
    """The text that a mutation replaces is not there exactly once."""


# --- One session ----------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> Path:
    """The project as it is now: what is edited while the mutants run is not seen by them."""
    leave_out = shutil.ignore_patterns(".*_cache", ".hypothesis", ".git", ".venv", "dist", "build", "node_modules")
    return Path(shutil.copytree(ROOT, folder / "project", ignore=leave_out, symlinks=True))


def prepare(project: Path, tree: Path, mutation: AnyMutation) -> None:
    """A tree that shares all files with the project but the one that is broken."""
    shutil.copytree(project, tree, symlinks=True, copy_function=os.link)
    if isinstance(mutation, Mutation):
        path = tree / mutation.path
        broken, written_at = mutated(mutation, path.read_text(encoding="utf-8")), path.stat().st_mtime
        path.unlink()
        path.write_text(broken, encoding="utf-8")
        os.utime(path, (written_at + 60, written_at + 60))  # never to be mistaken for what was compiled before


def mutated(mutation: Mutation, text: str) -> str:
    """The text with the change made, at the one place that it fits."""
    if (count := text.count(mutation.old)) != 1:
        raise DoesNotFit(f"its text stands {count} times in {mutation.path}, not once")
    return text.replace(mutation.old, mutation.new)


def run_session(tree: Path, job: Job) -> None:
    """In a process of its own: run the tests of ``tree`` and exit as pytest would."""
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    sys.dont_write_bytecode = False
    sys.path[:0] = [str(tree / "src"), str(tree)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "deerflow_runs")]:
        del sys.modules[name]
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path[:2])}
    if isinstance(job.mutation, DropGuard):
        os.environ["DROP_GUARD"] = f"{job.mutation.event}|{job.mutation.guard}"
    if isinstance(job.mutation, DropSql):
        os.environ["DROP_SQL"] = f"{job.mutation.event}|{job.mutation.part}"
    import pytest

    quiet = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    options = [*quiet, f"--rootdir={tree}", "-p", "tests.mutations.plugin"]

    code = pytest.main([*options, *job.tests], plugins=[sys.modules[name] for name in PLUGINS])
    product = sys.modules.get("deerflow_runs")
    ours = product is None or str(product.__file__).startswith(str(tree))
    sys.exit(SESSION + int(code) if ours else STRANGE)


# --- Many sessions --------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A session that has not ended."""

    job: Job
    tree: Path
    process: BaseProcess
    since: float

    def result(self, code: int | None) -> Result:
        log = self.tree.with_suffix(".log")
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if self.job.mutation is not None:
            shutil.rmtree(self.tree, ignore_errors=True)
        return Result(self.job, code, time.monotonic() - self.since, said[-1500:])


def results(jobs: Iterable[Job], project: Path) -> Iterator[Result]:
    """Run all of them, a few at a time, as they come. Those without a mutation run in the project itself, so that what
    they compile serves all others."""
    waiting = list(enumerate(jobs))[::-1]
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            number, job = waiting.pop()
            try:
                running.append(start(project, project.with_name(f"tree-{number}") if job.mutation else project, job))
            except DoesNotFit as error:
                yield Result(job, STRANGE, 0.0, str(error))
        wait([session.process.sentinel for session in running], timeout=1.0)
        for session in [*running]:
            overdue = time.monotonic() - session.since > PATIENCE
            if session.process.is_alive() and overdue:
                session.process.kill()
            session.process.join(0 if session.process.is_alive() and not overdue else None)
            if session.process.exitcode is not None:
                running.remove(session)
                yield session.result(None if overdue else session.process.exitcode)


def start(project: Path, tree: Path, job: Job) -> Running:
    """Copy, break, run."""
    if job.mutation is not None:
        prepare(project, tree, job.mutation)
    process = multiprocessing.get_context("fork").Process(target=run_session, args=(tree, job))
    process.start()
    return Running(job, tree, process, time.monotonic())


# --- Judgement ------------------------------------------------------------------------------------------------------


def judge(result: Result) -> Outcome:
    """A red test kills a mutant; so does one that never ends."""
    if result.code in (FAILED, None):
        return Outcome.KILLED
    return Outcome.SURVIVED if result.code == PASSED else Outcome.BROKEN


def report(result: Result) -> Outcome:
    """One line for each mutation; what went wrong where something did."""
    mutation, outcome = result.job.mutation, judge(result)
    assert mutation is not None
    print(f"{outcome.value:8}  {mutation.name}  [{mutation.rule}]  {result.seconds:.1f} s", flush=True)
    if outcome is Outcome.BROKEN:
        print(result.said, flush=True)
    return outcome


def red_without_mutation(tests: Sequence[tuple[str, ...]], project: Path) -> list[str]:
    """Of these tests, those that fail anyway and so prove nothing; all of them run together first."""
    together = Job(tuple(sorted({test for some in tests for test in some})))
    (all_at_once,) = results([together], project)
    if all_at_once.code == PASSED:
        return []
    alone = [result for some in sorted(set(tests)) for result in results([Job(some)], project)]
    red = [result for result in alone if result.code != PASSED]
    return [f"{' '.join(result.job.tests)}\n{result.said}" for result in red] or [all_at_once.said]


def main(words: Sequence[str]) -> int:
    """Exit code 0 if every chosen mutation is killed by tests that are green without it, 2 if none was chosen."""
    options = arguments(words)
    chosen = choose(all_mutations(), options.names, quick=options.quick)
    if not chosen:
        print("no mutation is called so; --list says which there are")
        return 2
    if options.list:
        print("\n".join(f"{mutation.name}  [{mutation.rule}]" for mutation in chosen))
        return 0
    for name in WARM:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, database(chosen):
        project = snapshot(Path(name))
        for text in (red := red_without_mutation([mutation.tests for mutation in chosen], project)):
            print(f"red without any mutation: {text}", flush=True)
        outcomes = [report(result) for result in results([Job(m.tests, m) for m in chosen], project)]
    passed = outcomes.count(Outcome.KILLED)
    print(f"{passed} passed, {len(outcomes) - passed + len(red)} failed")
    return 0 if passed == len(chosen) and not red else 1


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="only those whose tests need no database")
    parser.add_argument("--list", action="store_true", help="say which there are and do nothing")
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    return parser.parse_args(words)


def choose(mutations: Sequence[AnyMutation], names: Sequence[str], *, quick: bool) -> list[AnyMutation]:
    """Those of the quick selection, if only that is wanted, and of those the ones that are named."""
    selected = [mutation for mutation in mutations if is_quick(mutation) or not quick]
    return [mutation for mutation in selected if not names or any(name in mutation.name for name in names)]


@contextlib.contextmanager
def database(chosen: Sequence[AnyMutation]) -> Iterator[None]:
    """One server for all sessions, if any of them may want one: starting it each time would cost more than the test."""
    if all(is_quick(mutation) for mutation in chosen):
        yield
        return
    from deerflow_runs.testing.postgres import DSN_VARIABLE, open_server

    with open_server() as server:
        os.environ[DSN_VARIABLE] = server.dsn()
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
