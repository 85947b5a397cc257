"""How a caller that may be cancelled waits for work that must not be: until its fate is known.

Both ``writer`` and ``connections`` wait here and nowhere else. Nothing here knows a database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def _under_way() -> bool:
    return False


async def fate_of(work: asyncio.Future[T], *, withdraw: Callable[[], bool] = _under_way) -> T:
    """The outcome of ``work``, which is not cancelled when the caller is.

    However often the caller is cancelled meanwhile (a cancel scope may do it at every turn of the loop), it waits for
    the end of ``work`` and is told of its cancellation then; the outcome is dropped, an error included. If
    ``withdraw()`` says that the work had not begun and never will, the caller is told at once.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
            if withdraw():
                work.cancel()
                raise
    if cancelled is None:
        return work.result()
    if not work.cancelled():
        work.exception()  # looked at: nobody else will, and the loop would complain
    raise cancelled
