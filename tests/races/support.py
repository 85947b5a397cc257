"""A small world for races: rows put there in one go, players that take turns, and eyes on every state in between.

What must hold whenever anything is committed (I1, I4, I5, I7, one receipt for each end) is looked at after every step
of every order; what one race is about, the test itself says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
from sqlalchemy import Connection, delete, insert, select, update

from deerflow_runs.model import (
    ACTIVE,
    TERMINAL,
    Micros,
    OnOrphan,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    Strategy,
    ThreadId,
    WorkerId,
    micros,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Given
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store import endings
from deerflow_runs.store.events import attempt
from deerflow_runs.store.rows import to_run, whole
from deerflow_runs.store.schema import base_writes, events, fence, outbox, runs, threads, workers
from deerflow_runs.store.units import Units
from deerflow_runs.testing.contract.subject import run_row, session_row
from tests.races.stepping import Observer, Player, PostgresSteps, SqliteSteps, Verb, every_order

PAST: Final = micros(1_000)
"""Long ago by every clock: whatever is due or waits since then is due now."""

HOUR: Final = micros(3600)
THREAD: Final = ThreadId("thread")
ME: Final = WorkerId("host:me")
OTHER: Final = WorkerId("host:other")
DEAD: Final = WorkerId("host:dead")

Rows = Mapping[str, Run]
Verdict = Callable[[Sequence[Any], Rows], Awaitable[None] | None]


# --- What stands on the stage ---------------------------------------------------------------------------------------


def running(run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that ``ME`` runs at epoch 1."""
    return vacant(
        run_id,
        thread_id,
        **{"status": RunStatus.RUNNING, "owner_worker_id": ME, "epoch": 1, "attempt": 1, "turn": 1, "granted_at": PAST}
        | given,
    )


