"""Callers' mistakes that can be seen before anything happens, each told with what to write instead.

Only shapes are looked at: whether a request may be stored is the store's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

from deerflow_runs.errors import InvalidValue, UsageError

Word = TypeVar("Word", bound=StrEnum)


def require_parts(
    store: object, executors: Mapping[str, object], observers: object, hooks: Mapping[str, object]
) -> None:
    """What a manager is made of. Raises ``UsageError``."""
    if isinstance(store, str):
        raise UsageError("a manager is given an open store, not its address: store_at(address)")
    for name, executor in executors.items():
        _require_methods(executor, f"executor {name!r}", "run", "encode", "decode")
    if not isinstance(observers, Iterable):
        raise UsageError("observers is a list of them, also if it is one")
    for observer in observers:
        _require_methods(observer, "an observer", "observed")
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise UsageError(f"{name} must be an async function of the ended run")


def _require_methods(one: object, what: str, *methods: str) -> None:
    if isinstance(one, type):
        raise UsageError(f"{what} must be an object, not the class {one.__name__}: write {one.__name__}()")
    missing = [name for name in methods if not callable(getattr(one, name, None))]
    if missing:
        raise UsageError(f"{what} is a {type(one).__name__}, which has no method {missing[0]}()")


def require_work(work: object) -> None:
    """What ``submit`` carries out, if it is no name. Raises ``UsageError``."""
    if not callable(work):
        given = "a coroutine; give the function and do not call it" if hasattr(work, "cr_code") else repr(work)
        raise UsageError(f"the work is the name of an executor or an async function of the lease, not {given}")


def unknown_options(unknown: Iterable[str], known: Iterable[str]) -> UsageError:
    """The error for options that do not exist."""
    names = sorted(known)
    wrong = sorted(unknown)
    near = get_close_matches(wrong[0], names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return UsageError(f"there is no option {', '.join(wrong)}: {hint}")


def word(kind: type[Word], given: Any, path: str) -> Word:
    """One of a few words, as its enum or as text. Raises ``InvalidValue`` with those there are."""
    try:
        return kind(given)
    except ValueError:
        raise InvalidValue(path, f"must be one of {', '.join(one.value for one in kind)}") from None
