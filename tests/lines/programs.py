"""What other processes do with a session line in these tests. Each talks through a pipe and is killed at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection as Pipe

from deerflow_runs import store_at
from deerflow_runs.model import Session, WorkerId


def hold(pipe: Pipe, dsn: str, worker_id: str) -> None:
    """Open a session, say whether it is hinted, and stay."""
    asyncio.run(_hold(pipe, dsn, worker_id, ""))


def hold_and_fork(pipe: Pipe, dsn: str, worker_id: str) -> None:
    """The same, and fork a child that stays too; say who it is."""
    asyncio.run(_hold(pipe, dsn, worker_id, "fork"))


def hold_and_start(pipe: Pipe, dsn: str, worker_id: str) -> None:
    """The same with another program, which is given every descriptor that may be given away."""
    asyncio.run(_hold(pipe, dsn, worker_id, "start"))


async def _hold(pipe: Pipe, dsn: str, worker_id: str, then: str) -> None:
    async with store_at(dsn) as store:
        line = store.session_line()
        await line.connect(WorkerId(worker_id))
        await line.open_session(Session(WorkerId(worker_id)))
        if then == "fork":
            child = os.fork()
            if not child:
                signal.pause()
            pipe.send(child)
        if then == "start":
            program = [sys.executable, "-c", "import signal; signal.pause()"]
            pipe.send(subprocess.Popen(program, close_fds=False).pid)
        pipe.send(await line.probe() and line.hinted)
        pipe.recv()  # nobody ever sends anything


def wake(pipe: Pipe, dsn: str, worker_id: str) -> None:
    """Commit something when told to: open a session."""

    async def main() -> None:
        async with store_at(dsn) as store:
            pipe.send("ready")
            pipe.recv()
            await store.open_session(Session(WorkerId(worker_id)))
            pipe.send("done")

    asyncio.run(main())
