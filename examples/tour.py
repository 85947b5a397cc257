"""A tour of what the store decides, on a SQLite file that lives as long as the tour.

Two workers share one database. Watch a second message wait, a stop arrive from the other worker, a worker die, and the
dead worker wake up and find that it may not write. Run it with ``python examples/tour.py [DATABASE_URL]``.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

from deerflow_runs import OnOrphan, RunId, Session, SqlRunStore, Strategy, ThreadId, WorkerId, store_at
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted

THREAD = ThreadId(f"thread-{uuid4().hex[:6]}")


def message(worker: WorkerId, text: str, strategy: Strategy) -> Newcomer:
    """A user's message that arrives at one of the workers."""
    return Newcomer(
        run_id=RunId(f"{text}-{uuid4().hex[:6]}"),
        thread_id=THREAD,
        worker_id=worker,
        strategy=strategy,
        kwargs={"input": text},
        on_orphan=OnOrphan.RESUME,
    )


async def tour(store: SqlRunStore) -> None:
    """Tell the story, one decision a line."""
    alice, bob = (WorkerId(f"{name}:{uuid4().hex[:6]}") for name in ("alice", "bob"))
    for worker in (alice, bob):
        await store.open_session(Session(worker))

    first = await store.admit(message(alice, "first", Strategy.ENQUEUE))
    print("a message reaches alice:           ", first.run if isinstance(first, Admitted) else first)
    second = await store.admit(message(bob, "second", Strategy.ENQUEUE))
    print("another reaches bob, same thread:  ", second.run if isinstance(second, Admitted) else second)
    refused = await store.admit(message(bob, "impatient", Strategy.REJECT))
    print("a third will not wait:             ", refused)

    run = (await store.active(THREAD) or sys.exit("nobody holds the thread")).key
    holder = Actor(alice, epoch=1)
    await store.apply(run, RunEvent.START, holder)
    await store.close_session(alice)
    swept = await store.take_over(Actor(bob), Given(), limit=10)
    print("alice dies; bob's sweep finds:     ", *swept.resumed)
    claimed = await store.claim(Actor(bob), limit=1)
    print("bob claims it and has its input:   ", *claimed, *(one.kwargs for one in claimed))
    late = await store.apply(run, RunEvent.SETTLE_SUCCESS, holder)
    print("alice wakes up and wants to settle:", late)

    by = Actor(bob, epoch=claimed[0].epoch)
    await store.apply(run, RunEvent.START, by)
    ended = await store.apply(run, RunEvent.SETTLE_SUCCESS, by)
    assert isinstance(ended, Applied)
    print("bob settles:                       ", ended.run)
    print("and the second message has its turn:", await store.active(THREAD))


async def main() -> None:
    """Tour the database that was named, or a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        address = sys.argv[1] if len(sys.argv) > 1 else str(Path(folder) / "tour.db")
        async with store_at(address, migrate=True) as store:
            await tour(store)


if __name__ == "__main__":
    asyncio.run(main())