def pending(run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that ``ME`` holds and has not started."""
    return running(run_id, thread_id, **{"status": RunStatus.PENDING, "turn": None} | given)


def vacant(run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that holds its thread and waits for a worker."""
    instants = dict.fromkeys(("created_at", "updated_at", "due_at", "not_before"), PAST)
    return Run(RunId(run_id), ThreadId(thread_id), **instants | {"on_orphan": OnOrphan.RESUME} | given)


def queued(run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that waits behind another one."""
    return vacant(run_id, thread_id, **{"status": RunStatus.QUEUED} | given)


def due(run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A delayed run whose time has come; its thread may be idle."""
    return queued(run_id, thread_id, **{"created_at": Micros(PAST - HOUR)} | given)


def ended(run_id: str, thread_id: str = THREAD, **given: Any) -> Run:
    """A run that ended long ago."""
    return running(run_id, thread_id, **{"status": RunStatus.SUCCESS, "settled_at": PAST, "settled_by": ME} | given)


def sessions() -> tuple[Session, ...]:
    """Two that live, and one that is dead for certain."""
    dead = Session(DEAD, SessionState.DEAD, expires_at=PAST, started_at=PAST, dead_at=PAST, proven=True)
    living = (Session(worker_id, expires_at=Micros(10**18), started_at=PAST) for worker_id in (ME, OTHER))
    return (*living, dead)


# --- What players do ------------------------------------------------------------------------------------------------


def admit(run_id: str, strategy: Strategy = Strategy.REJECT, thread_id: str = THREAD, **given: Any) -> Verb:
    """Ask for the thread."""
    asked = {"worker_id": ME, "strategy": strategy, "thread_id": ThreadId(thread_id)} | given
    return lambda player: player.store.admit(Newcomer(run_id=RunId(run_id), **asked))


def apply(run: Run, event: RunEvent, worker_id: WorkerId = ME, given: Given = NOTHING_GIVEN, **actor: Any) -> Verb:
    """Let an event happen to a run, at the epoch it has on the stage."""
    by = Actor(worker_id, **{"epoch": run.epoch} | actor)
    return lambda player: player.store.apply(run.key, event, by, given)


def held_open(run: Run, event: RunEvent, worker_id: WorkerId = ME, given: Given = NOTHING_GIVEN, **actor: Any) -> Verb:
    """The same in a transaction of its own, so that its commit is a step."""
    by = Actor(worker_id, **{"epoch": run.epoch} | actor)
    how = endings.end_locked if TRANSITIONS[event].ends else attempt
    return lambda player: player.transaction(how, run.key, event, by, given)


def sweep(event: RunEvent, worker_id: WorkerId = OTHER, limit: int = 10, **given: Any) -> Verb:
    """Let one event happen to whatever the table allows it for, as a sweep does."""
    by = Actor(worker_id)
    if TRANSITIONS[event].ends:
        return lambda player: player.transaction(endings.end_batch, event, by, Given(**given), limit)
    return lambda player: player.transaction(endings.change_batch, event, by, Given(**given), limit)


# --- The world ------------------------------------------------------------------------------------------------------

THREAD_ROW: Final[Mapping[str, Any]] = {
    "thread_id": THREAD,
    "metadata": {},
    "config": {},
    "outcome": "idle",
    "interrupts": {},
    "temporary": False,
    "created_at": PAST,
    "updated_at": PAST,
}
RECEIPT_ROW: Final[Mapping[str, Any]] = {
    "kind": "receipt",
    "payload": {},
    "attempts": 0,
    "not_before": PAST,
    "delivered_at": PAST,
}
EVERYTHING: Final = (workers, runs, base_writes, threads, events, outbox, fence)

KEPT: Final = tuple(
    runs.c[name]
    for name in (
        "run_id",
        "thread_id",
        "status",
        "epoch",
        "owner_worker_id",
        "home_worker_id",
        "queue_behind",
        "cancel_action",
        "attempt",
        "superseded_by",
        "settled_by",
        "stop_reason",
    )
)
"""What makes a difference to what may happen next."""

HAS_RECEIPT: Final = (
    select(outbox.c.run_id).where(outbox.c.run_id == runs.c.run_id, outbox.c.kind == "receipt").exists()
)
LOOKED_AT: Final = select(
    *KEPT, runs.c.turn, runs.c.operation_kind, runs.c.created_at, runs.c.due_at, HAS_RECEIPT.label("receipt")
).order_by(runs.c.due_at, runs.c.seq)
WHO_LIVES: Final = select(workers.c.worker_id, workers.c.state, workers.c.beat)


@dataclass
class World:
    """A database under observation, and the players on it."""

    dsn: str
    units: Units
    observer: Observer | None
    players: Sequence[Player]

    def __post_init__(self) -> None:
        self._before: dict[str, Any] = {}

    async def every_order(
        self, scene: Sequence[Run], verbs: Sequence[Verb], verdict: Verdict, *, living: Sequence[Session] | None = None
    ) -> int:
        """Play the verbs on the scene in every order of their steps; the verdict gets the answers and the rows.

        Three players get every order in which at most twice somebody who could go on has to stand back.
        """

        async def begin() -> Sequence[Verb]:
            await self.set(*scene, living=living)
            return verbs

        async def judge(answers: Sequence[Any]) -> None:
            more = verdict(answers, await self.rows())
            if more is not None:
                await more

        players = self.players[: len(verbs)]
        limit = 2 if len(verbs) > 2 else None
        return await every_order(players, begin, self.look, judge, preemptions=limit)

    async def set(self, *placed: Run, living: Sequence[Session] | None = None) -> None:
        """Exactly these runs are there, the usual sessions, and the thread most of them are on."""
        people = [session_row(session) for session in (sessions() if living is None else living)]
        rows = [run_row(run) | {"seq": number, "idempotency_scope": _scope(run)} for number, run in enumerate(placed)]

        receipts = [{**RECEIPT_ROW, "run_id": run.run_id} for run in placed if run.terminal]

        def unit(connection: Connection) -> None:
            for table in EVERYTHING:
                connection.execute(delete(table))
            connection.execute(insert(workers), people)
            connection.execute(insert(threads), THREAD_ROW)
            if rows:
                connection.execute(insert(runs), rows)
            if receipts:
                connection.execute(insert(outbox), receipts)

        await self.units.transaction(unit)
        self._before = {}

    async def make_due(self, run_id: str) -> None:
        """Let a delayed run's time come."""
        changes = update(runs).where(runs.c.run_id == run_id).values(due_at=PAST)
        await self.units.once(lambda connection: connection.execute(changes).close())

    async def rows(self) -> dict[str, Run]:
        """What is committed now, by id."""
        return await self.units.read(
            lambda connection: {run.run_id: run for run in map(to_run, connection.execute(select(*whole())))}
        )

    async def look(self) -> tuple[Hashable, Hashable, Hashable]:
        """Look whether what is committed now may ever be seen. Returns it, as far as it could make a difference."""
        rows, people = await self.units.read(
            lambda connection: (connection.execute(LOOKED_AT).all(), connection.execute(WHO_LIVES).all())
        )
        _check(rows)
        now: dict[str, Any] = {row.run_id: row for row in rows}
        for run_id, row in self._before.items():
            if run_id in now:
                assert now[run_id].epoch >= row.epoch, f"I4: {now[run_id]} was {row}"
                assert row.status not in TERMINAL or now[run_id] == row, f"I5: {now[run_id]} was {row}"
        self._before = now
        order = tuple(row.run_id for row in rows if row.status == "queued")
        return frozenset((*row[: len(KEPT)], row.turn is None) for row in rows), order, frozenset(map(tuple, people))


def _check(rows: Sequence[Any]) -> None:
    """What no state may ever look like."""
    active = [row.thread_id for row in rows if row.status in ACTIVE]
    assert len(set(active)) == len(active), f"I1: {rows}"
    waiting = {row.thread_id for row in rows if row.status == "queued" and row.due_at <= row.created_at + 1000}
    assert waiting <= set(active), f"I7: {rows}"
    assert all(bool(row.receipt) == (row.status in TERMINAL) for row in rows), f"O28: {rows}"


@asynccontextmanager
async def opened(dsn: str, units: Units, players: int) -> AsyncIterator[World]:
    """A world with so many players on the database of ``dsn``; ``units`` look at it."""
    async with AsyncExitStack() as stack:
        observer = await _observer(dsn, stack) if dsn.startswith("postgres") else None
        steps = [PostgresSteps(dsn, observer) if observer else SqliteSteps(dsn) for _ in range(players)]
        for step in steps:
            await step.open()
            stack.push_async_callback(step.close)
        yield World(dsn, units, observer, [Player(step) for step in steps])


async def _observer(dsn: str, stack: AsyncExitStack) -> Observer:
    connection = await asyncpg.connect(dsn)
    stack.push_async_callback(connection.close)
    return Observer(connection)


def _scope(run: Run) -> str:
    return Newcomer(run_id=run.run_id, thread_id=run.thread_id, worker_id=ME).idempotency_scope


# --- Reading the rows -----------------------------------------------------------------------------------------------


def the_active(rows: Rows) -> str | None:
    """Who holds the thread."""
    return next((run.run_id for run in rows.values() if run.active), None)


def in_queue(rows: Rows) -> list[str]:
    """Who waits, in the order in which they would start."""
    waiting = [run for run in rows.values() if run.status is RunStatus.QUEUED]
    return [run.run_id for run in sorted(waiting, key=lambda run: (run.due_at, run.seq))]
