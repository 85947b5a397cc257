"""What is asked about a user, about a thread's order, and about runs that were undone: the answers, and what they cost.

The answers on both databases; the plans on PostgreSQL with a long history, and on SQLite by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy import Connection, event

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    RunId,
    RunKey,
    RunStatus,
    Session,
    ThreadId,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import arrivals, reads
from deerflow_runs.store.base import RunFilter
from deerflow_runs.store.dialect import POSTGRES, SQLITE
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.threads import NewThread
from deerflow_runs.store.units import Units, open_units
from tests.contract.lives import (
    HOUR,
    ME,
    THREAD,
    admitted,
    delayed,
    ended,
    happened,
    names,
    reserved,
    started,
    waiting,
)
from tests.contract.plans import add_history, plans
from tests.rules import rule

# --- The threads of a user ------------------------------------------------------------------------------------------


@pytest.fixture
async def crowd(store: SqlRunStore) -> SqlRunStore:
    """Runs of Ann and Ben in every state, and thread rows of both, on threads that tell what is on them."""
    await ended(store, "e1", "a-ended", user_id="ann")
    await ended(store, "e2", "a-ended", user_id="ann")
    await started(store, "r", "a-ended", user_id="ann")
    await started(store, "b", "shared", user_id="ben")
    await waiting(store, "q", "shared", user_id="ann")
    await delayed(store, "d", "c-delayed", user_id="ann")
    await started(store, "n", "b-nobody's")
    await reserved(store, "h", "b-held", user_id="ann")
    for thread_id, user_id in (("a-row", "ann"), ("shared", "ann"), ("b-row", "ben"), ("b-free", None)):
        await store.threads.create(NewThread(thread_id=ThreadId(thread_id), user_id=user_id))
    await store.threads.create(NewThread(thread_id=ThreadId("d-temporary"), user_id="ann", temporary=True))
    return store


@rule("F63", "F66")
async def test_a_user_s_threads_are_those_with_a_run_of_theirs_and_those_that_are_theirs(crowd: SqlRunStore) -> None:
    assert await crowd.threads_of("ann") == ("a-ended", "a-row", "c-delayed", "d-temporary", "shared")
    assert set(await crowd.threads_of("ben")) == {"shared", "b-row"}
    assert await crowd.threads_of("nobody") == ()
    assert await crowd.threads_of("") == ()


async def test_pages_of_a_user_s_threads_neither_lose_nor_repeat_one(crowd: SqlRunStore) -> None:
    for limit in (1, 2, 3, 5, 6):
        seen: list[str] = []
        after: ThreadId | None = None
        while len(seen) < 6 and (page := await crowd.threads_of("ann", limit=limit, after=after)):
            assert len(page) <= limit
            seen += page
            after = page[-1]
        assert seen == ["a-ended", "a-row", "c-delayed", "d-temporary", "shared"]


@pytest.mark.parametrize("limit", [0, 1001])
async def test_a_page_of_threads_has_a_size(store: SqlRunStore, limit: int) -> None:
    with pytest.raises(InvalidValue) as refused:
        await store.threads_of("ann", limit=limit)
    assert refused.value.path == "limit"


async def test_threads_are_asked_for_by_what_a_row_could_hold_only(store: SqlRunStore) -> None:
    with pytest.raises(InvalidValue, match="user_id"):
        await store.threads_of("a\0")
    with pytest.raises(InvalidValue, match="after"):
        await store.threads_of("ann", after=ThreadId(""))


# --- What was rolled back -------------------------------------------------------------------------------------------


async def _undone(store: SqlRunStore, run_id: str) -> None:
    run = await started(store, run_id)
    cancelled = await happened(store, run, RunEvent.REQUEST_CANCEL, Given(action=CancelAction.ROLLBACK))
    seized = await happened(store, cancelled, RunEvent.SEIZE)
    await happened(store, seized, RunEvent.SETTLE_CANCELLED, Given(restored=True))


@pytest.fixture
async def past(store: SqlRunStore) -> SqlRunStore:
    """Runs of one thread that ended in every way, two of them rolled back, and one that is to be."""
    await store.open_session(Session(ME))
    await ended(store, "fine")
    await _undone(store, "undone")
    stopped = await happened(store, await started(store, "stopped"), RunEvent.REQUEST_CANCEL)
    await happened(store, stopped, RunEvent.SETTLE_CANCELLED)
    await ended(store, "failed", how=RunEvent.SETTLE_ERROR, with_=Given(stop_reason="rollback"))
    holder = await started(store, "holder")
    queued = await waiting(store, "never started")
    await happened(store, queued, RunEvent.CANCEL_QUEUED, Given(action=CancelAction.ROLLBACK))
    await happened(store, holder, RunEvent.REQUEST_CANCEL, Given(action=CancelAction.ROLLBACK))
    return store


KEPT: Final = ["holder", "failed", "stopped", "fine"]
UNDONE: Final = ["never started", "undone"]


@rule("I16")
async def test_a_list_leaves_out_what_was_rolled_back_or_everything_else_or_nothing(past: SqlRunStore) -> None:
    found = {
        which: names((await past.list_runs(THREAD, scope=EVERYONE, only=RunFilter(rolled_back=which))).runs)
        for which in (None, True, False)
    }
    assert found[False] == KEPT
    assert found[True] == UNDONE
    assert sorted(found[None]) == sorted(KEPT + UNDONE)
    assert found[None] == names((await past.list_runs(THREAD, scope=EVERYONE)).runs)


@rule("I16")
async def test_the_row_says_itself_whether_it_was_rolled_back(past: SqlRunStore) -> None:
    runs = (await past.list_runs(THREAD, scope=EVERYONE)).runs
    assert names(run for run in runs if run.rolled_back) == UNDONE


@rule("I16", "F57")
async def test_pages_are_full_although_what_was_rolled_back_is_left_out(past: SqlRunStore) -> None:
    only, seen, after = RunFilter(rolled_back=False), [], None
    for _ in range(2):
        page = await past.list_runs(THREAD, scope=EVERYONE, only=only, limit=2, after=after)
        seen.append(names(page.runs))
        after = page.after
    assert (seen, after) == ([KEPT[:2], KEPT[2:]], None)


@rule("I16")
async def test_what_was_rolled_back_is_left_out_together_with_other_wishes(past: SqlRunStore) -> None:
    only = RunFilter({RunStatus.INTERRUPTED}, rolled_back=False)
    assert names((await past.list_runs(THREAD, scope=EVERYONE, only=only)).runs) == ["stopped"]
    only = RunFilter(metadata={"none": 1}, rolled_back=True)
    assert (await past.list_runs(THREAD, scope=EVERYONE, only=only)).runs == ()


# --- What a run can be asked for again with -------------------------------------------------------------------------


@rule("B186")
async def test_an_ended_run_still_tells_what_it_was_asked_with(store: SqlRunStore) -> None:
    asked: dict[str, Any] = {"executor": "agent", "payload_version": 3, "kwargs": {"input": {"text": "hello"}}}
    run = await ended(store, "poisoned", how=RunEvent.SETTLE_ERROR, **asked)
    kept = await store.get(run.key, scope=EVERYONE)
    assert kept is not None
    assert (kept.executor, kept.payload_version, kept.kwargs) == ("agent", 3, {"input": {"text": "hello"}})


# --- What it costs --------------------------------------------------------------------------------------------------

FEW: Final = 30
"""Rows that may be looked at beside those that are answered."""

Question = Callable[..., Any]
NEWCOMER: Final = Newcomer(
    run_id=RunId("new"), thread_id=ThreadId("free"), worker_id=ME, user_id="ann", max_active_per_user=2
)
QUESTIONS: Final[dict[str, Question]] = {
    "is the newest": lambda connection, dialect: reads.is_newest(connection, dialect, RunKey(THREAD, RunId("running"))),
    "is not the newest": lambda connection, dialect: reads.is_newest(
        connection, dialect, RunKey(THREAD, RunId("past"))
    ),
    "another user's threads": lambda connection, dialect: reads.threads_of(connection, dialect, "ben"),
    "a page of a user's threads": lambda connection, dialect: reads.threads_of(
        connection, dialect, "ann", limit=10, after=ThreadId("past-1")
    ),
    "a user's newcomer": lambda connection, dialect: arrivals.enter(connection, dialect, NEWCOMER),
    "a look for a user's newcomer": lambda connection, dialect: arrivals.look_at_thread(connection, dialect, NEWCOMER),
}


@pytest.fixture
async def dsn_with_history(postgres_dsn: str) -> str:
    """A few open runs of Ann's, and tens of thousands that have ended, half of them on one thread."""
    units: Units = open_units(parse_dsn(postgres_dsn))
    await units.open()
    store = SqlRunStore(units)
    await ended(store, "past", user_id="ann")
    await units.transaction(lambda connection: add_history(connection, "past"))
    await started(store, "running", user_id="ann")
    await delayed(store, "later", "sleeping", user_id="ann", delay=HOUR)
    await admitted(store, "vacant", "v", take=False, user_id="ben")
    await units.close()
    return postgres_dsn


