"""Starts and settles that wait at the same time go together (PostgreSQL): one statement for many runs.

While two statements are under way, what arrives is collected; the next statement takes all of it. One that waits for
somebody else's row holds nobody else up for long. A single caller is never delayed, and an admission never goes through
here. What the statement does stands in ``together``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, final

from deerflow_runs.model import Run, RunId
from deerflow_runs.protocol.decision import Applied, Decision
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Settlement
from deerflow_runs.store.clauses import Shape
from deerflow_runs.store.shield import fate_of

UNDER_WAY: Final = 2
MOST: Final = 256
PATIENCE: Final = 0.1
"""Seconds after which a flush that has not ended makes room for another: a row it asks for is locked, perhaps by a
process that stands still, or the store is slow. How many there are at most is then the business of the connections."""

Asked = tuple[Settlement, asyncio.Future[Decision]]

Alone = Callable[[Settlement], Awaitable[Decision]]
Together = Callable[[RunEvent, Shape, Sequence[Settlement]], Awaitable[dict[RunId, Run]]]


@final
class Coalescer:
    """Collects settlements; ``alone`` carries out one the whole way, ``together`` many that nobody waits behind.

    Its whole mutable state: what waits, the flushes that have not ended, and which of them nobody may pass yet. Bound
    to the loop that first uses it.
    """

    def __init__(self, alone: Alone, together: Together) -> None:
        self._alone = alone
        self._together = together
        self._waiting: list[Asked] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._under_way: set[asyncio.Task[None]] = set()

    async def apply(self, asked: Settlement) -> Decision:
        """Carry out one settlement, alone or with others. Cancelling the caller does not undo it."""
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        if len(self._under_way) < UNDER_WAY:
            # One turn of the loop: whatever else became ready in it goes along.
            asyncio.get_running_loop().call_soon(self._flush_if_free)
        return await fate_of(answer, withdraw=lambda: self._withdraw(asked, answer))

    async def idle(self) -> None:
        """Wait until nothing is collected or under way."""
        while self._waiting or self._flushes:
            self._flush_if_free()
            await asyncio.wait(set(self._flushes))

    def _withdraw(self, asked: Settlement, answer: asyncio.Future[Decision]) -> bool:
        """Take back what no statement has taken up yet."""
        if (asked, answer) not in self._waiting:
            return False
        self._waiting.remove((asked, answer))
        return True

    def _flush_if_free(self) -> None:
        if not self._waiting or len(self._under_way) >= UNDER_WAY:
            return
        taken, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        flush = asyncio.create_task(self._flush(taken), name="deerflow-runs-coalesce")
        self._flushes.add(flush)
        self._under_way.add(flush)
        late = asyncio.get_running_loop().call_later(PATIENCE, self._make_room, flush)
        flush.add_done_callback(partial(self._flushed, taken, late))

    def _make_room(self, flush: asyncio.Task[None]) -> None:
        self._under_way.discard(flush)
        self._flush_if_free()

    def _flushed(self, taken: list[Asked], late: asyncio.TimerHandle, flush: asyncio.Task[None]) -> None:
        late.cancel()
        self._flushes.discard(flush)
        # The end of a loop cancels all tasks, this one too; whoever waits for its answers would wait for ever.
        error = asyncio.CancelledError() if flush.cancelled() else flush.exception()
        for _, answer in taken:
            if error is not None and not answer.done():
                answer.set_exception(error)
        self._make_room(flush)

    async def _flush(self, taken: list[Asked]) -> None:
        groups: dict[tuple[RunEvent, Shape], list[Asked]] = defaultdict(list)
        for asked, answer in taken:
            groups[asked.event, Shape.of(asked.given)].append((asked, answer))
        for (event, shape), group in groups.items():
            await self._carry_out(event, shape, group)

    async def _carry_out(self, event: RunEvent, shape: Shape, group: list[Asked]) -> None:
        """Together what can be; what did not come back, and every error, is asked again alone by its own caller."""
        once_each: dict[RunId, Settlement] = {}
        for asked, _ in group:
            once_each.setdefault(asked.key.run_id, asked)
        done = await self._done_together(event, shape, list(once_each.values()))
        left = []
        for asked, answer in group:
            run = done.get(asked.key.run_id) if once_each[asked.key.run_id] is asked else None
            if run is None:
                left.append(self._settle_alone(asked, answer))
            else:
                answer.set_result(Applied(run))
        await asyncio.gather(*left)

    async def _done_together(self, event: RunEvent, shape: Shape, asked: list[Settlement]) -> dict[RunId, Run]:
        if len(asked) < 2:
            return {}
        try:
            return await self._together(event, shape, asked)
        except Exception:  # noqa: BLE001 - whatever it was, each caller meets it again alone, under its own name
            return {}

    async def _settle_alone(self, asked: Settlement, answer: asyncio.Future[Decision]) -> None:
        try:
            decision = await self._alone(asked)
        except Exception as error:  # noqa: BLE001 - handed to the caller, who asked
            answer.set_exception(error)
        else:
            answer.set_result(decision)
