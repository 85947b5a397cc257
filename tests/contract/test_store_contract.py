"""The shipped contract, on the model store, SQLite and PostgreSQL."""

from __future__ import annotations

import pytest

from deerflow_runs.testing.contract import CHECKS, Check, Subject
from tests.rules import rule


@pytest.mark.parametrize("check", [pytest.param(check, id=str(check), marks=rule(*check.rules)) for check in CHECKS])
async def test_every_store_keeps_the_contract(check: Check, subject: Subject) -> None:
    await check(subject)
