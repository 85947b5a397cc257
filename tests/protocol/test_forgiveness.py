"""What a run has achieved is not forgotten when its worker leaves in good order."""

from __future__ import annotations

import pytest

from deerflow_runs.protocol.decision import Applied
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.recovery import used_up
from tests.protocol.situations import HAPPENS
from tests.rules import rule


@rule("O30", "I18")
@pytest.mark.parametrize("event", [RunEvent.HAND_OVER, RunEvent.TAKE_BACK])
def test_a_run_on_its_last_attempt_that_wrote_a_checkpoint_survives_a_crash_after_a_drain(event: RunEvent) -> None:
    last = HAPPENS[event]
    achieved = last.but(attempt=last.run.max_attempts, progress_epoch=last.run.epoch)
    moved = achieved.decide(event)
    assert isinstance(moved, Applied)
    assert not used_up(moved.run)


@rule("O30")
@pytest.mark.parametrize("event", [RunEvent.HAND_OVER, RunEvent.TAKE_BACK])
def test_leaving_in_good_order_without_progress_neither_adds_nor_forgives_an_attempt(event: RunEvent) -> None:
    idle = HAPPENS[event].but(attempt=2, progress_epoch=None)
    moved = idle.decide(event)
    assert isinstance(moved, Applied)
    assert moved.run.attempt == 2
