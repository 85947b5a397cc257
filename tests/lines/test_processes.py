"""What the kernel says of sessions whose processes live, stand still, die, and leave children behind (O27)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deerflow_runs import store_at
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store.signals import Signal
from tests.lines.programs import hold, hold_and_fork, hold_and_start, wake
from tests.lines.support import ME, OTHER, connected, ending, sign_of, until_sign
from tests.migrations.processes import kill, process
from tests.rules import rule

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no flock, no fork and no SIGSTOP there")


def freed(dsn: str) -> Sign:
    """What a lock says that was freed."""
    return Sign.PROOF if dsn.startswith("sqlite") else Sign.HINT


@rule("O27")
async def test_a_hint_is_free_once_its_process_was_killed_and_not_before(dsn: str) -> None:
    async with store_at(dsn) as store:
        with process(hold, dsn, ME) as (holder, pipe):
            assert pipe.recv()
            assert await sign_of(store) is Sign.NONE
            kill(holder)
            await until_sign(store, freed(dsn))


@rule("O27")
async def test_a_process_that_stands_still_keeps_its_hint(dsn: str) -> None:
    async with store_at(dsn) as store:
        with process(hold, dsn, ME) as (holder, pipe):
            assert pipe.recv()
            assert holder.pid is not None
            os.kill(holder.pid, signal.SIGSTOP)
            for _ in range(20):
                assert await sign_of(store) is Sign.NONE


@rule("O27")
@pytest.mark.parametrize("holding", [hold_and_fork, hold_and_start])
async def test_a_child_that_lives_on_does_not_keep_its_dead_parent_s_hint(
    holding: Callable[..., None], dsn: str
) -> None:
    async with store_at(dsn) as store:
        with process(holding, dsn, ME) as (holder, pipe), living(pipe.recv()) as child:
            assert pipe.recv(), "the parent itself must go on with its hint"
            assert await sign_of(store) is Sign.NONE
            kill(holder)
            await until_sign(store, freed(dsn))
            os.kill(child, 0)  # it does live on


@rule("O34")
async def test_a_commit_of_another_process_wakes_a_line_on_the_same_file(sqlite_dsn: str) -> None:
    async with store_at(sqlite_dsn) as store, connected(store) as line:
        with process(wake, sqlite_dsn, OTHER) as (_, pipe):
            assert await asyncio.to_thread(pipe.recv) == "ready"
            assert await line.wait(0) == frozenset()
            wait = asyncio.create_task(line.wait(60))
            pipe.send("go")
            assert await ending(wait) == {Signal.CANCEL, Signal.WORK}


@contextmanager
def living(child: Any) -> Iterator[int]:
    """Not beyond the test."""
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
