"""The smallest changes that break a rule, one module for each part of the product; each must turn a test red."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from dataclasses import dataclass
from typing import final

QUICK = "tests/protocol/"
"""Tests that need no database."""


@final
@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace ``old``, which stands exactly once in ``path``, by ``new``: one of ``tests`` must fail.

    ``rule`` is what is broken by it; ``tests`` are arguments for pytest, all of which are green without it. ``quick``
    says that they are fast and need no database; tests of the protocol always are.
    """

    name: str
    rule: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    quick: bool = False


@final
@dataclass(frozen=True, slots=True)
class DropGuard:
    """Take one guard out of one rule of the table while the tests run; see ``plugin``."""

    event: str
    guard: str
    tests: tuple[str, ...]
    quick: bool = True

    @property
    def name(self) -> str:
        """In the words of the table."""
        return f"{self.event}, although not: {self.guard}"

    @property
    def rule(self) -> str:
        """The table as a whole is ownership.md §3."""
        return "§3"


@final
@dataclass(frozen=True, slots=True)
class DropSql:
    """Take one guard or effect out of a rule as the stores read it, not as ``decide()`` does; see ``plugin``."""

    event: str
    part: str
    tests: tuple[str, ...]
    quick: bool = False

    @property
    def name(self) -> str:
        """In the words of the table."""
        return f"SQL: {self.event}, without: {self.part}"

    @property
    def rule(self) -> str:
        """The table as a whole is ownership.md §3."""
        return "§3"


AnyMutation = Mutation | DropGuard | DropSql


def is_quick(mutation: AnyMutation) -> bool:
    """Whether it belongs to the quick selection."""
    return mutation.quick or all(test.startswith(QUICK) for test in mutation.tests)


def all_mutations() -> list[AnyMutation]:
    """The ``MUTATIONS`` of every module in this package, each under a name of its own."""
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if module.name != "plugin" and not module.name.startswith("test_")
    ]
    mutations: list[AnyMutation] = [mutation for module in modules for mutation in module.MUTATIONS]
    twice = [name for name, count in Counter(mutation.name for mutation in mutations).items() if count > 1]
    if twice:
        raise ValueError(f"two mutations of one name: {', '.join(twice)}")
    return mutations
