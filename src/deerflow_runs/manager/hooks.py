"""What a host wants to be called for when runs have ended; the calls themselves are ``deliveries``' part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from deerflow_runs.model import Run
from deerflow_runs.store.base import OutboxKind

ON_SETTLED: Final = "on_settled"
ON_RECOVERED: Final = "on_recovered"

WANTED: Final = "hooks"
"""What a delivery's payload calls the names of the hooks that the admitting worker has."""

Hook = Callable[[Run], Awaitable[object]]
"""Called at least once for an ended run, with its row. An error means that it is called again later."""


@final
@dataclass(frozen=True, slots=True)
class Hooks:
    """``on_recovered`` is for runs that a take-over ended; where there is none, ``on_settled`` gets them too."""

    on_settled: Hook | None = None
    on_recovered: Hook | None = None

    def __bool__(self) -> bool:
        return self.on_settled is not None or self.on_recovered is not None

    def deliveries(self) -> Mapping[str, Any]:
        """What a run is admitted with, so that its end asks for a hook wherever it comes about (O28). The names tell a
        worker that has the other hook only whether anybody wants to be called."""
        present = {ON_SETTLED: self.on_settled, ON_RECOVERED: self.on_recovered}
        names = [name for name, hook in present.items() if hook is not None]
        return {OutboxKind.HOOK.value: {WANTED: names}} if names else {}
