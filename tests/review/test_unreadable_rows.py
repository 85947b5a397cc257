"""A row that nobody can read, of a newer version or broken, keeps no other run from being claimed, freed or ended."""

from __future__ import annotations

import pytest

from deerflow_runs.model import OnOrphan, RunStatus, Session
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from tests.contract.conftest import store, units  # noqa: F401 - fixtures
from tests.contract.lives import ME, OTHER, THREAD, admitted, executed, happened, names, started, waiting
from tests.rules import rule

SPOILT = pytest.mark.parametrize("spoilt", ["metadata = '{broken'", "on_disconnect = 'a newer word'"])


async def spoil(units: Units, run_id: str, how: str) -> None:  # noqa: F811
    await executed(units, f"UPDATE dr_runs SET {how} WHERE run_id = :run", run=run_id)


@rule("O31", "I8")
@SPOILT
async def test_a_claim_takes_what_it_can_read(spoilt: str, store: SqlRunStore, units: Units) -> None:  # noqa: F811
    await store.open_session(Session(ME))
    for run_id in ("a", "b"):
        await admitted(store, run_id, f"of {run_id}", take=False)
    await spoil(units, "a", spoilt)
    assert names(await store.claim(Actor(ME), 10)) == ["b"]


@rule("O26", "I8")
@SPOILT
async def test_a_sweep_recovers_what_it_can_read(spoilt: str, store: SqlRunStore, units: Units) -> None:  # noqa: F811
    for worker_id in (ME, OTHER):
        await store.open_session(Session(worker_id))
    for run_id in ("a", "b"):
        await started(store, run_id, f"of {run_id}", worker_id=OTHER, on_orphan=OnOrphan.FAIL)
    await store.close_session(OTHER)
    await spoil(units, "a", spoilt)
    assert names((await store.take_over(Actor(ME), NOTHING_GIVEN, 10)).ended) == ["b"]


@rule("O7", "I5")
@SPOILT
async def test_a_run_ends_whoever_waits_behind_it(spoilt: str, store: SqlRunStore, units: Units) -> None:  # noqa: F811
    await store.open_session(Session(ME))
    run = await started(store, "a", THREAD)
    await waiting(store, "b", THREAD)
    await spoil(units, "b", spoilt)
    assert (await happened(store, run, RunEvent.SETTLE_SUCCESS)).status is RunStatus.SUCCESS
