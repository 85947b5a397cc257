"""Deliveries and receipts on both databases: due ones are taken by one worker at a time, until one says it is done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deerflow_runs.model import EVERYONE, Micros, OneUser, RunId, RunKey, RunStatus, Usage
from deerflow_runs.protocol.decision import Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store import outbox
from deerflow_runs.store.base import OutboxKind
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.outbox import Delivery
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units, open_units
from tests.contract.lives import HOUR, ME, THREAD, Pause, admitted, asked, ended, executed, reserved
from tests.rules import rule

NOW = Micros(0)
WEBHOOK, HOOK, CLEANUP = OutboxKind.WEBHOOK, OutboxKind.HOOK, OutboxKind.CLEANUP


async def take(units: Units, *kinds: OutboxKind, limit: int = 10, lease: Micros = HOUR) -> tuple[Delivery, ...]:
    return await units.once(lambda connection: outbox.take(connection, units.dialect, kinds, limit, lease))


async def delivered(units: Units, delivery: Delivery) -> bool:
    return await units.once(lambda connection: outbox.delivered(connection, units.dialect, delivery))


async def postponed(units: Units, delivery: Delivery, backoff: Micros) -> bool:
    return await units.once(lambda connection: outbox.postponed(connection, units.dialect, delivery, backoff))


def ids(taken: tuple[Delivery, ...]) -> list[str]:
    return [delivery.key.run_id for delivery in taken]


async def wanting(store: SqlRunStore, *run_ids: str, **deliveries: dict[str, Any]) -> None:
    """Ended runs that want something done."""
    for run_id in run_ids:
        await ended(store, run_id, deliveries=deliveries or {"webhook": {"url": f"https://{run_id}"}})


@rule("O28")
async def test_an_ending_leaves_its_deliveries_to_be_taken_oldest_first(store: SqlRunStore, units: Units) -> None:
    await wanting(store, "b", "a")
    first, second = await take(units, WEBHOOK)
    assert first == Delivery(RunKey(THREAD, RunId("b")), "webhook", {"url": "https://b"}, 1)
    assert (second.key.run_id, second.attempt) == ("a", 1)


async def test_only_what_there_is_a_handler_for_is_taken(store: SqlRunStore, units: Units) -> None:
    await wanting(store, "a", webhook={}, hook={"name": "h"})
    assert await take(units) == ()
    assert await take(units, CLEANUP, OutboxKind.RECEIPT) == ()
    assert [delivery.kind for delivery in await take(units, HOOK)] == ["hook"]
    assert [delivery.kind for delivery in await take(units, HOOK, WEBHOOK)] == ["webhook"]


async def test_no_more_are_taken_than_asked_for(store: SqlRunStore, units: Units) -> None:
    await wanting(store, "a", "b", "c")
    assert [ids(await take(units, WEBHOOK, limit=2)) for _ in range(3)] == [["a", "b"], ["c"], []]


async def test_two_deliveries_of_a_run_are_taken_one_by_one_where_one_is_asked_for(
    store: SqlRunStore, units: Units
) -> None:
    await wanting(store, "a", webhook={}, hook={})
    kinds = [[one.kind for one in await take(units, HOOK, WEBHOOK, limit=1)] for _ in range(3)]
    assert sorted(kinds) == [[], ["hook"], ["webhook"]]


@rule("O28")
async def test_what_is_taken_comes_back_once_its_lease_has_passed_and_is_counted(
    store: SqlRunStore, units: Units
) -> None:
    await wanting(store, "a")
    attempts = [(await take(units, WEBHOOK, lease=NOW))[0].attempt for _ in range(3)]
    assert attempts == [1, 2, 3]
    assert [one.attempt for one in await take(units, WEBHOOK, lease=HOUR)] == [4]
    assert await take(units, WEBHOOK) == ()


async def test_what_is_delivered_never_comes_back(store: SqlRunStore, units: Units) -> None:
    await wanting(store, "a")
    (delivery,) = await take(units, WEBHOOK, lease=NOW)
    assert await delivered(units, delivery) is True
    assert await delivered(units, delivery) is False
    assert await postponed(units, delivery, NOW) is False
    assert await take(units, WEBHOOK) == ()


async def test_what_failed_is_due_again_after_its_backoff(store: SqlRunStore, units: Units) -> None:
    await wanting(store, "a", "b")
    soon, late = await take(units, WEBHOOK)
    assert await postponed(units, soon, NOW) is True
    assert await postponed(units, late, HOUR) is True
    assert ids(await take(units, WEBHOOK)) == ["a"]


async def test_who_took_too_long_cannot_cut_the_next_takers_hold_short(store: SqlRunStore, units: Units) -> None:
    await wanting(store, "a")
    (slow,) = await take(units, WEBHOOK, lease=NOW)
    (next_one,) = await take(units, WEBHOOK, lease=HOUR)
    assert await postponed(units, slow, NOW) is False
    assert await take(units, WEBHOOK) == ()
    assert await delivered(units, slow) is True
    assert await postponed(units, next_one, NOW) is False


async def test_many_takers_at_once_never_hold_one_delivery_together(store: SqlRunStore, units: Units) -> None:
    await wanting(store, *(f"run-{number:02}" for number in range(20)), webhook={}, hook={})
    taken = await asyncio.gather(*(take(units, WEBHOOK, HOOK, limit=3) for _ in range(20)))
    together = [(delivery.key.run_id, delivery.kind) for part in taken for delivery in part]
    assert len(together) == len(set(together)) == 40
    assert max(map(len, taken)) <= 3


async def test_postgres_passes_over_what_another_taker_has_in_hand(postgres_dsn: str) -> None:
    units = open_units(parse_dsn(postgres_dsn))
    await units.open()
    await wanting(SqlRunStore(units), "a", "b")
    pause = Pause()
    unit = pause.after(lambda connection: outbox.take(connection, units.dialect, [WEBHOOK], 1, HOUR))
    first = asyncio.create_task(units.transaction(unit))
    await pause.reached.wait()
    assert ids(await take(units, WEBHOOK)) == ["b"]
    pause.go_on.set()
    assert ids(await first) == ["a"]
    assert await take(units, WEBHOOK) == ()
    await units.close()


async def test_an_unreadable_delivery_stops_no_other(
    store: SqlRunStore, units: Units, caplog: pytest.LogCaptureFixture
) -> None:
    await wanting(store, "a", "b", "c", webhook={"secret": 1})
    await executed(units, "UPDATE dr_outbox SET payload = '{\"secret\"' WHERE run_id = 'b' AND kind = 'webhook'")
    assert ids(await take(units, WEBHOOK)) == ["a", "c"]
    assert await take(units, WEBHOOK) == ()
    assert "'b'" in caplog.text
    assert "secret" not in caplog.text


async def test_what_is_still_to_be_done_is_counted_by_kind(store: SqlRunStore, units: Units) -> None:
    assert await asked(units, outbox.pending) == {}
    await wanting(store, "a", "b", webhook={}, hook={})
    (taken,) = await take(units, HOOK, limit=1)
    assert await asked(units, outbox.pending) == {"hook": 2, "webhook": 2}
    await delivered(units, taken)
    assert await asked(units, outbox.pending) == {"hook": 1, "webhook": 2}


# --- Receipts -------------------------------------------------------------------------------------------------------


@rule("O28")
async def test_every_ended_run_has_one_receipt(store: SqlRunStore, units: Units) -> None:
    usage = Usage(10, 5, 15, 2, 3, by_model={"m": 15})
    given = Given(usage=usage, checkpoint="c9", stop_reason="enough", error="broke")
    run = await ended(store, "a", how=RunEvent.SETTLE_ERROR, with_=given, model_name="m", user_id="ann")
    receipt = await asked(units, outbox.receipt, run.key, scope=EVERYONE)
    assert receipt == outbox.Receipt(
        key=run.key,
        status=RunStatus.ERROR,
        stop_reason="enough",
        settled_by=ME,
        epoch=1,
        attempt=1,
        last_checkpoint="c9",
        model_name="m",
        usage=Usage(10, 5, 15, 2, 3),
        settled_at=run.settled_at or Micros(0),
    )


@rule("B202")
async def test_a_receipt_is_its_users_only(store: SqlRunStore, units: Units) -> None:
    run = await ended(store, "a", user_id="ann")
    assert await asked(units, outbox.receipt, run.key, scope=OneUser("ann")) is not None
    assert await asked(units, outbox.receipt, run.key, scope=OneUser("ben")) is None


async def test_what_has_not_ended_has_no_receipt(store: SqlRunStore, units: Units) -> None:
    run = await admitted(store, "open")
    hold = await reserved(store, "hold", "elsewhere")
    for key in (run.key, hold.key, RunKey(THREAD, RunId("missing"))):
        assert await asked(units, outbox.receipt, key, scope=EVERYONE) is None
