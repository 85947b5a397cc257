"""The pytest plugin of the mutation runner: it takes one guard out of the table before anything else has imported it.

``DROP_GUARD="claim|due" pytest -p tests.mutations.plugin …``; the product itself knows nothing of mutations. It also
keeps hypothesis from looking for the smallest failing example, since any will do.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import MappingProxyType

import hypothesis

from deerflow_runs.protocol import decision, lifecycle

VARIABLE = "DROP_GUARD"


def pytest_configure() -> None:
    """After the settings of the test suite have been loaded."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", hypothesis.settings(), phases=phases)
    hypothesis.settings.load_profile("mutants")


def drop(event: lifecycle.RunEvent, guard: lifecycle.Guard) -> None:
    """Let ``event`` happen whether ``guard`` holds or not."""
    rule = lifecycle.TRANSITIONS[event]
    if guard not in rule.guards:
        raise ValueError(f"{event.value!r} does not ask for {guard.value!r}")
    weaker = replace(rule, guards=tuple(kept for kept in rule.guards if kept is not guard))
    table = MappingProxyType({**lifecycle.TRANSITIONS, event: weaker})
    for module in (lifecycle, decision):
        vars(module)["TRANSITIONS"] = table


if VARIABLE in os.environ:
    _event, _guard = os.environ[VARIABLE].split("|")
    drop(lifecycle.RunEvent(_event), lifecycle.Guard(_guard))
