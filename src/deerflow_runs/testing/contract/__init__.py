"""The contract of a store: one suite that the model store, SQLite and PostgreSQL pass, and that yours must pass too.

It needs no test framework: ``CHECKS`` are coroutine functions over a ``Subject`` that raise ``AssertionError``. A test
loops over them with a fresh subject each::

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_my_store_keeps_the_contract(check: Check, subject: Subject) -> None:
        await check(subject)
"""

from __future__ import annotations

from functools import partial
from typing import Final

from deerflow_runs.model import RunStatus
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.testing.contract.admission import ADMISSION
from deerflow_runs.testing.contract.cancelling import CANCELLING
from deerflow_runs.testing.contract.check import Check
from deerflow_runs.testing.contract.clock_steps import CLOCK_STEPS
from deerflow_runs.testing.contract.endings import ENDINGS
from deerflow_runs.testing.contract.limits import LIMITS
from deerflow_runs.testing.contract.passing import PASSING
from deerflow_runs.testing.contract.queueing import QUEUEING
from deerflow_runs.testing.contract.recovery import RECOVERY
from deerflow_runs.testing.contract.requests import REQUESTS
from deerflow_runs.testing.contract.reservations import RESERVATIONS
from deerflow_runs.testing.contract.sessions import SESSIONS
from deerflow_runs.testing.contract.subject import ModelSubject, SqlSubject, Subject
from deerflow_runs.testing.contract.table import agrees_with_the_table
from deerflow_runs.testing.contract.turns import TURNS

__all__ = ["CHECKS", "Check", "ModelSubject", "SqlSubject", "Subject"]

TABLE: Final = tuple(
    Check(
        f"{event.value} on {status.value} happens exactly when the table says",
        partial(_ask, status=status, event=event),
        ("O7", "O8", "O14", "O28"),
    )
    for _ask in (agrees_with_the_table,)
    for status in RunStatus
    for event in RunEvent
)

CHECKS: Final[tuple[Check, ...]] = (
    *TABLE,
    *ADMISSION,
    *REQUESTS,
    *QUEUEING,
    *CLOCK_STEPS,
    *LIMITS,
    *TURNS,
    *RESERVATIONS,
    *CANCELLING,
    *RECOVERY,
    *PASSING,
    *SESSIONS,
    *ENDINGS,
)
"""Everything that a store must make true."""
