"""Text that both databases hold: the JSON of a value, what is wrong with a text, and how a run's own is made to fit.

Nothing here decides what a value is made of (see ``jsonable``).
"""

from __future__ import annotations

import json
from typing import Any, Final

from deerflow_runs.model import Json

ERROR_BYTES: Final = 8 * 1024
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
UNREADABLE: Final = "object"

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Json) -> str:
    """JSON as both databases hold it, in their text columns: keys in the order given, characters as they are.

    Characters are not escaped: a limit in bytes then means what it says, and both databases hold UTF-8.
    """
    return _ENCODER.encode(value)


def decode(stored: str) -> Json:
    """The value that ``encode`` made text of."""
    value: Json = json.loads(stored)
    return value


def flaw(text: str) -> str | None:
    """Why a database would not hold this text; None if both would."""
    if "\0" in text:
        return "holds a NUL character, which Postgres cannot store"
    if not text.isascii() and utf8_size(text) is None:
        return "holds half of a surrogate pair, which is no character"
    return None


def utf8_size(text: str) -> int | None:
    """Length in bytes of UTF-8; None if the text has none, because of a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def cleaned(text: str) -> str:
    """The text with U+FFFD for every NUL and every lone surrogate; two halves of a pair become their character."""
    if flaw(text) is None:
        return text
    return text.replace("\0", REPLACEMENT).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cut_text(text: str, limit_bytes: int = ERROR_BYTES) -> str:
    """A run's own text, cleaned, in at most ``limit_bytes`` of UTF-8. Never cut inside a character; a cut is said."""
    # Each character is a byte at least: what is beyond the limit need not be cleaned.
    data = cleaned(text[: limit_bytes + 1]).encode()
    if len(data) <= limit_bytes:
        return data.decode()
    mark = f"… [cut, {len(text)} characters in all]"
    room = limit_bytes - len(mark.encode())
    return (data[:room].decode(errors="ignore") + mark) if room >= 0 else data[:limit_bytes].decode(errors="ignore")


def described(value: Any, limit_bytes: int = ERROR_BYTES) -> str:
    """What an object says of itself, cleaned and cut; only its type's name when it says nothing or fails to."""
    try:
        kind: Any = type(value)
        silent = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
        return f"<{type_name(value)}>" if silent else cut_text(str.__str__(str(value)), limit_bytes)
    except Exception:  # noqa: BLE001 (the object's own code runs here, and may fail in any way)
        return f"<{type_name(value)}>"


def type_name(value: Any) -> str:
    """The name of an object's type, for messages."""
    try:
        return cut_text(type(value).__qualname__, 100)
    except Exception:  # noqa: BLE001 (a metaclass runs its own code here)
        return UNREADABLE
