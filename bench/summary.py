"""Percentiles of samples. Medians and spans of rounds are ``results.line``'s business."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed; nothing is interpolated."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
