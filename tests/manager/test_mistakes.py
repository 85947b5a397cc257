"""A mistake is told where it is made, with what to write instead; an error of a caller's code is not silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import make_url

from deerflow_runs.errors import InvalidValue, RunCancelled, StoreUnavailable, UsageError
from deerflow_runs.manager.faults import log_fault
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.model import Run, RunId, RunKey, RunStatus, ThreadId
from deerflow_runs.observe import LogObserver
from deerflow_runs.store.opening import store_at
from deerflow_runs.store.sql import SqlRunStore
from tests.manager.spoiled import PATIENCE, Echo, manager_on

SECRET = "what-a-user-sent"


@pytest.fixture
async def manager(store: SqlRunStore) -> AsyncIterator[RunManager]:
    """A worker with one executor."""
    async with manager_on(store, executors={"echo": Echo()}) as running:
        yield running


async def no_op(lease: RunLease) -> None:
    """A run that ends at once."""


async def breaks(lease: RunLease) -> None:
    raise ValueError(SECRET)


# --- Told at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"executors": {"echo": Echo}}, r"executor 'echo' must be an object, not the class Echo: write Echo\(\)"),
        ({"executors": {"echo": no_op}}, r"executor 'echo' is a function, which has no method run\(\)"),
        ({"observers": LogObserver()}, "observers is a list"),
        ({"observers": [LogObserver]}, r"an observer must be an object, not the class LogObserver"),
        ({"observers": [print]}, r"which has no method observed\(\)"),
        ({"on_settled": "tell"}, "on_settled must be an async function of the ended run"),
    ],
    ids=["executor's class", "function as executor", "one observer", "observer's class", "no observer", "hook"],
)
async def test_a_manager_is_not_made_of_what_could_only_fail_later(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        RunManager(store_at(":memory:"), **wrong)


async def test_an_address_is_no_store() -> None:
    with pytest.raises(UsageError, match=r"store_at\(address\)"):
        RunManager("runs.db")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"on_orphan": "retry"}, "on_orphan: must be one of fail, resume"),
        ({"run_timeout": 60}, "run_timeout: must be a timedelta, not a value of type int"),
        ({"delay": 1}, "delay: must be a timedelta, not a value of type int"),
        ({"run_id": ""}, "run_id: must not be empty"),
    ],
)
async def test_an_options_wrong_value_is_refused_by_its_name(
    asked: dict[str, Any], told: str, manager: RunManager
) -> None:
    with pytest.raises(InvalidValue, match=told):
        await manager.submit("thread", no_op, **asked)
    assert not await manager.has_inflight("thread")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"multitask_strateg": "enqueue"}, r"no option multitask_strateg: did you mean multitask_strategy\?"),
        ({"colour": "red"}, "no option colour: there are .*idempotency_key, .*user_id"),
    ],
)
async def test_an_option_that_does_not_exist_is_answered_with_those_that_do(
    asked: dict[str, Any], told: str, manager: RunManager
) -> None:
    with pytest.raises(UsageError, match=told):
        await manager.submit("thread", no_op, **asked)


async def test_what_cannot_be_called_is_no_work(manager: RunManager) -> None:
    called = no_op(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a coroutine; give the function and do not call it"):
        await manager.submit("thread", called)  # type: ignore[arg-type]
    called.close()
    with pytest.raises(UsageError, match="the name of an executor or an async function of the lease, not None"):
        await manager.submit("thread", None)  # type: ignore[arg-type]
    assert not await manager.has_inflight("thread")


async def test_words_are_accepted_as_text_and_wrong_ones_answered_with_the_right_ones(manager: RunManager) -> None:
    nothing = RunKey(ThreadId("thread"), RunId("none"))
    with pytest.raises(InvalidValue, match="action: must be one of interrupt, rollback"):
        await manager.cancel(nothing, "stop")
    handle = await manager.submit("elsewhere", no_op)
    with pytest.raises(InvalidValue, match="action: must be one of interrupt, rollback"):
        await handle.cancel("stop")
    with pytest.raises(InvalidValue, match="kind: must be one of run, checkpoint_write"):
        manager.reserve_thread_operation("thread", "write")
    async with manager.reserve_thread_operation("thread", "checkpoint_write") as lease:
        assert lease.run.reservation


async def test_a_block_over_a_run_that_has_ended_says_how_it_ended(manager: RunManager) -> None:
    run = await manager.create_or_reject("thread")
    async with manager.execute(run):
        pass
    with pytest.raises(RunCancelled, match="has ended as success") as caught:
        async with manager.execute(run):
            pytest.fail("the block of an ended run was entered")
    assert caught.value.stop_reason is None


async def test_a_server_that_does_not_answer_is_named_and_its_password_is_not() -> None:
    with pytest.raises(StoreUnavailable, match=r"cannot open postgresql://nobody@127.0.0.1:1/none: ") as caught:
        await store_at(f"postgresql://nobody:{SECRET}@127.0.0.1:1/none").open()
    assert SECRET not in str(caught.value)
    assert "stored" not in str(caught.value), "nothing was asked that could have been"


async def test_a_database_that_is_not_there_is_named_by_our_own_error(postgres_dsn: str) -> None:
    elsewhere = make_url(postgres_dsn).set(database="not_there").render_as_string(hide_password=False)
    with pytest.raises(StoreUnavailable, match=r'cannot open .*/not_there.*: database "not_there" does not exist$'):
        await store_at(elsewhere).open()


# --- Not silent -----------------------------------------------------------------------------------------------------


async def test_an_error_in_the_background_is_logged_with_its_place_and_without_its_message(
    manager: RunManager, caplog: pytest.LogCaptureFixture
) -> None:
    ended = await (await manager.submit("thread", breaks)).join(timeout=PATIENCE)
    assert ended.error == f"ValueError: {SECRET}"
    (record,) = [record for record in caplog.records if record.name == "deerflow_runs.manager"]
    assert record.getMessage().startswith(f"the function of run {ended.run_id} on thread raised ValueError")
    assert "in breaks" in record.getMessage()
    assert f"ValueError: {SECRET}" not in record.getMessage()


async def test_a_hook_that_raises_is_logged_with_its_place_also_without_an_observer(
    store: SqlRunStore, caplog: pytest.LogCaptureFixture
) -> None:
    called = asyncio.Event()

    async def hook_that_breaks(run: Run) -> None:
        called.set()
        raise ValueError(SECRET)

    async with manager_on(store, on_settled=hook_that_breaks) as manager:
        ended = await (await manager.submit("thread", no_op)).join(timeout=PATIENCE)
        assert ended.status is RunStatus.SUCCESS
        async with asyncio.timeout(PATIENCE):
            await called.wait()
    (record, *_) = [record for record in caplog.records if record.name == "deerflow_runs.manager"]
    assert record.getMessage().startswith(f"on_settled for run {ended.run_id} raised ValueError")
    assert "in hook_that_breaks" in record.getMessage()


def test_the_causes_and_the_members_of_an_error_are_logged_each_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = ValueError(SECRET), KeyError(SECRET)
    first.__cause__ = second
    second.__context__ = first
    log_fault("a test", ExceptionGroup("two", [first, second]))
    told = caplog.records[0].getMessage().splitlines()
    assert told == ["a test raised ExceptionGroup", "KeyError:", "ValueError:", "ExceptionGroup:"]
