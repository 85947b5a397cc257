"""What PostgreSQL's units promise beyond those of every database: round trips, order, limits, lost connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import create_async_engine

from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.store.connections import Limits, PostgresUnits
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.migrate import upgrade
from deerflow_runs.store.retry import RetryPolicy
from deerflow_runs.store.schema import fence
from deerflow_runs.store.units import Unit, open_units
from deerflow_runs.testing.postgres import PostgresCluster
from tests.rules import rule
from tests.support.proxy import RoundTripProxy
from tests.support.units import count_up, fails, look, no_complaints, other_tasks, put

HASTE = RetryPolicy(initial=0.001, maximum=0.01)


@asynccontextmanager
async def opened(dsn: str, **options: Any) -> AsyncIterator[PostgresUnits]:
    database = parse_dsn(dsn)
    assert isinstance(database, Postgres)
    units = PostgresUnits(database, **options)
    await units.open()
    try:
        yield units
    finally:
        await units.close()


@asynccontextmanager
async def stranger(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of somebody else."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def locked(dsn: str, name: str) -> AsyncIterator[None]:
    """Somebody else has changed the row of ``name`` and does not commit."""
    async with stranger(dsn) as connection, connection.transaction():
        await connection.execute("UPDATE dr_fence SET turn = turn WHERE thread_id = $1", name)
        yield


async def sessions(dsn: str) -> list[str]:
    """What the server says about each connection of ours."""
    async with stranger(dsn) as connection:
        rows = await connection.fetch(
            "SELECT state FROM pg_stat_activity WHERE application_name = 'deerflow_runs'"
            " AND datname = current_database()"
        )
    return [row["state"] for row in rows]


async def prefer_serializable(dsn: str) -> None:
    """What an administrator may have told the database."""
    async with stranger(dsn) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")


async def until_one_waits_for_a_lock(dsn: str) -> None:
    async with stranger(dsn) as connection:
        while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            pass


def backend(connection: Connection) -> int:
    """The process that serves us."""
    return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


# --- Round trips ----------------------------------------------------------------------------------------------------


async def test_a_unit_of_one_statement_is_one_round_trip(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy, opened(proxy.dsn(postgres_dsn), connections=1) as units:
        await units.once(put("a"))
        await units.once(count_up("a"))  # the first time a statement is prepared
        before = proxy.turns
        for _ in range(10):
            await units.once(count_up("a"))
        assert proxy.turns - before == 10
        async with stranger(postgres_dsn) as connection:
            assert await connection.fetchval("SELECT turn FROM dr_fence") == 11  # and all are committed


async def test_a_transaction_costs_two_round_trips_more_than_its_statements(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy, opened(proxy.dsn(postgres_dsn), connections=1) as units:
        await units.transaction(put("a", "b", "c"))
        before = proxy.turns
        await units.transaction(put("d", "e", "f"))
        assert proxy.turns - before == 5


async def test_an_error_the_server_answers_costs_no_connection(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy, opened(proxy.dsn(postgres_dsn), connections=1) as units:
        pid = await units.read(backend)
        await units.once(put("a"))
        before = proxy.turns
        with pytest.raises(Exception, match="duplicate key"):
            await units.once(put("a"))
        assert proxy.turns - before == 1
        with pytest.raises(ValueError, match="no"):
            await units.transaction(fails(ValueError("no"), "b"))
        assert await units.read(backend) == pid


# --- Order ----------------------------------------------------------------------------------------------------------


async def test_nobody_overtakes_who_waits_for_a_connection(postgres_dsn: str) -> None:
    """Those who are served and ask again stand behind those who wait since before."""
    order: list[int] = []

    async def ask_three_times(units: PostgresUnits, number: int) -> None:
        for _ in range(3):
            await units.read(look)
            order.append(number)

    async with opened(postgres_dsn, connections=1) as units:
        await asyncio.gather(*(ask_three_times(units, number) for number in range(10)))
    assert order == [*range(10)] * 3


async def test_a_caller_cancelled_while_it_waits_leaves_at_once_and_its_place_to_the_next(postgres_dsn: str) -> None:
    async with opened(postgres_dsn, connections=1) as units:
        await units.once(put("a"))
        async with locked(postgres_dsn, "a"):
            first = asyncio.create_task(units.once(count_up("a")))
            await until_one_waits_for_a_lock(postgres_dsn)
            second, third = (asyncio.create_task(units.once(put(name))) for name in ("b", "c"))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        assert await first == 1
        await third
        assert await units.read(look) == {"a": 1, "c": 0}


async def test_as_many_connections_are_open_as_are_wanted_at_once_and_no_more(postgres_dsn: str) -> None:
    async with opened(postgres_dsn, connections=3) as units:
        for _ in range(5):
            await units.read(look)
        assert await sessions(postgres_dsn) == ["idle"]
        pids = await asyncio.gather(*(units.transaction(backend) for _ in range(20)))
        assert len(set(pids)) == 3
        assert await sessions(postgres_dsn) == ["idle"] * 3
    while await sessions(postgres_dsn):  # the server takes leave of them in its own time
        pass


# --- Transactions ---------------------------------------------------------------------------------------------------


async def test_nobody_sees_a_transaction_before_it_is_whole(postgres_dsn: str) -> None:
    async with opened(postgres_dsn) as units:
        await units.once(put("b"))
        async with locked(postgres_dsn, "b"):

            def both(connection: Connection) -> None:
                put("a")(connection)
                count_up("b")(connection)

            changing = asyncio.create_task(units.transaction(both))
            await until_one_waits_for_a_lock(postgres_dsn)
            assert await units.read(look) == {"b": 0}
        await changing
        assert await units.read(look) == {"a": 0, "b": 1}


async def test_a_unit_that_hides_an_error_of_the_database_is_told_that_nothing_was_stored(postgres_dsn: str) -> None:
    def hide(connection: Connection) -> None:
        put("a")(connection)
        with pytest.raises(Exception, match="duplicate key"):
            put("a")(connection)

    async with opened(postgres_dsn) as units:
        with pytest.raises(UsageError, match="nothing can be committed"):
            await units.transaction(hide)
        assert await units.read(look) == {}
        assert await sessions(postgres_dsn) == ["idle"]


@rule("O7")
async def test_the_statement_after_a_lock_sees_what_its_holder_committed_whatever_the_database_prefers(
    postgres_dsn: str,
) -> None:
    await prefer_serializable(postgres_dsn)

    def count_after_lock(connection: Connection) -> int:
        connection.execute(text("SELECT pg_advisory_xact_lock(7)"))
        return count_up("a")(connection)

    def isolation(connection: Connection) -> str:
        return str(connection.exec_driver_sql("SHOW transaction_isolation").scalar_one())

    async with opened(postgres_dsn) as units:
        assert await units.once(isolation) == await units.transaction(isolation) == "read committed"
        await units.once(put("a"))
        answers = await asyncio.gather(*(units.transaction(count_after_lock) for _ in range(20)))
        assert sorted(answers) == list(range(1, 21))


# --- Limits ---------------------------------------------------------------------------------------------------------


@rule("O14", "P067")
async def test_every_session_has_limits(postgres_dsn: str) -> None:
    def settings(connection: Connection) -> list[Any]:
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "application_name")
        return [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]

    async with opened(postgres_dsn) as units:
        assert await units.once(settings) == ["10s", "5s", "10s", "deerflow_runs"]
    limits = Limits(statement=2.5, lock=1, idle_in_transaction=3)
    async with opened(postgres_dsn + "?application_name=mine", limits=limits) as units:
        assert await units.once(settings) == ["2500ms", "1s", "3s", "mine"]


@rule("O14", "P067")
@pytest.mark.parametrize("verb", ["once", "transaction"])
async def test_a_lock_that_is_never_given_back_is_no_answer_and_not_waited_for_for_ever(
    postgres_dsn: str, verb: str
) -> None:
    limits = Limits(lock=0.02)
    async with opened(postgres_dsn, limits=limits, policy=HASTE, connections=1) as units:
        await units.once(put("a"))
        async with locked(postgres_dsn, "a"):
            with pytest.raises(StoreUnavailable):
                await getattr(units, verb)(count_up("a"))
            assert await sessions(postgres_dsn) == ["idle"]
        assert await getattr(units, verb)(count_up("a")) == 1


async def test_a_network_that_swallows_everything_is_no_answer_and_the_store_recovers(postgres_dsn: str) -> None:
    limits = Limits(command=0.1, connect=0.1)
    async with (
        RoundTripProxy() as proxy,
        opened(proxy.dsn(postgres_dsn), limits=limits, policy=HASTE, connections=2) as units,
    ):
        with no_complaints():
            await asyncio.gather(units.transaction(put("a", "b")), units.transaction(put("c", "d")))
            proxy.hold()
            for verb in (units.once, units.transaction, units.once):
                with pytest.raises(StoreUnavailable):
                    await verb(count_up("a"))
            proxy.release()
            rows = await units.read(look)
            assert set(rows) == {"a", "b", "c", "d"}
            assert await units.transaction(count_up("b")) == 1
    assert other_tasks() == set()


async def test_closing_does_not_wait_for_a_network_that_swallows_everything(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy:
        async with opened(proxy.dsn(postgres_dsn), connections=2) as units:
            await asyncio.gather(units.read(look), units.read(look))
            proxy.hold()
        proxy.release()


async def test_a_swallowing_network_is_no_answer_on_the_host_s_engine_either(postgres_dsn: str) -> None:
    async with RoundTripProxy() as proxy:
        address = proxy.dsn(postgres_dsn).replace("postgresql://", "postgresql+asyncpg://")
        engine = create_async_engine(address)
        limits = Limits(command=0.1)
        async with opened(postgres_dsn, engine=engine, limits=limits, policy=HASTE, connections=2) as units:
            with no_complaints():
                await asyncio.gather(units.transaction(put("a", "b")), units.transaction(put("c", "d")))
                proxy.hold()
                for verb in (units.once, units.transaction, units.once):
                    with pytest.raises(StoreUnavailable):
                        await verb(count_up("a"))
                proxy.release()
                assert set(await units.read(look)) == {"a", "b", "c", "d"}
        await engine.dispose()
    assert other_tasks() == set()


# --- Lost connections -----------------------------------------------------------------------------------------------


def put_once(name: str, runs: list[str]) -> Unit[bool]:
    """One statement that is safe to repeat: answers whether the row is there. Notes each time it runs."""

    def unit(connection: Connection) -> bool:
        runs.append(name)
        row = insert(fence).values({"thread_id": name, "turn": 0, "epoch": 0})
        here = row.on_conflict_do_update(index_elements=["thread_id"], set_={"epoch": 0}).returning(fence.c.thread_id)
        return connection.execute(here).scalar_one_or_none() == name

    return unit


@rule("O8")
@pytest.mark.parametrize(("verb", "replies"), [("once", 1), ("transaction", 3)])
async def test_whichever_reply_is_lost_the_unit_is_repeated_and_its_effect_is_there_once(
    postgres_dsn: str, verb: str, replies: int
) -> None:
    """Those of BEGIN and of COMMIT too."""
    async with RoundTripProxy() as proxy, opened(proxy.dsn(postgres_dsn), connections=1) as units:
        for lost in range(1, replies + 1):
            runs: list[str] = []
            await getattr(units, verb)(put_once("a", []))  # from now on the statement is prepared
            proxy.lose_reply(lost)
            with no_complaints():
                assert await getattr(units, verb)(put_once(f"{verb}-{lost}", runs))
            assert len(runs) == (1 if verb == "transaction" and lost == 1 else 2)
        assert len(await units.read(look)) == replies + 1


@rule("P051")
async def test_connections_that_the_server_ends_are_not_noticed(postgres_dsn: str) -> None:
    """Again and again, idle ones and those at work."""
    done = asyncio.Event()

    async def end_all() -> None:
        async with stranger(postgres_dsn) as connection:
            while not done.is_set():
                await connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'deerflow_runs'"
                    " AND datname = current_database()"
                )
                await asyncio.gather(*(units.read(look) for _ in range(20)))  # so that attempts come to an end

    async def ask(number: int) -> bool:
        verb = units.transaction if number % 2 else units.once
        return await verb(put_once(f"{number}", []))

    async with opened(postgres_dsn, policy=RetryPolicy(max_attempts=50, initial=0.001, maximum=0.01)) as units:
        with no_complaints():
            ending = asyncio.create_task(end_all())
            assert await asyncio.gather(*(ask(number) for number in range(200))) == [True] * 200
            done.set()
            await ending
        assert len(await units.read(look)) == 200


async def test_a_server_that_is_away_is_no_answer_and_one_that_is_back_answers(
    private_postgres: PostgresCluster,
) -> None:
    dsn = private_postgres.dsn()
    await asyncio.to_thread(upgrade, dsn)
    async with opened(dsn, policy=HASTE) as units:
        await asyncio.gather(*(units.transaction(put(f"{n}-a", f"{n}-b")) for n in range(10)))
        with no_complaints():
            await asyncio.to_thread(private_postgres.kill)
            for verb in (units.once, units.transaction, units.read):
                with pytest.raises(StoreUnavailable):
                    await verb(look)
            await asyncio.to_thread(private_postgres.start)
            rows = await asyncio.gather(*(units.read(look) for _ in range(10)))
            assert {len(found) for found in rows} == {20}


async def test_a_server_that_comes_back_in_time_is_not_noticed(private_postgres: PostgresCluster) -> None:
    dsn = private_postgres.dsn()
    await asyncio.to_thread(upgrade, dsn)
    async with opened(dsn, policy=RetryPolicy(max_attempts=1000)) as units:
        await units.once(put("a"))
        await asyncio.to_thread(private_postgres.kill)
        asking = [asyncio.create_task(units.transaction(put_once(f"{n}", []))) for n in range(20)]
        await asyncio.to_thread(private_postgres.start)
        assert await asyncio.gather(*asking) == [True] * 20


@rule("B021", "P039")
async def test_after_300_random_cancellations_every_connection_is_back_and_none_is_in_a_transaction(
    postgres_dsn: str,
) -> None:
    chance = random.Random(5)

    async def cancelled_some_time(units: PostgresUnits, number: int) -> None:
        task = asyncio.create_task(units.transaction(put(f"{number}-a", f"{number}-b")))
        for _ in range(chance.randrange(60)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with opened(postgres_dsn, connections=3) as units:
        pids = await asyncio.gather(*(units.transaction(backend) for _ in range(3)))
        with no_complaints():
            await asyncio.gather(*(cancelled_some_time(units, number) for number in range(300)))
        assert await sessions(postgres_dsn) == ["idle"] * 3
        # A caller's cancellation never reaches a connection, so none had to be replaced.
        assert set(await asyncio.gather(*(units.transaction(backend) for _ in range(3)))) == set(pids)
    assert other_tasks() == set()


async def test_a_table_that_was_changed_by_a_newer_worker_s_migration_is_read_on(postgres_dsn: str) -> None:
    """Plans that are kept on open connections are made anew, also inside of a transaction."""
    everything = text("SELECT * FROM dr_fence")
    async with opened(postgres_dsn, connections=2) as units:
        for verb in (units.once, units.transaction):
            for _ in range(10):
                await asyncio.gather(*(verb(lambda connection: connection.execute(everything).all()) for _ in range(2)))
            async with stranger(postgres_dsn) as connection:
                await connection.execute("ALTER TABLE dr_fence ADD COLUMN news integer")
            rows = await asyncio.gather(*(verb(lambda c: tuple(c.execute(everything).keys())) for _ in range(2)))
            assert all("news" in names for names in rows)
            async with stranger(postgres_dsn) as connection:
                await connection.execute("ALTER TABLE dr_fence DROP COLUMN news")


# --- Whose engine, which loop ---------------------------------------------------------------------------------------


async def test_the_host_s_engine_lends_its_connections_and_stays_open(postgres_dsn: str) -> None:
    await prefer_serializable(postgres_dsn)
    engine = create_async_engine(postgres_dsn.replace("postgresql://", "postgresql+asyncpg://"), pool_size=2)

    def settings(connection: Connection) -> list[Any]:
        names = ("statement_timeout", "lock_timeout", "transaction_isolation")
        return [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]

    async with opened(postgres_dsn, engine=engine, connections=2) as units:
        await asyncio.gather(*(units.transaction(put(f"{n}-a", f"{n}-b")) for n in range(10)))
        with pytest.raises(ValueError, match="no"):
            await units.transaction(fails(ValueError("no"), "c"))
        assert await units.transaction(settings) == ["10s", "5s", "read committed"]
        assert (await units.once(settings))[0] == "0"
        assert len(await units.read(look)) == 20
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM dr_fence")) == 20
        await connection.execute(text("DELETE FROM dr_fence"))
        await connection.rollback()  # what we borrowed begins transactions again
        assert await connection.scalar(text("SELECT count(*) FROM dr_fence")) == 20
    await engine.dispose()


def test_an_engine_that_speaks_through_another_driver_is_refused(postgres_dsn: str) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(UsageError, match="asyncpg"):
        open_units(parse_dsn(postgres_dsn), engine=engine)


async def test_another_event_loop_is_refused(postgres_dsn: str) -> None:
    async with opened(postgres_dsn) as units:

        async def ask() -> None:
            await units.read(look)

        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, ask())


async def test_tables_in_a_schema_of_their_own_are_found_there(postgres_dsn: str) -> None:
    dsn = postgres_dsn + "?schema=elsewhere"
    await asyncio.to_thread(upgrade, dsn)
    async with opened(postgres_dsn) as units:
        await units.once(put("plain"))
    async with opened(dsn) as units:
        await units.transaction(put("a", "b"))
        assert set(await units.read(look)) == {"a", "b"}
