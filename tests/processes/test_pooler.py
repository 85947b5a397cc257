"""Units of work through a real PgBouncer in transaction mode: no session lasts longer than a transaction."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, text

from deerflow_runs.store.connections import PostgresUnits
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate import upgrade
from tests.rules import rule
from tests.support.pooler import pgbouncer
from tests.support.proxy import RoundTripProxy
from tests.support.units import count_up, fails, look, no_complaints, put


@pytest.fixture
def pooled(postgres_dsn: str) -> Iterator[str]:
    """The address through a pooler that has three connections to the server."""
    with pgbouncer(postgres_dsn, connections=3) as dsn:
        yield dsn + "?pooler=true"


@asynccontextmanager
async def opened(dsn: str, *, connections: int = 16) -> AsyncIterator[PostgresUnits]:
    database = parse_dsn(dsn)
    assert isinstance(database, Postgres)
    units = PostgresUnits(database, connections=connections)
    await units.open()
    yield units
    await units.close()


@rule("P087")
async def test_many_clients_over_few_connections_lose_and_mix_up_nothing(pooled: str) -> None:
    async with opened(pooled) as units:
        await units.once(put("a", "b"))

        def both(connection: Connection) -> tuple[int, int]:
            return count_up("a")(connection), count_up("b")(connection)

        async def ask(number: int) -> tuple[int, int] | int:
            return await (units.transaction(both) if number % 2 else units.once(count_up("a")))

        answers = await asyncio.gather(*(ask(number) for number in range(400)))
        singles = [answer for answer in answers if isinstance(answer, int)]
        pairs = [answer for answer in answers if isinstance(answer, tuple)]
        assert sorted(singles + [first for first, _ in pairs]) == list(range(1, 401))
        assert sorted(second for _, second in pairs) == list(range(1, 201))
        kept = text("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
        assert await asyncio.gather(*(units.read(lambda c: c.scalar(kept)) for _ in range(9))) == [0] * 9


async def test_a_unit_of_one_statement_is_two_round_trips_and_no_more(pooled: str) -> None:
    """Prepared and executed; nothing is sent to begin, commit or clean up."""
    async with RoundTripProxy() as proxy, opened(proxy.dsn(pooled), connections=1) as units:
        await units.once(put("a"))
        before = proxy.turns
        for _ in range(10):
            await units.once(count_up("a"))
        assert proxy.turns - before == 20


@rule("O14")
async def test_transactions_have_limits_and_leave_none_to_others(pooled: str) -> None:
    def settings(connection: Connection) -> list[Any]:
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        return [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]

    async with opened(pooled) as units:
        assert await asyncio.gather(*(units.transaction(settings) for _ in range(9))) == [["10s", "5s", "10s"]] * 9
        with pytest.raises(ValueError, match="no"):
            await units.transaction(fails(ValueError("no"), "a"))
        assert await asyncio.gather(*(units.once(settings) for _ in range(9))) == [["0", "0", "0"]] * 9
        assert await units.read(look) == {}


async def test_tables_in_a_schema_of_their_own_are_found_there(postgres_dsn: str, pooled: str) -> None:
    await asyncio.to_thread(upgrade, postgres_dsn + "?schema=elsewhere")
    async with opened(pooled) as plain, opened(pooled + "&schema=elsewhere") as units:
        await plain.once(put("plain"))
        await asyncio.gather(*(units.transaction(put(f"{n}-a", f"{n}-b")) for n in range(20)))
        assert len(await units.read(look)) == 40
        assert set(await plain.read(look)) == {"plain"}


@rule("B021")
async def test_random_cancellations_leave_every_unit_whole_or_absent(pooled: str) -> None:
    chance = random.Random(9)

    async def cancelled_some_time(units: PostgresUnits, number: int) -> None:
        task = asyncio.create_task(units.transaction(put(f"{number}-a", f"{number}-b")))
        for _ in range(chance.randrange(80)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with opened(pooled) as units:
        with no_complaints():
            await asyncio.gather(*(cancelled_some_time(units, number) for number in range(100)))
        rows = await units.read(look)
    assert {name[:-2] for name in rows if name.endswith("-a")} == {name[:-2] for name in rows if name.endswith("-b")}
