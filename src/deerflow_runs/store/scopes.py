"""Whose rows a statement reaches: the one condition that keeps users apart, and its parameter.

Every read or change on behalf of a user has it, so that a foreign row looks like one that does not exist. Who the
user is was decided before.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, bindparam

from deerflow_runs.model import OneUser, Scope


def restricted(scope: Scope) -> bool:
    """Whether the statement needs the condition: part of its shape."""
    return isinstance(scope, OneUser)


def in_scope(user: ColumnElement[Any], *, mine: bool) -> list[ColumnElement[bool]]:
    """The condition on the column that names a row's user, or nothing."""
    return [user == bindparam("p_user")] if mine else []


def scope_parameters(scope: Scope) -> dict[str, Any]:
    """What the condition compares with."""
    return {"p_user": scope.user_id} if isinstance(scope, OneUser) else {}
