"""How a test says which rule it proves: ``@rule("O14")`` cites ownership rules, invariants, flaws or public cases."""

from __future__ import annotations

import pytest


def rule(*names: str) -> pytest.MarkDecorator:
    """Mark a test as proof of the named rules (O.., I.., B.., F.., P..)."""
    return pytest.mark.rule(*names)
