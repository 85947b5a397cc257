"""What both databases promise about a unit of work."""

from __future__ import annotations

import asyncio
import random
import threading

import anyio
import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError

from deerflow_runs.errors import SchemaMismatch, UsageError
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.retry import ErrorKind, classify
from deerflow_runs.store.units import Units, open_units
from tests.migrations.databases import do
from tests.rules import rule
from tests.support.units import count_up, fails, look, no_complaints, other_tasks, present, put


async def test_what_a_unit_returns_is_the_answer(units: Units) -> None:
    await units.once(put("a"))
    assert await units.once(count_up("a")) == 1
    assert await units.transaction(count_up("a")) == 2
    assert await units.read(look) == {"a": 2}


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), KeyError("x"), UsageError("no")], ids=repr)
async def test_a_transaction_that_fails_leaves_nothing_and_its_error_passes(units: Units, error: Exception) -> None:
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
        await units.transaction(fails(error, "a", "b"))
    assert await units.read(look) == {}


async def test_a_transaction_of_several_statements_leaves_all_of_them(units: Units) -> None:
    await units.transaction(put("a", "b", "c"))
    assert await present(units, "a", "b", "c") == [True, True, True]


@rule("O8")
@pytest.mark.parametrize("verb", ["once", "transaction"])
async def test_a_unique_violation_reaches_the_caller_as_it_is(units: Units, verb: str) -> None:
    await units.once(put("a"))
    with pytest.raises(IntegrityError) as caught:
        await getattr(units, verb)(put("a"))
    assert classify(caught.value) is ErrorKind.UNIQUE_VIOLATION


async def test_an_error_belongs_to_its_own_unit(units: Units) -> None:
    """Also to none that is committed together with it."""
    await units.once(put("taken"))
    good = [units.once(put(f"once-{n}")) for n in range(20)] + [units.transaction(put(f"whole-{n}")) for n in range(20)]
    bad = [units.once(put("taken")) for _ in range(10)] + [
        units.transaction(fails(ValueError("no"), f"half-{n}")) for n in range(10)
    ]
    asked = [*good, *bad]
    order = list(range(len(asked)))
    random.Random(7).shuffle(order)
    answers = await asyncio.gather(*(asked[place] for place in order), return_exceptions=True)
    by_place = dict(zip(order, answers, strict=True))
    assert [by_place[place] for place in range(40)] == [None] * 40
    assert {type(by_place[place]) for place in range(40, 50)} == {IntegrityError}
    assert {type(by_place[place]) for place in range(50, 60)} == {ValueError}
    kept = {f"{how}-{n}" for how in ("once", "whole") for n in range(20)}
    assert set(await units.read(look)) == kept | {"taken"}


async def test_a_statement_the_database_refuses_does_not_spoil_the_next(units: Units) -> None:
    for verb in (units.once, units.transaction, units.read):
        with pytest.raises(DBAPIError):
            await verb(lambda connection: connection.exec_driver_sql("SELECT no_such_column FROM dr_fence"))
        assert await verb(look) == {}


# --- Cancelling -----------------------------------------------------------------------------------------------------


@rule("B021")
async def test_300_random_cancellations_leave_every_unit_whole_or_absent_and_leak_nothing(units: Units) -> None:
    """What is true when the cancellation arrives is true for good."""
    chance = random.Random(300)
    seen: dict[int, list[bool]] = {}

    async def ask(number: int) -> None:
        verb = units.transaction if number % 3 else units.once
        names = [f"{number}-a", f"{number}-b"] if number % 3 else [f"{number}-a"]
        try:
            await verb(put(*names))
        finally:
            seen[number] = await present(units, f"{number}-a", f"{number}-b")

    async def cancelled_some_time(number: int) -> BaseException | None:
        task = asyncio.create_task(ask(number), name=f"asker-{number}")
        for _ in range(chance.randrange(60)):
            await asyncio.sleep(0)
        if chance.random() < 0.8:
            task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        return ended

    with no_complaints():
        ended = await asyncio.gather(*(cancelled_some_time(number) for number in range(300)))
    assert {type(end) for end in ended} == {type(None), asyncio.CancelledError}
    rows = await units.read(look)
    for number, before in seen.items():
        now = [f"{number}-a" in rows, f"{number}-b" in rows]
        assert now == before
        assert now[0] == now[1] or not number % 3
        assert now[0] or ended[number] is not None
    assert other_tasks() == set()


