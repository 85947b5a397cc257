"""Starts and settles that were collected: nobody is forgotten at an end, and nobody waits for somebody else's row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deerflow_runs.model import Run, RunId, RunKey, ThreadId, WorkerId
from deerflow_runs.protocol.decision import Actor, Applied, Decision
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Settlement
from deerflow_runs.store.clauses import Shape
from deerflow_runs.store.coalesce import Coalescer
from tests.rules import rule


class Rows:
    """Stands for the database: a run in ``locked`` is answered only after ``unlock``."""

    def __init__(self, *locked: str) -> None:
        self._locked = locked
        self._unlocked = asyncio.Event()
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    async def alone(self, asked: Settlement) -> Decision:
        self.asked.put_nowait(asked.key.run_id)
        if asked.key.run_id in self._locked:
            await self._unlocked.wait()
        return Applied(Run(asked.key.run_id, asked.key.thread_id))

    async def together(self, event: RunEvent, shape: Shape, asked: Sequence[Settlement]) -> dict[RunId, Run]:
        """Never waits: what is locked does not come back."""
        runs = (Run(one.key.run_id, one.key.thread_id) for one in asked if one.key.run_id not in self._locked)
        return {run.run_id: run for run in runs}

    def unlock(self) -> None:
        self._unlocked.set()


def start(run_id: str) -> Settlement:
    return Settlement(RunKey(ThreadId(run_id), RunId(run_id)), RunEvent.START, Actor(WorkerId("me"), 1))


@pytest.mark.timeout(20)
@rule("O35")
async def test_the_end_of_a_loop_leaves_nobody_waiting_for_an_answer() -> None:
    rows = Rows("a")
    coalescer = Coalescer(rows.alone, rows.together)
    caller = asyncio.create_task(coalescer.apply(start("a")))
    await rows.asked.get()
    everybody = asyncio.all_tasks() - {asyncio.current_task()}
    for task in everybody:  # as asyncio.run() does
        task.cancel()
    await asyncio.wait(everybody)
    assert caller.cancelled()


@rule("O35")
async def test_what_was_collected_before_a_close_is_carried_out_by_it() -> None:
    rows = Rows()
    coalescer = Coalescer(rows.alone, rows.together)
    caller = asyncio.create_task(coalescer.apply(start("a")))
    await asyncio.sleep(0)  # it has asked, and nothing more
    await coalescer.idle()
    assert rows.asked.get_nowait() == "a"
    assert isinstance(await caller, Applied)


@rule("O14", "F41")
@pytest.mark.parametrize("at_once", [False, True])
async def test_runs_whose_rows_are_locked_hold_no_other_run_up(at_once: bool) -> None:
    rows = Rows("a", "b", "c", "d")
    coalescer = Coalescer(rows.alone, rows.together)
    stuck = []
    for run_id in "abcd":
        stuck.append(asyncio.create_task(coalescer.apply(start(run_id))))
        if not at_once:
            await rows.asked.get()
    other = await coalescer.apply(start("e"))
    assert isinstance(other, Applied)
    assert not any(task.done() for task in stuck)
    rows.unlock()
    await asyncio.gather(*stuck)
