"""Two processes, one database: a run, a cancel from the other process, a kill, and the recovery of what was lost.

Run it with ``python examples/ownership_demo.py [DATABASE_URL]``; without an address it makes a SQLite file.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from deerflow_runs import Executor, RunId, RunKey, RunLease, RunManager, RunsConfig, ThreadId, store_at

STEPS = 12


def say(text: str) -> None:
    print(f"  process {os.getpid()}: {text}", flush=True)


class Counting(Executor):
    """Counts, slowly. Whoever has this executor may carry its runs out, and go on with those of a dead process."""

    async def run(self, lease: RunLease, payload: Any) -> None:
        for number in range(1, payload["to"] + 1):
            await lease.check()  # raises as soon as this process does not own the run any more
            say(f"{lease.run_id}, epoch {lease.epoch}: {number} of {payload['to']}")
            await asyncio.sleep(0.1)


async def work(path: str, ready: Any) -> None:
    """The other process: takes two runs and lives until it is killed."""
    config = RunsConfig.for_tests()
    async with store_at(path) as store, RunManager(store, executors={"count": Counting()}, config=config) as manager:
        for thread in ("red", "blue"):
            await manager.submit(thread, "count", input={"to": STEPS}, run_id=f"run-{thread}")
        ready.set()  # the parent may cancel and kill now
        await asyncio.Event().wait()


async def main(path: str) -> None:
    ready = multiprocessing.get_context("spawn").Event()
    async with store_at(path, migrate=True) as store:
        other = multiprocessing.get_context("spawn").Process(target=run_worker, args=(path, ready), daemon=True)
        other.start()
        await asyncio.to_thread(ready.wait)
        red, blue = (RunKey(ThreadId(thread), RunId(f"run-{thread}")) for thread in ("red", "blue"))
        config = RunsConfig.for_tests()
        async with RunManager(store, executors={"count": Counting()}, config=config) as manager:
            print(f"Process {other.pid} owns two runs. From here we cancel the red one:")
            print(f"  {(await manager.cancel(red, wait=True)).outcome.value}: {await manager.get(red)}")
            print(f"Now we kill process {other.pid} in the middle of the blue one:")
            other.kill()
            other.join()
            print(f"  {await manager.join(blue, timeout=30)}")
            print("It was carried on here, under a higher epoch: nothing the dead process may still do counts.")


def run_worker(path: str, ready: Any) -> None:
    asyncio.run(work(path, ready))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder) / "runs.db")))
