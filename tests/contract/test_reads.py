"""Reading runs on both databases: who sees what, in which order, and what an unreadable row may spoil (nothing)."""

from __future__ import annotations

import base64
import logging
from typing import Any

import pytest
from sqlalchemy import event

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    Micros,
    OneUser,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Session,
    SessionState,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import reads
from deerflow_runs.store.base import RunFilter
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dialect import SQLITE
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.sqlite_connection import sqlite_engine, wall_clock
from deerflow_runs.store.units import Units
from deerflow_runs.testing.contract import SqlSubject
from tests.contract.lives import (
    HOUR,
    ME,
    OTHER,
    THREAD,
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
    waiting,
)
from tests.rules import rule

ANN, BEN = OneUser("ann"), OneUser("ben")


def key(run_id: str, thread_id: str = THREAD) -> RunKey:
    return RunKey(ThreadId(thread_id), RunId(run_id))


def past(number: int, **given: Any) -> Run:
    """An ended run, to be put there by the hundred."""
    row: dict[str, Any] = {"created_at": Micros(1000 + number), "settled_at": Micros(2000 + number)} | given
    return Run(RunId(f"run-{number:05}"), THREAD, status=RunStatus.SUCCESS, epoch=1, attempt=1, **row)


# --- By id ----------------------------------------------------------------------------------------------------------


async def test_a_single_read_carries_the_stored_input(store: SqlRunStore) -> None:
    await admitted(store, "a", kwargs={"input": {"n": 1e22, "z": 1, "a": "é"}}, metadata={"tags": ["x"]})
    run = await store.get(key("a"), scope=EVERYONE)
    assert run is not None
    assert run.kwargs is not None
    assert list(run.kwargs["input"].items()) == [("n", 1e22), ("z", 1), ("a", "é")]
    assert (run.metadata, run.status, run.owner_worker_id) == ({"tags": ["x"]}, RunStatus.PENDING, ME)


@rule("F65", "B057")
async def test_no_read_for_callers_answers_a_reservation(store: SqlRunStore) -> None:
    await reserved(store, "hold")
    assert await store.get(key("hold"), scope=EVERYONE) is None
    assert await store.get_many(THREAD, [RunId("hold")], scope=EVERYONE) == {}
    assert (await store.list_runs(THREAD, scope=EVERYONE)).runs == ()
    assert (await store.tokens_by_thread(THREAD, scope=EVERYONE, include_active=True)).runs == 0


@rule("F63", "B202")
async def test_a_foreign_run_looks_like_a_missing_one(store: SqlRunStore) -> None:
    await ended(store, "anns", user_id="ann", with_=Given(usage=Usage(total_tokens=7)))
    await ended(store, "nobodys", metadata={"regenerate_from_run_id": "anns"})
    for scope, visible in ((ANN, ["anns"]), (BEN, []), (EVERYONE, ["nobodys", "anns"])):
        both = [RunId("anns"), RunId("nobodys")]
        assert names((await store.list_runs(THREAD, scope=scope)).runs) == visible
        assert sorted(await store.get_many(THREAD, both, scope=scope)) == sorted(visible)
        assert [run_id for run_id in visible if await store.get(key(run_id), scope=scope) is None] == []
        assert (await store.tokens_by_thread(THREAD, scope=scope)).runs == len(visible)
    assert await store.get(key("anns"), scope=BEN) is None
    assert await store.get(key("nobodys"), scope=ANN) is None
    assert (await store.visibility(THREAD, scope=EVERYONE)).hidden == {"anns"}
    assert (await store.visibility(THREAD, scope=ANN)).hidden == frozenset()


@rule("B185")
async def test_ids_are_looked_for_on_one_thread_only(store: SqlRunStore) -> None:
    await admitted(store, "here")
    await admitted(store, "there", "elsewhere")
    asked_for = [RunId(f"unknown-{n}") for n in range(1500)] + [RunId("there"), RunId("here"), RunId("here")]
    assert names((await store.get_many(THREAD, asked_for, scope=EVERYONE)).values()) == ["here"]
    assert await store.get(key("there"), scope=EVERYONE) is None


# --- A thread's list ------------------------------------------------------------------------------------------------


