"""Tools for testing what is built on ``deerflow_runs``; nothing in the product imports them.

Stores: ``ModelStore`` (in memory, nothing to connect) and the contract that any store must keep, ``CHECKS`` over a
``Subject``. Time and order: ``ManualClock``, ``Sequencer``. Witness: ``HistoryChecker``. A real server for tests that
want one: ``open_server``, ``PostgresCluster``. Each is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deerflow_runs.testing.clock import ManualClock
    from deerflow_runs.testing.contract import CHECKS, Check, ModelSubject, SqlSubject, Subject
    from deerflow_runs.testing.history import HistoryBroken, HistoryChecker
    from deerflow_runs.testing.model_store import ModelStore
    from deerflow_runs.testing.postgres import NoPostgres, PostgresCluster, PostgresServer, open_server
    from deerflow_runs.testing.sequencer import SequenceBroken, Sequencer

__all__ = [
    "CHECKS",
    "Check",
    "HistoryBroken",
    "HistoryChecker",
    "ManualClock",
    "ModelStore",
    "ModelSubject",
    "NoPostgres",
    "PostgresCluster",
    "PostgresServer",
    "SequenceBroken",
    "Sequencer",
    "SqlSubject",
    "Subject",
    "open_server",
]

_HOMES: Final = {
    "clock": ("ManualClock",),
    "contract": ("CHECKS", "Check", "ModelSubject", "SqlSubject", "Subject"),
    "history": ("HistoryBroken", "HistoryChecker"),
    "model_store": ("ModelStore",),
    "postgres": ("NoPostgres", "PostgresCluster", "PostgresServer", "open_server"),
    "sequencer": ("SequenceBroken", "Sequencer"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load the part that a name stands in; a test that wants a clock need not wait for a database's driver."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
