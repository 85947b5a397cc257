"""The page ``docs/lifecycle.md``: the one table of a run's life, and its picture, from ``protocol.lifecycle``.

Only the arrivals are told in prose here, since a run that does not exist yet has no row to guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

from deerflow_runs.model import TERMINAL, RunStatus
from deerflow_runs.protocol.lifecycle import REASONS, TRANSITIONS, Effect, Guard, Into, Rule, RunEvent

NOTHING: Final = "–"


def page() -> str:
    """The text of the page."""
    return "\n".join(
        [
            _OPENING,
            *_picture(),
            _TABLE_OPENING,
            *_table(),
            _ARRIVALS,
            _REFUSALS_OPENING,
            *_refusals(),
            _ENDINGS,
            *_endings(),
            "",
        ]
    )


_OPENING: Final = """\
<!-- Generated from src/deerflow_runs/protocol/lifecycle.py by `python3 dev.py docs`; change that, not this. -->

# The life of a run

Everything that can happen to an operation of a thread is one of the events below, and nothing else changes a run's
status, owner or epoch. The same table is read twice: by the function `decide` on values, and as the WHERE and SET of
one SQL statement. An event happens only if all its guards hold in the statement that carries it out; otherwise nothing
changes and the answer says why. The words are explained in [concepts](concepts.md).

```mermaid
stateDiagram-v2"""

_TABLE_OPENING: Final = """```

A run that is queued, vacant or held reads as `pending` on the wire. A cancel changes no status: the run keeps its
thread until whoever holds it has cleaned up and settled it. Nothing ever leaves `success`, `error`, `timeout` or
`interrupted`.

## Events

"Me" is the worker session that asks, "mine" the epoch that it believes to hold. "Again" says when the same request
repeated after a lost reply is answered yes although it changes nothing.

| event | from | to | only if | changes | again |
| --- | --- | --- | --- | --- | --- |"""

_ARRIVALS: Final = """
## Arrivals

*Admit.* A newcomer becomes pending if nothing is active on the thread, which a unique index guarantees, and nothing
waits for it (with a strategy other than reject: nothing that is due). It is owned by the session that admits it, at
epoch 1 and attempt 1, if that session takes it at once; otherwise it is vacant at epoch 0 and waits for a worker.

*Admit behind.* A newcomer becomes queued if the holder is active and is flagged in the same statement, so that its end
looks at the queue; or under the lock of the thread, when it displaces (interrupt, rollback); or if it is not due yet.

A reservation is admitted or refused, it never waits. A delete ends the runs that wait on its thread."""

_REFUSALS_OPENING: Final = """
## Refusals

A run that is not there answers `unknown`. A status that is not in the column "from" answers `terminal` if the run is
over, else `wrong_status`. A guard that does not hold answers:

| guard | answer |
| --- | --- |"""

_ENDINGS: Final = """
## Endings

These bring an operation to its end. Status, outcome of the thread, receipt and deliveries change together, and where
the thread becomes free the next run that is due is promoted in the same transaction:
"""


# --- The picture ----------------------------------------------------------------------------------------------------


class Place(StrEnum):
    """A status, with pending taken apart by whether somebody owns the run."""

    QUEUED = "queued"
    VACANT = "vacant"
    HELD = "held"
    RUNNING = "running"
    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    GONE = "[*]"


_OWNED: Final = frozenset({Guard.OWNER_IS_ME, Guard.OWNER_WAS_ME, Guard.OWNER_IS_DEAD})
_VACATES: Final = frozenset({Effect.VACATE, Effect.NO_OWNER})


def _picture() -> Iterator[str]:
    yield '    state "pending, nobody\'s" as vacant'
    yield '    state "pending, owned" as held'
    yield "    [*] --> held : admit"
    yield "    [*] --> vacant : admit"
    yield "    [*] --> queued : admit behind"
    for (source, target), events in sorted(_edges().items(), key=lambda edge: _in_order(*edge[0])):
        yield f"    {source} --> {target} : {' / '.join(event.value.replace(':', ' –') for event in events)}"


def _edges() -> dict[tuple[Place, Place], list[RunEvent]]:
    """Each step between two places, with the events that take it; what stays where it is, is not drawn."""
    edges: dict[tuple[Place, Place], list[RunEvent]] = {}
    for event, rule in TRANSITIONS.items():
        for source in _sources(rule):
            for target in _targets(rule, source):
                if source is not target:
                    edges.setdefault((source, target), []).append(event)
    return edges


def _sources(rule: Rule) -> Iterator[Place]:
    never_started = Guard.IS_RESERVATION in rule.guards
    for status in _in_life(rule.sources & {RunStatus.PENDING} if never_started else rule.sources):
        if status is not RunStatus.PENDING:
            yield Place(status.value)
            continue
        if _OWNED.isdisjoint(rule.guards):
            yield Place.VACANT
        if Guard.UNOWNED not in rule.guards:
            yield Place.HELD


def _targets(rule: Rule, source: Place) -> Iterator[Place]:
    match rule.target:
        case Into.GONE:
            yield Place.GONE
        case Into.STAYS:
            yield source
        case RunStatus.PENDING:
            yield Place.VACANT if _VACATES & set(rule.effects) else Place.HELD
        case status:
            yield Place(status.value)
            if Effect.CANCEL_DECIDES in rule.effects:
                yield Place.INTERRUPTED


def _in_order(source: Place, target: Place) -> tuple[int, int]:
    places = list(Place)
    return places.index(source), places.index(target)


# --- The tables -----------------------------------------------------------------------------------------------------


def _table() -> Iterator[str]:
    for event, rule in TRANSITIONS.items():
        cells = (f"**{event}**", _from(rule), _to(rule), _listed(rule.guards), _listed(rule.effects))
        yield _row((*cells, rule.repeat.value if rule.repeat else NOTHING))


def _from(rule: Rule) -> str:
    return "any terminal" if rule.sources == TERMINAL else ", ".join(_in_life(rule.sources))


def _to(rule: Rule) -> str:
    also = ", or interrupted" if Effect.CANCEL_DECIDES in rule.effects else ""
    return rule.target.value + also


def _in_life(statuses: Iterable[RunStatus]) -> list[RunStatus]:
    """In the order of a run's life, so that the same table always reads the same."""
    return [status for status in RunStatus if status in set(statuses)]


def _refusals() -> Iterator[str]:
    return (_row((guard.value, f"`{REASONS[guard]}`")) for guard in Guard)


def _endings() -> Iterator[str]:
    ends = [event for event, rule in TRANSITIONS.items() if rule.ends]
    frees = {event for event in ends if TRANSITIONS[event].frees}
    for event in ends:
        yield f"- {event}" + ("" if event in frees else " (holds no thread)")


def _listed(words: Iterable[StrEnum]) -> str:
    return " · ".join(word.value for word in words) or NOTHING


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
