"""Workers that do what comes to their mind, all at once, on a few threads; each with connections of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final

from deerflow_runs import SqlRunStore, store_at
from deerflow_runs.model import (
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
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Applied, Decision, Given
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store.base import Admitted
from deerflow_runs.testing import grant_of, write_step

NOW: Final = Given(cancel_grace=Micros(0), backoff=Micros(0), restored=True, checkpoint="one")
PATIENT: Final = Given(backoff=Micros(0))
THREADS: Final = tuple(map(ThreadId, "abcde"))
SOMETIMES_LATER: Final = tuple(map(Micros, (0, 0, 0, 5000)))
STRATEGIES: Final = (Strategy.REJECT, *[Strategy.ENQUEUE] * 20, Strategy.INTERRUPT, Strategy.ROLLBACK)
BY_ITS_HOLDER: Final = (
    RunEvent.PROGRESS,
    RunEvent.SETTLE_SUCCESS,
    RunEvent.SETTLE_ERROR,
    RunEvent.SETTLE_CANCELLED,
    RunEvent.GIVE_BACK_RESUME,
)
GONE: Final = frozenset({Refusal.LOST, Refusal.TERMINAL, Refusal.UNKNOWN})


async def crowd(dsn: str, *, workers: int, moves: int) -> None:
    """Let them all go at once."""
    async with asyncio.TaskGroup() as together:
        for number in range(workers):
            together.create_task(_works(dsn, number, moves), name=f"worker-{number}")


async def _works(dsn: str, number: int, moves: int) -> None:
    async with store_at(dsn, connections=2) as store:
        member = Member(store, number)
        await member.opens()
        for _ in range(moves):
            await member.does_something()


class Member:
    """One of the crowd, through its successive sessions."""

    def __init__(self, store: SqlRunStore, number: int) -> None:
        self._store = store
        self._number = number
        self._chance = random.Random(number)
        self._counted = 0
        self._me = WorkerId("")
        self._held: dict[RunId, Run] = {}
        self._does: dict[Callable[[], Awaitable[object]], int] = {
            self._asks: 20,
            self._claims: 15,
            self._sweeps: 15,
            self._seizes: 8,
            self._dies: 2,
            self._cancels: 2,
            self._goes_on: 40,
            self._writes: 20,
        }

    async def opens(self) -> None:
        """A new session."""
        self._me = WorkerId(f"worker-{self._number}:{self._next()}")
        await self._store.open_session(Session(self._me))

    async def does_something(self) -> None:
        """One move."""
        (move,) = self._chance.choices(list(self._does), list(self._does.values()))
        await move()

    async def _asks(self) -> None:
        newcomer = Newcomer(
            run_id=RunId(f"{self._number}/{self._next()}"),
            thread_id=self._chance.choice(THREADS),
            worker_id=self._me,
            strategy=self._chance.choice(STRATEGIES),
            take=self._chance.random() < 0.6,
            on_orphan=self._chance.choice(list(OnOrphan)),
            delay=self._chance.choice(SOMETIMES_LATER),
            max_queued=3,
        )
        answer = await self._store.admit(newcomer, PATIENT)
        if isinstance(answer, Admitted):
            self._learns(answer.run)

    async def _claims(self) -> None:
        for run in await self._store.claim(Actor(self._me), 3):
            self._learns(run)

    async def _sweeps(self) -> None:
        by, given = Actor(self._me), self._chance.choice((PATIENT, PATIENT, NOW))
        await self._chance.choice(
            (
                lambda: self._store.promote(5),
                lambda: self._store.take_over(by, given, 5),
                lambda: self._store.force(by, given, 5),
                lambda: self._store.hand_over(by, 5),
            )
        )()

    async def _seizes(self) -> None:
        for run in await self._store.seizable(Actor(self._me), NOW, 3):
            self._hears(run, await self._store.apply(run.key, RunEvent.SEIZE, Actor(self._me, run.epoch), NOW))

    async def _dies(self) -> None:
        previous = self._me
        await self._store.close_session(previous)
        await self.opens()
        for run in [*self._held.values()] if self._chance.random() < 0.5 else []:
            by = Actor(self._me, run.epoch, previous=previous)
            self._hears(run, await self._store.apply(run.key, RunEvent.TAKE_BACK, by, NOW))

    async def _cancels(self) -> None:
        thread_id = self._chance.choice(THREADS)
        given = Given(action=self._chance.choice(list(CancelAction)))
        if (holder := await self._store.active(thread_id)) is not None:
            await self._store.apply(holder.key, RunEvent.REQUEST_CANCEL, Actor(self._me), given)
        for run in await self._store.queue(thread_id) if self._chance.random() < 0.2 else ():
            await self._store.apply(run.key, RunEvent.CANCEL_QUEUED, Actor(self._me), given)

    async def _goes_on(self) -> None:
        for run in self._one_of_mine():
            waits = run.status is RunStatus.PENDING and self._chance.random() < 0.7
            event = RunEvent.START if waits else self._chance.choice(BY_ITS_HOLDER)
            given = self._chance.choice((PATIENT, NOW))
            self._hears(run, await self._store.apply(run.key, event, Actor(self._me, run.epoch), given))

    async def _writes(self) -> None:
        for run in self._one_of_mine():
            if not await write_step(self._store, grant_of(run), f"{self._number}/{self._next()}"):
                self._held.pop(run.run_id, None)

    def _one_of_mine(self) -> list[Run]:
        return self._chance.sample([*self._held.values()], k=min(1, len(self._held)))

    def _hears(self, run: Run, decision: Decision) -> None:
        if isinstance(decision, Applied):
            self._learns(decision.run)
        elif decision.reason in GONE and self._chance.random() < 0.7:  # or it tries once more, late as it is
            self._held.pop(run.run_id, None)

    def _learns(self, run: Run) -> None:
        if run.owner_worker_id == self._me and not run.terminal:
            self._held[run.run_id] = run
        elif run.terminal:
            self._held.pop(run.run_id, None)

    def _next(self) -> int:
        self._counted += 1
        return self._counted
