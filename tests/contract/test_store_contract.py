"""The shipped contract, on the model store, SQLite and PostgreSQL."""

from __future__ import annotations

import pytest

from deerflow_runs.testing.contract import CHECKS, Check, Subject
from tests.rules import rule


@rule("O7", "O8", "O14", "O28")
@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_every_store_keeps_the_contract(check: Check, subject: Subject) -> None:
    await check(subject)
