"""What every kind of end leaves in the database: one receipt, each delivery once, the thread as it was left (O28).

And what removing an ended run takes along.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from sqlalchemy import Connection, insert, select, text

from deerflow_runs.model import EVERYONE, Micros, Run, RunStatus, ThreadOutcome
from deerflow_runs.protocol.decision import Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.rows import to_run, whole
from deerflow_runs.store.schema import base_writes, events, outbox
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.threads import NewThread, ThreadChange
from deerflow_runs.store.units import Units
from deerflow_runs.testing.contract.stage import HOUR, THREAD, Stage, names
from deerflow_runs.testing.contract.turns import ENDS
from tests.contract.emptying import emptied
from tests.rules import rule

FAR: Final = Micros(2**62)


async def rows(units: Units) -> dict[str, Run]:
    """All runs by their ids."""
    found = await units.read(lambda connection: [to_run(row) for row in connection.execute(select(*whole()))])
    return {run.run_id: run for run in found}


async def stored(units: Units, sql: str) -> list[Any]:
    """What a question in SQL finds."""
    return await units.read(lambda connection: [tuple(row) for row in connection.execute(text(sql))])


# --- Every kind of end ----------------------------------------------------------------------------------------------


@rule("O28", "I5", "F08", "F09", "F10", "B072")
async def test_every_kind_of_end_leaves_one_receipt_and_the_thread_as_it_was_left(
    store: SqlRunStore, units: Units
) -> None:
    for name, end in ENDS.items():
        await emptied(units)
        await store.threads.create(NewThread(thread_id=THREAD))
        await store.threads.update(THREAD, ThreadChange(outcome=ThreadOutcome.INTERRUPTED), scope=EVERYONE)
        await end(Stage(store))
        ended = (await rows(units)).get("holder")
        receipts = await stored(units, "SELECT run_id FROM dr_outbox WHERE kind = 'receipt' ORDER BY run_id")
        assert receipts == ([("holder",)] if ended is not None else []), f"the end of a holder {name}"
        await _agrees(store, ended, name)


async def _agrees(store: SqlRunStore, ended: Run | None, name: str) -> None:
    thread = await store.threads.get(THREAD, scope=EVERYONE)
    assert thread is not None
    if ended is None or (ended.turn is None and "waited" in name):
        assert thread.outcome is ThreadOutcome.INTERRUPTED, f"nothing has run: {name}"
        return
    receipt = await store.outbox.receipt(ended.key, scope=EVERYONE)
    assert receipt is not None
    told = (receipt.status, receipt.stop_reason, receipt.settled_by, receipt.epoch, receipt.settled_at)
    assert told == (ended.status, ended.stop_reason, ended.settled_by, ended.epoch, ended.settled_at)
    failed = ended.status in (RunStatus.ERROR, RunStatus.TIMEOUT)
    assert thread.outcome is (ThreadOutcome.ERROR if failed else ThreadOutcome.IDLE), name
    assert thread.error == (ended.error if failed else None)


@rule("O28")
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "with somebody behind"])
@pytest.mark.parametrize("how", [RunEvent.SETTLE_SUCCESS, RunEvent.SETTLE_ERROR, RunEvent.SETTLE_CANCELLED])
async def test_a_settle_asked_for_twice_delivers_once(
    how: RunEvent, behind: bool, store: SqlRunStore, units: Units
) -> None:
    stage, wanted = Stage(store), {"webhook": {"to": "a"}, "hook": {"name": "b"}}
    run = await stage.starts("run", deliveries=wanted)
    if behind:
        await stage.waits("next", deliveries=wanted)
    await stage.ends(run, how=how)
    await stage.repeats(how, run)
    kinds = await stored(units, "SELECT run_id, kind FROM dr_outbox ORDER BY kind")
    assert kinds == [("run", "hook"), ("run", "receipt"), ("run", "webhook")]
    assert await store.outbox.pending() == {"hook": 1, "webhook": 1}


@rule("O28")
async def test_the_last_run_that_ran_decides_how_its_thread_is_left(store: SqlRunStore) -> None:
    stage = Stage(store)
    await store.threads.create(NewThread(thread_id=THREAD, values={"from": "the beginning"}))
    asks = Given(outcome=ThreadOutcome.INTERRUPTED, values={"asks": 1}, interrupts={"task": ["go on?"]})
    await stage.ends(await stage.starts("asks"), asks)
    fails = await stage.starts("fails")
    waiting = await stage.waits("never runs")
    await stage.ends(fails, Given(error="broke"), how=RunEvent.SETTLE_ERROR)
    await stage.is_cancelled(await stage.now(waiting))
    await stage.happens(RunEvent.FORCE, waiting)
    later = await stage.waits("later", delay=HOUR)
    await stage.happens(RunEvent.CANCEL_QUEUED, later)
    thread = await store.threads.get(THREAD, scope=EVERYONE)
    assert thread is not None
    assert (thread.values, thread.interrupts) == ({"asks": 1}, {}), "what the last one did not mention"
    assert (thread.outcome, thread.error, thread.busy) == (ThreadOutcome.IDLE, None, False)


# --- Removing -------------------------------------------------------------------------------------------------------


async def _hang(units: Units, run_id: str) -> None:
    """Pending writes and an event, as an executor would leave them."""
    write = {"namespace": "", "checkpoint_id": "c", "task_id": "t", "idx": 0, "channel": "ch"}
    event = {"id": 1, "thread_id": THREAD, "event": "values", "namespace": "", "data": "x", "bytes": 1, "at": 0}

    def unit(connection: Connection) -> None:
        connection.execute(insert(base_writes), {"run_id": run_id} | write)
        connection.execute(insert(events), {"run_id": run_id} | event)

    await units.transaction(unit)


async def _hanging(units: Units) -> dict[str, list[str]]:
    def unit(connection: Connection) -> dict[str, list[str]]:
        tables = (base_writes, events, outbox)
        return {table.name: sorted(set(connection.scalars(select(table.c.run_id)))) for table in tables}

    return await units.read(unit)


@rule("O4", "O28")
async def test_the_writes_kept_for_a_rollback_go_with_the_end_and_all_else_with_the_run(
    store: SqlRunStore, units: Units
) -> None:
    stage = Stage(store)
    ended, other = await stage.starts("ended", "1", deliveries={"hook": {}}), await stage.starts("other", "2")
    for run in (ended, other):
        await _hang(units, run.run_id)
    await stage.ends(ended)
    assert await _hanging(units) == {
        "dr_base_writes": ["other"],
        "dr_events": ["ended", "other"],
        "dr_outbox": ["ended"],
    }
    await stage.happens(RunEvent.REMOVE, ended)
    assert await _hanging(units) == {"dr_base_writes": ["other"], "dr_events": ["other"], "dr_outbox": []}


@rule("O5", "O28", "F51")
async def test_a_purge_removes_what_ended_before_an_instant_oldest_first_and_frees_its_keys(
    store: SqlRunStore, units: Units
) -> None:
    stage = Stage(store)
    ended = [
        await stage.ends(await stage.starts(name, idempotency_key=name, deliveries={"hook": {}})) for name in "abcd"
    ]
    await stage.starts("open")
    await stage.waits("waiting", idempotency_key="w")
    await _hang(units, "a")
    await _all_delivered(store)
    until_c = ended[2].settled_at
    assert until_c is not None
    assert await store.purge(before=until_c, limit=1) == 1
    assert sorted(await rows(units)) == ["b", "c", "d", "open", "waiting"]
    assert await store.purge(before=until_c, limit=9) == 1
    assert await store.purge(before=until_c, limit=9) == 0
    assert await store.purge(before=FAR, limit=9) == 2
    assert sorted(await rows(units)) == ["open", "waiting"]
    assert await _hanging(units) == {"dr_base_writes": [], "dr_events": [], "dr_outbox": []}
    assert names([await stage.waits("again", idempotency_key="a")]) == ["again"]


async def _all_delivered(store: SqlRunStore) -> None:
    for delivery in await store.outbox.take(["hook", "webhook"], 100, FAR):
        assert await store.outbox.delivered(delivery)


@rule("O28")
async def test_a_purge_leaves_a_run_alone_until_everything_it_owes_is_delivered(store: SqlRunStore) -> None:
    stage = Stage(store)
    for name, owed in (("owes two", ["hook", "webhook"]), ("owes nothing", []), ("owes one", ["hook"])):
        await stage.ends(await stage.starts(name, name, deliveries={kind: {} for kind in owed}))
    assert await store.purge(before=FAR, limit=1) == 1, "what is owed by one stops no other"
    (webhook,) = await store.outbox.take(["webhook"], 9, FAR)
    assert await store.outbox.delivered(webhook)
    assert await store.purge(before=FAR, limit=9) == 0
    assert await store.outbox.pending() == {"hook": 2}
    await _all_delivered(store)
    assert await store.purge(before=FAR, limit=9) == 2


@rule("O28")
async def test_who_removes_a_run_by_name_means_it_whatever_it_owes(store: SqlRunStore) -> None:
    stage = Stage(store)
    ended = await stage.ends(await stage.starts("owes", deliveries={"hook": {}}))
    await stage.happens(RunEvent.REMOVE, ended)
    assert await store.outbox.pending() == {}
