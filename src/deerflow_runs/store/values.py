"""What may be stored, alike on SQLite and Postgres: caller's input is made JSON or refused, a run's own is repaired.

Texts, their limits and the one encoding of JSON live here; how a nested value is walked stands in ``jsonable``.
No message ever holds a value, only its path and its type: it may be a secret.

====================================  =======================================  ====================================
value                                 a caller's (``storable``)                a run's own (``repaired``)
====================================  =======================================  ====================================
None, bool, text, finite float        kept                                     kept
int of at most 64 bits, with sign     kept                                     kept
list, tuple                           list                                     list
set, frozenset                        list, ordered by the encoded elements    the same
dict and other mappings               dict, in the order given                 the same
pydantic model, dataclass             dict of its fields (``model_dump``)      the same; text if dumping fails
Enum                                  its value                                the same
datetime, date, time                  ISO 8601 text, as naive or aware as was  the same
timedelta                             seconds                                  the same
Decimal (finite), UUID, Path, URL,    text                                     text
IP address
text with NUL or lone surrogates      refused                                  U+FFFD in their place
NaN, Infinity, larger int             refused                                  text
bytes                                 refused: encode them                     base64 text
key that is no text                   refused                                  its text
contains itself                       refused                                  ``<contains itself>``
more than 200 levels deep             refused                                  ``<more than 200 levels deep>``
larger than the limit                 refused                                  cut there
anything else                         refused                                  its text
====================================  =======================================  ====================================
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import Json
from deerflow_runs.store.jsonable import BODY_BYTES, Mending, Strict, Walk
from deerflow_runs.store.plain import copied
from deerflow_runs.store.texts import ERROR_BYTES, cut_text, decode, described, encode, flaw

__all__ = [
    "BODY_BYTES",
    "ERROR_BYTES",
    "ID_CHARACTERS",
    "METADATA_BYTES",
    "MODEL_NAME_CHARACTERS",
    "cut_text",
    "decode",
    "digest",
    "encode",
    "model_name",
    "repaired",
    "storable",
    "text",
]

METADATA_BYTES: Final = 256 * 1024
ID_CHARACTERS: Final = 255
MODEL_NAME_CHARACTERS: Final = 128


def storable(value: Any, path: str, *, limit_bytes: int = BODY_BYTES) -> Json:
    """Make JSON of a caller's value, or raise ``InvalidValue`` with the place below ``path``.

    What is returned comes back equal from both databases, and making it storable again changes nothing.
    ``limit_bytes`` is the size of its UTF-8 encoded JSON.
    """
    plain = copied(value, limit_bytes)
    return plain[0] if plain else Walk(Strict(path), limit_bytes).run(value)


def repaired(value: Any, path: str, *, limit_bytes: int = BODY_BYTES) -> tuple[Json, tuple[str, ...]]:
    """Make JSON of whatever a run produced, and say what had to be replaced or cut. Never raises for any value."""
    plain = copied(value, limit_bytes)
    if plain:
        return plain[0], ()
    mending = Mending(path)
    return Walk(mending, limit_bytes).run(value), mending.notes()


def text(value: Any, path: str, max_len: int = ID_CHARACTERS, *, nonempty: bool = False) -> str:
    """An id or a name of at most ``max_len`` characters (not bytes), or ``InvalidValue``."""
    if not isinstance(value, str):
        raise InvalidValue(path, f"must be text, not a value of type {type(value).__name__}")
    plain = str.__str__(value)
    found = flaw(plain)
    if found:
        raise InvalidValue(path, found)
    if nonempty and not plain:
        raise InvalidValue(path, "must not be empty")
    if len(plain) > max_len:
        raise InvalidValue(path, f"has {len(plain)} characters, and {max_len} are allowed")
    return plain


def model_name(value: Any) -> str | None:
    """A model's name as it is stored: text, trimmed, at most 128 characters; None clears it. Never raises."""
    if value is None:
        return None
    return described(value).strip()[:MODEL_NAME_CHARACTERS].rstrip() or None


def digest(value: Json) -> str:
    """The digest of a payload (O5): equal for equal payloads, whatever the order of their keys. Takes storable JSON."""
    canonical = json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
