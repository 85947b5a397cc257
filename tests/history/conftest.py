"""Stores whose database writes down its own history."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from deerflow_runs import SqlRunStore, store_at
from deerflow_runs.testing import install_recording


@pytest.fixture
def recorded_dsn(dsn: str) -> str:
    """A fresh database of each kind, recording."""
    install_recording(dsn)
    return dsn


@pytest.fixture
async def store(recorded_dsn: str) -> AsyncIterator[SqlRunStore]:
    """A store on it."""
    async with store_at(recorded_dsn) as opened:
        yield opened
