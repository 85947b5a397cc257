"""Runs that wait, as workers look at them: what has been vacant for long, and whether what is expected has ended.

Reads only. Why a run is not taken is decided in ``protocol.recovery``, and written down by ``reads.note_waiting``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Final

from sqlalchemy import BigInteger, Connection, Text, bindparam, null, select, tuple_

from deerflow_runs.model import TERMINAL, Micros, Run, RunId
from deerflow_runs.store.clauses import R, status_in
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.lenient import as_text, read_or_skip
from deerflow_runs.store.pages import IS_RUN
from deerflow_runs.store.rows import narrow, run_from
from deerflow_runs.store.statement import Statement

MANY: Final = 1000
"""Ids in one statement."""


def unclaimed(
    connection: Connection, dialect: Dialect, waited_for: Micros, *, limit: int, after: Run | None = None
) -> tuple[Run, ...]:
    """Vacant runs that could have been claimed for so long, and were not: the longest first, those after ``after``.

    Cancelled ones are left out: they are ended or seized, never claimed. Unreadable ones are, too.
    """
    place = {"p_ready_at": after.not_before if after else -1, "p_run": after.run_id if after else ""}
    rows = _unclaimed(dialect).run(connection, {"p_waited": waited_for, "p_limit": limit} | place)
    read = (read_or_skip(run_from, row, "run_id") for row in rows)
    return tuple(run for run in read if run is not None)


@cache
def _unclaimed(dialect: Dialect) -> Statement:
    ready_at, run_id = bindparam("p_ready_at", type_=BigInteger), bindparam("p_run", type_=Text)
    found = select(*as_text(narrow())).where(
        R.active,
        R.owner_worker_id.is_(null()),
        R.cancel_requested_at.is_(null()),
        IS_RUN,
        R.not_before <= dialect.now - bindparam("p_waited", type_=BigInteger),
        tuple_(R.not_before, R.run_id) > tuple_(ready_at, run_id),
    )
    return Statement.of(found.order_by(R.not_before, R.run_id).limit(bindparam("p_limit", type_=BigInteger)))


def have_ended(connection: Connection, dialect: Dialect, run_ids: Collection[RunId]) -> dict[RunId, bool]:
    """Those of the runs that are there, whatever their threads, and whether they are over."""
    wanted: list[RunId] = list(dict.fromkeys(run_ids))
    found: dict[RunId, bool] = {}
    for start in range(0, len(wanted), MANY):
        rows = _have_ended(dialect).run(connection, {"p_ids": wanted[start : start + MANY]})
        found |= {RunId(row.run_id): bool(row.over) for row in rows}
    return found


@cache
def _have_ended(_: Dialect) -> Statement:
    these = R.run_id.in_(bindparam("p_ids", expanding=True))
    return Statement.of(select(R.run_id, status_in(*TERMINAL).label("over")).where(these, IS_RUN))
