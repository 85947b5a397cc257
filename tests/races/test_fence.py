"""The fence against whoever takes a run away: nothing of an old epoch is committed once a newer one was granted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import Connection, func, insert, literal, select

from deerflow_runs.model import CancelAction, RunKey
from deerflow_runs.protocol.decision import Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import fence
from deerflow_runs.store.clauses import key_parameters
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.schema import events
from deerflow_runs.store.schema import fence as foreign
from tests.races.stepping import Player, Verb, every_order
from tests.races.support import DEAD, OTHER, PAST, THREAD, World, apply, held_open, pending, running, sweep
from tests.rules import rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORPHAN: Final = running("held", owner_worker_id=DEAD)
OWED: Final = running("held", cancel_action=CancelAction.ROLLBACK, cancel_requested_at=PAST)
CANCELLED: Final = running("held", cancel_action=CancelAction.INTERRUPT, cancel_requested_at=PAST)

TAKING: Final = {
    "take over": (ORPHAN, held_open(ORPHAN, RunEvent.TAKE_OVER_RESUME, OTHER)),
    "take over, many": (ORPHAN, sweep(RunEvent.TAKE_OVER_RESUME)),
    "take back": (ORPHAN, held_open(ORPHAN, RunEvent.TAKE_BACK, OTHER, previous=DEAD)),
    "seize": (OWED, held_open(OWED, RunEvent.SEIZE, OTHER)),
    "force": (CANCELLED, held_open(CANCELLED, RunEvent.FORCE, OTHER)),
    "force, many": (CANCELLED, sweep(RunEvent.FORCE)),
    "settle": (running("held"), held_open(running("held"), RunEvent.SETTLE_SUCCESS)),
    "hand over": (pending("held"), held_open(pending("held"), RunEvent.HAND_OVER)),
}
"""Every way in which an epoch ends."""

EVENT: Final = {"id": 1, "thread_id": THREAD, "event": "values", "namespace": "", "data": "{}", "bytes": 2, "at": 0}


def in_one_statement(connection: Connection, dialect: Dialect, key: RunKey, epoch: int) -> int:
    """PostgreSQL's form: guard and write are one statement."""
    held = fence.held(dialect)
    row = {"run_id": literal(key.run_id)} | {name: literal(value) for name, value in EVENT.items()}
    rows = select(*(value.label(name) for name, value in row.items())).select_from(held)
    write = insert(events).from_select(list(row), rows).returning(events.c.id)
    return len(connection.execute(write, key_parameters(key) | {"p_epoch": epoch}).all())


def in_one_transaction(connection: Connection, dialect: Dialect, key: RunKey, epoch: int) -> int:
    """The form for a unit of work with several writes."""
    if not fence.holds(connection, dialect, key, epoch):
        return 0
    connection.execute(insert(events), {"run_id": key.run_id, **EVENT})
    return 1


WRITES: Final = {"one statement": in_one_statement, "one transaction": in_one_transaction}


class _Watch:
    """Fails if an event appears when the epoch that wrote it is over."""

    def __init__(self, world: World) -> None:
        self.written = 0
        self._world = world

    async def look(self) -> Hashable:
        seen = await self._world.look()
        count = select(func.count()).select_from(events)
        now = await self._world.units.read(lambda connection: connection.scalar(count) or 0)
        (held,) = (await self._world.rows()).values()
        assert now == self.written or (held.active and held.epoch == 1), "I2: written after the epoch was over"
        self.written = now
        return seen, now


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("taking", TAKING)
@rule("O14", "I2", "T9")
async def test_a_stale_writer_writes_before_its_epoch_ends_or_not_at_all(world: World, taking: str, write: str) -> None:
    held, take = TAKING[taking]
    if not world.units.dialect.writes_in_ctes:
        write = "one transaction"
    watch = _Watch(world)

    async def begin() -> Sequence[Verb]:
        await world.set(held)
        watch.written = 0
        return [lambda player: player.transaction(WRITES[write], held.key, held.epoch), take]

    async def verdict(answers: Sequence[Any]) -> None:
        written, taken = answers
        assert written in {0, 1}
        assert taken is not None
        assert taken != () or written == 1  # a sweep passes over a row that is being written for

    assert await every_order(world.players[:2], begin, watch.look, verdict) >= 2


@rule("O14", "I2")
async def test_a_write_waits_for_a_take_over_in_flight_and_then_writes_nothing(postgres_world: World) -> None:
    taker, writer, _ = postgres_world.players
    await postgres_world.set(ORPHAN)
    await taker.begin(sweep(RunEvent.TAKE_OVER_RESUME))
    await taker.step()
    await writer.begin(lambda player: player.transaction(in_one_statement, ORPHAN.key, ORPHAN.epoch))
    assert not await writer.step(), "nobody stood in the way"
    await taker.finish()
    assert await writer.finish() == 0


