"""Many at once, with nobody telling them whose turn it is: what must come out, whatever the order was."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
from sqlalchemy import func, select

from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    Micros,
    OnOrphan,
    Run,
    RunId,
    RunStatus,
    Session,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import Newcomer, Reuse
from deerflow_runs.protocol.decision import Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted
from deerflow_runs.store.connections import PostgresUnits
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.schema import outbox, runs
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from deerflow_runs.store.writer import SqliteUnits
from tests.races.stepping import ONCE
from tests.races.support import THREAD
from tests.rules import rule

NO_GRACE: Final = Given(cancel_grace=Micros(0))


def _units(dsn: str, connections: int) -> Units:
    """Units that repeat nothing: a deadlock would be an error here."""
    database = parse_dsn(dsn)
    if isinstance(database, Postgres):
        return PostgresUnits(database, connections=connections, policy=ONCE)
    return SqliteUnits(database, policy=ONCE)


@pytest.fixture
async def stores(dsn: str) -> AsyncIterator[Sequence[SqlRunStore]]:
    """Six stores on one fresh database, as six processes would have."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(SqlRunStore(_units(dsn, 2))) for _ in range(6)]
        for number in range(len(opened)):
            await opened[0].open_session(Session(worker(number), lease=Micros(10**15)))
        yield opened


def worker(number: int) -> WorkerId:
    return WorkerId(f"host:{number}")


async def admitted(store: SqlRunStore, run_id: str, thread_id: str = THREAD, number: int = 0, **given: Any) -> Any:
    asked = {"worker_id": worker(number)} | given
    return await store.admit(Newcomer(run_id=RunId(run_id), thread_id=ThreadId(thread_id), **asked))


async def started(store: SqlRunStore, run: Run) -> Run:
    answer = await store.apply(run.key, RunEvent.START, Actor(run.owner_worker_id or worker(0), run.epoch))
    assert isinstance(answer, Applied)
    return answer.run


# --- One kind of thing ----------------------------------------------------------------------------------------------


@rule("O3", "I1", "I6", "T5")
async def test_of_thirty_two_interrupts_none_is_refused_and_one_survives(stores: Sequence[SqlRunStore]) -> None:
    first, second, watching = stores[:3]
    held = await started(first, (await admitted(first, "held")).run)
    newcomers = [
        admitted((first, second)[n % 2], f"new{n}", number=n % 2, strategy=Strategy.INTERRUPT) for n in range(32)
    ]
    asking = asyncio.gather(*newcomers)
    while not asking.done():
        holder = await watching.active(THREAD)
        assert holder is not None
        assert holder.run_id == "held"
    assert all(isinstance(answer, Admitted) for answer in await asking)
    (survivor,) = await watching.queue(THREAD)
    ended = await watching.list_runs(THREAD, scope=EVERYONE)
    assert Counter(run.status for run in ended.runs) == {
        RunStatus.RUNNING: 1,
        RunStatus.QUEUED: 1,
        RunStatus.INTERRUPTED: 31,
    }
    await first.apply(held.key, RunEvent.SETTLE_CANCELLED, Actor(worker(0), held.epoch))
    assert await watching.active(THREAD) is not None
    (claimed,) = await second.claim(Actor(worker(1)), 5)
    assert claimed.run_id == survivor.run_id


@rule("O31", "I19", "T6")
async def test_six_claimers_take_fifty_vacant_runs_once_each(stores: Sequence[SqlRunStore]) -> None:
    for number in range(50):
        await admitted(stores[0], f"r{number}", f"t{number}", take=False)

    async def claim_all(number: int) -> list[Run]:
        taken: list[Run] = []
        while batch := await stores[number].claim(Actor(worker(number)), 3):
            assert len(batch) <= 3
            taken += batch
        return taken

    shares = await asyncio.gather(*(claim_all(number) for number in range(6)))
    assert sorted(run.run_id for share in shares for run in share) == sorted(f"r{number}" for number in range(50))
    for number, share in enumerate(shares):
        assert {run.owner_worker_id for run in share} <= {worker(number)}
        assert {run.epoch for run in share} <= {1}


