"""The pytest plugin of the mutation runner: it takes one guard out of the table before anything else has imported it.

``DROP_GUARD="claim|due" pytest -p tests.mutations.plugin …``; the product itself knows nothing of mutations. It also
keeps hypothesis from looking for the smallest failing example, since any will do.
"""

from __future__ import annotations

import os
import sys
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


def drop_from_stores(event: lifecycle.RunEvent, part: str) -> None:
    """Let the stores' statements forget a guard or an effect that ``decide()`` still knows."""
    import deerflow_runs.store.sql  # every module that builds statements

    rule = lifecycle.TRANSITIONS[event]
    guards = tuple(guard for guard in rule.guards if guard.value != part)
    effects = tuple(effect for effect in rule.effects if effect.value != part)
    if (guards, effects) == (rule.guards, rule.effects):
        raise ValueError(f"{event.value!r} has no {part!r}")
    table = MappingProxyType({**lifecycle.TRANSITIONS, event: replace(rule, guards=guards, effects=effects)})
    for name, module in list(sys.modules.items()):
        if name.startswith(deerflow_runs.store.__name__) and "TRANSITIONS" in vars(module):
            vars(module)["TRANSITIONS"] = table


SQL_VARIABLE = "DROP_SQL"

if SQL_VARIABLE in os.environ:
    _event, _part = os.environ[SQL_VARIABLE].split("|")
    drop_from_stores(lifecycle.RunEvent(_event), _part)

if VARIABLE in os.environ:
    _event, _guard = os.environ[VARIABLE].split("|")
    drop(lifecycle.RunEvent(_event), lifecycle.Guard(_guard))
