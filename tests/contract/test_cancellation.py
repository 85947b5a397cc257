"""Callers that leave in the middle: every verb has happened as a whole or not at all, and a repeat finds out which."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import pytest
from sqlalchemy import func, select, text

from deerflow_runs.model import (
    EVERYONE,
    OnOrphan,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Session,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import Deny, Newcomer, Reuse
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Applied, Decision, Given, Refused
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admission, Admitted, Renewed
from deerflow_runs.store.connections import CONNECTIONS
from deerflow_runs.store.database import DatabaseKind
from deerflow_runs.store.rows import to_run, whole
from deerflow_runs.store.schema import outbox
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from deerflow_runs.testing.history import HistoryChecker
from tests.contract.emptying import emptied
from tests.rules import rule
from tests.support.units import no_complaints, other_tasks

T = TypeVar("T")

CANCELLATIONS = 300
WORKERS = 8
THREADS = 5
TURNS = 40
"""Of the loop, at most, before a caller leaves: enough for any verb to have ended by itself."""


# --- Workers that are interrupted all the time ----------------------------------------------------------------------


class Impatient:
    """Asks, leaves at a random turn of the loop, and asks again until it stays long enough for the answer."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.left = 0

    async def hears(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that may be asked several times."""
        while True:
            asking = asyncio.ensure_future(ask())
            for _ in range(self.chance.randrange(TURNS)):
                await asyncio.sleep(0)
            if self.chance.random() < 0.6:
                asking.cancel()
            (answer,) = await asyncio.gather(asking, return_exceptions=True)
            if not isinstance(answer, asyncio.CancelledError):
                assert not isinstance(answer, BaseException), answer
                return answer
            self.left += 1


class Worker:
    """Lets runs in and brings those it owns to their end, as impatiently as can be."""

    def __init__(self, store: SqlRunStore, worker_id: WorkerId, impatient: Impatient) -> None:
        self._store = store
        self._hears = impatient.hears
        self._chance = impatient.chance
        self.me = worker_id
        self.admitted: set[RunId] = set()
        self.beats = 0

    async def opens(self) -> None:
        await self._hears(lambda: self._store.open_session(Session(self.me)))

    async def steps(self) -> None:
        """One of everything."""
        await self.beats_once()
        await self.lets_a_run_in()
        await self._hears(lambda: self._store.claim(Actor(self.me), 2))
        await self.goes_on()

    async def beats_once(self) -> None:
        renewed = await self._hears(lambda: self._store.renew(self.me))
        assert isinstance(renewed, Renewed)
        assert renewed.beat > self.beats, "a beat that was answered had been counted"
        self.beats = renewed.beat

    async def lets_a_run_in(self) -> None:
        newcomer = Newcomer(
            run_id=RunId(f"{self.me}-{len(self.admitted)}"),
            thread_id=ThreadId(f"thread-{self._chance.randrange(THREADS)}"),
            worker_id=self.me,
            strategy=self._chance.choice(tuple(Strategy)),
            take=self._chance.random() < 0.7,
            on_orphan=OnOrphan.RESUME,
        )
        answer = await self._hears(lambda: self._store.admit(newcomer))
        assert isinstance(answer, Admitted | Deny) or _is_its_own(answer, newcomer), answer
        if not isinstance(answer, Deny):
            self.admitted.add(newcomer.run_id)

    async def goes_on(self) -> None:
        """What it owns is what the store says, whatever it was told: an answer may have been lost."""
        for run in await self._hears(lambda: self._store.owned(self.me)):
            event, given = _next_step(run)
            decision = await self._happens(run, event, given)
            if isinstance(decision, Applied) and event is RunEvent.SEIZE:
                await self._happens(decision.run, RunEvent.SETTLE_CANCELLED, Given(restored=True))

    async def sweeps(self) -> None:
        """What nobody else does: an interrupted admission may have left a cancelled run that nobody holds (O4)."""
        by = Actor(self.me)
        await self._hears(lambda: self._store.force(by, NOTHING_GIVEN, 9))
        for run in await self._hears(lambda: self._store.seizable(by, NOTHING_GIVEN, 9)):
            await self._happens(run, RunEvent.SEIZE, NOTHING_GIVEN)
        await self._hears(lambda: self._store.claim(by, 1))

    async def _happens(self, run: Run, event: RunEvent, given: Given) -> Decision:
        decision = await self._hears(lambda: self._store.apply(run.key, event, Actor(self.me, run.epoch), given))
        if isinstance(decision, Refused):
            now = await self._store.get(run.key, scope=EVERYONE)
            assert now is not None
            changed = (now.epoch, now.cancel_action, now.status) != (run.epoch, run.cancel_action, run.status)
            assert changed, f"{event.value} was refused as {decision.reason} although nothing had changed"
        return decision


def _is_its_own(answer: Admission, newcomer: Newcomer) -> bool:
    return isinstance(answer, Reuse) and not answer.by_key and answer.run.run_id == newcomer.run_id


def _next_step(run: Run) -> tuple[RunEvent, Given]:
    if run.rollback_owed:
        return RunEvent.SEIZE, NOTHING_GIVEN
    if run.cancel_action is not None:
        return RunEvent.SETTLE_CANCELLED, NOTHING_GIVEN
    return (RunEvent.START if run.status is RunStatus.PENDING else RunEvent.SETTLE_SUCCESS), NOTHING_GIVEN


# --- What must be true afterwards -----------------------------------------------------------------------------------


async def rows(units: Units) -> list[Run]:
    """All runs."""
    return await units.read(lambda connection: [to_run(row) for row in connection.execute(select(*whole()))])


async def receipts(units: Units) -> list[tuple[str, int]]:
    """How many receipts each run has."""
    counted = select(outbox.c.run_id, func.count()).where(outbox.c.kind == "receipt").group_by(outbox.c.run_id)
    return await units.read(lambda connection: sorted(tuple(row) for row in connection.execute(counted)))


async def states_of_connections(units: Units) -> set[str]:
    """What the server says of ours, of which there are no more than were allowed; SQLite has none to tell of."""
    if units.dialect.kind is not DatabaseKind.POSTGRES:
        return set()
    ours = text("SELECT state FROM pg_stat_activity WHERE datname = current_database() AND backend_type LIKE 'client%'")
    states = await units.read(lambda connection: list(connection.execute(ours).scalars()))
    assert len(states) <= CONNECTIONS
    return set(states)


@rule("O8", "I1", "I5", "I6", "B006", "B008", "B034", "P4")
async def test_300_random_cancellations_leave_no_verb_half_done_and_no_thread_stuck(
    store: SqlRunStore, units: Units
) -> None:
    impatient, witness = Impatient(300), HistoryChecker()
    workers = [Worker(store, WorkerId(f"host:{number}"), impatient) for number in range(WORKERS)]
    with no_complaints():
        await asyncio.gather(*(worker.opens() for worker in workers))
        while impatient.left < CANCELLATIONS:
            await asyncio.gather(*(worker.steps() for worker in workers))
            witness.saw(await rows(units))
        for _ in range(4 * len(await rows(units))):
            if all(run.terminal for run in await rows(units)):
                break
            for worker in workers:
                await worker.sweeps()
                await worker.goes_on()
    ended = await rows(units)
    witness.saw(ended)
    assert {run.run_id for run in ended if not run.terminal} == set(), "every thread goes on"
    assert {run.run_id for run in ended} == set().union(*(worker.admitted for worker in workers))
    assert await receipts(units) == sorted((run.run_id, 1) for run in ended)
    assert other_tasks() == set()
    async with asyncio.timeout(60):
        await asyncio.gather(*(store.now() for _ in range(50)))
    assert await states_of_connections(units) <= {"active", "idle"}


# --- Cancel scopes, which cancel at every turn of the loop ----------------------------------------------------------

ME = WorkerId("host:me")
THREAD = ThreadId("thread")


def newcomer(run_id: str, strategy: Strategy = Strategy.REJECT, *, take: bool = True) -> Newcomer:
    return Newcomer(
        run_id=RunId(run_id),
        thread_id=THREAD,
        worker_id=ME,
        strategy=strategy,
        take=take,
        on_orphan=OnOrphan.RESUME,
    )


def key(run_id: str) -> RunKey:
    return RunKey(THREAD, RunId(run_id))


@dataclass(frozen=True)
class Verb:
    """Something to be asked of a store: what comes before it, and how the runs look once it has happened."""

    ask: Callable[[SqlRunStore], Awaitable[Any]]
    done: Callable[[dict[str, Run]], bool]
    before: tuple[Callable[[SqlRunStore], Awaitable[Any]], ...] = ()


def admits(newcomer: Newcomer) -> Callable[[SqlRunStore], Awaitable[Any]]:
    return lambda store: store.admit(newcomer)


def applies(event: RunEvent, run_id: str = "run", given: Given = NOTHING_GIVEN) -> Callable[..., Awaitable[Any]]:
    return lambda store: store.apply(key(run_id), event, Actor(ME, 1), given)


ADMITTED = admits(newcomer("run"))
STARTED = (ADMITTED, applies(RunEvent.START))
BEHIND = admits(newcomer("behind", Strategy.ENQUEUE))
VERBS: dict[str, Verb] = {
    "admit": Verb(ADMITTED, lambda runs: runs["run"].owner_worker_id == ME),
    "enqueue": Verb(BEHIND, lambda runs: "behind" in runs and runs["run"].queue_behind, STARTED),
    "interrupt": Verb(
        admits(newcomer("new", Strategy.INTERRUPT)),
        lambda runs: "new" in runs and runs["run"].cancel_action is not None and runs["behind"].terminal,
        (*STARTED, BEHIND),
    ),
    "start": Verb(STARTED[1], lambda runs: runs["run"].status is RunStatus.RUNNING, (ADMITTED,)),
    "settle": Verb(applies(RunEvent.SETTLE_SUCCESS), lambda runs: runs["run"].terminal, STARTED),
    "settle before another": Verb(
        applies(RunEvent.SETTLE_SUCCESS),
        lambda runs: runs["run"].terminal and runs["behind"].vacant,
        (*STARTED, BEHIND),
    ),
    "cancel": Verb(applies(RunEvent.REQUEST_CANCEL), lambda runs: runs["run"].cancel_action is not None, STARTED),
    "hand over": Verb(lambda store: store.hand_over(Actor(ME), 9), lambda runs: runs["run"].vacant, STARTED),
    "claim": Verb(
        lambda store: store.claim(Actor(ME), 9),
        lambda runs: runs["run"].owner_worker_id == ME,
        (admits(newcomer("run", take=False)),),
    ),
    "take over": Verb(
        lambda store: store.take_over(Actor(WorkerId("host:other")), NOTHING_GIVEN, 9),
        lambda runs: runs["run"].vacant and runs["run"].epoch == 2,
        (*STARTED, lambda store: store.close_session(ME)),
    ),
}


@rule("O8", "P4", "B006", "B008")
@pytest.mark.parametrize("name", VERBS)
async def test_a_verb_that_is_cancelled_at_every_turn_of_the_loop_is_whole_and_can_be_repeated(
    name: str, store: SqlRunStore, units: Units
) -> None:
    verb = VERBS[name]
    with no_complaints():
        for turns in (0, 1, 2, 3, 5, 8, 13, 30):
            await emptied(units)
            await store.open_session(Session(ME))
            for before in verb.before:
                await before(store)
            as_before = await by_id(units)
            await cancelled_after(turns, verb, store)
            left = await by_id(units)
            assert left == as_before or verb.done(left), "half of it has happened"
            await verb.ask(store)
            after = await by_id(units)
            assert verb.done(after), "a repeat finds out"
            assert await receipts(units) == sorted((run_id, 1) for run_id, run in after.items() if run.terminal)
    assert other_tasks() == set()


async def by_id(units: Units) -> dict[str, Run]:
    return {run.run_id: run for run in await rows(units)}


async def cancelled_after(turns: int, verb: Verb, store: SqlRunStore) -> None:
    async def ask() -> None:
        await verb.ask(store)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        for _ in range(turns):
            await asyncio.sleep(0)
        group.cancel_scope.cancel()
