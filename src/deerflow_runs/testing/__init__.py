"""Tools for testing what is built on ``deerflow_runs``; nothing in the product imports them.

Stores: ``ModelStore`` (in memory, nothing to connect) and the contract that any store must keep, ``CHECKS`` over a
``Subject``. Session lines: ``ModelLines``, and ``FlakyLine`` and
``FlakyStore`` to let any line or store fail as a test wishes. Time and order:
``ManualClock``, ``Sequencer``. Witnesses: ``HistoryChecker`` of what a test saw, ``install_recording``,
``read_history`` and ``check_history`` of all that a database went through. A real server for tests that want one:
``open_server``, ``PostgresCluster``. Each is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deerflow_runs.testing.clock import ManualClock
    from deerflow_runs.testing.contract import CHECKS, Check, ModelSubject, SqlSubject, Subject
    from deerflow_runs.testing.flaky_line import Faults, FlakyLine, Gate
    from deerflow_runs.testing.flaky_store import FlakyStore
    from deerflow_runs.testing.history import HistoryBroken, HistoryChecker
    from deerflow_runs.testing.invariants import Expected, Report, StepLogged, Violation, check_history
    from deerflow_runs.testing.model_line import ModelLine, ModelLines
    from deerflow_runs.testing.model_store import ModelStore
    from deerflow_runs.testing.postgres import NoPostgres, PostgresCluster, PostgresServer, open_server
    from deerflow_runs.testing.recorded import History
    from deerflow_runs.testing.recording import grant_of, install_recording, read_history, steps_of, write_step
    from deerflow_runs.testing.sequencer import SequenceBroken, Sequencer

__all__ = [
    "CHECKS",
    "Check",
    "Expected",
    "Faults",
    "FlakyLine",
    "FlakyStore",
    "Gate",
    "History",
    "HistoryBroken",
    "HistoryChecker",
    "ManualClock",
    "ModelLine",
    "ModelLines",
    "ModelStore",
    "ModelSubject",
    "NoPostgres",
    "PostgresCluster",
    "PostgresServer",
    "Report",
    "SequenceBroken",
    "Sequencer",
    "SqlSubject",
    "StepLogged",
    "Subject",
    "Violation",
    "check_history",
    "grant_of",
    "install_recording",
    "open_server",
    "read_history",
    "steps_of",
    "write_step",
]

_HOMES: Final = {
    "clock": ("ManualClock",),
    "contract": ("CHECKS", "Check", "ModelSubject", "SqlSubject", "Subject"),
    "flaky_line": ("Faults", "FlakyLine", "Gate"),
    "flaky_store": ("FlakyStore",),
    "history": ("HistoryBroken", "HistoryChecker"),
    "invariants": ("Expected", "Report", "StepLogged", "Violation", "check_history"),
    "model_line": ("ModelLine", "ModelLines"),
    "model_store": ("ModelStore",),
    "postgres": ("NoPostgres", "PostgresCluster", "PostgresServer", "open_server"),
    "recorded": ("History",),
    "recording": ("grant_of", "install_recording", "read_history", "steps_of", "write_step"),
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