@rule("O14", "T7")
async def test_two_writers_and_a_progress_of_one_epoch_never_wait_in_a_ring(postgres_world: World) -> None:
    held = running("held")

    async def other_write(player: Player) -> Any:
        return await player.transaction(_second_write, held.key, held.epoch)

    def verdict(answers: Sequence[Any], _: object) -> None:
        assert answers[:2] == [1, 1]
        assert isinstance(answers[2], Applied)

    write: Verb = lambda player: player.transaction(in_one_statement, held.key, held.epoch)  # noqa: E731
    progress = apply(held, RunEvent.PROGRESS, given=Given(checkpoint="checkpoint"))
    await postgres_world.every_order([held], [write, other_write, progress], verdict)


def _second_write(connection: Connection, dialect: Dialect, key: RunKey, epoch: int) -> int:
    if not fence.holds(connection, dialect, key, epoch):
        return 0
    connection.execute(insert(events), {"run_id": key.run_id, **EVENT, "id": 2})
    return 1


@rule("O14", "I2")
async def test_the_fence_as_text_writes_for_its_epoch_only(postgres_world: World) -> None:
    held = running("held")
    await postgres_world.set(held)
    written = []
    async with await psycopg.AsyncConnection.connect(postgres_world.dsn, autocommit=True) as connection:
        for epoch in (held.epoch - 1, held.epoch, held.epoch + 1):
            statement = f"WITH held AS ({fence.held_sql()}) INSERT INTO dr_fence SELECT 'thread', 1, 1 FROM held"
            cursor = await connection.execute(statement.encode(), {"fence_run": held.run_id, "fence_epoch": epoch})
            written.append(cursor.rowcount)
    assert written == [0, 1, 0]


# --- Another database -----------------------------------------------------------------------------------------------

TOKENS: Final = ((1, 1), (1, 2), (2, 1))


@pytest.mark.parametrize("first", TOKENS)
@pytest.mark.parametrize("second", TOKENS)
@rule("O16", "I2", "I3")
async def test_a_foreign_fence_only_ever_rises(world: World, first: tuple[int, int], second: tuple[int, int]) -> None:
    def raising(token: tuple[int, int]) -> Verb:
        return lambda player: player.transaction(fence.raise_fence, THREAD, *token)

    async def verdict(answers: Sequence[Any], _: object) -> None:
        highest = max(first, second)
        assert answers[(first, second).index(highest)]
        may = {token: await _passes(world, token) for token in TOKENS}
        assert may == {token: token == highest for token in TOKENS}

    await world.every_order([], [raising(first), raising(second)], verdict)


async def _passes(world: World, token: tuple[int, int]) -> bool:
    return await world.units.transaction(
        lambda connection: fence.passes(connection, world.units.dialect, THREAD, *token)
    )


def _behind_a_foreign_fence(connection: Connection, dialect: Dialect, token: tuple[int, int]) -> bool:
    if not fence.passes(connection, dialect, THREAD, *token):
        return False
    connection.execute(insert(events), {"run_id": "held", **EVENT})
    return True


@rule("O14", "O16", "I2")
async def test_a_stale_writer_in_another_database_writes_before_the_fence_rises_or_not_at_all(world: World) -> None:
    seen_before: Hashable = None

    async def begin() -> Sequence[Verb]:
        nonlocal seen_before
        seen_before = None
        await world.set()
        await world.units.transaction(
            lambda connection: fence.raise_fence(connection, world.units.dialect, THREAD, *TOKENS[0])
        )
        old, new = TOKENS[:2]
        return [
            lambda player: player.transaction(_behind_a_foreign_fence, old),
            lambda player: player.transaction(fence.raise_fence, THREAD, *new),
        ]

    async def look() -> Hashable:
        nonlocal seen_before
        epoch, written = select(foreign.c.epoch).scalar_subquery(), select(func.count()).select_from(events)
        both = select(epoch, written.scalar_subquery())
        seen = await world.units.read(lambda connection: tuple(connection.execute(both).one()))
        assert seen_before != (2, 0) or seen == (2, 0), "I2: written after the fence had risen"
        seen_before = seen
        return seen

    async def verdict(answers: Sequence[Any]) -> None:
        assert answers[1] is True

    assert await every_order(world.players[:2], begin, look, verdict) >= 2
