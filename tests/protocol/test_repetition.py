"""Answers to whoever asks again because a reply was lost, and pauses that differ from run to run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deerflow_runs.model import Micros, WorkerId, micros
from deerflow_runs.protocol.decision import Applied, Refused
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.recovery import spread_backoff
from tests.protocol.situations import HAPPENS, Situation
from tests.rules import rule

REPEATED = [RunEvent.CANCEL_QUEUED, RunEvent.FORCE, RunEvent.GIVE_BACK_FAIL]


def again(event: RunEvent) -> Situation:
    """The same question, once its first answer has been lost."""
    first = HAPPENS[event]
    happened = first.decide(event)
    assert isinstance(happened, Applied)
    return replace(first, run=happened.run)


@rule("O8", "O21")
@pytest.mark.parametrize("event", REPEATED)
def test_an_end_whose_reply_was_lost_is_answered_yes_when_it_is_asked_for_again(event: RunEvent) -> None:
    repeated = again(event)
    assert repeated.decide(event) == Applied(repeated.run, repeated=True)


@rule("O8")
@pytest.mark.parametrize("event", REPEATED)
def test_somebody_else_who_asks_for_it_is_told_that_it_is_over(event: RunEvent) -> None:
    assert isinstance(again(event).but(by={"worker_id": WorkerId("third")}).decide(event), Refused)


@rule("O30", "O32")
@given(st.integers(1, 10_000), st.integers(1, 6))
def test_a_pause_lies_between_the_shortest_and_a_ceiling_that_doubles(seq: int, attempt: int) -> None:
    run = replace(HAPPENS[RunEvent.TAKE_OVER_RESUME].run, seq=seq, attempt=attempt, progress_epoch=None)
    pause = spread_backoff(run, minimum=micros(1), maximum=micros(60))
    assert micros(1) <= pause <= min(micros(60), Micros(micros(1) << (attempt + 1)))


@rule("O32")
def test_the_runs_of_one_dead_worker_do_not_come_back_in_one_wave() -> None:
    run = replace(HAPPENS[RunEvent.TAKE_OVER_RESUME].run, attempt=5, progress_epoch=None)
    pauses = {spread_backoff(replace(run, seq=n), minimum=micros(1), maximum=micros(60)) for n in range(500)}
    assert len(pauses) == 500
