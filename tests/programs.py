"""Helper programs that only some tests need, such as Java. Elsewhere they may be missing; where CI is set they may not.

A test asks with ``require_program("java")``. How many were skipped for want of one is said at the end of the run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

_REASON = re.compile(r"needs the program ([\w.+-]+)")
# Debian keeps servers where only root's PATH looks.
_PLACES = os.pathsep.join(["/usr/sbin", "/usr/local/sbin"])


def require_program(name: str) -> str:
    """The path of the program. Without it: a skipped test, or a failed one when ``CI=true``."""
    path = shutil.which(name) or shutil.which(name, path=_PLACES)
    if path is not None:
        return path
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"needs the program {name}, and with CI=true none may be missing", pytrace=False)
    pytest.skip(f"needs the program {name}")


def skipped_for_programs(reasons: Iterable[str]) -> Counter[str]:
    """How many of the skip ``reasons`` name which program."""
    return Counter(found.group(1) for reason in reasons if (found := _REASON.search(reason)))
