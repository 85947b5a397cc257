"""What is logged when code raises that the manager calls and nobody awaits: where it happened, and of which type it is.

Never the message: it may hold what a user sent. A run's error stands in its row, where those may read it who may read
the run.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator

from deerflow_runs.observe import error_code

logger = logging.getLogger("deerflow_runs.manager")


def log_fault(whose: str, error: BaseException) -> None:
    """One record at ERROR: ``whose`` code raised, what, and the stacks of it and its causes, the first cause first."""
    with contextlib.suppress(Exception):  # the host's logging may be what is broken
        logger.error("%s raised %s\n%s", whose, error_code(error), "".join(_places(error, set())).rstrip())


def _places(error: BaseException, seen: set[int]) -> Iterator[str]:
    """An error may be a group, and errors may name each other in a circle."""
    if id(error) in seen:
        return
    seen.add(id(error))
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _places(part, seen)
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _places(before, seen)
    yield f"{error_code(error)}:\n"
    yield from traceback.format_tb(error.__traceback__)
