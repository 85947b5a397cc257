"""The model's session line keeps what real lines promise: the same checks, another store."""

from __future__ import annotations

from typing import Any, final

import pytest

from deerflow_runs.testing.model_line import ModelLines
from deerflow_runs.testing.model_store import ModelStore
from tests.lines import test_lines

globals().update({name: check for name, check in vars(test_lines).items() if name.startswith("test_")})


@final
class ModelStoreWithLines:
    """A model store and what connects its workers, as one."""

    def __init__(self) -> None:
        self._store = ModelStore()
        self._lines = ModelLines(self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines if name in {"session_line", "send"} else self._store, name)


@pytest.fixture
def store() -> ModelStoreWithLines:
    """Instead of a database."""
    return ModelStoreWithLines()
