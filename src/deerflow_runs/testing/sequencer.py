"""Forces blocks of different tasks into one order, so that a race can be told step by step.

It decides nothing about what happens inside a block, and works within one event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final


class SequenceBroken(RuntimeError):
    """A task gave up before its turn, so that later turns can never come."""


@final
class Sequencer:
    """``async with sequencer(2):`` waits until the blocks 0 and 1 are over, whichever tasks they stand in.

    Positions start at 0 and are used once each. A block that ends with an error is over all the same.
    """

    def __init__(self) -> None:
        self._turns: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._turns[0].set()
        self._used: set[int] = set()
        self._broken = False

    @asynccontextmanager
    async def __call__(self, position: int) -> AsyncIterator[None]:
        """Wait for the turn of ``position``; raises ``SequenceBroken`` when it can no longer come."""
        if position < 0 or position in self._used:
            raise ValueError(f"position {position} is negative or was used before")
        self._used.add(position)
        await self._wait_for(position)
        try:
            yield
        finally:
            self._turns[position + 1].set()

    async def _wait_for(self, position: int) -> None:
        try:
            if not self._broken:
                await self._turns[position].wait()
        except asyncio.CancelledError:
            self._break()
            raise
        if self._broken:
            raise SequenceBroken(f"the turn of position {position} cannot come: an earlier task gave up")

    def _break(self) -> None:
        self._broken = True
        for turn in self._turns.values():
            turn.set()