@rule("F50", "I19")
async def test_no_question_about_a_user_or_an_order_reads_what_has_ended(dsn_with_history: str) -> None:
    for name, question in QUESTIONS.items():
        found = await plans(dsn_with_history, partial(question, dialect=POSTGRES))
        for plan in found:
            assert (name, {"dr_runs", "dr_threads"} & set(plan.sequential())) == (name, set())
            assert plan.rows_read("dr_runs") <= FEW, name
        index, _, _ = INDEXES[name].partition(" ")
        assert index in set().union(*(plan.indexes() for plan in found)), name


INDEXES: Final = {
    "is the newest": "ix_dr_runs_thread_seq (thread_id=? AND seq>?)",
    "is not the newest": "ix_dr_runs_thread_seq (thread_id=? AND seq>?)",
    "another user's threads": "ix_dr_runs_user (user_id=? AND active=? AND thread_id>?)",
    "a page of a user's threads": "ix_dr_runs_user (user_id=? AND active=? AND thread_id>?)",
    "a user's newcomer": "ix_dr_runs_user (user_id=? AND active=?)",
    "a look for a user's newcomer": "ix_dr_runs_user (user_id=? AND active=?)",
}
"""What each question must go through, and with what in hand, in SQLite's words."""


@rule("F50", "I19")
async def test_sqlite_goes_through_the_same_indexes_with_all_that_it_knows(sqlite_dsn: str) -> None:
    units = open_units(parse_dsn(sqlite_dsn))
    await units.open()
    for name, question in QUESTIONS.items():
        steps = await units.transaction(partial(_steps, question=question))
        assert any(step.endswith(f"USING INDEX {INDEXES[name]}") for step in steps), (name, steps)
        assert not [step for step in steps if step.startswith(("SCAN dr_", "SCAN later", "SCAN theirs"))], (name, steps)
    await units.close()


def _steps(connection: Connection, question: Question) -> list[str]:
    seen: list[tuple[str, Any]] = []

    def see(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        seen.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", see)
    question(connection, dialect=SQLITE)
    event.remove(connection, "before_cursor_execute", see)
    explained = (connection.exec_driver_sql("EXPLAIN QUERY PLAN " + sql, given) for sql, given in seen)
    return [row[3] for rows in explained for row in rows]
