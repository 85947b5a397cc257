"""What SQLite's units promise beyond those of every database: groups that share a commit, readers beside the writer."""

from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import OperationalError

from deerflow_runs.errors import StoreUnavailable, UsageError
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.retry import RetryPolicy
from deerflow_runs.store.sqlite_connection import contains, require_version, wal_reset_risk
from deerflow_runs.store.units import open_units
from deerflow_runs.store.writer import LARGEST_GROUP, SqliteUnits
from tests.rules import rule
from tests.support.units import Gate, busy, count_up, everybody_has_asked, fails, look, no_complaints, present, put

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
async def units(sqlite_dsn: str) -> AsyncIterator[SqliteUnits]:
    opened = units_on(sqlite_dsn)
    await opened.open()
    yield opened
    await opened.close()


def units_on(dsn: str, **options: Any) -> SqliteUnits:
    database = parse_dsn(dsn)
    assert isinstance(database, Sqlite)
    return SqliteUnits(database, **options)


@contextmanager
def locked(dsn: str) -> Iterator[None]:
    """Somebody else is inside a transaction that writes."""
    connection = sqlite3.connect(dsn.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


# --- Groups ---------------------------------------------------------------------------------------------------------


@rule("O34")
async def test_units_that_wait_together_are_committed_together(units: SqliteUnits) -> None:
    async with busy(units) as gate:
        before = units.stats()
        waiting = [asyncio.create_task(units.once(put(f"{n}"))) for n in range(25)]
        waiting += [asyncio.create_task(units.transaction(put(f"{n}-a", f"{n}-b"))) for n in range(25)]
        await everybody_has_asked()
        gate.open()
        await asyncio.gather(*waiting)
    after = units.stats()
    assert after.commits - before.commits == 2  # that of the gate, and one for the fifty
    assert after.units - before.units == 51


@rule("O34")
async def test_a_group_has_a_largest_size(units: SqliteUnits) -> None:
    async with busy(units) as gate:
        before = units.stats()
        waiting = [asyncio.create_task(units.once(look)) for _ in range(LARGEST_GROUP + 1)]
        await everybody_has_asked()
        gate.open()
        await asyncio.gather(*waiting)
    assert units.stats().commits - before.commits == 3


async def test_one_unit_is_one_commit_and_a_read_is_none(units: SqliteUnits) -> None:
    before = units.stats()
    await units.once(put("a"))
    assert units.stats().commits - before.commits == 1
    await units.transaction(put("b", "c"))
    assert units.stats().commits - before.commits == 2
    await units.read(look)
    assert units.stats().commits - before.commits == 2


async def test_a_failed_unit_of_several_statements_leaves_nothing_in_a_group_that_is_committed(
    units: SqliteUnits,
) -> None:
    async with busy(units) as gate:
        good = asyncio.create_task(units.transaction(put("a", "b")))
        bad = asyncio.create_task(units.transaction(fails(ValueError("no"), "c", "d")))
        last = asyncio.create_task(units.transaction(put("e")))
        await everybody_has_asked()
        gate.open()
        await good
        await last
        with pytest.raises(ValueError, match="no"):
            await bad
    assert set(await units.read(look)) == {"a", "b", "e"}


async def test_a_result_that_was_not_read_to_its_end_does_not_keep_the_group_from_its_commit(
    units: SqliteUnits,
) -> None:
    await units.transaction(put("a", "b", "c"))

    def half_read(connection: Connection) -> Any:
        return connection.execute(text("UPDATE dr_fence SET turn = 7 RETURNING turn")).fetchone()

    def kept_half_read(connection: Connection) -> None:
        raise AssertionError(connection.execute(text("UPDATE dr_fence SET turn = 8 RETURNING turn")))

    async with busy(units) as gate:
        first = asyncio.create_task(units.once(half_read))
        second = asyncio.create_task(units.transaction(kept_half_read))
        neighbour = asyncio.create_task(units.transaction(put("d")))
        await everybody_has_asked()
        gate.open()
        assert await first == (7,)
        with pytest.raises(AssertionError):
            await second
        await neighbour
    assert await units.read(look) == {"a": 7, "b": 7, "c": 7, "d": 0}


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
async def test_a_unit_that_ends_the_transaction_takes_nobody_s_write_with_it_unnoticed(
    units: SqliteUnits, statement: str
) -> None:
    """So it is with errors after which SQLite itself rolls back, such as a full disk."""
    async with busy(units) as gate:
        waiting = [
            asyncio.create_task(units.once(put("a"))),
            asyncio.create_task(units.once(lambda connection: connection.exec_driver_sql(statement).close())),
            asyncio.create_task(units.once(put("b"))),
        ]
        await everybody_has_asked()
        gate.open()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [UsageError] * 3
    assert await present(units, "b") == [False]
    await units.once(put("b"))


@rule("O8")
async def test_a_full_disk_that_undoes_the_group_is_the_answer_of_its_cause_only(units: SqliteUnits) -> None:
    """The neighbours are repeated."""
    runs: list[str] = []

    def small(connection: Connection) -> None:
        runs.append("small")
        put("a")(connection)

    def too_large(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        put(*(f"{n}".rjust(200) for n in range(10_000)))(connection)

    async with busy(units) as gate:
        waiting = [asyncio.create_task(units.once(small)), asyncio.create_task(units.transaction(too_large))]
        await everybody_has_asked()
        gate.open()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None), StoreUnavailable]
    assert len(runs) > 1
    assert await units.read(look) == {"a": 0}


