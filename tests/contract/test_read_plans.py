"""What reads cost on PostgreSQL when nearly every run has ended: they look at what they answer, and at little more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy import Connection

from deerflow_runs.model import EVERYONE, Micros, OneUser, RunId, RunKey, RunStatus, ThreadId
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.store import outbox, reads, thread_search, threads
from deerflow_runs.store.base import RunFilter
from deerflow_runs.store.dialect import POSTGRES
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.thread_search import ThreadQuery
from deerflow_runs.store.threads import NewThread, ThreadStatus
from deerflow_runs.store.units import Units, open_units
from tests.contract.lives import HOUR, ME, THREAD, admitted, delayed, done, ended, reserved, started, waiting
from tests.contract.plans import add_history, plans
from tests.rules import rule

FEW: Final = 30
"""Rows that may be looked at where about ten are open."""


@pytest.fixture
async def dsn_with_history(postgres_dsn: str) -> str:
    """A dozen open operations among tens of thousands of ended ones."""
    units: Units = open_units(parse_dsn(postgres_dsn))
    await units.open()
    store = SqlRunStore(units)
    await ended(store, "past", deliveries={"webhook": {"url": "x"}}, user_id="ann")
    await done(units, threads.create, NewThread(thread_id=THREAD, user_id="ann"))
    await units.transaction(lambda connection: add_history(connection, "past"))
    await started(store, "running")
    await waiting(store, "next")
    await delayed(store, "later")
    for number in range(4):
        await admitted(store, f"vacant-{number}", f"v{number}", take=False)
        await delayed(store, f"sleeping-{number}", f"s{number}")
    await reserved(store, "hold", "r")
    await units.close()
    return postgres_dsn


Question = Callable[[Connection], Any]

OPEN: Final = frozenset({RunStatus.QUEUED, RunStatus.PENDING, RunStatus.RUNNING})

ABOUT_OPEN_RUNS: Final[dict[str, Question]] = {
    "active": lambda connection: reads.active(connection, POSTGRES, THREAD),
    "queue": lambda connection: reads.queue(connection, POSTGRES, THREAD),
    "owned": lambda connection: reads.owned(connection, POSTGRES, ME),
    "in flight": lambda connection: reads.in_flight(connection, POSTGRES, THREAD),
    "counts": lambda connection: reads.counts(connection, POSTGRES),
    "seizable": lambda connection: reads.seizable(connection, POSTGRES, Actor(ME), Given(), 10),
    "idle threads": lambda connection: reads.idle_threads_with_due_runs(connection, POSTGRES, 10),
    "next due": lambda connection: reads.next_due(connection, POSTGRES),
    "open runs of a thread": lambda connection: reads.list_runs(
        connection, POSTGRES, THREAD, scope=EVERYONE, only=RunFilter(OPEN)
    ),
    "running runs of a thread": lambda connection: reads.list_runs(
        connection, POSTGRES, THREAD, scope=EVERYONE, only=RunFilter({RunStatus.RUNNING})
    ),
    "a thread": lambda connection: threads.get(connection, POSTGRES, THREAD, scope=EVERYONE),
    "busy threads": lambda connection: thread_search.search(
        connection, POSTGRES, ThreadQuery(status=ThreadStatus.BUSY), scope=EVERYONE
    ),
}


@rule("F50")
async def test_no_question_about_open_runs_looks_at_ended_ones(dsn_with_history: str) -> None:
    for name, question in ABOUT_OPEN_RUNS.items():
        (plan,) = await plans(dsn_with_history, question)
        assert (name, {"dr_runs", "dr_threads"} & set(plan.sequential())) == (name, set())
        assert plan.rows_read("dr_runs") <= FEW, name
        assert plan.rows_read("dr_threads") <= FEW, name


@rule("F57")
async def test_a_page_looks_at_no_more_runs_of_a_thread_than_it_answers(dsn_with_history: str) -> None:
    position: list[str | None] = [None]

    def page(connection: Connection) -> None:
        answer = reads.list_runs(connection, POSTGRES, THREAD, scope=OneUser("ann"), limit=50, after=position[0])
        position[0] = answer.after

    for _ in range(2):
        (plan,) = await plans(dsn_with_history, page)
        assert plan.indexes() == {"ix_dr_runs_thread"}
        assert plan.rows_read("dr_runs") <= 51 + FEW
    assert position[0] is not None


async def test_a_page_of_a_users_threads_looks_at_no_more_threads_than_it_answers(dsn_with_history: str) -> None:
    for query in (ThreadQuery(), ThreadQuery(status=ThreadStatus.IDLE), ThreadQuery(ids=["past-1", "past-2"])):
        searching = partial(thread_search.search, dialect=POSTGRES, query=query, scope=OneUser("ann"))
        (plan,) = await plans(dsn_with_history, searching)
        assert plan.sequential() == []
        assert plan.rows_read("dr_threads") <= 11 + FEW


async def test_a_run_is_found_by_its_id(dsn_with_history: str) -> None:
    key = RunKey(ThreadId(THREAD), RunId("running"))
    ids = [RunId("running"), RunId("thread/5")]
    questions: tuple[Question, ...] = (
        lambda connection: reads.get(connection, POSTGRES, key, scope=EVERYONE),
        lambda connection: reads.get_many(connection, POSTGRES, key.thread_id, ids, scope=EVERYONE),
        lambda connection: reads.note_waiting(connection, POSTGRES, key, {"missing": []}),
        lambda connection: outbox.receipt(connection, POSTGRES, key, scope=EVERYONE),
    )
    for question in questions:
        (plan,) = await plans(dsn_with_history, question)
        assert plan.indexes() <= {"pk_dr_runs", "pk_dr_outbox"}
        assert plan.rows_read("dr_runs") <= len(ids)


async def test_deliveries_are_found_among_many_receipts(dsn_with_history: str) -> None:
    taken: list[Any] = []
    (taking,) = await plans(
        dsn_with_history, lambda connection: taken.extend(outbox.take(connection, POSTGRES, ["webhook"], 10, Micros(0)))
    )
    assert [delivery.key.run_id for delivery in taken] == ["past"]
    (counting,) = await plans(dsn_with_history, lambda connection: outbox.pending(connection, POSTGRES))
    for plan in (taking, counting):
        assert plan.sequential() == []
        assert plan.rows_read("dr_outbox") <= FEW
    by_key: tuple[Question, ...] = (
        lambda connection: outbox.postponed(connection, POSTGRES, taken[0], HOUR),
        lambda connection: outbox.delivered(connection, POSTGRES, taken[0]),
    )
    for question in by_key:
        (plan,) = await plans(dsn_with_history, question)
        assert plan.indexes() == {"pk_dr_outbox"}
