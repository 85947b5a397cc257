"""Revision 0002 ends what its unique indexes would not allow, and nothing else."""

from __future__ import annotations

import json

import pytest

from deerflow_runs.store.migrate import current, head, upgrade
from tests.migrations.databases import add_run, add_session, ask, do, indexes, run, statuses
from tests.rules import rule


@pytest.fixture
def before(empty: str) -> str:
    """A database at 0001, where nothing keeps two operations off one thread."""
    upgrade(empty, revision="0001")
    return empty


# --- Which one is kept ----------------------------------------------------------------------------------------------


@rule("B253", "F62", "P046")
def test_the_run_of_a_live_session_is_kept_although_others_are_newer(before: str) -> None:
    add_session(before, "alive", "live")
    add_session(before, "gone", "dead")
    add_run(before, "old", owner_worker_id="alive", created_at=1)
    add_run(before, "dead", owner_worker_id="gone", created_at=2)
    add_run(before, "unknown", owner_worker_id="never heard of", created_at=3)
    add_run(before, "vacant", status="pending", created_at=4)
    upgrade(before)
    assert statuses(before) == {"old": "running", "dead": "error", "unknown": "error", "vacant": "error"}


def test_a_draining_session_counts_as_live(before: str) -> None:
    add_session(before, "drains", "draining")
    add_run(before, "old", owner_worker_id="drains", created_at=1)
    add_run(before, "new", created_at=2)
    upgrade(before)
    assert statuses(before) == {"old": "running", "new": "error"}


def test_a_lease_that_stands_beats_one_that_expired_and_that_beats_a_dead_session(before: str) -> None:
    add_session(before, "stands", "live")
    add_session(before, "expired", "live", expires_at=1)
    add_session(before, "gone", "dead")
    for thread, owners in {"a": ("stands", "expired", "gone"), "b": ("expired", "gone", "gone")}.items():
        for age, owner in enumerate(owners):
            add_run(before, f"{thread}{age}", thread_id=thread, owner_worker_id=owner, created_at=age)
    upgrade(before)
    kept = [run_id for run_id, status in statuses(before).items() if status == "running"]
    assert sorted(kept) == ["a0", "b0"]


@rule("B253", "P046")
def test_without_a_live_owner_the_newest_is_kept_by_time_then_number_then_id(before: str) -> None:
    add_run(before, "z", thread_id="by time", created_at=1, seq=9)
    add_run(before, "a", thread_id="by time", created_at=2, seq=1)
    add_run(before, "y", thread_id="by number", seq=1)
    add_run(before, "b", thread_id="by number", seq=2)
    add_run(before, "c", thread_id="by id")
    add_run(before, "x", thread_id="by id")
    upgrade(before)
    kept = [run_id for run_id, status in statuses(before).items() if status == "running"]
    assert sorted(kept) == ["a", "b", "x"]


# --- What becomes of the others -------------------------------------------------------------------------------------


@pytest.fixture
def ended(before: str) -> str:
    """One thread with two active runs, upgraded: ``other`` was ended, ``kept`` stays."""
    add_run(
        before,
        "other",
        owner_worker_id="somebody:1",
        epoch=4,
        turn=3,
        input_tokens=11,
        last_checkpoint="c9",
        waits_for={"missing": ["x"]},
        deliveries={"webhook": {"url": "http://example.invalid"}, "hook": ["a", 1]},
    )
    add_run(before, "kept", created_at=2, epoch=2)
    for run_id in ("other", "kept"):
        do(
            before,
            "INSERT INTO dr_base_writes (run_id, namespace, checkpoint_id, task_id, idx, channel) "
            f"VALUES ('{run_id}', '', 'c', 't', 0, 'ch')",
        )
    upgrade(before)
    return before


@rule("B253", "O14")
def test_the_others_end_as_errors_that_explain_themselves_and_fence_their_owners(ended: str) -> None:
    other = run(ended, "other")
    assert (other["status"], other["stop_reason"], other["epoch"]) == ("error", "orphan_recovered", 5)
    assert other["active"] is False
    assert other["waits_for"] is None
    assert other["settled_by"] == "migration:0002"
    assert "Another operation was active on the same thread" in other["error"]


@rule("F67")
def test_the_explanation_names_no_worker(ended: str) -> None:
    assert "somebody" not in run(ended, "other")["error"]