# --- Cancelling -----------------------------------------------------------------------------------------------------


async def test_a_caller_cancelled_before_its_unit_began_leaves_at_once_and_the_unit_never_runs(
    units: SqliteUnits,
) -> None:
    async with busy(units) as gate:
        before = units.stats()
        waiting = asyncio.create_task(units.once(put("a")))
        await everybody_has_asked()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting  # although the writer is still busy
        gate.open()
    await units.once(put("b"))
    assert await units.read(look) == {"b": 0}
    assert units.stats().units - before.units == 2


async def test_a_unit_may_still_be_withdrawn_while_its_group_is_at_work(units: SqliteUnits) -> None:
    inside = Gate()
    async with busy(units) as gate:
        first = asyncio.create_task(units.once(inside.unit))
        withdrawn = asyncio.create_task(units.once(put("a")))
        last = asyncio.create_task(units.once(put("b")))
        await everybody_has_asked()
        gate.open()
        await inside.reached()
        withdrawn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await withdrawn
        inside.open()
        await asyncio.gather(first, last)
    assert await units.read(look) == {"b": 0}


@rule("B021")
async def test_a_caller_cancelled_while_its_unit_runs_waits_for_its_end(units: SqliteUnits) -> None:
    gate = Gate()

    def slow(connection: Connection) -> None:
        put("a")(connection)
        gate.unit(connection)

    asking = asyncio.create_task(units.once(slow))
    await gate.reached()
    for _ in range(3):
        asking.cancel()
        await everybody_has_asked()
    assert not asking.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await present(units, "a") == [True]


# --- Locks ----------------------------------------------------------------------------------------------------------