@rule("F57", "B180")
async def test_a_list_is_newest_first_and_leaves_the_stored_input_out(store: SqlRunStore) -> None:
    for name in ("c", "a", "b"):
        await ended(store, name, kwargs={"input": "much"})
    page = await store.list_runs(THREAD, scope=EVERYONE)
    assert (names(page.runs), page.after) == (["b", "a", "c"], None)
    assert [run.kwargs for run in page.runs] == [None, None, None]


@rule("F57")
async def test_a_cursor_goes_on_where_its_page_ended_while_runs_come_and_go(store: SqlRunStore, units: Units) -> None:
    await SqlSubject(store, units).place([past(number) for number in range(7)])
    first = await store.list_runs(THREAD, scope=EVERYONE, limit=3)
    await admitted(store, "new")
    await executed(units, "DELETE FROM dr_runs WHERE run_id = :last", last=first.runs[-1].run_id)
    second = await store.list_runs(THREAD, scope=EVERYONE, limit=3, after=first.after)
    third = await store.list_runs(THREAD, scope=EVERYONE, limit=3, after=second.after)
    assert [names(page.runs) for page in (first, second, third)] == [
        ["run-00006", "run-00005", "run-00004"],
        ["run-00003", "run-00002", "run-00001"],
        ["run-00000"],
    ]
    assert third.after is None


async def test_a_page_that_takes_the_last_run_is_the_last(store: SqlRunStore, units: Units) -> None:
    await SqlSubject(store, units).place([past(number) for number in range(3)])
    assert (await store.list_runs(THREAD, scope=EVERYONE, limit=3)).after is None


@rule("B183")
async def test_runs_of_one_instant_are_neither_lost_nor_doubled_between_pages(store: SqlRunStore, units: Units) -> None:
    await SqlSubject(store, units).place([past(number, created_at=Micros(5)) for number in range(5)])
    seen, after = [], None
    for _ in range(3):
        page = await store.list_runs(THREAD, scope=EVERYONE, limit=2, after=after)
        seen += names(page.runs)
        after = page.after
    assert (seen, after) == ([f"run-{number:05}" for number in range(4, -1, -1)], None)


