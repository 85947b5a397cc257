"""Every store agrees with the table: each event on each status, asked in dozens of situations.

The answer must be the table's (happened, happened before, refused and why), the row must be what the table says
afterwards, and a refusal must leave it untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, final

from deerflow_runs.model import Micros, Run, RunStatus
from deerflow_runs.protocol.decision import Applied, Decision, Refused, decide
from deerflow_runs.protocol.lifecycle import TRANSITIONS, Into, RunEvent
from deerflow_runs.testing.contract.situations import Situation, sessions, situations
from deerflow_runs.testing.contract.subject import Subject

INSTANTS: Final = frozenset(
    {
        "due_at",
        "granted_at",
        "not_before",
        "cancel_requested_at",
        "progress_at",
        "created_at",
        "started_at",
        "settled_at",
        "updated_at",
    }
)
APART: Final = frozenset({"kwargs", "seq", "turn"})


async def agrees_with_the_table(subject: Subject, status: RunStatus, event: RunEvent) -> None:
    """Ask the store every situation of one status and event; raises ``AssertionError`` at the first difference."""
    now = await subject.store.now()
    asked = _worth_asking(status, event, now)
    await subject.place_sessions(sessions(now))
    await subject.place([run for situation in asked for run in (situation.run, *situation.beside)])
    answers = [await subject.store.apply(one.run.key, event, one.by, one.given) for one in asked]
    kept = await subject.rows([situation.run.run_id for situation in asked])
    for situation, answer in zip(asked, answers, strict=True):
        _agree(event, situation, answer, kept.get(situation.run.run_id))


def _worth_asking(status: RunStatus, event: RunEvent, now: Micros) -> tuple[Situation, ...]:
    """All situations, where the event may start; elsewhere those in which it has visibly happened already, and every
    fifth of the others: all dimensions in turn."""
    all_of_them = enumerate(situations(status, event, now))
    starts = status in TRANSITIONS[event].sources
    return tuple(one for number, one in all_of_them if starts or number % 5 == 0 or _is_allowed(event, one))


def _is_allowed(event: RunEvent, one: Situation) -> bool:
    return isinstance(decide(one.run, event, one.by, one.facts, one.given), Applied)


def _agree(event: RunEvent, situation: Situation, actual: Decision, kept: Run | None) -> None:
    run, by, given = situation.run, situation.by, situation.given
    expected = decide(run, event, by, situation.facts, given)
    where = _Where(event, situation)
    assert _told(actual) == _told(expected), f"{where}answered {actual}\nthe table says {expected}"
    if isinstance(expected, Refused) or expected.repeated:
        assert kept is not None, f"{where}lost the row"
        assert _plain(kept, run) == _plain(run, run), f"{where}changed the row to {kept}"
    elif TRANSITIONS[event].target is Into.GONE:
        assert kept is None, f"{where}left the row {kept}"
    else:
        assert isinstance(actual, Applied)
        wanted = _plain(expected.run, run)
        assert kept is not None, f"{where}lost the row"
        assert _plain(kept, run) == wanted, _difference(where, kept, expected.run, run)
        assert _plain(actual.run, run) == wanted, _difference(where, actual.run, expected.run, run)


@final
@dataclass(frozen=True, slots=True)
class _Where:
    """What was asked; written out only when an answer was wrong."""

    event: RunEvent
    situation: Situation

    def __str__(self) -> str:
        run, by, facts, given = self.situation.run, self.situation.by, self.situation.facts, self.situation.given
        return f"{self.event.value} on {run.status}: {asdict(run)}\nby {by}\nfacts {facts}\ngiven {given}\n"


def _told(decision: Decision) -> tuple[object, ...]:
    if isinstance(decision, Applied):
        return ("applied", decision.repeated)
    return ("refused", decision.reason)


def _plain(run: Run, placed: Run) -> Mapping[str, Any]:
    """The row without what only a clock or a counter decides: instants are as placed, newer, or a backoff away."""
    plain = {field.name: getattr(run, field.name) for field in fields(run) if field.name not in APART}
    plain |= {name: _instant(getattr(run, name), getattr(placed, name)) for name in INSTANTS}
    drawn = placed.turn is None and run.turn is not None and run.turn > 0
    return plain | {"turn": "drawn" if drawn else run.turn}


def _instant(value: Micros | None, placed: Micros | None) -> object:
    return value if value is None else "as placed" if value == placed else "newer"


def _difference(where: _Where, found: Run, wanted: Run, placed: Run) -> str:
    left, right = _plain(found, placed), _plain(wanted, placed)
    odd = {name: (left[name], right[name]) for name in left if left[name] != right[name]}
    return f"{where}differs (found, wanted): {odd}"
