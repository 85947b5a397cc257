"""Where it was measured and with what: facts that make a number comparable, and none that tell whose machine it is."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from pathlib import Path
from typing import Final

from deerflow_runs import __version__

ROOT: Final = Path(__file__).resolve().parents[1]
WATCHED: Final = ("src", "migrations", "bench")
"""What a result depends on."""


def facts() -> dict[str, str | int]:
    """Processors, memory, operating system."""
    return {
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": _system(),
    }


def versions(postgres: str) -> dict[str, str]:
    """Of all that takes part."""
    return {
        "deerflow_runs": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "postgres": postgres,
    }


def commit() -> str:
    """What was measured; a plus sign says that files differed from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *WATCHED)
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def load() -> float:
    """How many processes wanted a processor during the last minute."""
    return round(os.getloadavg()[0], 2)


def resident() -> int:
    """Bytes of memory that this process has just now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for row in information.read_text().splitlines():
            name, _, value = row.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
