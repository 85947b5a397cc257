"""Units of work on one small table, and ways to watch what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import Connection, insert, select, update

from deerflow_runs.store.schema import fence
from deerflow_runs.store.units import Unit, Units


def put(*names: str) -> Unit[None]:
    """One row for each name, a statement each. A name that is there already is an error."""

    def unit(connection: Connection) -> None:
        for name in names:
            connection.execute(insert(fence), {"thread_id": name, "turn": 0, "epoch": 0})

    return unit


def count_up(name: str) -> Unit[int]:
    """Add one to a row in one statement, and answer with the sum."""

    def unit(connection: Connection) -> int:
        changed = update(fence).where(fence.c.thread_id == name).values(turn=fence.c.turn + 1).returning(fence.c.turn)
        return int(connection.execute(changed).scalar_one())

    return unit


def look(connection: Connection) -> dict[str, int]:
    """What every row has counted up to. A unit that reads."""
    return {row.thread_id: row.turn for row in connection.execute(select(fence.c.thread_id, fence.c.turn))}


async def present(units: Units, *names: str) -> list[bool]:
    """Which of the names have a row."""
    rows = await units.read(look)
    return [name in rows for name in names]


def fails(error: BaseException, *names: str) -> Unit[None]:
    """Put rows, then raise."""

    def unit(connection: Connection) -> None:
        put(*names)(connection)
        raise error

    return unit


class Gate:
    """A unit that keeps the writer of SQLite busy until it is let go."""

    def __init__(self) -> None:
        self._inside = threading.Event()
        self._go = threading.Event()

    def unit(self, connection: Connection) -> None:
        self._inside.set()
        assert self._go.wait(10), "nobody opened the gate"

    async def reached(self) -> None:
        """Return when the unit runs."""
        assert await asyncio.to_thread(self._inside.wait, 10), "nobody came to the gate"

    def open(self) -> None:
        """Let the unit end."""
        self._go.set()


@asynccontextmanager
async def busy(units: Units) -> AsyncIterator[Gate]:
    """Meanwhile the writer is inside a unit; it ends at the latest with the block."""
    gate = Gate()
    holder = asyncio.create_task(units.once(gate.unit), name="gate")
    try:
        await gate.reached()
        yield gate
    finally:
        gate.open()
        await holder


async def everybody_has_asked() -> None:
    """Let every task that was just made run until it waits."""
    await asyncio.sleep(0)


@contextmanager
def no_complaints() -> Iterator[None]:
    """Fail if the event loop had something to complain about, such as an exception nobody has looked at."""
    heard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: heard.append(context))
    try:
        yield
        gc.collect()
        assert heard == []
    finally:
        loop.set_exception_handler(None)


def other_tasks() -> set[str]:
    """The names of all tasks but the one that asks."""
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
