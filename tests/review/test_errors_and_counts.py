"""What a run reports never keeps it from ending, and no error of a database shows what somebody stored."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from deerflow_runs.model import Session, Strategy, Usage
from deerflow_runs.protocol.decision import Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import open_units
from tests.contract.conftest import store, units  # noqa: F401 - fixtures
from tests.contract.lives import ME, admitted, executed, happened, started
from tests.rules import rule

NONE = cast("Any", None)


@rule("F06")
@pytest.mark.parametrize(
    ("reported", "kept"),
    [
        (Usage(input_tokens=2**70, llm_calls=2**40), Usage(input_tokens=2**63 - 1, llm_calls=2**31 - 1)),
        (Usage(total_tokens=-5, message_count=3), Usage(message_count=3)),
        (Usage(output_tokens=NONE, input_tokens=7), Usage(input_tokens=7)),
        (Usage(output_tokens=cast("Any", float("nan")), input_tokens=7), Usage(input_tokens=7)),
    ],
)
async def test_a_run_ends_as_it_did_whatever_it_counted(reported: Usage, kept: Usage, store: SqlRunStore) -> None:  # noqa: F811
    await store.open_session(Session(ME))
    run = await started(store, "a")
    ended = await happened(store, run, RunEvent.SETTLE_SUCCESS, Given(usage=reported))
    assert ended.usage == kept


@rule("F06")
async def test_a_run_starts_whatever_the_heads_before_it_are_called(store: SqlRunStore) -> None:  # noqa: F811
    await store.open_session(Session(ME))
    run = await admitted(store, "a")
    begun = await happened(store, run, RunEvent.START, Given(base_heads={"inner\ud800": "1"}))
    assert begun.base_heads == {"inner\N{REPLACEMENT CHARACTER}": "1"}


@rule("F06")
async def test_a_requirement_no_database_holds_defers_a_run_all_the_same(store: SqlRunStore) -> None:  # noqa: F811
    await store.open_session(Session(ME))
    run = await admitted(store, "a")
    deferred = await happened(store, run, RunEvent.DEFER, Given(requirements=frozenset({"a\0"})))
    assert deferred.required_capabilities == {"a\N{REPLACEMENT CHARACTER}"}


@rule("F67")
@pytest.mark.parametrize("in_a_transaction", [False, True])
async def test_neither_an_error_nor_a_log_on_the_host_s_engine_shows_an_input(
    postgres_dsn: str, in_a_transaction: bool, caplog: pytest.LogCaptureFixture
) -> None:
    address = postgres_dsn.replace("postgresql://", "postgresql+asyncpg://")
    engine = create_async_engine(address, echo=True)
    caplog.set_level(logging.INFO, logger="sqlalchemy.engine")
    borrowing = open_units(parse_dsn(postgres_dsn), engine=engine, connections=1)
    await borrowing.open()
    try:
        store = SqlRunStore(borrowing)
        await store.open_session(Session(ME))
        await executed(borrowing, "ALTER TABLE dr_runs DROP COLUMN last_ai_message")
        strategy = Strategy.INTERRUPT if in_a_transaction else Strategy.REJECT
        with pytest.raises(DBAPIError) as caught:
            await admitted(store, "a", strategy=strategy, kwargs={"input": "my secret"}, user_id="my name")
    finally:
        await borrowing.close()
    for told in (str(caught.value), caplog.text):
        assert "dr_runs" in told
        assert "my secret" not in told
        assert "my name" not in told
    async with engine.connect() as connection:
        with pytest.raises(DBAPIError, match="the host's own"):
            await connection.execute(text("SELECT nothing FROM dr_runs WHERE run_id = :id"), {"id": "the host's own"})
    await engine.dispose()


@rule("F67")
async def test_an_error_of_the_database_shows_no_input(dsn: str) -> None:
    broken = open_units(parse_dsn(dsn))
    await broken.open()
    try:
        store = SqlRunStore(broken)
        await store.open_session(Session(ME))
        await executed(broken, "ALTER TABLE dr_runs DROP COLUMN last_ai_message")
        with pytest.raises(DBAPIError) as caught:
            await admitted(store, "a", kwargs={"input": "my secret"})
        assert "my secret" not in str(caught.value)
    finally:
        await broken.close()
