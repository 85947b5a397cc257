"""Mutations of the table's SQL reading: every guard and every effect of every rule, forgotten by the stores alone.

Generated from the table, so that none is forgotten; the contract holds the stores against ``decide()``, on SQLite.
"""

from __future__ import annotations

from typing import Final

from deerflow_runs.protocol.lifecycle import TRANSITIONS, Effect, Guard, Into, Rule, RunEvent
from tests.mutations import AnyMutation, DropSql

CONTRACT: Final = "tests/contract/test_store_contract.py::test_every_store_keeps_the_contract"


def tests_of(event: RunEvent, rule: Rule) -> tuple[str, ...]:
    """The contract's sentences about an event, from where it may start."""
    exactly = "happens exactly when the table says"
    return tuple(f"{CONTRACT}[sqlite-{event.value} on {status.value} {exactly}]" for status in sorted(rule.sources))


def parts_of(rule: Rule) -> list[Guard | Effect]:
    """Guards, and effects where a row is left to show them."""
    return [*rule.guards, *([] if rule.target is Into.GONE else rule.effects)]


IMPLIED: Final = frozenset(
    {
        (RunEvent.PROMOTE, Guard.DUE),  # the first of the due queue is due
        (RunEvent.PROMOTE, Effect.NO_OWNER),  # what waits in the queue has no owner
        (RunEvent.TAKE_OVER_FAIL, Guard.OWNER_IS_DEAD),  # only a death can be proven or grow old
        (RunEvent.TAKE_OVER_FAIL_WAITING, Guard.HOME_IS_DEAD),
    }
)
"""Said for the reader; another guard of the same rule says it too, so no row can show their loss."""

MUTATIONS: Final[list[AnyMutation]] = [
    DropSql(event.value, part.value, tests_of(event, rule))
    for event, rule in TRANSITIONS.items()
    for part in parts_of(rule)
    if (event, part) not in IMPLIED
]
