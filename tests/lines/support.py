"""Lines that are connected, and closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store.base import Renewal, Renewed, RunStore, SessionLine
from deerflow_runs.store.signals import SignalMode

T = TypeVar("T")

ME: Final = WorkerId("host:me")
OTHER: Final = WorkerId("host:other")
LIVE: Final = SessionState.LIVE

SOON: Final = 10.0
"""Seconds for what happens within milliseconds; only a failing test waits for them."""


@asynccontextmanager
async def connected(store: RunStore, worker_id: WorkerId = ME) -> AsyncIterator[SessionLine]:
    """A line without a session."""
    line = store.session_line()
    await line.connect(worker_id)
    try:
        yield line
    finally:
        await line.close()


@asynccontextmanager
async def beating(store: RunStore, worker_id: WorkerId = ME, **given: Any) -> AsyncIterator[SessionLine]:
    """A line with a session that is open and has heard what there was to hear."""
    async with connected(store, worker_id) as line:
        await line.open_session(Session(worker_id, **given))
        await line.probe()
        await line.wait(0)
        yield line


def holds(line: SessionLine) -> bool:
    """Whether it holds its hint now; a function, since what a property said a moment ago need not be so."""
    return line.hinted


def mode(line: SessionLine) -> SignalMode:
    """How it hears now."""
    return line.mode


async def beat(line: SessionLine, worker_id: WorkerId = ME) -> Renewed:
    """One beat that is accepted."""
    renewal: Renewal = await line.renew(worker_id, state=LIVE)
    assert isinstance(renewal, Renewed)
    return renewal


async def ending(work: Awaitable[T]) -> T:
    """What ``work`` answers, which must be soon."""
    return await asyncio.wait_for(work, SOON)


async def heard_out(*lines: SessionLine) -> None:
    """On SQLite everybody's own commits are signals too: hear them now."""
    for line in lines:
        for _ in range(10):
            if not await line.wait(0):
                break
        else:
            raise AssertionError("there is always something new to hear")


async def sign_of(store: RunStore, worker_id: WorkerId = ME) -> Sign:
    """What the kernel says about one session now."""
    return (await store.signs(await store.sessions())).get(worker_id, Sign.NONE)


async def until_sign(store: RunStore, expected: Sign, worker_id: WorkerId = ME) -> None:
    """Return when the kernel says so: a server needs a moment to notice that a socket was closed."""
    async with asyncio.timeout(SOON):
        while await sign_of(store, worker_id) is not expected:
            pass