def _cursor(place: str) -> str:
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "run-00001",
        "%%%",
        "é",
        _cursor("5"),
        _cursor("5:"),
        _cursor("-5:a"),
        _cursor("05:a"),
        _cursor(" 5:a"),
        _cursor(f"{2**63}:a"),
        _cursor("5:a\0"),
        _cursor("5:" + "a" * 300),
        _cursor("5:a") + "=",
        _cursor("5:a") + "\n",
    ],
)
async def test_a_cursor_that_was_made_up_is_refused(store: SqlRunStore, cursor: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        await store.list_runs(THREAD, scope=EVERYONE, after=cursor)
    assert refused.value.path == "after"


async def test_a_cursor_holds_any_id_a_run_may_have(store: SqlRunStore, units: Units) -> None:
    for name in ("one:two/+", "é 🙂", "x" * 255):
        await ended(store, name)
    seen, after = [], None
    for _ in range(3):
        page = await store.list_runs(THREAD, scope=EVERYONE, limit=1, after=after)
        seen += names(page.runs)
        after = page.after
    assert (seen, after) == (["x" * 255, "é 🙂", "one:two/+"], None)


@pytest.mark.parametrize("limit", [0, -1, 1001])
async def test_a_page_has_bounds(store: SqlRunStore, limit: int) -> None:
    with pytest.raises(InvalidValue) as refused:
        await store.list_runs(THREAD, scope=EVERYONE, limit=limit)
    assert refused.value.path == "limit"


async def test_a_list_can_be_restricted_to_statuses(store: SqlRunStore) -> None:
    await ended(store, "failed", how=RunEvent.SETTLE_ERROR)
    await ended(store, "fine")
    await started(store, "running")
    await waiting(store, "queued")
    await reserved(store, "hold", "elsewhere")

    async def found(*statuses: RunStatus) -> list[str]:
        return names((await store.list_runs(THREAD, scope=EVERYONE, only=RunFilter(statuses=statuses))).runs)

    assert await found(RunStatus.SUCCESS) == ["fine"]
    assert await found(RunStatus.SUCCESS, RunStatus.RUNNING) == ["running", "fine"]
    assert await found(RunStatus.QUEUED, RunStatus.PENDING, RunStatus.RUNNING) == ["queued", "running"]
    assert await found(RunStatus.QUEUED) == ["queued"]
    assert await found(RunStatus.PENDING) == []
    assert await found() == []
    assert await found(*RunStatus) == ["queued", "running", "fine", "failed"]


CONTAINED: dict[str, dict[str, Any]] = {
    "a key": {"a": 1},
    "a number by value": {"a": 1.0},
    "a nested key": {"deep": {"tags": ["x"]}},
    "odd characters": {'50%_/"\\': "é 🙂\n"},
    "a long text": {"long": "y" * 1000},
    "true": {"flag": True},
}
NOT_CONTAINED: dict[str, dict[str, Any]] = {
    "another value": {"a": 2},
    "one of two": {"a": 1, "b": 1},
    "the key elsewhere": {"tags": ["x"]},
    "another case": {"A": 1},
    "a wildcard": {"long": "y%"},
    "a number for true": {"flag": 1},
    "null for missing": {"none": None},
}


@pytest.mark.parametrize("name", [*CONTAINED, *NOT_CONTAINED])
async def test_a_list_can_be_restricted_to_runs_whose_metadata_contain_something(store: SqlRunStore, name: str) -> None:
    metadata = {"a": 1, "flag": True, '50%_/"\\': "é 🙂\n", "long": "y" * 1000, "deep": {"tags": ["w", "x"], "b": 1}}
    await ended(store, "full", metadata=metadata)
    await ended(store, "empty")
    only = RunFilter(metadata=(CONTAINED | NOT_CONTAINED)[name])
    found = names((await store.list_runs(THREAD, scope=EVERYONE, only=only)).runs)
    assert found == (["full"] if name in CONTAINED else [])


async def test_pages_of_a_search_in_metadata_hold_what_fits_and_skip_the_rest(store: SqlRunStore, units: Units) -> None:
    runs = [past(number, metadata={"kind": "even" if number % 2 == 0 else "odd"}) for number in range(9)]
    await SqlSubject(store, units).place(runs)
    seen, after = [], None
    for _ in range(3):
        only = RunFilter(metadata={"kind": "even"})
        page = await store.list_runs(THREAD, scope=EVERYONE, only=only, limit=2, after=after)
        seen.append(names(page.runs))
        after = page.after
    assert (seen, after) == ([["run-00008", "run-00006"], ["run-00004", "run-00002"], ["run-00000"]], None)


async def test_a_search_for_what_no_row_could_hold_is_refused(store: SqlRunStore) -> None:
    with pytest.raises(InvalidValue) as refused:
        await store.list_runs(THREAD, scope=EVERYONE, only=RunFilter(metadata={"tags": ["a\0"]}))
    assert refused.value.path == "metadata.tags[0]"


# --- Unreadable rows ------------------------------------------------------------------------------------------------

SPOILT = ["status = 'paused'", "metadata = '{\"tag\": 1'", "required_capabilities = '1'", "deliveries = ''"]


@rule("B184")
@pytest.mark.parametrize("spoilt", SPOILT)
async def test_an_unreadable_row_spoils_neither_the_list_nor_the_cursor(
    store: SqlRunStore, units: Units, caplog: pytest.LogCaptureFixture, spoilt: str
) -> None:
    await SqlSubject(store, units).place([past(number, metadata={"tag": 1}) for number in range(4)])
    await executed(units, f"UPDATE dr_runs SET {spoilt} WHERE run_id IN ('run-00001', 'run-00002')")
    for only in (None, RunFilter(metadata={"tag": 1})):
        with caplog.at_level(logging.WARNING, logger="deerflow_runs"):
            first = await store.list_runs(THREAD, scope=EVERYONE, only=only, limit=1)
            second = await store.list_runs(THREAD, scope=EVERYONE, only=only, limit=1, after=first.after)
        assert (names(first.runs), first.unreadable) == (["run-00003"], ())
        assert (names(second.runs), second.unreadable, second.after) == (
            ["run-00000"],
            ("run-00002", "run-00001"),
            None,
        )
    assert {"'run-00001'" in message or "'run-00002'" in message for message in caplog.messages} == {True}
    assert "tag" not in caplog.text


async def test_an_unreadable_row_spoils_no_other_read_of_many(store: SqlRunStore, units: Units) -> None:
    await started(store, "good")
    await waiting(store, "next")
    await waiting(store, "bad")
    await started(store, "bad-too", "elsewhere")
    await executed(units, "UPDATE dr_runs SET metadata = '{' WHERE run_id IN ('bad', 'bad-too')")
    assert names(await store.queue(THREAD)) == ["next"]
    assert names(await store.owned(ME)) == ["good"]
    assert list(await store.get_many(THREAD, [RunId("bad"), RunId("next")], scope=EVERYONE)) == ["next"]
    assert (await store.tokens_by_thread(THREAD, scope=EVERYONE, include_active=True)).runs == 1
    with pytest.raises(ValueError, match="Expecting"):
        await store.get(key("bad"), scope=EVERYONE)


# --- What is open ---------------------------------------------------------------------------------------------------


@rule("O12")
async def test_a_session_finds_all_active_operations_that_name_it(store: SqlRunStore) -> None:
    await ended(store, "over")
    await started(store, "mine")
    await waiting(store, "not-mine-yet")
    await reserved(store, "hold", "other-thread")
    await admitted(store, "somebody-elses", "third-thread", worker_id=OTHER)
    assert names(await store.owned(ME)) == ["mine", "hold"]
    assert names(await store.owned(WorkerId("host:nobody"))) == []


async def test_the_holder_of_a_thread_may_be_of_any_kind(store: SqlRunStore) -> None:
    assert await store.active(THREAD) is None
    await ended(store, "over")
    assert await store.active(THREAD) is None
    hold = await reserved(store, "hold")
    assert await store.active(THREAD) == hold


@rule("I17")
async def test_a_queue_is_in_order_of_due_time_then_admission(store: SqlRunStore) -> None:
    await delayed(store, "late")
    await started(store, "first", strategy=Strategy.ENQUEUE)
    for name in ("second", "third"):
        await waiting(store, name)
    await delayed(store, "elsewhere", "other-thread")
    assert names(await store.queue(THREAD)) == ["second", "third", "late"]


@rule("B015")
async def test_a_reservation_is_no_run_in_flight(store: SqlRunStore, units: Units) -> None:
    await ended(store, "over")
    await reserved(store, "hold")
    assert await asked(units, reads.in_flight, THREAD) is False
    await started(store, "running", "busy")
    assert await asked(units, reads.in_flight, "busy") is True
    await delayed(store, "later", "waits")
    assert await asked(units, reads.in_flight, "waits") is True


# --- What a sweep looks for -----------------------------------------------------------------------------------------


async def owing(store: SqlRunStore, run_id: str, **given: Any) -> Run:
    """A run that owes a rollback."""
    run = await started(store, run_id, f"thread-of-{run_id}", **given)
    return await happened(store, run, RunEvent.REQUEST_CANCEL, Given(action=CancelAction.ROLLBACK))


@rule("O4")
async def test_who_may_seize_a_run_finds_it_by_the_rule_of_the_table(store: SqlRunStore) -> None:
    live, dead = Session(OTHER), Session(WorkerId("host:dead"))
    for session in (live, dead):
        await store.open_session(session)
    await owing(store, "mine")
    await owing(store, "held", worker_id=OTHER)
    await owing(store, "orphan", worker_id=dead.worker_id)
    await owing(store, "orphan-gpu", worker_id=dead.worker_id, required_capabilities=frozenset({"gpu"}))
    untouched = await admitted(store, "never-started", "t1", worker_id=dead.worker_id)
    await happened(store, untouched, RunEvent.REQUEST_CANCEL, Given(action=CancelAction.ROLLBACK))
    kept = await started(store, "interrupted-only", "t2", worker_id=dead.worker_id)
    await happened(store, kept, RunEvent.REQUEST_CANCEL)
    await store.close_session(dead.worker_id)

    by, able, patient, at_once = (
        Actor(ME),
        Actor(ME, capabilities=frozenset({"gpu"})),
        Given(),
        Given(cancel_grace=Micros(0)),
    )
    assert names(await store.seizable(by, patient, 9)) == ["mine", "orphan"]
    assert names(await store.seizable(able, patient, 9)) == ["mine", "orphan", "orphan-gpu"]
    assert names(await store.seizable(by, at_once, 9)) == ["mine", "held", "orphan"]
    assert names(await store.seizable(by, at_once, 2)) == ["mine", "held"]


@rule("O7")
async def test_a_due_run_on_an_idle_thread_is_found_and_one_behind_another_is_not(
    store: SqlRunStore, units: Units
) -> None:
    for thread in ("idle", "held"):
        await delayed(store, f"due-{thread}", thread, delay=Micros(1))
    await delayed(store, "due-idle-too", "idle", delay=Micros(1))
    await delayed(store, "later", "asleep")
    await delayed(store, "due-idle-2", "idle-2", delay=Micros(1))
    await executed(units, "UPDATE dr_runs SET status = 'running' WHERE run_id = 'due-held'")
    await waiting(store, "next", "held")
    assert await asked(units, reads.idle_threads_with_due_runs, 9) == ("idle", "idle-2")
    assert await asked(units, reads.idle_threads_with_due_runs, 1) == ("idle",)


async def test_the_next_due_time_is_told_as_a_duration_and_ignores_what_is_due(
    store: SqlRunStore, units: Units
) -> None:
    await delayed(store, "due", "t1", delay=Micros(1))
    assert await asked(units, reads.next_due) is None
    await delayed(store, "far", "t2", delay=Micros(2 * HOUR))
    await delayed(store, "near", "t3", delay=HOUR)
    wait = await asked(units, reads.next_due)
    assert wait is not None
    assert HOUR // 2 < wait <= HOUR


@rule("O31")
async def test_a_note_why_a_run_waits_reaches_vacant_runs_only(store: SqlRunStore, units: Units) -> None:
    vacant = await admitted(store, "vacant", take=False)
    owned = await admitted(store, "owned", "t1")
    over = await ended(store, "over", "t2")
    queued = await delayed(store, "queued", "t3")
    note = {"missing": ["gpu"], "message": "no worker has a GPU \0", "since": 1}
    assert await done(units, reads.note_waiting, vacant.key, note) is True
    for run in (owned, over, queued):
        assert await done(units, reads.note_waiting, run.key, note) is False
    noted = await store.active(THREAD)
    assert noted is not None
    assert noted.waits_for == {
        "missing": ["gpu"],
        "message": "no worker has a GPU \N{REPLACEMENT CHARACTER}",
        "since": 1,
    }
    assert (noted.updated_at, noted.epoch) == (vacant.updated_at, vacant.epoch)


# --- How many -------------------------------------------------------------------------------------------------------


async def test_open_runs_are_counted_by_status_and_sessions_by_state(store: SqlRunStore, units: Units) -> None:
    await ended(store, "over")
    await started(store, "running")
    await waiting(store, "behind")
    await admitted(store, "owned", "t1")
    await reserved(store, "hold", "t2")
    for number, missing in enumerate((["gpu"], ["gpu", "zone-b"], [])):
        vacant = await admitted(store, f"vacant-{number}", f"v{number}", take=False)
        await done(units, reads.note_waiting, vacant.key, {"missing": missing})
    await admitted(store, "vacant-unexplained", "v9", take=False)
    await store.open_session(Session(ME))
    await store.open_session(Session(OTHER))
    await store.close_session(OTHER)

    counts = await store.counts()
    assert counts.by_status == {RunStatus.QUEUED: 1, RunStatus.PENDING: 5, RunStatus.RUNNING: 1}
    assert (counts.vacant, counts.waiting_for) == (4, {"gpu": 2, "zone-b": 1})
    assert counts.sessions == {SessionState.LIVE: 1, SessionState.DRAINING: 0, SessionState.DEAD: 1}


async def test_an_empty_store_counts_zero_of_everything(store: SqlRunStore) -> None:
    counts = await store.counts()
    assert set(counts.by_status.values()) == set(counts.sessions.values()) == {0}
    assert (counts.vacant, counts.waiting_for) == (0, {})


# --- A thread's past ------------------------------------------------------------------------------------------------


@rule("F64", "B196")
async def test_tokens_count_however_a_run_ended_and_of_active_runs_on_request(store: SqlRunStore) -> None:
    used = Given(usage=Usage(10, 5, 15, by_model={"m": 15}, by_caller={"lead": 15}))
    endings = (RunEvent.SETTLE_SUCCESS, RunEvent.SETTLE_ERROR, RunEvent.SETTLE_TIMEOUT, RunEvent.SETTLE_CANCELLED)
    for ending in endings:
        await ended(store, ending.name, how=ending, with_=used)
    running = await started(store, "running")
    await happened(store, running, RunEvent.PROGRESS, used)
    await ended(store, "elsewhere", "other-thread", with_=used)

    totals = await store.tokens_by_thread(THREAD, scope=EVERYONE)
    assert (totals.runs, totals.input_tokens, totals.output_tokens, totals.total_tokens) == (4, 40, 20, 60)
    assert (totals.by_model, totals.by_caller, totals.runs_by_model) == ({"m": 60}, {"lead": 60}, {"m": 4})
    assert (await store.tokens_by_thread(THREAD, scope=EVERYONE, include_active=True)).total_tokens == 75


@rule("B198")
async def test_tokens_are_counted_even_where_their_details_cannot_be_read(store: SqlRunStore, units: Units) -> None:
    await ended(store, "a", model_name="m", with_=Given(usage=Usage(total_tokens=5, by_model={"x": 5})))
    await executed(units, "UPDATE dr_runs SET tokens_by_model = '{', tokens_by_caller = '[]'")
    totals = await store.tokens_by_thread(THREAD, scope=EVERYONE)
    assert (totals.runs, totals.total_tokens, totals.by_model, totals.by_caller) == (1, 5, {"m": 5}, {})


async def test_a_long_past_is_added_up_and_searched_whole(store: SqlRunStore, units: Units) -> None:
    spent = Usage(total_tokens=1)
    regenerated = {"regenerate_from_run_id": "run-00001"}
    runs = [past(number, usage=spent, metadata=regenerated if number == 3 else {}) for number in range(2001)]
    await SqlSubject(store, units).place(runs)
    assert (await store.tokens_by_thread(THREAD, scope=EVERYONE)).total_tokens == 2001
    assert (await store.visibility(THREAD, scope=EVERYONE)).hidden == {"run-00001"}


@rule("B188", "B189", "B190")
async def test_a_regenerated_run_hides_and_a_failed_edit_hides_itself(store: SqlRunStore) -> None:
    over = "regenerate_from_run_id"
    await ended(store, "answer")
    await ended(store, "again", metadata={over: "answer"})
    await ended(store, "edit", metadata={over: "again", "replay_kind": "edit"}, how=RunEvent.SETTLE_ERROR)
    assert (await store.visibility(THREAD, scope=EVERYONE)).hidden == {"answer", "edit"}
    await started(store, "edit-2", metadata={over: "again", "replay_kind": "edit"})
    assert (await store.visibility(THREAD, scope=EVERYONE)).hidden == {"answer", "edit", "again"}


async def test_metadata_that_only_look_like_a_regeneration_hide_nothing(store: SqlRunStore, units: Units) -> None:
    key_name = "regenerate_from_run_id"
    odd: list[Any] = [
        {key_name: 5},
        {key_name: None},
        {"note": key_name},
        {"deep": {key_name: "a"}},
        {key_name: "odd-4"},
    ]
    for number, metadata in enumerate(odd):
        await ended(store, f"odd-{number}", metadata=metadata)
    await ended(store, "broken", metadata={key_name: "a"})
    await executed(units, "UPDATE dr_runs SET metadata = '[\"regenerate_from_run_id\"]' WHERE run_id = 'broken'")
    assert (await store.visibility(THREAD, scope=EVERYONE)).hidden == frozenset()


# --- What it costs on SQLite ----------------------------------------------------------------------------------------


async def test_sqlite_asks_the_partial_indexes_about_active_operations(sqlite_dsn: str) -> None:
    """A flag that is rendered as ``active = 1`` would make every one of these scan the table."""
    database = parse_dsn(sqlite_dsn)
    assert isinstance(database, Sqlite)
    engine = sqlite_engine(database, clock=wall_clock)
    seen: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *given: seen.append((given[2], given[3])))
    with engine.connect() as connection:
        reads.active(connection, SQLITE, THREAD)
        reads.owned(connection, SQLITE, ME)
        reads.queue(connection, SQLITE, THREAD)
        reads.counts(connection, SQLITE)
        reads.seizable(connection, SQLITE, Actor(ME), Given(), 5)
        asked_for = list(seen)
        plans = [
            row[3]
            for sql, values in asked_for
            for row in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + sql, values)
            if "dr_runs" in row[3]
        ]
    assert [plan for plan in plans if "INDEX" not in plan] == []
