"""Twenty newcomers from four processes want one fresh thread at the same moment, two hundred times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from deerflow_runs import EVERYONE, RunStatus, Strategy, ThreadId, store_at
from tests.migrations.processes import process
from tests.processes.admission_programs import CALLERS, ROUNDS, Told, ask_in_rounds
from tests.rules import rule

PROCESSES = 4


def rounds(pipes: list[Connection], number: int) -> Iterator[tuple[str, list[Told]]]:
    """Let all processes ask for one thread after the other; what each of them was told."""
    for name in (f"round-{n}" for n in range(number)):
        for pipe in pipes:
            pipe.send(name)
        yield name, [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("enough")


def gateways(stack: ExitStack, dsn: str, strategy: Strategy) -> list[Connection]:
    """Processes that stand ready."""
    pipes = [stack.enter_context(process(ask_in_rounds, dsn, strategy.value))[1] for _ in range(PROCESSES)]
    assert [pipe.recv() for pipe in pipes] == ["ready"] * PROCESSES
    return pipes


@rule("O1", "I1", "T1", "B002")
@pytest.mark.timeout(300)
def test_of_twenty_newcomers_exactly_one_gets_the_thread_and_the_others_are_told_who(dsn: str) -> None:
    with ExitStack() as stack:
        for _, told in rounds(gateways(stack, dsn, Strategy.REJECT), ROUNDS):
            winners = [run for admitted, _ in told for run in admitted]
            holders = [holder for _, denied in told for holder in denied]
            assert len(winners) == 1, told
            assert holders == winners * (PROCESSES * CALLERS - 1), told


@rule("O3", "I1", "I6", "T5", "F30")
@pytest.mark.timeout(300)
async def test_of_twenty_interrupts_none_is_refused_and_one_stands_at_the_end(dsn: str) -> None:
    everybody: dict[str, list[str]] = {}
    with ExitStack() as stack:
        for name, told in rounds(gateways(stack, dsn, Strategy.INTERRUPT), 10):
            everybody[name] = [run for admitted, _ in told for run in admitted]
            assert len(everybody[name]) == PROCESSES * CALLERS, told
    async with store_at(dsn) as store:
        for name, runs in everybody.items():
            holder = await store.active(ThreadId(name))
            waiting = await store.queue(ThreadId(name))
            assert holder is not None
            # The first was never started and is asked to stop; of those behind it only the newest is left.
            assert len(waiting) <= 1
            found = await store.list_runs(ThreadId(name), scope=EVERYONE)
            statuses = [run.status for run in found.runs]
            assert len(statuses) == len(runs)
            assert statuses.count(RunStatus.INTERRUPTED) == len(runs) - 1 - len(waiting)


@rule("O2", "I7", "I17")
@pytest.mark.timeout(300)
async def test_of_twenty_that_queue_up_one_holds_the_thread_and_all_others_wait(dsn: str) -> None:
    with ExitStack() as stack:
        names = [name for name, _ in rounds(gateways(stack, dsn, Strategy.ENQUEUE), 10)]
    async with store_at(dsn) as store:
        for name in names:
            holder = await store.active(ThreadId(name))
            assert holder is not None
            assert holder.queue_behind
            assert len(await store.queue(ThreadId(name))) == PROCESSES * CALLERS - 1
