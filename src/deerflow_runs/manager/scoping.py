"""Who may see a run that this process holds: the same as in the store, asked of a row in memory (behaviours §17)."""

from __future__ import annotations

from deerflow_runs.model import OneUser, Run, Scope


def visible(run: Run, scope: Scope) -> bool:
    """Whether a reader with ``scope`` may know of ``run``; a foreign one reads as missing (F63)."""
    return not isinstance(scope, OneUser) or run.user_id == scope.user_id