def test_the_end_is_stamped_with_the_clock_of_the_store(before: str) -> None:
    add_run(before, "other")
    add_run(before, "kept", created_at=2)
    upgrade(before)
    other = run(before, "other")
    year_2020, year_2100 = 1_577_836_800_000_000, 4_102_444_800_000_000
    assert year_2020 < other["settled_at"] < year_2100
    assert abs(other["updated_at"] - other["settled_at"]) < 1_000_000


@rule("O28")
def test_the_others_leave_a_receipt_like_every_run_that_ended(ended: str) -> None:
    ((payload, attempts, delivered),) = ask(
        ended, "SELECT payload, attempts, delivered_at IS NOT NULL FROM dr_outbox WHERE kind = 'receipt'"
    )
    receipt = json.loads(payload)
    assert receipt.keys() >= {"status", "stop_reason", "settled_by", "input_tokens", "last_checkpoint", "settled_at"}
    assert receipt == {name: run(ended, "other")[name] for name in receipt}
    assert (attempts, bool(delivered)) == (0, True)


@rule("O28")
def test_what_the_others_asked_for_at_their_end_is_in_the_outbox(ended: str) -> None:
    wanted = ask(
        ended, "SELECT run_id, kind, payload, delivered_at FROM dr_outbox WHERE kind <> 'receipt' ORDER BY kind"
    )
    assert [(run_id, kind, json.loads(payload), delivered) for run_id, kind, payload, delivered in wanted] == [
        ("other", "hook", ["a", 1], None),
        ("other", "webhook", {"url": "http://example.invalid"}, None),
    ]


def test_only_the_base_of_the_others_is_forgotten(ended: str) -> None:
    assert ask(ended, "SELECT run_id FROM dr_base_writes") == [("kept",)]


def test_the_kept_run_is_not_touched(ended: str) -> None:
    kept = run(ended, "kept")
    assert (kept["status"], kept["epoch"], kept["updated_at"]) == ("running", 2, 1)


@rule("I16")
def test_an_owed_rollback_that_cannot_be_carried_out_any_more_is_said_so(before: str) -> None:
    add_run(before, "owed", cancel_action="rollback", turn=1)
    add_run(before, "never started", status="pending", cancel_action="rollback")
    add_run(before, "kept", created_at=2)
    upgrade(before)
    assert run(before, "owed")["stop_reason"] == "rollback_failed"
    assert run(before, "never started")["stop_reason"] == "orphan_recovered"


@rule("B058")
def test_a_surplus_reservation_goes_without_a_trace(before: str) -> None:
    add_run(before, "reservation", operation_kind="checkpoint_write", status="running")
    add_run(before, "kept", created_at=2)
    upgrade(before)
    assert statuses(before) == {"kept": "running"}
    assert ask(before, "SELECT count(*) FROM dr_outbox") == [(0,)]


@rule("I14")
def test_a_key_given_twice_stays_with_the_run_that_had_it_first(before: str) -> None:
    for age, run_id in enumerate(["first", "second"]):
        add_run(
            before,
            run_id,
            thread_id=run_id,
            status="success",
            idempotency_scope="s",
            idempotency_key="k",
            created_at=age,
        )
    add_run(before, "elsewhere", thread_id="e", status="success", idempotency_scope="other", idempotency_key="k")
    upgrade(before)
    keys = dict(ask(before, "SELECT run_id, idempotency_key FROM dr_runs"))
    assert keys == {"first": "k", "second": None, "elsewhere": "k"}


# --- And nothing else -----------------------------------------------------------------------------------------------


@rule("B253", "P046")
def test_a_clean_database_stays_as_it_is(before: str) -> None:
    add_run(before, "active", thread_id="a")
    add_run(before, "queued", thread_id="a", status="queued")
    add_run(before, "over", thread_id="a", status="success")
    add_run(before, "reservation", thread_id="b", operation_kind="delete")
    rows = "SELECT * FROM dr_runs ORDER BY run_id"
    as_it_was = ask(before, rows)
    upgrade(before)
    assert ask(before, rows) == as_it_was
    assert ask(before, "SELECT count(*) FROM dr_outbox") == [(0,)]


@rule("B253")
def test_an_index_that_is_there_already_is_no_obstacle(before: str) -> None:
    do(before, "CREATE UNIQUE INDEX uq_dr_runs_active_thread ON dr_runs (thread_id) WHERE active")
    upgrade(before)
    assert current(before) == head()
    assert len([name for name in indexes(before) if "dr_runs" in name]) >= 7
