"""The clock was set back while a run waited: who comes now, in every order, comes after it and after each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from deerflow_runs.model import Micros, RunStatus, Strategy
from deerflow_runs.protocol.decision import Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted
from tests.races.support import HOUR, PAST, Rows, World, admit, apply, queued, running, the_active
from tests.rules import rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

AHEAD: Final = Micros(PAST + 100_000_000 * HOUR)
"""Before every clock that a database has here."""

HELD: Final = running("held", queue_behind=True, seq=1)
FIRST: Final = queued("first", seq=2, created_at=AHEAD, due_at=AHEAD, not_before=AHEAD)


def _in_order_of_admission(rows: Rows) -> list[str]:
    waiting = [run for run in rows.values() if run.status is RunStatus.QUEUED]
    assert not any(run.delayed for run in waiting)
    by_place = sorted(waiting, key=lambda run: (run.due_at, run.seq))
    assert by_place == sorted(waiting, key=lambda run: run.seq)
    return [run.run_id for run in by_place]


@rule("I17", "O2")
async def test_newcomers_that_meet_come_in_order_whether_or_not_the_one_ahead_still_waits(world: World) -> None:
    def verdict(answers: Sequence[Any], rows: Rows) -> None:
        assert all(isinstance(answer, Admitted) for answer in answers[:2]), answers
        assert (the_active(rows), sorted(_in_order_of_admission(rows))) == ("held", ["one", "two"])

    gone = apply(FIRST, RunEvent.CANCEL_QUEUED, given=Given())
    verbs = [admit("one", Strategy.ENQUEUE), admit("two", Strategy.ENQUEUE), gone]
    await world.every_order([HELD, FIRST], verbs, verdict)


@rule("I7", "I17", "O2", "O7")
async def test_the_end_of_the_incumbent_lets_in_the_one_ahead_and_whoever_comes_waits_behind_it(world: World) -> None:
    def verdict(_: Sequence[Any], rows: Rows) -> None:
        assert (the_active(rows), _in_order_of_admission(rows)) == ("first", ["new"])

    verbs = [apply(HELD, RunEvent.SETTLE_SUCCESS), admit("new", Strategy.ENQUEUE)]
    await world.every_order([HELD, FIRST], verbs, verdict)
