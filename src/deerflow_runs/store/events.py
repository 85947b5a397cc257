"""One event on one run: the guarded statement, and the look that explains a refusal.

Events that end an operation or free a thread are in ``endings``. What an answer of "no row" means is decided by
``protocol.decision.decide`` on a look at the row, never here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

from sqlalchemy import Connection, Row, Select, bindparam, select, update

from deerflow_runs.model import Micros, Run, RunKey, SessionState
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Decision, Facts, Given, SessionFacts, decide
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store.clauses import (
    R,
    Shape,
    assignments,
    at_key,
    first_due,
    guards,
    key_parameters,
    parameters,
    thread_active,
)
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.rows import narrow, to_run
from deerflow_runs.store.schema import runs, workers
from deerflow_runs.store.statement import Statement

TRIES: Final = 20
"""How often an admission or an event looks again at what changes under it, before that counts as no answer."""


@cache
def guarded_update(event: RunEvent, dialect: Dialect, shape: Shape) -> Statement:
    """The event as one statement: its guards in the WHERE, its effects in the SET, the row afterwards as the answer."""
    rule = TRANSITIONS[event]
    changes = update(runs).where(at_key(), guards(rule, dialect)).values(assignments(rule, dialect, shape))
    return Statement.of(changes.returning(*narrow()))


def attempt(
    connection: Connection, dialect: Dialect, key: RunKey, event: RunEvent, by: Actor, given: Given
) -> Run | None:
    """Let the event happen if the table allows it; None: it did not, and a look may say why."""
    bag = parameters(by, given) | key_parameters(key)
    row = guarded_update(event, dialect, Shape.of(given)).run(connection, bag).one_or_none()
    if row is None:
        return None
    if event is RunEvent.START:
        dialect.drawn(connection, "turn")
    return to_run(row)


# --- The look -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Look:
    """A run and what its table's guards ask beside it, in one snapshot."""

    run: Run | None
    facts: Facts
    owner_expires_at: Micros | None = None

    @property
    def unheld(self) -> bool:
        """Active, and no living session has it."""
        if self.run is None or not self.run.active:
            return False
        owner = self.facts.owner
        return self.run.vacant or (owner is not None and owner.state is SessionState.DEAD)


OWNER = workers.alias("owner_session")
HOME = workers.alias("home_session")
ME = workers.alias("my_session")


def look_columns(dialect: Dialect) -> list[Any]:
    """What a look reads beside the run's own columns."""
    sessions = [
        session.c[name].label(f"{prefix}_{name}")
        for prefix, session in (("owner", OWNER), ("home", HOME))
        for name in ("state", "proven", "dead_at", "lease", "expires_at")
    ]
    return [
        dialect.now.label("now"),
        ME.c.state.label("my_state"),
        thread_active().label("thread_active"),
        first_due(R.thread_id, dialect).label("first_due"),
        *sessions,
    ]


def looking_from(statement: Select[Any]) -> Select[Any]:
    """Join a look's sessions to the runs it reads."""
    mine = ME.c.worker_id == bindparam("p_worker")
    joined = runs.outerjoin(OWNER, OWNER.c.worker_id == R.owner_worker_id)
    joined = joined.outerjoin(HOME, HOME.c.worker_id == R.home_worker_id).outerjoin(ME, mine)
    return statement.select_from(joined)


@cache
def _look(dialect: Dialect) -> Statement:
    return Statement.of(looking_from(select(*narrow(), *look_columns(dialect))).where(at_key()))


@cache
def _now(dialect: Dialect) -> Select[Any]:
    return select(dialect.now)


def look(connection: Connection, dialect: Dialect, key: RunKey, by: Actor) -> Look:
    """Read the run and the facts its guards ask for. A run that is not there still has a now."""
    row = _look(dialect).run(connection, key_parameters(key) | {"p_worker": by.worker_id}).one_or_none()
    return to_look(row) if row is not None else Look(None, Facts(Micros(connection.scalar(_now(dialect)) or 0)))


def to_look(row: Row[Any]) -> Look:
    """A look from a row of ``narrow()`` and ``look_columns()``."""
    data = row._mapping
    facts = Facts(
        now=Micros(data["now"]),
        owner=_session(data, "owner"),
        home=_session(data, "home"),
        actor=SessionState(data["my_state"]) if data["my_state"] else SessionState.DEAD,
        thread_active=bool(data["thread_active"]),
        first_due=data["first_due"] == data["run_id"],
    )
    return Look(to_run(row), facts, data["owner_expires_at"])


def _session(data: Any, prefix: str) -> SessionFacts | None:
    if data[f"{prefix}_state"] is None:
        return None
    return SessionFacts(
        state=SessionState(data[f"{prefix}_state"]),
        proven=bool(data[f"{prefix}_proven"]),
        dead_at=Micros(data[f"{prefix}_dead_at"] or 0),
        lease=Micros(data[f"{prefix}_lease"]),
    )


def explain(
    connection: Connection, dialect: Dialect, key: RunKey, event: RunEvent, by: Actor, given: Given = NOTHING_GIVEN
) -> Decision:
    """What the table says about the event now. "Applied, not repeated" means: it would be allowed, ask again."""
    seen = look(connection, dialect, key, by)
    return decide(seen.run, event, by, seen.facts, given)
