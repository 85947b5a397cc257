"""The figures, a module each: ``TITLE``, a docstring that says how it is measured, and ``measure(bench)``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Final

from bench.figures import (
    admission_while_one_hangs,
    beat,
    crowded,
    drain,
    ended_runs,
    foreign_cancel,
    keyed_admission,
    outage,
    recovery,
    restart,
    round_trips,
    run_memory,
    throughput,
)

FIGURES: Final[Mapping[str, ModuleType]] = MappingProxyType(
    {
        module.__name__.rpartition(".")[2]: module
        for module in (
            foreign_cancel,
            recovery,
            restart,
            outage,
            crowded,
            beat,
            round_trips,
            admission_while_one_hangs,
            keyed_admission,
            drain,
            throughput,
            run_memory,
            ended_runs,
        )
    }
)
"""By name, in the order of the page."""
