"""Walks a value of any shape and makes JSON of it, without recursion: depth, size and cycles may be hostile.

How a value of each type is read stands here once; what becomes of one that cannot be stored is said by a ``Strict``
or a ``Mending`` companion. The rules as a table: ``values``.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from json.encoder import encode_basestring
from pathlib import PurePath
from typing import Any, Final, NoReturn, Protocol, TypeVar
from uuid import UUID

from pydantic import AnyUrl, BaseModel

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import Json
from deerflow_runs.store.texts import cleaned, described, encode, flaw, type_name

BODY_BYTES: Final = 32 * 1024 * 1024
MAX_DEPTH: Final = 200
MAX_NOTES: Final = 20
INT64: Final = range(-(2**63), 2**63)

Subject = TypeVar("Subject")
Found = TypeVar("Found")

Key = str | int | None
"""Where a value stands in its container; None for the root."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a value cannot be stored, and what a mended one becomes (asked for only then)."""

    reason: str
    instead: Callable[[], Json]


def unfit(reason: str, instead: Json) -> Unfit:
    return Unfit(reason, lambda: instead)


NO_NUMBER: Final = "NaN or an infinity, which JSON does not have"
TOO_DEEP: Final = unfit(f"more than {MAX_DEPTH} levels deep", f"<more than {MAX_DEPTH} levels deep>")


@dataclass(frozen=True, slots=True)
class Instead:
    """The value to be read in another's place: an enum's, or a model's fields."""

    value: Any


@dataclass(slots=True)
class Open:
    """A container on the way from the root to the value at hand; ``source`` is held so that its identity is kept."""

    source: Any
    children: Iterator[tuple[Any, Any]]
    result: list[Json] | dict[str, Json]
    ordered: bool = True
    key: Key = None


class Companion(Protocol):
    """Decides what happens where a value cannot be stored."""

    def unfit(self, keys: list[Key], problem: Unfit) -> Json:
        """Raise, or return what stands in its place."""

    def full(self, keys: list[Key], limit_bytes: int) -> None:
        """Raise, or note that the rest is cut off."""


class Strict:
    """Refuses with ``InvalidValue``, naming the path and never the value."""

    def __init__(self, path: str) -> None:
        self._path = path

    def unfit(self, keys: list[Key], problem: Unfit) -> NoReturn:
        raise InvalidValue(path_of(self._path, keys), problem.reason)

    def full(self, keys: list[Key], limit_bytes: int) -> NoReturn:  # noqa: ARG002 (the whole is too large, not a part)
        raise InvalidValue(self._path, f"is larger than {limit_bytes} bytes of JSON")


