"""Mutations of what a clock that was set back must not change: who is due, who is first, what a stamp says."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation
from tests.mutations.contract import change as store
from tests.mutations.contract import clause, says

PROTOCOL: Final = "src/deerflow_runs/protocol/"
_ORDERS: Final = "tests/protocol/test_orderings.py::"
IN_ORDER: Final = (
    _ORDERS
    + "test_runs_that_were_never_delayed_come_in_order_and_at_once_whenever_the_clock_is_set_back[queued_behind]",
)
_TOLD: Final = "tests/contract/test_clock_steps.py::"

LET_IN: Final = "the end of the incumbent lets in a run that was never delayed whatever the clock says"
FOUND: Final = "a sweep and whoever comes find a run that was never delayed on an idle thread"
BEHIND: Final = "whoever comes after the step waits behind those that came before it"
BY_TIME: Final = "a delayed run takes its place by its time and keeps nobody waiting until then"
BEFORE: Final = "a delayed run from before the step delays nobody and is not due early"
TRIED: Final = "a rollback of a run that was granted before the step has all its attempts"
COUNTED: Final = "restores are counted although the cancel lies ahead of the clock"
SEIZED: Final = "whoever seized its own run over a cancel that lies ahead has not taken it back"
TAKEN_BACK: Final = "a take back is still a yes when the cancel came after a grant that lies ahead"


def protocol(name: str, rule: str, module: str, old: str, new: str, tests: tuple[str, ...]) -> Mutation:
    """A text of one module of the protocol replaced by another."""
    return Mutation(name, rule, f"{PROTOCOL}{module}.py", old, new, tests, quick=True)


MUTATIONS: Final = [
    # --- Who is due -------------------------------------------------------------------------------------------------
    protocol(
        "a clock that was set back keeps a run waiting that was never delayed",
        "I7",
        "decision",
        "return run.due_at <= max(now, run.created_at)",
        "return run.due_at <= now",
        IN_ORDER,
    ),
    clause(
        "SQL: a clock that was set back keeps a run waiting that was never delayed",
        "I7",
        "return run.due_at <= dialect.later(dialect.now, run.created_at)",
        "return run.due_at <= dialect.now",
        says(LET_IN, FOUND),
    ),
    clause(
        "SQL: a run is due whenever it was admitted",
        "I17",
        "return run.due_at <= dialect.later(dialect.now, run.created_at)",
        "return run.due_at >= run.created_at",
        says(BY_TIME, BEFORE),
    ),
    store(
        "a batch lets in whoever the clock says is due",
        "I7",
        "endings",
        "        due(waiting.c, dialect),\n",
        "        waiting.c.due_at <= dialect.now,\n",
        says(LET_IN, store="postgres"),
    ),
    store(
        "a sweep finds only threads whose runs the clock says are due",
        "I7",
        "reads",
        "idle = and_(WAITING, due(R, dialect), ~thread_active())",
        "idle = and_(WAITING, R.due_at <= dialect.now, ~thread_active())",
        says(FOUND),
    ),
    store(
        "a newcomer passes a run that was never delayed because the clock was set back",
        "I17",
        "arrivals",
        "    their_time = [due(waiting.c, dialect)] if only_due else []\n",
        "    their_time = [waiting.c.due_at <= dialect.now] if only_due else []\n",
        says(FOUND),
    ),
    store(
        "a sweep is timed by a run that was never delayed",
        "I7",
        "reads",
        ".where(WAITING, ~due(R, dialect)))",
        ".where(WAITING, R.due_at > dialect.now))",
        (_TOLD + "test_no_sweep_is_told_to_wait_for_a_run_that_was_never_delayed[sqlite]",),
    ),
    protocol(
        "a plan looks at the clock and at no admission",
        "I17",
        "admission",
        "any(is_due(run, view.facts.now) for run in view.queued)",
        "any(run.due_at <= view.facts.now for run in view.queued)",
        says(FOUND, store="model"),
    ),
    # --- Who is first -----------------------------------------------------------------------------------------------
    protocol(
        "whoever comes after the clock was set back is stamped earlier",
        "I17",
        "admission",
        "return Micros(max((now, *earlier)))",
        "return now",
        IN_ORDER,
    ),
    protocol(
        "whoever comes waits for those that are delayed",
        "I17",
        "admission",
        "for run in waiting if not run.delayed)",
        "for run in waiting)",
        says(BEFORE, store="model"),
    ),
    protocol(
        "a delayed run is counted from those that wait",
        "I17",
        "admission",
        "earlier = () if newcomer.delayed else (run.created_at",
        "earlier = (run.created_at",
        says(BY_TIME, store="model"),
    ),
    store(
        "SQL: whoever comes after the clock was set back is stamped earlier",
        "I17",
        "arrivals",
        "    reading = _reading(dialect) if later else _reading_behind_others(dialect)\n",
        "    reading = _reading(dialect)\n",
        says(BEHIND),
    ),
    store(
        "SQL: a delayed run is counted from those that wait",
        "I17",
        "arrivals",
        "    reading = _reading(dialect) if later else _reading_behind_others(dialect)\n",
        "    reading = _reading_behind_others(dialect)\n",
        says(BY_TIME),
    ),
    store(
        "SQL: whoever comes waits for those that are delayed",
        "I17",
        "arrivals",
        "where(queued, ~delayed(waiting.c))",
        "where(queued)",
        says(BEFORE),
    ),
    # --- One reading ------------------------------------------------------------------------------------------------
    store(
        "a row's instants come from several readings",
        "I7",
        "arrivals",
        '        "created_at": now,\n',
        '        "created_at": dialect.now,\n',
        (_TOLD + "test_a_row_says_whether_it_was_delayed_whatever_the_clock_says_at_its_next_reading[1000]",),
    ),
    store(
        "a row's time comes from a reading of its own",
        "I7",
        "arrivals",
        '        "due_at": now + bindparam',
        '        "due_at": dialect.now + bindparam',
        (_TOLD + "test_a_row_says_whether_it_was_delayed_whatever_the_clock_says_at_its_next_reading[-1000]",),
    ),
    # --- Grants and cancels -----------------------------------------------------------------------------------------
    protocol(
        "a cancel is stamped as the clock says",
        "I16",
        "decision",
        "Micros(max(facts.now, run.granted_at + 1))",
        "facts.now",
        says(TRIED, TAKEN_BACK, store="model"),
    ),
    protocol(
        "a seizure is stamped as the clock says",
        "I4",
        "decision",
        "granted = Micros(max(facts.now, run.cancel_requested_at or 0))",
        "granted = facts.now",
        (_ORDERS + "test_no_rollback_is_lost_and_no_epoch_shared_whenever_the_clock_is_set_back[running]",),
    ),
    protocol(
        "a cancel in the instant of the grant is a seizure",
        "I16",
        "decision",
        "Micros(max(facts.now, run.granted_at + 1))",
        "Micros(max(facts.now, run.granted_at))",
        says(TRIED, store="model"),
    ),
    clause(
        "SQL: a cancel is stamped as the clock says",
        "I16",
        "func.coalesce(R.cancel_requested_at, _requested(dialect))",
        "func.coalesce(R.cancel_requested_at, dialect.now)",
        says(TRIED, TAKEN_BACK),
    ),
    clause(
        "SQL: a cancel in the instant of the grant is a seizure",
        "I16",
        'R.granted_at + literal_column("1")',
        'R.granted_at + literal_column("0")',
        says(TRIED),
    ),
    clause(
        "SQL: a seizure is stamped as the clock says",
        "I4",
        'return dialect.later(dialect.now, func.coalesce(R.cancel_requested_at, literal_column("0")))',
        "return dialect.now",
        says(COUNTED, SEIZED),
    ),
]
