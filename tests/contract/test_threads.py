"""Thread rows on both databases: made, changed, searched, and deleted with everything that hangs on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import func, select

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import (
    EVERYONE,
    OneUser,
    OperationKind,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Scope,
    Strategy,
    ThreadId,
    ThreadOutcome,
    WorkerId,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Given, Refused
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store import arrivals, thread_search, threads
from deerflow_runs.store.dialect import POSTGRES
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.schema import metadata as tables
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.thread_search import ThreadQuery, ThreadSort
from deerflow_runs.store.threads import NewThread, Thread, ThreadChange, ThreadDeleted, ThreadStatus
from deerflow_runs.store.units import Units, open_units
from tests.contract.lives import (
    ME,
    OTHER,
    THREAD,
    Pause,
    admitted,
    asked,
    delayed,
    done,
    ended,
    executed,
    happened,
    names,
    reserved,
    started,
    until_somebody_waits,
    waiting,
)
from tests.rules import rule

ANN, BEN = OneUser("ann"), OneUser("ben")


async def created(units: Units, thread_id: str = THREAD, **given: Any) -> Thread:
    thread = await done(units, threads.create, NewThread(thread_id=ThreadId(thread_id), **given))
    assert thread is not None
    return thread


async def got(units: Units, thread_id: str = THREAD, *, scope: Scope = EVERYONE) -> Thread | None:
    return await asked(units, threads.get, ThreadId(thread_id), scope=scope)


async def changed(units: Units, change: ThreadChange, *, scope: Scope = EVERYONE) -> Thread:
    thread = await done(units, threads.update, THREAD, change, scope=scope)
    assert thread is not None
    return thread


async def found(units: Units, *, scope: Scope = EVERYONE, **query: Any) -> list[str]:
    page = await asked(units, thread_search.search, ThreadQuery(**query), scope=scope)
    assert await asked(units, thread_search.count, ThreadQuery(**query), scope=scope) >= len(page.threads)
    return [thread.thread_id for thread in page.threads]


# --- Making ---------------------------------------------------------------------------------------------------------


async def test_a_thread_comes_back_as_it_was_made(units: Units) -> None:
    given: dict[str, Any] = {
        "metadata": {"z": 1e22, "a": [1, {"é": "🙂"}]},
        "config": {"configurable": {}},
        "values": {"messages": []},
        "user_id": "ann",
    }
    made = await created(units, **given)
    assert {name: getattr(made, name) for name in given} == given
    assert list(made.metadata) == ["z", "a"]
    assert (made.status, made.interrupts, made.error, made.temporary) == (ThreadStatus.IDLE, {}, None, False)
    assert made.created_at > 0
    assert await got(units) == made


async def test_an_id_is_made_once_and_the_first_thread_stays_as_it_was(units: Units) -> None:
    first = await created(units, metadata={"first": True}, user_id="ann")
    second = NewThread(thread_id=THREAD, metadata={"second": True}, user_id="ben")
    assert await done(units, threads.create, second) is None
    assert await got(units) == first


@rule("B202")
async def test_a_foreign_thread_looks_like_a_missing_one(units: Units) -> None:
    await created(units, user_id="ann", metadata={"tag": 1})
    await created(units, "nobodys")
    assert await got(units, scope=BEN) is None
    assert await done(units, threads.update, THREAD, ThreadChange(metadata={"tag": 2}), scope=BEN) is None
    assert await found(units, scope=BEN) == []
    assert await asked(units, thread_search.count, ThreadQuery(), scope=BEN) == 0
    assert await found(units, scope=BEN, ids=[THREAD, "nobodys"], metadata={"tag": 1}) == []
    assert await found(units, scope=ANN) == [THREAD]
    assert await got(units, "nobodys", scope=ANN) is None
    thread = await got(units)
    assert thread is not None
    assert thread.metadata == {"tag": 1}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"thread_id": ""}, "thread_id"),
        ({"thread_id": "a\0"}, "thread_id"),
        ({"thread_id": "x" * 256}, "thread_id"),
        ({"user_id": "\ud800"}, "user_id"),
        ({"metadata": {"deep": [{"n": float("nan")}]}}, "metadata.deep[0].n"),
        ({"metadata": ["no", "object"]}, "metadata"),
        ({"metadata": {"big": "x" * 300_000}}, "metadata"),
        ({"config": {"n": 2**64}}, "config.n"),
    ],
)
def test_a_thread_that_could_not_be_stored_is_refused_by_its_path(given: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        NewThread(**{"thread_id": THREAD} | given)
    assert refused.value.path.startswith(path)


async def test_what_a_graph_left_is_repaired_and_never_refused(units: Units) -> None:
    made = await created(units, values={"text": "a\0b", "n": float("inf")})
    assert made.values == {"text": "a\N{REPLACEMENT CHARACTER}b", "n": "inf"}
    assert (await changed(units, ThreadChange(interrupts={"task": [{1}]}))).interrupts == {"task": [[1]]}


# --- Changing -------------------------------------------------------------------------------------------------------


async def test_metadata_are_merged_at_the_top_and_all_else_is_replaced(units: Units) -> None:
    before = await created(units, metadata={"a": {"x": 1}, "b": 1}, config={"c": 1}, values={"v": 1}, user_id="ann")
    change = ThreadChange(metadata={"a": {"y": 2}, "n": None}, config={"d": 2}, values={"w": 2}, interrupts={"t": []})
    after = await changed(units, change, scope=ANN)
    assert after.metadata == {"a": {"y": 2}, "b": 1, "n": None}
    assert (after.config, after.values, after.interrupts) == ({"d": 2}, {"w": 2}, {"t": []})
    assert (after.user_id, after.created_at, after.outcome) == ("ann", before.created_at, ThreadOutcome.IDLE)
    assert after.updated_at > before.updated_at
    assert await got(units) == after


@rule("O8")
async def test_a_repeated_change_leaves_what_the_first_one_left(units: Units) -> None:
    await created(units, metadata={"a": 1})
    change = ThreadChange(metadata={"b": 2}, outcome=ThreadOutcome.INTERRUPTED)
    first, second = await changed(units, change), await changed(units, change)
    assert (first.metadata, first.outcome) == (second.metadata, second.outcome)


async def test_a_change_of_nothing_keeps_everything(units: Units) -> None:
    before = await created(units, metadata={"a": 1}, values={"v": 1})
    after = await changed(units, ThreadChange())
    assert (after.metadata, after.config, after.values) == (before.metadata, before.config, before.values)


async def test_an_outcome_takes_its_error_with_it(units: Units) -> None:
    await created(units)
    failed = await changed(units, ThreadChange(outcome=ThreadOutcome.ERROR, error="x" * 10_000))
    assert failed.status is ThreadStatus.ERROR
    assert failed.error is not None
    assert len(failed.error.encode()) <= 8 * 1024
    assert (await changed(units, ThreadChange(metadata={"a": 1}))).error == failed.error
    mended = await changed(units, ThreadChange(outcome=ThreadOutcome.IDLE))
    assert (mended.status, mended.error) == (ThreadStatus.IDLE, None)


async def test_metadata_that_would_outgrow_the_limit_change_nothing(units: Units) -> None:
    await created(units, metadata={"a": "x" * 200_000})
    with pytest.raises(InvalidValue) as refused:
        await changed(units, ThreadChange(metadata={"b": "x" * 200_000}, config={"changed": True}))
    assert refused.value.path == "metadata"
    thread = await got(units)
    assert thread is not None
    assert (list(thread.metadata), thread.config) == (["a"], {})


async def test_there_is_nothing_to_change_on_a_thread_that_is_missing(units: Units) -> None:
    assert await done(units, threads.update, "missing", ThreadChange(), scope=EVERYONE) is None


# --- Status ---------------------------------------------------------------------------------------------------------


async def status(units: Units, thread_id: str = THREAD) -> ThreadStatus:
    thread = await got(units, thread_id)
    assert thread is not None
    assert await found(units, status=thread.status, ids=[thread_id]) == [thread_id]
    others = [one for one in ThreadStatus if one is not thread.status]
    assert [await found(units, status=one, ids=[thread_id]) for one in others] == [[], [], []]
    return thread.status


async def test_a_thread_is_busy_while_a_run_is_active_or_waits(store: SqlRunStore, units: Units) -> None:
    await created(units)
    assert await status(units) is ThreadStatus.IDLE
    run = await admitted(store, "a", take=False)
    assert await status(units) is ThreadStatus.BUSY
    run = (await happened(store, run, RunEvent.REQUEST_CANCEL),)[0]
    assert await status(units) is ThreadStatus.BUSY
    await happened(store, run, RunEvent.FORCE)
    assert await status(units) is ThreadStatus.IDLE
    await delayed(store, "later")
    assert await status(units) is ThreadStatus.BUSY


async def test_a_reservation_makes_no_thread_busy(store: SqlRunStore, units: Units) -> None:
    await created(units)
    await reserved(store, "hold")
    assert await status(units) is ThreadStatus.IDLE


@rule("O28")
async def test_a_thread_is_left_as_its_last_run_left_it(store: SqlRunStore, units: Units) -> None:
    await created(units)
    await ended(store, "a", how=RunEvent.SETTLE_ERROR, with_=Given(error="broke"))
    assert await status(units) is ThreadStatus.ERROR
    await ended(store, "b", with_=Given(outcome=ThreadOutcome.INTERRUPTED, values={"v": 1}))
    assert await status(units) is ThreadStatus.INTERRUPTED
    thread = await got(units)
    assert thread is not None
    assert (thread.values, thread.error) == ({"v": 1}, None)


# --- Searching ------------------------------------------------------------------------------------------------------


@rule("P096")
async def test_threads_are_found_by_what_they_contain(units: Units) -> None:
    await created(units, "a", metadata={"tags": ["x", "y"], "n": 1}, values={"deep": {"k": "v"}})
    await created(units, "b", metadata={"tags": ["y"]})
    assert sorted(await found(units, metadata={"tags": ["y"]})) == ["a", "b"]
    assert await found(units, metadata={"tags": ["x"], "n": 1.0}) == ["a"]
    assert await found(units, metadata={"n": True}) == []
    assert await found(units, values={"deep": {"k": "v"}}) == ["a"]
    assert await found(units, values={"deep": {}}, metadata={"tags": ["y"]}) == ["a"]
    assert sorted(await found(units, metadata={}, values={})) == ["a", "b"]


async def test_threads_are_found_by_id(units: Units) -> None:
    for name in ("a", "b", "c"):
        await created(units, name)
    assert sorted(await found(units, ids=["c", "a", "missing"])) == ["a", "c"]
    assert await found(units, ids=[]) == []


async def test_temporary_threads_are_in_no_list(units: Units) -> None:
    await created(units, temporary=True)
    assert await found(units) == []
    assert await asked(units, thread_search.count, ThreadQuery(), scope=EVERYONE) == 0
    assert await got(units) is not None


async def test_threads_are_sorted_by_whatever_is_asked_for(store: SqlRunStore, units: Units) -> None:
    for name in ("b", "c", "a"):
        await created(units, name)
    await started(store, "run", "c")
    await ended(store, "failed", "a", how=RunEvent.SETTLE_ERROR)
    await done(units, threads.update, "b", ThreadChange(metadata={"a": 1}), scope=EVERYONE)

    async def by(sort_by: ThreadSort) -> list[str]:
        falling = await found(units, sort_by=sort_by)
        assert await found(units, sort_by=sort_by, descending=False) == falling[::-1]
        return falling

    assert await found(units) == ["b", "a", "c"]
    assert await by(ThreadSort.UPDATED_AT) == ["b", "a", "c"]
    assert await by(ThreadSort.CREATED_AT) == ["a", "c", "b"]
    assert await by(ThreadSort.THREAD_ID) == ["c", "b", "a"]
    assert await by(ThreadSort.STATUS) == ["b", "a", "c"]  # idle, error, busy


async def test_parts_of_a_search_neither_overlap_nor_leave_gaps(units: Units) -> None:
    for number in range(7):
        await created(units, f"t{number}")
    await executed(units, "UPDATE dr_threads SET updated_at = 5")
    seen, more = [], []
    for offset in (0, 3, 6, 9):
        page = await asked(units, thread_search.search, ThreadQuery(limit=3, offset=offset), scope=EVERYONE)
        seen += [thread.thread_id for thread in page.threads]
        more.append(page.more)
    assert (seen, more) == ([f"t{number}" for number in range(6, -1, -1)], [True, True, False, False])
    assert await asked(units, thread_search.count, ThreadQuery(limit=3, offset=6), scope=EVERYONE) == 7


@rule("P096")
@pytest.mark.parametrize(
    ("query", "path"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"offset": -1}, "offset"),
        ({"offset": 2**31}, "offset"),
        ({"ids": [str(n) for n in range(1001)]}, "ids"),
        ({"metadata": {"a": "\0"}}, "metadata.a"),
        ({"values": {"a": float("nan")}}, "values.a"),
    ],
)
def test_a_search_for_what_cannot_be_is_refused_by_its_path(query: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        ThreadQuery(**query)
    assert refused.value.path == path


async def test_an_unreadable_thread_is_left_out_and_named(units: Units, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        await created(units, name, metadata={"secret": 1})
    await executed(units, "UPDATE dr_threads SET outcome = 'odd' WHERE thread_id = 'b'")
    page = await asked(units, thread_search.search, ThreadQuery(), scope=EVERYONE)
    assert ([thread.thread_id for thread in page.threads], page.unreadable) == (["a"], ("b",))
    assert "'b'" in caplog.text
    assert "secret" not in caplog.text


# --- Deleting -------------------------------------------------------------------------------------------------------


async def delete_reservation(store: SqlRunStore, **given: Any) -> Run:
    return await reserved(store, "delete", kind=OperationKind.DELETE, **given)


async def deleted(units: Units, hold: Run, *, epoch: int | None = None, scope: Scope = EVERYONE) -> Any:
    by = Actor(WorkerId(hold.owner_worker_id or ME), hold.epoch if epoch is None else epoch)
    return await done(units, threads.delete, hold.key, by, scope=scope)


async def rows(units: Units) -> dict[str, int]:
    """How many rows there are, of the tables that have any."""

    def count(connection: Any) -> dict[str, int]:
        kept = [table for table in tables.sorted_tables if table.name != "dr_meta"]
        numbers = {table.name: connection.scalar(select(func.count()).select_from(table)) for table in kept}
        return {name: number for name, number in numbers.items() if number}

    return await units.read(count)


async def with_a_past(store: SqlRunStore, units: Units, thread_id: str = THREAD) -> None:
    """A thread with a row, an ended run, a receipt, a delivery, an event and a base write."""
    await created(units, thread_id, user_id="ann")
    await ended(store, f"past-of-{thread_id}", thread_id, deliveries={"webhook": {}}, user_id="ann")
    await executed(
        units,
        "INSERT INTO dr_events (run_id, id, thread_id, event, namespace, data, bytes, at)"
        f" VALUES ('past-of-{thread_id}', 1, '{thread_id}', 'values', '', '', 0, 0)",
    )
    await executed(
        units,
        "INSERT INTO dr_base_writes (run_id, namespace, checkpoint_id, task_id, idx, channel)"
        f" VALUES ('past-of-{thread_id}', '', 'c', 't', 0, 'ch')",
    )


ONE_THREAD = {"dr_base_writes": 1, "dr_events": 1, "dr_outbox": 2, "dr_runs": 1, "dr_threads": 1}


@rule("F66", "P102")
async def test_a_deleted_thread_leaves_nothing_and_others_are_untouched(store: SqlRunStore, units: Units) -> None:
    await with_a_past(store, units)
    await with_a_past(store, units, "kept")
    hold = await delete_reservation(store)
    queued = await waiting(store, "queued", deliveries={"webhook": {}})
    answer = await deleted(units, hold, scope=ANN)
    assert isinstance(answer, ThreadDeleted)
    assert (answer.removed, names(answer.ended)) == (2, [queued.run_id])
    assert await rows(units) == ONE_THREAD
    assert await got(units, "kept") is not None
    await created(units, user_id="ben")
    assert (await store.list_runs(THREAD, scope=EVERYONE)).runs == ()
    assert (await admitted(store, "fresh")).status is RunStatus.PENDING


@rule("F66")
async def test_a_thread_without_a_row_is_deleted_with_its_runs(store: SqlRunStore, units: Units) -> None:
    await ended(store, "a", user_id="ann")
    assert await deleted(units, await delete_reservation(store, user_id="ann"), scope=ANN) == ThreadDeleted(1)
    assert await rows(units) == {}


@rule("O8")
async def test_deleting_again_after_a_lost_reply_is_yes(store: SqlRunStore, units: Units) -> None:
    await with_a_past(store, units)
    hold = await delete_reservation(store)
    assert isinstance(await deleted(units, hold), ThreadDeleted)
    assert await deleted(units, hold) == ThreadDeleted()


@pytest.mark.parametrize("who", ["a run", "another reservation", "another delete"])
async def test_a_thread_that_something_else_holds_is_not_deleted(store: SqlRunStore, units: Units, who: str) -> None:
    await with_a_past(store, units)
    mine = Run(RunId("delete"), THREAD, OperationKind.DELETE, owner_worker_id=ME, epoch=1)
    match who:
        case "a run":
            holder = await admitted(store, "run")
        case "another reservation":
            holder = mine = await reserved(store, "write")
        case _:
            holder = await reserved(store, "other", kind=OperationKind.DELETE, worker_id=OTHER)
    before = await rows(units)
    assert await deleted(units, mine) == Refused(Refusal.THREAD_BUSY, holder)
    assert await rows(units) == before


@rule("O14")
async def test_a_delete_whose_reservation_was_lost_changes_nothing(store: SqlRunStore, units: Units) -> None:
    await with_a_past(store, units)
    hold = await delete_reservation(store)
    await waiting(store, "queued")
    before = await rows(units)
    answer = await deleted(units, hold, epoch=hold.epoch + 1)
    assert isinstance(answer, Refused)
    assert answer.reason is Refusal.LOST
    assert await rows(units) == before
    assert names(await store.queue(THREAD)) == ["queued"]
    await happened(store, hold, RunEvent.RELEASE)
    assert await deleted(units, hold) == Refused(Refusal.UNKNOWN)


@rule("B202")
async def test_nobody_deletes_what_is_foreign(store: SqlRunStore, units: Units) -> None:
    await with_a_past(store, units)
    hold = await delete_reservation(store, user_id="ben")
    before = await rows(units)
    assert await deleted(units, hold, scope=BEN) == Refused(Refusal.UNKNOWN)
    assert await rows(units) == before


@rule("B202")
async def test_without_a_row_a_thread_is_foreign_to_who_did_not_make_all_its_runs(
    store: SqlRunStore, units: Units
) -> None:
    await ended(store, "anns", user_id="ann")
    await ended(store, "nobodys")
    hold = await delete_reservation(store, user_id="ann")
    assert await deleted(units, hold, scope=ANN) == Refused(Refusal.UNKNOWN)
    assert isinstance(await deleted(units, hold), ThreadDeleted)


async def test_a_reservation_of_another_thread_deletes_nothing(store: SqlRunStore, units: Units) -> None:
    await with_a_past(store, units)
    hold = await reserved(store, "delete", "elsewhere", kind=OperationKind.DELETE)
    by = Actor(ME, hold.epoch)
    assert await done(units, threads.delete, RunKey(THREAD, hold.run_id), by, scope=EVERYONE) == Refused(
        Refusal.UNKNOWN
    )
    assert await rows(units) == ONE_THREAD | {"dr_runs": 2}


# --- Deleting while others arrive, on PostgreSQL --------------------------------------------------------------------


@pytest.fixture
async def on_postgres(postgres_dsn: str) -> AsyncIterator[Units]:
    """Units of work on PostgreSQL, where others are not simply locked out."""
    units = open_units(parse_dsn(postgres_dsn))
    await units.open()
    yield units
    await units.close()


@rule("O2", "F66")
async def test_who_queues_behind_a_delete_that_is_about_to_commit_gets_a_fresh_thread(on_postgres: Units) -> None:
    store, pause = SqlRunStore(on_postgres), Pause()
    await with_a_past(store, on_postgres)
    hold = await delete_reservation(store)
    by = Actor(ME, hold.epoch)
    unit = pause.after(lambda connection: threads.delete(connection, POSTGRES, hold.key, by, scope=EVERYONE))
    deleting = asyncio.create_task(on_postgres.transaction(unit))
    await pause.reached.wait()
    arriving = asyncio.create_task(admitted(store, "new", strategy=Strategy.ENQUEUE))
    await until_somebody_waits(on_postgres)
    pause.go_on.set()
    assert isinstance(await deleting, ThreadDeleted)
    assert (await arriving).status is RunStatus.PENDING
    assert await rows(on_postgres) == {"dr_runs": 1}


@rule("O2", "F66")
async def test_a_delete_ends_who_is_just_queueing_behind_it(on_postgres: Units) -> None:
    store, pause = SqlRunStore(on_postgres), Pause()
    hold = await delete_reservation(store)
    newcomer = Newcomer(run_id=RunId("new"), thread_id=THREAD, worker_id=ME, strategy=Strategy.ENQUEUE)
    unit = pause.after(lambda connection: arrivals.wait_behind(connection, POSTGRES, newcomer, NOTHING_GIVEN))
    arriving = asyncio.create_task(on_postgres.transaction(unit))
    await pause.reached.wait()
    deleting = asyncio.create_task(deleted(on_postgres, hold))
    await until_somebody_waits(on_postgres)
    pause.go_on.set()
    assert await arriving is not None
    assert names((await deleting).ended) == ["new"]
    assert await rows(on_postgres) == {}
