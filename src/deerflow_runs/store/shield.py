"""How a caller that may be cancelled waits for work that must not be: until its fate is known.

Everybody in the store who waits for such work waits here. Nothing here knows a database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, final

T = TypeVar("T")


def _under_way() -> bool:
    """Work that cannot be withdrawn."""
    return False


@final
class Fate(asyncio.Future[T]):
    """What becomes of a piece of work. Made and set in one event loop; ``await`` it in one task.

    However often that task is cancelled meanwhile (a cancel scope may do it at every turn of the loop), it waits for
    the end and is told of its cancellation then; the outcome is dropped, an error included. Only if ``withdraw()``
    says that the work had not begun and never will, it is told at once.
    """

    def __init__(self, *, withdraw: Callable[[], bool] = _under_way) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self, msg: Any | None = None) -> bool:
        """What a task does with that for which it waits. After False it remembers its cancellation until it wakes."""
        return not self.done() and self._withdraw() and super().cancel(msg)

    def succeed(self, value: T) -> None:
        """It ended with a value. Nothing happens if its end is known already."""
        if not self.done():
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """It ended with an error. Nothing happens if its end is known already."""
        if self.done():
            return
        if isinstance(error, StopIteration):  # a future cannot hold one
            error = RuntimeError(f"a unit of work raised {error!r}")
        self.set_exception(error)


async def see_through(work: Callable[[], Awaitable[T]], *, name: str) -> T:
    """Do ``work`` in a task of its own, which the caller's cancellation does not reach."""
    fate = Fate[T]()
    task = asyncio.create_task(_report(work, fate), name=name)
    # The end of a loop cancels all tasks; one that had not begun reports nothing.
    task.add_done_callback(lambda _: fate.fail(asyncio.CancelledError()))
    return await fate


async def fate_of(work: asyncio.Future[T], *, withdraw: Callable[[], bool] = _under_way) -> T:
    """The outcome of ``work``, which is not cancelled when the caller is: see ``Fate``."""
    fate = Fate[T](withdraw=withdraw)

    def follow(ended: asyncio.Future[T]) -> None:
        if ended.cancelled():
            fate.fail(asyncio.CancelledError())
        elif (error := ended.exception()) is not None:
            fate.fail(error)
        else:
            fate.succeed(ended.result())

    work.add_done_callback(follow)
    return await fate


async def _report(work: Callable[[], Awaitable[T]], fate: Fate[T]) -> None:
    try:
        fate.succeed(await work())
    except BaseException as error:  # noqa: BLE001 - raised where the caller waits
        fate.fail(error)
