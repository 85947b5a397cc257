"""Mutations of what a worker tells and of who listens."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

FOLDER = "src/deerflow_runs/observe/"
TESTS = ("tests/manager/test_observe.py",)


def observe(name: str, rule: str, file: str, old: str, new: str) -> Mutation:
    return Mutation(name, rule, FOLDER + file, old, new, TESTS, quick=True)


MUTATIONS: Final = [
    observe(
        "an observer's error stops the run",
        "observers",
        "observers.py",
        "except (Exception, asyncio.CancelledError) as error:",
        "except ZeroDivisionError as error:",
    ),
    observe(
        "an observer makes a run look cancelled",
        "observers",
        "observers.py",
        "except (Exception, asyncio.CancelledError) as error:",
        "except Exception as error:",
    ),
    observe(
        "an observer swallows the wish to end the process",
        "observers",
        "observers.py",
        "except (Exception, asyncio.CancelledError) as error:",
        "except BaseException as error:",
    ),
    observe(
        "an observer's error hides the others'",
        "observers",
        "observers.py",
        "kind = (place, type(error))",
        "kind = (0, type(error))",
    ),
    observe(
        "an observer that always fails fills the log",
        "observers",
        "observers.py",
        "self._known.add(kind)",
        "pass",
    ),
    observe(
        "a host's broken logging stops the run",
        "observers",
        "observers.py",
        "with contextlib.suppress(Exception):",
        "with contextlib.suppress(OSError):",
    ),
    observe(
        "the message of an error is told",
        "events",
        "base.py",
        'return f"{type(error).__name__} {code}" if code else type(error).__name__',
        'return f"{type(error).__name__} {code}" if code else repr(error)',
    ),
    observe(
        "the code of a wrapped error is lost",
        "events",
        "base.py",
        "_code(error) or _code(error.__cause__)",
        "_code(error)",
    ),
    observe(
        "a thread's id forges a line of the log",
        "log",
        "log.py",
        "if not value or not value.isprintable() or any(",
        "if not value or any(",
    ),
    observe(
        "a thread's id forges a field of a line",
        "log",
        "log.py",
        'for sign in " =',
        'for sign in "',
    ),
    observe(
        "a field takes the place of the record's own",
        "log",
        "log.py",
        '{f"{name}_" if name in TAKEN else name: value',
        "{name: value",
    ),
    observe(
        "a user's cancel is logged as a warning",
        "log",
        "runs.py",
        '''of its cancel and stops it. Once for each run that is stopped by it."""

    level = logging.DEBUG''',
        '''of its cancel and stops it. Once for each run that is stopped by it."""

    level = logging.WARNING''',
    ),
    observe(
        "a snapshot goes on counting",
        "counters",
        "counters.py",
        "MappingProxyType(dict(counts))",
        "MappingProxyType(counts)",
    ),
    observe(
        "threads that count together lose events",
        "counters",
        "counters.py",
        "with self._lock:\n            self._events.setdefault",
        "if True:\n            self._events.setdefault",
    ),
    observe(
        "the longest run is the last one",
        "counters",
        "counters.py",
        "max(self.longest, seconds)",
        "seconds",
    ),
]
