"""Replays a history once, before all judges; each invariant has one judge, and each judge a few invariants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from deerflow_runs.testing.invariants import GRANTS, Expected, Report, Violation
from deerflow_runs.testing.judging.base import Judge, World, fault
from deerflow_runs.testing.judging.recovery import Attempts, Drains, Takings
from deerflow_runs.testing.judging.runs import Admissions, Cancels, Ends, Epochs
from deerflow_runs.testing.judging.sessions import Deaths
from deerflow_runs.testing.judging.steps import Steps, Trust, Writes
from deerflow_runs.testing.judging.threads import Limits, Queues, Quiet, Slots
from deerflow_runs.testing.recorded import History, RunChanged

JUDGES: Final[Sequence[type[Judge]]] = (
    Slots,
    Writes,
    Epochs,
    Ends,
    Cancels,
    Queues,
    Quiet,
    Attempts,
    Deaths,
    Trust,
    Admissions,
    Drains,
    Takings,
    Limits,
    Steps,
)


def judge(history: History, expected: Expected) -> Report:
    """See ``invariants.check_history``."""
    changes = list(history.changes)
    grants = sum(isinstance(change, RunChanged) and change.granted for change in changes)
    found = [] if grants else [fault(GRANTS, None, f"nothing was ever granted in {len(changes)} changes")]
    found += _found(history, expected)
    left_out = _not_judged(expected)
    return Report(
        tuple(violation for violation in found if violation.invariant not in expected.without),
        grants,
        len(changes),
        left_out,
    )


def _found(history: History, expected: Expected) -> Iterator[Violation]:
    world = World()
    judges = [kind(expected, world) for kind in JUDGES]
    for transaction in history.transactions:
        for change in transaction:
            world.replay(change)
            yield from (violation for one in judges for violation in one.saw(change))
        yield from (violation for one in judges for violation in one.committed(transaction))
    yield from (violation for one in judges for violation in one.over())


def _not_judged(expected: Expected) -> Mapping[str, str]:
    given = {
        "I8": (expected.quiet, "the history was not said to end quiet"),
        "I10": (expected.healthy and not expected.outage, "no session was said to be healthy, without an outage"),
        "I11": (any(step.started_at is not None for step in expected.steps), "no step was logged with its times"),
        "I13": (expected.healthy and expected.outage, "no session was said to be healthy through an outage"),
        "I15": (expected.acknowledged, "no admission was said to be acknowledged"),
        "I19": (
            (expected.max_running, expected.max_queued, expected.max_active_per_user) != (None, None, None),
            "no limit was given",
        ),
    }
    left_out = {name: why for name, (judged, why) in given.items() if not judged}
    return left_out | dict.fromkeys(expected.without, "the test suspends it")
