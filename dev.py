#!/usr/bin/env python3
"""The one command of this repository: ``python3 dev.py VERB`` makes the environment if it has to, then runs.

Standard library only, and it must at least start on an old interpreter, to say what is wrong with it. What the verbs
check is configured in pyproject.toml; nothing is decided here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / ".deerflow-runs-stamp"
OLDEST = (3, 11)
PAGE_WRITERS = ("deerflow_runs.docs", "bench.page", "tests.docs.cases")


# --- Verbs ----------------------------------------------------------------------------------------------------------


def demo(arguments: Sequence[str]) -> int:
    """show two processes cancel, kill and recover runs on SQLite (or the database named); becomes the chat gateway"""
    print("The demo will be a chat gateway on SQLite. Until then: two processes, and one of them dies.\n", flush=True)
    return run(PYTHON, ROOT / "examples" / "ownership_demo.py", *arguments)


def test(arguments: Sequence[str]) -> int:
    """run every test, on SQLite and on a real PostgreSQL; arguments go to pytest"""
    chosen = any(argument.startswith(("-n", "--numprocesses")) for argument in arguments)
    workers = [] if chosen else ["-n", str(max(2, cores()))]
    return run(PYTHON, "-m", "pytest", *workers, *arguments)


def lint(_: Sequence[str]) -> int:
    """check style, types, layers, dependencies and the generated pages"""
    failed = [name for name, command in checks() if not passes(name, command)]
    if failed:
        print("lint failed: " + ", ".join(failed))
    return 1 if failed else 0


def spec(arguments: Sequence[str]) -> int:
    """check the TLA+ models, and that each mutation of them fails (needs Java); --quick, or names of models"""
    return run(PYTHON, ROOT / "spec" / "run.py", *arguments)


def mutants(arguments: Sequence[str]) -> int:
    """break each rule in turn and demand a red test; --quick, or names of mutants"""
    return run(PYTHON, "-m", "tests.mutants", *arguments)


def docs(arguments: Sequence[str]) -> int:
    """write the generated pages of docs/ anew"""
    return max(run(PYTHON, "-m", module, *arguments) for module in PAGE_WRITERS)


def bench(arguments: Sequence[str]) -> int:
    """measure what docs/performance.md says; --quick takes about four minutes, names of figures less"""
    return run(PYTHON, "-m", "bench", *arguments)


def env(_: Sequence[str]) -> int:
    """make or update the environment, and print the path of its Python"""
    print(PYTHON)
    return 0


VERBS: tuple[Callable[[Sequence[str]], int], ...] = (demo, test, lint, spec, mutants, bench, docs, env)
PASS_ARGUMENTS_ON = (demo, test, spec, mutants, bench, docs)


def main(words: Sequence[str]) -> int:
    if sys.version_info < OLDEST:
        sys.exit(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(prog="dev.py", description="Everything a developer of deerflow-runs runs.")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        verbs.add_parser(verb.__name__, help=verb.__doc__, description=verb.__doc__).set_defaults(verb=verb)
    known, arguments = parser.parse_known_args(words)
    if arguments and known.verb not in PASS_ARGUMENTS_ON:
        parser.error(f"{known.verb.__name__} takes no arguments: {' '.join(arguments)}")
    make_environment()
    answer: int = known.verb(arguments)
    return answer


def checks() -> Iterator[tuple[str, Sequence[str | Path]]]:
    """What ``lint`` runs, the quickest first."""
    yield "ruff check", [BIN / "ruff", "check", "."]
    yield "ruff format", [BIN / "ruff", "format", "--check", "."]
    yield "import contracts", [BIN / "lint-imports", "--no-logo"]
    yield "dependencies", [BIN / "deptry", "--no-ansi", "src"]
    if (ROOT / "src" / "deerflow_runs" / "docs").exists():
        for module in PAGE_WRITERS:
            yield f"pages of {module}", [PYTHON, "-m", module, "--check"]
    yield "mypy", [BIN / "mypy", "--strict", "src", "tests", "bench", "dev.py"]


def passes(name: str, command: Sequence[str | Path]) -> bool:
    """Run one check; what it wrote is shown only if it fails."""
    started = time.monotonic()
    done = subprocess.run(words_of(command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    verdict = "ok    " if done.returncode == 0 else "FAILED"
    print(f"{verdict} {name} ({time.monotonic() - started:.1f} s)", flush=True)
    if done.returncode != 0:
        print(done.stdout.decode(errors="replace"), flush=True)
    return done.returncode == 0


def run(*command: str | Path) -> int:
    return subprocess.run(words_of(command), cwd=ROOT, check=False).returncode


def words_of(command: Iterable[str | Path]) -> list[str]:
    return [str(word) for word in command]


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # what we may use, in a container less than what there is
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- The environment ------------------------------------------------------------------------------------------------


def make_environment() -> None:
    """Bring ``.venv`` to what pyproject.toml and requirements.lock say, unless its stamp says that it is there."""
    wanted = fingerprint()
    if stamped(wanted):
        return
    with only_one():
        if stamped(wanted):  # somebody else was quicker
            return
        if not fits():
            create()
        print("Installing into .venv, once ...", file=sys.stderr, flush=True)
        install()
        STAMP.write_text(wanted)


def fingerprint() -> str:
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "requirements.lock")]
    return hashlib.sha256(b"\0".join([*inputs, sys.version.encode(), str(ROOT).encode()])).hexdigest()


def stamped(wanted: str) -> bool:
    return STAMP.exists() and STAMP.read_text() == wanted and PYTHON.exists()


def fits() -> bool:
    """Whether ``.venv`` has a working Python of our version; then it is updated, not made anew."""
    try:
        done = subprocess.run(
            [str(PYTHON), "-c", "import sys; print(sys.version)"], stdout=subprocess.PIPE, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return done.stdout.strip() == sys.version.strip()


def create() -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        import venv

        venv.create(VENV, with_pip=shutil.which("uv") is None, symlinks=os.name != "nt")
    except (ImportError, subprocess.CalledProcessError):
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit(
            "This Python cannot make environments with pip in them (ensurepip is missing).\n"
            "Install your system's package for that (Debian and Ubuntu: python3-venv), or uv, and try again."
        )


def install() -> None:
    installer = [*find_installer(), "-c", "requirements.lock", "-e", ".[test,lint]"]
    done = subprocess.run(installer, cwd=ROOT, check=False)
    if done.returncode != 0:
        sys.exit("Installing failed; the reason stands above. Nothing else was run.")


def find_installer() -> list[str]:
    """The command that installs into ``.venv``: uv from PATH, else uv installed there, else plain pip."""
    inside = BIN / ("uv.exe" if os.name == "nt" else "uv")
    uv = shutil.which("uv")
    if uv is None and not inside.exists():
        if subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0:
            subprocess.run([str(PYTHON), "-m", "ensurepip"], capture_output=True, check=False)
        subprocess.run([str(PYTHON), "-m", "pip", "install", "-q", "uv"], capture_output=True, check=False)
    if uv is None and not inside.exists():
        return [str(PYTHON), "-m", "pip", "install", "-q"]
    return [uv or str(inside), "pip", "install", "-q", "--python", str(PYTHON)]


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Two of us at once would install over each other. The lock goes away with its process, however that ends."""
    with (ROOT / ".venv.lock").open("w") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
