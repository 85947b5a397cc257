"""The quick way for what nearly every value is: JSON already, within all limits. All others are for ``jsonable``.

Types and sizes are looked at level by level; everything about texts is read off the encoded whole.
"""

from __future__ import annotations

from typing import Any, Final

from deerflow_runs.model import Json
from deerflow_runs.store.jsonable import INT64, MAX_DEPTH
from deerflow_runs.store.texts import decode, encode

MAX_NODES: Final = 100_000
"""Beyond these the careful way is taken, which stops as soon as the size is too large."""

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_PLAIN: Final = _SCALARS | {list, dict}
_NUL: Final = r"\u0000"
"""How a NUL is encoded; a text that spells it out is suspected for nothing."""


def copied(value: Any, limit_bytes: int) -> tuple[Json] | None:
    """A copy of ``value``, in a tuple since it may be None; None if it is not certainly storable as it stands."""
    if not is_plain(value, limit_bytes):
        return None
    try:
        encoded = encode(value)
        size = len(encoded.encode())
    except (ValueError, RecursionError):  # NaN, a lone surrogate; a caller near the end of the stack
        return None
    return (decode(encoded),) if size <= limit_bytes and _NUL not in encoded else None


def is_plain(value: Any, limit_bytes: int) -> bool:
    """Exact JSON types only, not too deep, and roughly not too large: shared parts count as often as they occur."""
    children, nodes, characters = [value], 0, 0
    for _ in range(MAX_DEPTH + 1):
        nodes += len(children)
        if not _PLAIN.issuperset(map(type, children)) or nodes > MAX_NODES:
            return False
        if any(child not in INT64 for child in children if type(child) is int):
            return False
        characters += sum(len(child) for child in children if type(child) is str)
        containers = [child for child in children if type(child) not in _SCALARS]
        if not containers or characters > limit_bytes:
            return characters <= limit_bytes
        children = []
        for container in containers:
            if type(container) is dict:
                if not all(type(key) is str for key in container):
                    return False
                characters += sum(map(len, container))
                children.extend(container.values())
            else:
                children.extend(container)
    return False