@rule("O5", "I14", "T10", "T11")
async def test_twenty_requests_with_one_key_are_one_run_each_round(stores: Sequence[SqlRunStore]) -> None:
    for number in range(10):
        thread = f"t{number}"
        strategy = list(Strategy)[number % 4]
        asked = [
            admitted(stores[n % 6], f"{thread}-{n}", thread, number=n % 6, strategy=strategy, idempotency_key="key")
            for n in range(20)
        ]
        answers = await asyncio.gather(*asked)
        (winner,) = [answer.run.run_id for answer in answers if isinstance(answer, Admitted)]
        assert [answer.run.run_id for answer in answers if isinstance(answer, Reuse)] == [winner] * 19
        page = await stores[0].list_runs(ThreadId(thread), scope=EVERYONE)
        assert [run.run_id for run in page.runs] == [winner]
        assert page.runs[0].cancel_action is None


@rule("I17", "T2")
async def test_no_two_admissions_draw_one_number(stores: Sequence[SqlRunStore]) -> None:
    answers = await asyncio.gather(*(admitted(stores[n % 6], f"r{n}", f"t{n}", number=n % 6) for n in range(40)))
    assert len({answer.run.seq for answer in answers}) == 40


@rule("O15", "I3", "T12")
async def test_turns_on_one_thread_never_go_backwards_whoever_draws_them(stores: Sequence[SqlRunStore]) -> None:
    turns: list[int] = []
    for number in range(12):
        store, me = stores[number % 3], worker(number % 3)
        run = await started(store, (await admitted(store, f"r{number}", number=number % 3)).run)
        turns.append(run.turn or 0)
        await store.apply(run.key, RunEvent.SETTLE_SUCCESS, Actor(me, run.epoch))
    assert turns == sorted(set(turns))


@rule("O1", "O2", "O16")
async def test_one_connection_answers_a_conflict_the_tenth_time_as_the_first(dsn: str) -> None:
    """From the sixth time on PostgreSQL plans without the values, and must still see which index is meant."""
    async with SqlRunStore(_units(dsn, 1)) as store:
        await store.open_session(Session(worker(0)))
        for number in range(10):
            assert (await store.open_session(Session(worker(0)))).worker_id == worker(0)
            thread = f"t{number}"
            assert isinstance(await admitted(store, f"{thread}-a", thread), Admitted)
            denied = await admitted(store, f"{thread}-b", thread)
            assert denied.holder.run_id == f"{thread}-a"
            waits = await admitted(store, f"{thread}-c", thread, strategy=Strategy.ENQUEUE)
            assert waits.run.status is RunStatus.QUEUED
            again = await admitted(store, f"{thread}-c", thread, strategy=Strategy.ENQUEUE)
            assert isinstance(again, Reuse)


# --- Everything at once ---------------------------------------------------------------------------------------------


