"""What a recording database writes down, of a real store on both databases, and what the judge says of it."""

from __future__ import annotations

from deerflow_runs import Session, SqlRunStore
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.testing import check_history, grant_of, read_history, steps_of, write_step
from tests.contract.lives import ME, happened, started


async def test_a_step_is_recorded_while_the_run_is_held_and_not_after_its_end(
    store: SqlRunStore, recorded_dsn: str
) -> None:
    await store.open_session(Session(ME))
    run = await started(store, "a")
    assert await write_step(store, grant_of(run), "one")
    assert await steps_of(store, run.key) == ("one",)
    await happened(store, run, RunEvent.SETTLE_SUCCESS)
    assert not await write_step(store, grant_of(run), "two")
    history = read_history(recorded_dsn)
    report = check_history(history)
    assert not report.violations
    assert report.grants == 1