@rule("P4")
async def test_a_caller_who_is_cancelled_at_every_turn_of_the_loop_is_told_once_the_fate_is_known(units: Units) -> None:
    """Cancel scopes do that. The whole unit is there or will never be."""
    known: list[list[bool]] = []

    async def ask() -> None:
        try:
            await units.transaction(put("a", "b"))
        finally:
            with anyio.CancelScope(shield=True):
                known.append(await present(units, "a", "b"))

    async def cancelled_after(turns: int) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            for _ in range(turns):
                await asyncio.sleep(0)
            group.cancel_scope.cancel()

    with no_complaints():
        for turns in range(12):
            await cancelled_after(turns)
            if known:
                before = known.pop()
                assert before in ([True, True], [False, False])
                assert await present(units, "a", "b") == before
                await units.once(lambda connection: connection.exec_driver_sql("DELETE FROM dr_fence").close())
    assert other_tasks() == set()


async def test_an_error_that_arrives_after_the_cancellation_is_nobody_s_concern(units: Units) -> None:
    """The caller is told of its cancellation, and the loop does not complain."""
    with no_complaints():
        for turns in range(8):
            asking = asyncio.create_task(units.transaction(fails(ValueError("no"), "a")))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            (ended,) = await asyncio.gather(asking, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError | ValueError)
            del asking, ended
    assert await units.read(look) == {}


@rule("B021")
async def test_a_deadline_of_the_caller_is_still_a_timeout(units: Units) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await units.transaction(put("a", "b"))
    assert len(set(await present(units, "a", "b"))) == 1


async def test_an_event_loop_that_ends_takes_its_units_along_whole(dsn: str) -> None:
    """Without a close: all tasks are cancelled at once, ours included."""

    async def leave() -> None:
        units = open_units(parse_dsn(dsn))
        await units.open()
        tasks = [asyncio.create_task(units.transaction(put(f"{n}-a", f"{n}-b"))) for n in range(20)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)

    await asyncio.to_thread(asyncio.run, leave())
    units = open_units(parse_dsn(dsn))
    await units.open()
    rows = await units.read(look)
    await units.close()
    assert {name[:-2] for name in rows if name.endswith("-a")} == {name[:-2] for name in rows if name.endswith("-b")}


# --- Opening and closing --------------------------------------------------------------------------------------------


async def test_opening_and_closing_may_be_repeated(dsn: str) -> None:
    units = open_units(parse_dsn(dsn))
    await units.close()
    for _ in range(2):
        await asyncio.gather(units.open(), units.open())
        await units.open()
        assert await units.read(look) == {}
        await asyncio.gather(units.close(), units.close())
        await units.close()


async def test_what_is_not_open_answers_nothing(dsn: str) -> None:
    units = open_units(parse_dsn(dsn))
    with pytest.raises(UsageError, match="not open"):
        await units.once(look)
    await units.open()
    await units.close()
    with pytest.raises(UsageError, match="not open"):
        await units.read(look)


async def test_closing_finishes_what_was_accepted(dsn: str) -> None:
    units = open_units(parse_dsn(dsn))
    await units.open()
    asked = [asyncio.create_task(units.once(put(f"{n}"))) for n in range(50)]
    await asyncio.sleep(0)
    await units.close()
    assert await asyncio.gather(*asked) == [None] * 50


async def test_what_was_never_opened_goes_without_a_word(dsn: str) -> None:
    with no_complaints():
        open_units(parse_dsn(dsn))


async def test_tables_that_are_missing_are_named_when_opening(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("none") / "runs.db"
    with pytest.raises(SchemaMismatch, match=r"deerflow_runs\.store\.migrate"):
        await open_units(parse_dsn(str(path))).open()
    assert not path.exists()


@pytest.fixture(params=["sqlite", "postgres"])
def outdated(request: pytest.FixtureRequest) -> str:
    """A database whose tables are of a newer version that this one cannot read."""
    dsn = str(request.getfixturevalue(f"{request.param}_dsn"))
    do(dsn, "UPDATE dr_meta SET number = 1000 WHERE name = 'min_reader'")
    return dsn


async def test_what_could_not_be_opened_needs_no_closing(outdated: str) -> None:
    before = threading.active_count()
    with no_complaints():
        units = open_units(parse_dsn(outdated))
        with pytest.raises(SchemaMismatch):
            await units.open()
        with pytest.raises(UsageError, match="not open"):
            await units.read(look)
        del units
    assert threading.active_count() == before
