"""Mutations of the admission plans (ownership.md §4)."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

ADMISSION = "src/deerflow_runs/protocol/admission.py"
TESTS = ("tests/protocol/test_admission.py",)
_ORDER = "tests/protocol/test_orderings.py::"
NEWCOMERS = (_ORDER + "test_newcomers_of_every_strategy_meet_every_kind_of_incumbent_in_every_order[over]",)


def change(name: str, rule: str, old: str, new: str, tests: tuple[str, ...] = TESTS) -> Mutation:
    """One change of text in the plans."""
    return Mutation(name, rule, ADMISSION, old, new, tests)


MUTATIONS: Final = [
    # --- The same request again -------------------------------------------------------------------------------------
    change(
        "a repeated displacement displaces itself",
        "I14",
        "    if view.known is not None:\n        return _known(newcomer, view.known)\n",
        "    if view.known is not None and newcomer.strategy is Strategy.REJECT:\n"
        "        return _known(newcomer, view.known)\n",
        NEWCOMERS,
    ),
    change(
        "another payload under a known key is the same run",
        "O5",
        "(newcomer.kind, newcomer.user_id, newcomer.payload_digest)",
        "(newcomer.kind, newcomer.user_id, known.payload_digest)",
    ),
    change(
        "another user's run is answered",
        "B042",
        "(newcomer.kind, newcomer.user_id, newcomer.payload_digest)",
        "(newcomer.kind, known.user_id, newcomer.payload_digest)",
    ),
    change(
        "a reservation is answered as a run",
        "B047",
        "(newcomer.kind, newcomer.user_id, newcomer.payload_digest)",
        "(known.kind, newcomer.user_id, newcomer.payload_digest)",
    ),
    change(
        "a run of another thread is answered",
        "O5",
        "known.thread_id == newcomer.thread_id or (by_key and newcomer.stateless)",
        "True",
    ),
    change(
        "a stateless key holds on one thread only",
        "O5",
        "known.thread_id == newcomer.thread_id or (by_key and newcomer.stateless)",
        "known.thread_id == newcomer.thread_id",
    ),
    change(
        "a run id travels with a stateless key",
        "O5",
        "known.thread_id == newcomer.thread_id or (by_key and newcomer.stateless)",
        "known.thread_id == newcomer.thread_id or newcomer.stateless",
    ),
    change(
        "its own lost reply counts as somebody else's run",
        "O8",
        "by_key = known.run_id != newcomer.run_id",
        "by_key = True",
    ),
    change(
        "a key is the same whoever's it is",
        "O5",
        "return f\"{len(user)}:{user}{'' if self.stateless else self.thread_id}\"",
        "return f\"{'' if self.stateless else self.thread_id}\"",
    ),
    change(
        "user and thread run into each other",
        "O5",
        'return f"{len(user)}:{user}{',
        'return f"{user}{',
    ),
    # --- What nobody will run ---------------------------------------------------------------------------------------
    change(
        "a dead holder refuses",
        "O1",
        "    if clearing := _clearing(newcomer, view, given):\n        return clearing\n",
        "",
    ),
    change(
        "a homeless run is waited for",
        "O31",
        "    RunEvent.TAKE_OVER_FAIL_WAITING,\n",
        "",
    ),
    change(
        "a dead reservation is waited for",
        "B051",
        "    RunEvent.TAKE_OVER_RELEASE,\n",
        "",
    ),
    change(
        "a cancelled run that nobody holds is waited for",
        "O4",
        "    RunEvent.FORCE,\n",
        "",
    ),
    # --- Strategies -------------------------------------------------------------------------------------------------
    change(
        "a run for later displaces",
        "O3",
        "    if newcomer.delayed and newcomer.strategy is not Strategy.REJECT:\n        return _wait(newcomer, view)\n",
        "    if newcomer.delayed and newcomer.strategy is Strategy.ENQUEUE:\n        return _wait(newcomer, view)\n",
    ),
    change(
        "a run for later enters a free thread",
        "O2",
        "    if newcomer.delayed and newcomer.strategy is not Strategy.REJECT:\n        return _wait(newcomer, view)\n",
        "",
    ),
    change(
        "reject passes the queue",
        "I17",
        "holder = view.active or (view.queued[0] if view.queued else None)",
        "holder = view.active",
        NEWCOMERS,
    ),
    change(
        "reject for later enters now",
        "O1",
        "return Wait(None) if newcomer.delayed else Enter()",
        "return Enter()",
    ),
    change(
        "enqueue passes a run that is due",
        "I17",
        "return PromoteFirst() if due else Enter()",
        "return Enter()",
        NEWCOMERS,
    ),
    change(
        "enqueue waits for a run that is not due",
        "O2",
        "any(is_due(run, view.facts.now) for run in view.queued)",
        "any(view.queued)",
    ),
    change(
        "who waits is not flagged on whom he waits for",
        "O2",
        "return Wait(view.active)",
        "return Wait(None)",
    ),
    change(
        "a queue has no end",
        "I19",
        "if limit is not None and len(view.queued) >= limit:",
        "if limit is not None and len(view.queued) > limit:",
    ),
    change(
        "interrupt rolls back",
        "O3",
        "return _displace(CancelAction.INTERRUPT, view)",
        "return _displace(CancelAction.ROLLBACK, view)",
    ),
    change(
        "rollback keeps what was written",
        "O3",
        "return _displace(CancelAction.ROLLBACK, view)",
        "return _displace(CancelAction.INTERRUPT, view)",
    ),
    change(
        "a live reservation is displaced",
        "B050",
        "if view.active is not None and view.active.reservation:",
        "if False:",
    ),
    change(
        "whoever displaces leaves the queue in front of him",
        "O3",
        "return Displace(action, view.active, view.queued)",
        "return Displace(action, view.active, ())",
    ),
    # --- Reservations -----------------------------------------------------------------------------------------------
    change(
        "a delete leaves what waits",
        "O28",
        "if newcomer.kind is OperationKind.DELETE and view.active is None and view.queued:",
        "if False:",
    ),
    change(
        "a delete ends what runs",
        "B059",
        "if newcomer.kind is OperationKind.DELETE and view.active is None and view.queued:",
        "if newcomer.kind is OperationKind.DELETE and view.queued:",
    ),
    change(
        "a reservation may wait",
        "I8",
        "plain = self.strategy is Strategy.REJECT and self.take and not self.delayed",
        "plain = self.take and not self.delayed",
    ),
    change(
        "a reservation may be nobody's",
        "I8",
        "plain = self.strategy is Strategy.REJECT and self.take and not self.delayed",
        "plain = self.strategy is Strategy.REJECT and not self.delayed",
    ),
    change(
        "a reservation may be for later",
        "I8",
        "plain = self.strategy is Strategy.REJECT and self.take and not self.delayed",
        "plain = self.strategy is Strategy.REJECT and self.take",
    ),
    # --- When to come back ------------------------------------------------------------------------------------------
    change(
        "come back at once",
        "O1",
        "return max(1, -(-(until - view.facts.now) // MICROS_PER_SECOND))",
        "return max(0, -(-(until - view.facts.now) // MICROS_PER_SECOND))",
    ),
    change(
        "come back a moment before the lease ends",
        "O1",
        "return max(1, -(-(until - view.facts.now) // MICROS_PER_SECOND))",
        "return max(1, (until - view.facts.now) // MICROS_PER_SECOND)",
    ),
    change(
        "come back when the next in the queue is due, although another holds the thread",
        "O1",
        "if view.queued and view.active is None else None",
        "if view.queued else None",
    ),
]
