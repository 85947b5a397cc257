"""Ids that sort by time: UUID version 7 (RFC 9562), so that new rows go to one end of an index."""

from __future__ import annotations

import secrets
import time
import uuid


def new_id() -> str:
    """A fresh id. Random but for its first 48 bits, which are the milliseconds since 1970 by this machine's clock."""
    milliseconds = time.time_ns() // 1_000_000
    value = milliseconds << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))
