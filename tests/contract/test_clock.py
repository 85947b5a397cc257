"""Both clocks keep the same promises; the manual one wakes sleepers in order; the sequencer orders blocks of tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from deerflow_runs.clock import Clock, SystemClock
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.sequencer import SequenceBroken, Sequencer
from tests.rules import rule

PassTime = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Real time passes by itself."""


@pytest.fixture(params=["system", "manual"])
def clock_and_time(request: pytest.FixtureRequest) -> tuple[Clock, PassTime]:
    if request.param == "system":
        return SystemClock(), nothing
    manual = ManualClock()
    return manual, lambda: manual.advance(1)


async def test_boot_time_never_goes_back_and_sleepers_wake_by_deadline(
    clock_and_time: tuple[Clock, PassTime],
) -> None:
    clock, pass_time = clock_and_time
    before, woken = clock.boot_time(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as tasks:
        for seconds in (0.03, 0.01, 0.02):
            tasks.create_task(sleeper(seconds))
        await pass_time()
    assert woken == [0.01, 0.02, 0.03]
    assert clock.boot_time() >= before


@pytest.mark.parametrize("seconds", [0, -1])
async def test_sleeping_for_no_time_lets_others_run(clock_and_time: tuple[Clock, PassTime], seconds: float) -> None:
    clock, _ = clock_and_time
    ran = asyncio.create_task(nothing())
    await clock.sleep(seconds)
    assert ran.done()


async def test_a_sleeper_can_be_cancelled(clock_and_time: tuple[Clock, PassTime]) -> None:
    clock, pass_time = clock_and_time
    sleeper = asyncio.create_task(clock.sleep(3600))
    await clock.sleep(0)
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    await pass_time()


def test_the_wall_clock_is_in_whole_microseconds(clock_and_time: tuple[Clock, PassTime]) -> None:
    clock, _ = clock_and_time
    assert type(clock.wall()) is int
    assert clock.wall() > 10**14


@rule("O9")
def test_boot_time_counts_while_the_machine_is_suspended_where_that_is_possible() -> None:
    counting = time.CLOCK_BOOTTIME if hasattr(time, "CLOCK_BOOTTIME") else time.CLOCK_MONOTONIC
    before = time.clock_gettime(counting)
    assert before <= SystemClock().boot_time() <= time.clock_gettime(counting)


# --- The manual clock


def test_time_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(boot_time=5, wall=7)
    assert (clock.boot_time(), clock.wall()) == (5.0, 7_000_000)
    for _ in range(10):
        clock.jump(0.1)
    assert (clock.boot_time(), clock.wall()) == (6.0, 8_000_000)


@rule("O9")
def test_a_step_of_the_wall_clock_moves_nothing_else() -> None:
    clock = ManualClock()
    boot_time, wall = clock.boot_time(), clock.wall()
    clock.step_wall(-31)
    assert (clock.boot_time(), clock.wall()) == (boot_time, wall - 31_000_000)


async def test_a_periodic_task_acts_at_each_of_its_times() -> None:
    clock = ManualClock(boot_time=0)
    beats: list[float] = []

    async def beat() -> None:
        while True:
            await clock.sleep(2.5)
            beats.append(clock.boot_time())

    task = asyncio.create_task(beat())
    await clock.advance(10)
    assert beats == [2.5, 5.0, 7.5, 10.0]
    assert clock.boot_time() == 10.0
    clock.jump(10)
    await clock.advance(0)
    assert beats[4:] == [20.0], "after a jump it was late once, not four times"
    task.cancel()


async def test_sleepers_of_the_same_time_wake_in_the_order_they_fell_asleep() -> None:
    clock, woken = ManualClock(), []

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await clock.sleep(nap)
        woken.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, naps in (("a", [1, 1]), ("b", [2]), ("c", [1]), ("d", [2])):
            tasks.create_task(sleeper(name, *naps))
        await clock.until_sleeping(4)
        await clock.advance(2)
    assert woken == ["c", "b", "d", "a"]
    assert clock.sleeping == 0


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    sleeper = asyncio.create_task(clock.sleep(1))
    await clock.until_sleeping(1)
    sleeper.cancel()
    await asyncio.wait([sleeper])
    assert clock.sleeping == 0
    await clock.advance(2)


async def test_a_sleeper_of_another_thread_wakes_too() -> None:
    clock = ManualClock()
    thread = threading.Thread(target=lambda: asyncio.run(clock.sleep(5)))
    thread.start()
    await clock.until_sleeping(1)
    clock.jump(5)
    await asyncio.to_thread(thread.join)
    assert clock.sleeping == 0


# --- The sequencer


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
async def test_blocks_run_in_the_order_of_their_positions(order: tuple[int, ...]) -> None:
    sequencer, ran = Sequencer(), []

    async def block(position: int) -> None:
        async with sequencer(position):
            ran.append(("in", position))
            await asyncio.sleep(0)
            ran.append(("out", position))

    await asyncio.gather(*(block(position) for position in order))
    assert ran == [(word, position) for position in range(4) for word in ("in", "out")]


async def test_a_block_that_fails_is_over_all_the_same() -> None:
    sequencer = Sequencer()
    with pytest.raises(KeyError):
        async with sequencer(0):
            raise KeyError
    async with sequencer(1):
        pass


async def test_a_task_that_gives_up_before_its_turn_breaks_the_sequence() -> None:
    sequencer = Sequencer()

    async def block(position: int) -> None:
        async with sequencer(position):
            pass

    first, second = asyncio.create_task(block(1)), asyncio.create_task(block(2))
    await asyncio.sleep(0)
    first.cancel()
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
    with pytest.raises(SequenceBroken):
        await second
    with pytest.raises(SequenceBroken):
        await block(3)


async def test_a_position_is_used_once() -> None:
    sequencer = Sequencer()
    async with sequencer(0):
        with pytest.raises(ValueError, match="used before"):
            async with sequencer(0):
                pass
    with pytest.raises(ValueError, match="negative"):
        async with sequencer(-1):
            pass