class Mending:
    """Puts something storable in its place, and keeps the first notes of what was mended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._notes: list[str] = []
        self._more = 0

    def unfit(self, keys: list[Key], problem: Unfit) -> Json:
        self._note(keys, problem.reason)
        return problem.instead()

    def full(self, keys: list[Key], limit_bytes: int) -> None:
        self._note(keys, f"cut off here, at {limit_bytes} bytes of JSON")

    def notes(self) -> tuple[str, ...]:
        """What was mended, the first twenty in full."""
        return (*self._notes, f"and {self._more} more") if self._more else tuple(self._notes)

    def _note(self, keys: list[Key], reason: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(f"{path_of(self._path, keys)}: {reason}")
        else:
            self._more += 1


class Walk:
    """One pass over one value. Its state: the open containers, their identities, and the bytes still allowed."""

    def __init__(self, companion: Companion, limit_bytes: int) -> None:
        self._companion = companion
        self._limit = limit_bytes
        self._left = limit_bytes
        self._full = False
        self._root: list[Json] = []
        self._stack = [Open(None, iter(()), self._root)]
        self._identities: set[int] = set()

    def run(self, value: Any) -> Json:
        """The JSON of ``value``; where it has none, what the companion says."""
        self._put(None, value)
        while len(self._stack) > 1:
            child = None if self._full else self._next_child(self._stack[-1])
            if child is None:
                self._close()
            else:
                self._put(*child)
        return self._root[0] if self._root else None

    def _next_child(self, top: Open) -> tuple[Key, Any] | None:
        child = attempt(lambda children: next(children, None), top.children)
        if isinstance(child, Unfit):
            self._companion.unfit(self._keys(), child)
            return None
        if child is None or not isinstance(top.result, dict):
            return child
        return self._name(child[0], top.result), child[1]

    def _name(self, key: Any, taken: dict[str, Json]) -> str:
        name = attempt(read_key, key)
        if isinstance(name, Unfit):
            name = str(self._companion.unfit(self._keys(), name))
        if name in taken:
            twice = unfit("two keys that are the same text", f"{name} ({len(taken) + 1})")
            name = str(self._companion.unfit(self._keys(), twice))
        return name

    def _put(self, key: Key, value: Any) -> None:
        """Add one child to the innermost container; open it if it is a container itself."""
        top = self._stack[-1]
        found = self._admissible(attempt(read, value))
        if isinstance(found, Unfit):
            found = self._companion.unfit(self._keys(key), found)
        around = (1 if top.result else 0) + (size_of(key) + 1 if isinstance(key, str) else 0)
        if not isinstance(found, Open):
            self._put_leaf(key, found, around)
        elif self._takes(key, around + 2):
            self._add(key, found.result)
            found.key = key
            self._stack.append(found)
            self._identities.add(id(found.source))

    def _put_leaf(self, key: Key, leaf: Json, around: int) -> None:
        room = self._left - around
        if self._takes(key, around + size_of(leaf)):
            self._add(key, leaf)
        elif isinstance(leaf, str) and room > 2:
            self._add(key, fitting(leaf, room))

    def _admissible(self, found: Json | Open | Unfit) -> Json | Open | Unfit:
        if isinstance(found, Open):
            if id(found.source) in self._identities:
                return unfit("contains itself", "<contains itself>")
            if len(self._stack) > MAX_DEPTH:
                return TOO_DEEP
        return found

    def _takes(self, key: Key, size: int) -> bool:
        if size <= self._left:
            self._left -= size
            return True
        self._full = True
        self._companion.full(self._keys(key), self._limit)
        return False

    def _add(self, key: Key, value: Json) -> None:
        result = self._stack[-1].result
        if isinstance(result, dict):
            result[str(key)] = value
        else:
            result.append(value)

    def _close(self) -> None:
        done = self._stack.pop()
        self._identities.discard(id(done.source))
        if not done.ordered and isinstance(done.result, list):
            done.result.sort(key=encode)

    def _keys(self, last: Key = None) -> list[Key]:
        return [*(container.key for container in self._stack), last]


# --- How a value of each type is read


def attempt(reading: Callable[[Subject], Found], subject: Subject) -> Found | Unfit:
    """Read something whose own code may fail in any way; if it does, that is why it is unfit."""
    try:
        return reading(subject)
    except Exception as error:  # noqa: BLE001 (a value's own code runs here: properties, iterators, model_dump)
        reason = f"a value of type {type_name(subject)} that fails to be read ({type_name(error)})"
        return Unfit(reason, partial(described, subject))


def read(value: Any) -> Json | Open | Unfit:
    """Read one value of any type, its children not included."""
    for _ in range(MAX_DEPTH):
        found = read_builtin(value)
        if not isinstance(found, Instead):
            return found
        value = found.value
    return TOO_DEEP


def read_builtin(value: Any) -> Json | Open | Instead | Unfit:
    """The types that JSON itself has, by their exact type: nearly every value is one of these."""
    kind = type(value)
    if kind is str:
        return read_text(value)
    if value is None or value is True or value is False:
        return value
    if kind is int:
        return read_integer(value)
    if kind is float:
        return read_float(value)
    if kind is dict:
        return Open(value, iter(value.items()), {})
    if kind is list:
        return Open(value, enumerate(value), [])
    return read_container(value) or read_scalar(value)


def read_container(value: Any) -> Open | Instead | None:
    """Containers of other types; None if it is not one of them."""
    if isinstance(value, Mapping):
        return Open(value, ((key, item) for key, item in value.items()), {})
    if isinstance(value, list | tuple):
        return Open(value, enumerate(value), [])
    if isinstance(value, set | frozenset):
        return Open(value, enumerate(value), [], ordered=False)
    if isinstance(value, BaseModel):
        return Instead(value.model_dump(serialize_as_any=True, warnings=False))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return Open(value, ((name, getattr(value, name)) for name in names), {})
    return None


def read_scalar(value: Any) -> Json | Instead | Unfit:
    """Everything that becomes text or a number, or cannot be stored."""
    if isinstance(value, str):
        return read_text(str.__str__(value))
    if isinstance(value, int):
        return read_integer(int.__int__(value))
    if isinstance(value, float):
        return read_float(float.__float__(value))
    if isinstance(value, Enum):
        return Instead(value.value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime | date | time):
        return read_text(value.isoformat())
    if isinstance(value, Decimal) and not value.is_finite():
        return Unfit(NO_NUMBER, partial(described, value))
    if isinstance(value, Decimal | UUID | PurePath | AnyUrl | IPv4Address | IPv6Address):
        return read_text(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return Unfit("bytes; encode them as text, for example base64", lambda: base64.b64encode(data).decode())
    return Unfit(f"a value of type {type_name(value)}", partial(described, value))


def read_text(value: str) -> str | Unfit:
    reason = flaw(value)
    return value if reason is None else Unfit(reason, partial(cleaned, value))


def read_float(value: float) -> float | Unfit:
    return value if math.isfinite(value) else Unfit(NO_NUMBER, partial(described, value))


def read_integer(value: int) -> int | Unfit:
    return value if value in INT64 else Unfit("an integer beyond 64 bits; write it as text", partial(described, value))


def read_key(key: Any) -> str | Unfit:
    if isinstance(key, str):
        return read_text(str.__str__(key))
    return Unfit(f"a key of type {type_name(key)}, and keys must be text", partial(described, key))


# --- Sizes and paths


def size_of(leaf: Json) -> int:
    """Bytes of the leaf's JSON; a container's brackets and children are counted where they are added."""
    if isinstance(leaf, str):
        quoted = encode_basestring(leaf)
        return len(quoted) if quoted.isascii() else len(quoted.encode())
    return 4 if leaf is None or leaf is True else 5 if leaf is False else len(repr(leaf))


def fitting(text: str, room: int) -> str:
    """The longest beginning of a text whose JSON fits into ``room`` bytes."""
    return text[: bisect_right(range(min(len(text), room) + 1), room, key=lambda length: size_of(text[:length])) - 1]


def path_of(base: str, keys: list[Key]) -> str:
    """A place for people: ``metadata.tags[3]``. Long keys and long paths are shortened."""
    path = base + "".join(segment(key) for key in keys)
    return path if len(path) <= 300 else f"{path[:150]}…{path[-150:]}"


def segment(key: Key) -> str:
    if key is None:
        return ""
    if isinstance(key, int):
        return f"[{key}]"
    if key.isidentifier() and len(key) <= 60:
        return f".{key}"
    return f"[{key if len(key) <= 60 else key[:60] + '…'!r}]"
