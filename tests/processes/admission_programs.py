"""A gateway process that asks for threads when told to, together with others."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection as Pipe

from deerflow_runs import RunId, Session, SqlRunStore, Strategy, ThreadId, WorkerId, store_at
from deerflow_runs.protocol.admission import Deny, Newcomer
from deerflow_runs.store.base import Admitted

ROUNDS = 200
CALLERS = 5
"""Callers a process; four processes make twenty at once."""

Told = tuple[list[str], list[str]]
"""Of one round: the runs that were let in here, and the holders that the others were told of."""


def ask_in_rounds(pipe: Pipe, dsn: str, strategy: str) -> None:
    """Say "ready"; for every round received, ask for its thread ``CALLERS`` times at once and send ``Told``."""
    asyncio.run(_ask_in_rounds(pipe, dsn, Strategy(strategy)))


async def _ask_in_rounds(pipe: Pipe, dsn: str, strategy: Strategy) -> None:
    me = WorkerId(f"gateway:{os.getpid()}")
    async with store_at(dsn, connections=CALLERS) as store:
        await store.open_session(Session(me))
        pipe.send("ready")
        while (round_name := await asyncio.to_thread(pipe.recv)) != "enough":
            asked = (_ask(store, me, round_name, number, strategy) for number in range(CALLERS))
            answers = await asyncio.gather(*asked)
            admitted = [answer.run.run_id for answer in answers if isinstance(answer, Admitted)]
            pipe.send((admitted, [answer.holder.run_id for answer in answers if isinstance(answer, Deny)]))


async def _ask(store: SqlRunStore, me: WorkerId, thread: str, number: int, strategy: Strategy) -> object:
    run_id = RunId(f"{thread}/{me}/{number}")
    return await store.admit(
        Newcomer(run_id=run_id, thread_id=ThreadId(thread), worker_id=me, strategy=strategy, max_queued=None)
    )