class Gateway:
    """One worker that does whatever chance tells it, on a few threads that everybody wants."""

    THREADS: Final = tuple(ThreadId(f"t{number}") for number in range(4))

    def __init__(self, store: SqlRunStore, number: int) -> None:
        self.asked = 0
        self._store = store
        self._number = number
        self._life = 0
        self._chance = random.Random(number)

    @property
    def me(self) -> WorkerId:
        """A new one for each life."""
        return WorkerId(f"gateway{self._number}:{self._life}")

    async def live(self, acts: int) -> None:
        """Do so many things."""
        await self._store.open_session(Session(self.me, lease=Micros(10**15)))
        verbs = [self.ask, self.ask, self.ask, self.serve, self.serve, self.cancel, self.sweep, self.claim]
        for _ in range(acts):
            await self._chance.choice(verbs)()
            if self._chance.random() < 0.05:
                await self.die()

    async def ask(self) -> None:
        """Ask for a thread by any strategy, now or in a moment."""
        self.asked += 1
        strategy = self._chance.choice(list(Strategy))
        await self._store.admit(
            Newcomer(
                run_id=RunId(f"{self._number}-{self.asked}"),
                thread_id=self._chance.choice(self.THREADS),
                worker_id=self.me,
                strategy=strategy,
                take=self._chance.random() < 0.7,
                pinned=self._chance.random() < 0.2,
                delay=Micros(self._chance.choice([0, 0, 0, 2_000])),
                on_orphan=self._chance.choice(list(OnOrphan)),
                max_attempts=2,
            ),
            NO_GRACE,
        )

    async def serve(self) -> None:
        """Bring every run of mine one step further."""
        for run in await self._store.owned(self.me):
            by = Actor(self.me, run.epoch)
            if run.cancel_action is None:
                event = RunEvent.START if run.status is RunStatus.PENDING else RunEvent.SETTLE_SUCCESS
                await self._store.apply(run.key, event, by)
                continue
            seized = await self._store.apply(run.key, RunEvent.SEIZE, by, NO_GRACE)
            epoch, restored = (seized.run.epoch, True) if isinstance(seized, Applied) else (run.epoch, False)
            done = Given(restored=restored)
            await self._store.apply(run.key, RunEvent.SETTLE_CANCELLED, Actor(self.me, epoch), done)

    async def cancel(self) -> None:
        """Cancel whoever is first in a queue, or holds the thread."""
        thread = self._chance.choice(self.THREADS)
        action = self._chance.choice(list(CancelAction))
        if (queue := await self._store.queue(thread)) and self._chance.random() < 0.5:
            await self._store.apply(queue[0].key, RunEvent.CANCEL_QUEUED, Actor(self.me), Given(action=action))
        elif (holder := await self._store.active(thread)) is not None:
            await self._store.apply(holder.key, RunEvent.REQUEST_CANCEL, Actor(self.me), Given(action=action))

    async def sweep(self) -> None:
        """All that a sweep does."""
        await self._store.take_over(Actor(self.me), NO_GRACE, 5)
        await self._store.force(Actor(self.me), NO_GRACE, 5)
        await self._store.promote(5)
        for run in await self._store.seizable(Actor(self.me), NO_GRACE, 2):
            await self._store.apply(run.key, RunEvent.SEIZE, Actor(self.me), NO_GRACE)

    async def claim(self) -> None:
        """Take what is vacant."""
        await self._store.claim(Actor(self.me), 2)

    async def die(self) -> None:
        """Leave everything behind, now and then after taking it back, and begin another life."""
        old = self.me
        left = await self._store.owned(old)
        await self._store.close_session(old)
        self._life += 1
        await self._store.open_session(Session(self.me, lease=Micros(10**15)))
        for run in left:
            if self._chance.random() < 0.3:
                back = Actor(self.me, run.epoch, previous=old)
                await self._store.apply(run.key, RunEvent.TAKE_BACK, back)


@rule("O7", "O26", "I1", "I5", "I7", "I8", "T13", "T14")
async def test_a_mixed_load_ends_every_run_once_and_never_waits_in_a_ring(
    dsn: str, stores: Sequence[SqlRunStore]
) -> None:
    gateways = [Gateway(store, number) for number, store in enumerate(stores)]
    await asyncio.gather(*(gateway.live(50) for gateway in gateways))
    store = stores[0]
    await store.bury_strangers()
    for _ in range(50):
        if not any((await store.counts()).by_status.values()):
            break
        for gateway in gateways:
            await gateway.sweep()
            await gateway.claim()
            await gateway.serve()
    assert not any((await store.counts()).by_status.values()), await store.counts()
    await _every_run_has_one_receipt(dsn)


async def _every_run_has_one_receipt(dsn: str) -> None:
    units = _units(dsn, 1)
    await units.open()
    both = select(
        select(func.count()).select_from(runs).where(runs.c.settled_at.is_not(None)).scalar_subquery(),
        select(func.count()).select_from(outbox).where(outbox.c.kind == "receipt").scalar_subquery(),
    )
    ended, receipts = await units.read(lambda connection: tuple(connection.execute(both).one()))
    await units.close()
    assert ended == receipts > 0
