"""A statement built once and run often: it takes from a bag of parameters what it names.

The bag (``clauses.parameters``) holds everything an event may carry; SQLAlchemy refuses what a statement does not use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from sqlalchemy import BindParameter, ColumnClause, Connection, Executable, Result
from sqlalchemy.sql import ClauseElement, visitors


@final
@dataclass(frozen=True, slots=True)
class Statement:
    """``clause`` with the names of its own bound parameters."""

    clause: Executable
    names: frozenset[str]

    @classmethod
    def of(cls, clause: Executable) -> Statement:
        """Find the names; done once per statement, since walking it costs more than running it."""
        return cls(clause, frozenset(_names(clause)))

    def run(self, connection: Connection, bag: Mapping[str, Any]) -> Result[Any]:
        """Execute with what it needs of ``bag``; a name that is missing there is a programming error."""
        return connection.execute(self.clause, {name: bag[name] for name in self.names})


def _names(clause: Executable) -> set[str]:
    return {bind.key for bind in binds_of(clause) if bind.key.startswith("p_")}


def binds_of(*clauses: Any) -> list[BindParameter[Any]]:
    """Every bound parameter, also inside tables that are only reached through their columns (UPDATE … FROM)."""
    found: dict[int, BindParameter[Any]] = {}
    seen: set[int] = set()
    left: list[Any] = list(clauses)
    while left:
        clause = left.pop()
        if id(clause) in seen:
            continue
        seen.add(id(clause))
        for element in visitors.iterate(clause):
            if isinstance(element, BindParameter):
                found[id(element)] = element
            elif isinstance(element, ColumnClause) and isinstance(element.table, ClauseElement):
                left.append(element.table)
    return list(found.values())