@rule("O34")
async def test_a_locked_file_is_no_answer_for_everybody_in_the_group_and_nothing_is_lost(sqlite_dsn: str) -> None:
    units = units_on(sqlite_dsn, lock_timeout=0.05)
    await units.open()
    with no_complaints(), locked(sqlite_dsn):
        answers = await asyncio.gather(*(units.once(put(f"{n}")) for n in range(5)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 5
        assert await units.read(look) == {}
    await units.once(put("a"))
    assert await units.read(look) == {"a": 0}
    await units.close()


@rule("O34")
async def test_a_lock_that_is_given_back_in_time_costs_no_attempt(sqlite_dsn: str) -> None:
    units = units_on(sqlite_dsn, policy=ONCE)
    await units.open()
    with locked(sqlite_dsn):
        waiting = asyncio.create_task(units.once(put("a")))
        assert await units.read(look) == {}
        assert not waiting.done()
    await waiting
    assert await units.read(look) == {"a": 0}
    await units.close()


@rule("O34")
async def test_a_transaction_that_reads_before_it_writes_finds_nobody_in_between(sqlite_dsn: str) -> None:
    """Two stores on one file, which repeat nothing: each adds to what it has read."""
    stores = [units_on(sqlite_dsn, policy=ONCE) for _ in range(2)]
    for store in stores:
        await store.open()
    await stores[0].once(put("a"))

    def add(connection: Connection) -> None:
        connection.execute(text("UPDATE dr_fence SET turn = :turn"), {"turn": look(connection)["a"] + 1})

    async def add_often(store: SqliteUnits) -> None:
        for _ in range(100):
            await store.transaction(add)

    await asyncio.gather(*(add_often(store) for store in stores))
    assert await stores[0].read(look) == {"a": 200}
    for store in stores:
        await store.close()


# --- Reading --------------------------------------------------------------------------------------------------------


async def test_a_read_does_not_wait_for_the_writer(units: SqliteUnits) -> None:
    async with busy(units):
        assert await units.read(look) == {}


async def test_a_read_sees_one_state_however_often_it_looks(units: SqliteUnits) -> None:
    first_look, second_look = threading.Event(), threading.Event()

    def look_twice(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
        before = look(connection)
        first_look.set()
        assert second_look.wait(60)
        return before, look(connection)

    reading = asyncio.create_task(units.read(look_twice))
    assert await asyncio.to_thread(first_look.wait, 60)
    await units.once(put("a"))
    second_look.set()
    assert await reading == ({}, {})
    assert await units.read(look) == {"a": 0}


async def test_a_read_cannot_write(units: SqliteUnits) -> None:
    with pytest.raises(OperationalError, match="readonly"):
        await units.read(put("a"))
    assert await units.read(look) == {}


async def test_what_was_answered_can_be_read(units: SqliteUnits) -> None:
    await units.once(put("a"))
    for count in range(1, 50):
        await units.once(count_up("a"))
        assert await units.read(look) == {"a": count}


# --- Loops and threads ----------------------------------------------------------------------------------------------


@rule("O10")
async def test_several_event_loops_share_one_store(units: SqliteUnits) -> None:
    await units.once(put("a"))

    async def count_often() -> list[int]:
        return [await units.once(count_up("a")) for _ in range(50)]

    here = asyncio.create_task(count_often())
    there = [asyncio.to_thread(asyncio.run, count_often()) for _ in range(2)]
    answers = await asyncio.gather(here, *there)
    assert sorted(number for some in answers for number in some) == list(range(1, 151))


async def test_a_loop_that_is_gone_does_not_keep_others_from_their_answers(units: SqliteUnits) -> None:
    def lonely() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(units.once(put("a")))
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert not task.done()
        loop.close()

    async with busy(units) as gate:
        await asyncio.to_thread(lonely)
        other = asyncio.create_task(units.once(put("b")))
        await everybody_has_asked()
        gate.open()
        await other
    assert await present(units, "b") == [True]


async def test_a_store_that_nobody_holds_any_more_takes_its_threads_along(sqlite_dsn: str) -> None:
    before = set(threading.enumerate())
    units = units_on(sqlite_dsn)
    await units.open()
    threads = set(threading.enumerate()) - before
    assert {thread.daemon for thread in threads} == {True}
    with no_complaints():
        del units
        for _ in range(10):  # the loop still holds what it woke us with
            await asyncio.sleep(0)
        gc.collect()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


async def test_closing_ends_the_threads(sqlite_dsn: str) -> None:
    before = set(threading.enumerate())
    units = units_on(sqlite_dsn)
    await units.open()
    threads = set(threading.enumerate()) - before
    await units.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


# --- The connection -------------------------------------------------------------------------------------------------


async def test_a_database_in_memory_is_made_when_it_is_opened_and_private() -> None:
    one, other = open_units(parse_dsn(":memory:")), open_units(parse_dsn(":memory:"))
    await one.open()
    await other.open()
    await one.once(put("a"))
    await one.open()
    assert await one.read(look) == {"a": 0}
    assert await other.read(look) == {}
    await one.close()
    await other.close()


async def test_the_clock_of_the_store_is_the_one_it_was_given(sqlite_dsn: str) -> None:
    instants = iter([7, 11, 13])
    units = open_units(parse_dsn(sqlite_dsn), clock=lambda: next(instants))
    await units.open()
    ask = select(units.dialect.now)
    assert await units.read(lambda connection: connection.scalar(ask)) == 7
    assert await units.once(lambda connection: connection.scalar(ask)) == 11
    assert await units.transaction(lambda connection: connection.scalar(ask)) == 13
    await units.close()


@rule("O34")
async def test_what_was_committed_has_reached_the_disk(units: SqliteUnits) -> None:
    def settings(connection: Connection) -> list[Any]:
        names = ("journal_mode", "synchronous", "busy_timeout")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert await units.once(settings) == ["wal", 2, 0]


def test_an_sqlite_without_our_statements_is_refused() -> None:
    require_version((3, 35, 0))
    with pytest.raises(UsageError, match=r"3\.34\.1 is too old"):
        require_version((3, 34, 1))


@rule("O34")
def test_sqlite_versions_that_may_damage_a_shared_file_are_known() -> None:
    assert wal_reset_risk((3, 51, 2))
    assert not wal_reset_risk((3, 51, 3))


# --- Containment ----------------------------------------------------------------------------------------------------


def some_json(chance: random.Random, depth: int = 3) -> str:
    """JSON of few different values, so that one often contains another."""
    scalars = [
        "0",
        "1",
        "1.0",
        "10",
        "1e1",
        "0.1",
        "0.100000000000000000001",
        "true",
        "false",
        "null",
        '""',
        '"a"',
        '"1"',
    ]
    kind = chance.randrange(5) if depth else 0
    if kind < 2:
        return chance.choice(scalars)
    many = range(chance.randrange(4))
    if kind < 4:
        return "[" + ", ".join(some_json(chance, depth - 1) for _ in many) + "]"
    return "{" + ", ".join(f'"{chance.choice("abc")}": {some_json(chance, depth - 1)}' for _ in many) + "}"


async def test_containment_means_what_it_means_to_postgres(postgres_dsn: str) -> None:
    chance = random.Random(3)
    pairs = [(some_json(chance), some_json(chance)) for _ in range(20_000)]
    units = open_units(parse_dsn(postgres_dsn))
    await units.open()
    ask = text(
        "SELECT CAST(whole AS jsonb) @> CAST(part AS jsonb)"
        " FROM unnest(CAST(:wholes AS text[]), CAST(:parts AS text[])) AS pairs (whole, part)"
    )
    given = {"wholes": [whole for whole, _ in pairs], "parts": [part for _, part in pairs]}
    expected = await units.read(lambda connection: list(connection.scalars(ask, given)))
    await units.close()
    assert [(*pair, contains(*pair)) for pair in pairs] == [
        (*pair, wanted) for pair, wanted in zip(pairs, expected, strict=True)
    ]
    assert 1000 < sum(expected) < 19_000


async def test_statements_can_ask_for_containment(units: SqliteUnits) -> None:
    def ask(connection: Connection) -> list[int | None]:
        pairs = [('{"a": [1, 2]}', '{"a": [2]}'), ('{"a": 1}', '{"b": 1}'), (None, "{}"), ("{}", None)]
        return [connection.scalar(select(func.dr_contains(*pair))) for pair in pairs]

    assert await units.read(ask) == [1, 0, None, None]
