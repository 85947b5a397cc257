"""What the heartbeat's thread tells the main loop, as frozen values posted one by one in order.

No gate depends on their arrival: trust is computed when it is asked for (O9), and what a message announces is read anew
from the store by whoever acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from deerflow_runs.model import WorkerId
from deerflow_runs.store.base import CancelRequest


@final
@dataclass(frozen=True, slots=True)
class Heard:
    """Cancels recorded on runs that this session owns; told again with every beat while they are recorded (O10)."""

    requests: tuple[CancelRequest, ...]


@final
@dataclass(frozen=True, slots=True)
class TrustEnded:
    """The deadline has passed: every run is suspended (O12). Told once for each time that trust ends."""


@final
@dataclass(frozen=True, slots=True)
class TrustRegained:
    """Trust is back after ``suspended_for`` seconds, by a late confirmation or under a new session."""

    suspended_for: float


@final
@dataclass(frozen=True, slots=True)
class SessionReplaced:
    """The session named was not live any more; a new one is open, and runs must be taken back from it (O13)."""

    previous: WorkerId


@final
@dataclass(frozen=True, slots=True)
class WorkWanted:
    """Somebody said that there is work to claim."""


@final
@dataclass(frozen=True, slots=True)
class Reconnected:
    """The session has a new connection; signals may have been missed, so everything must be read again (O19, O32)."""


@final
@dataclass(frozen=True, slots=True)
class DrainWanted:
    """Somebody said that this worker shall drain (O33)."""


Message = Heard | TrustEnded | TrustRegained | SessionReplaced | WorkWanted | Reconnected | DrainWanted
