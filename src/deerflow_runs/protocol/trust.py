"""What a worker may believe about its own lease, from its own clock and the answers it has had (O9–O13).

Trust, the pace of beats, and the watch over the main loop, as frozen values: a fact comes in, a new value comes out.
Seconds are floats here. What others may conclude about this worker is decided in ``judge``; the gate that trust opens
and closes belongs to ``manager.lease``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NewType, final

BootSeconds = NewType("BootSeconds", float)
"""A reading of the boot-time clock, which goes on while the machine sleeps. Comparable within one boot of one host."""

BEAT_JITTER: Final = 0.1
"""A beat comes up to this part early or late."""

FIRST_RETRY: Final = 0.2
LAST_RETRY: Final = 2.0
"""Seconds between beats that fail: from the first to the last, doubling."""

BEATS_PER_TIMEOUT: Final = 2.0
"""A beat is given up after this many beats without an answer, earlier while little trust remains."""

BEATS_PER_TRUST: Final = 2 * (1 + BEAT_JITTER) + BEATS_PER_TIMEOUT
"""Trust must outlast two beats, each as late as it may come, and one answer that takes as long as it may. A judge
counts on the same number: it bounds what a short outage can hide (see ``judge``)."""


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """The durations a session promises and lives by, in seconds. ``config`` checks that they fit together."""

    lease: float
    margin: float
    beat: float
    max_suspend: float
    max_stall: float


class Standing(Enum):
    """What a session may do now."""

    TRUSTED = "trusted"
    SUSPENDED = "suspended"
    """Nothing new may start and nothing may be written; what is in flight may finish and is kept in memory (O12)."""
    ABORT = "abort"
    """Suspended for longer than ``max_suspend``: the runs are stopped locally and given back."""


@final
@dataclass(frozen=True, slots=True)
class Trust:
    """The belief that a session's lease stands. Computed whenever it is asked for, never kept as a flag (O9).

    ``ends`` is the first instant at which it no longer holds. ``refused`` says that the store called the session not
    live: such a session never comes back (I12), its runs are taken back under a new one (O13).
    """

    terms: Terms
    ends: BootSeconds
    refused: bool = False

    @classmethod
    def opened(cls, terms: Terms, *, sent_at: BootSeconds) -> Trust:
        """Trust of a session whose opening the store confirmed; ``sent_at`` was read before the request was sent."""
        return cls(terms, _deadline(terms, sent_at))

    def trusted(self, now: BootSeconds) -> bool:
        """Whether something new may start at ``now`` (I11)."""
        return now < self.ends

    def remaining(self, now: BootSeconds) -> float:
        """Seconds of trust left, never below zero."""
        return max(0.0, self.ends - now)

    def standing(self, now: BootSeconds) -> Standing:
        """Trusted, suspended, or suspended for too long (O12)."""
        if self.trusted(now):
            return Standing.TRUSTED
        return Standing.SUSPENDED if now < self.ends + self.terms.max_suspend else Standing.ABORT

    def renewed(self, *, sent_at: BootSeconds, now: BootSeconds) -> Trust:
        """Trust once an accepted renewal's answer has arrived at ``now``.

        Only the time of sending counts: the store stamped the lease at some instant after it, so it runs at least
        until then. An answer that arrives when even that deadline has passed proves nothing about the present and
        changes nothing: neither does it restore trust, nor does it make a suspension look younger than it is.
        """
        confirmed = _deadline(self.terms, sent_at)
        if self.refused or confirmed <= max(now, self.ends):
            return self
        return replace(self, ends=confirmed)

    def not_live(self, now: BootSeconds) -> Trust:
        """Trust once a beat was answered "not live": it ends at once, whatever the deadline said (O13)."""
        return self if self.refused else replace(self, ends=min(self.ends, now), refused=True)


def _deadline(terms: Terms, sent_at: BootSeconds) -> BootSeconds:
    """O9: from the clock as read before sending. Counted from the answer, a slow reply would outlive the lease."""
    return BootSeconds(sent_at + terms.lease - terms.margin)


# ---- beats (O10) ---------------------------------------------------------------------------------------------------


def next_beat(terms: Terms, *, failures: int, unit: float) -> float:
    """Seconds until the next beat is sent, after ``failures`` failed ones in a row; ``unit`` is random in [0, 1).

    After a failure the worker hurries, but it never waits longer than for an ordinary beat.
    """
    if failures > 0:
        return min(terms.beat, LAST_RETRY, FIRST_RETRY * 2.0 ** min(failures - 1, 10))
    return terms.beat * (1 - BEAT_JITTER + 2 * BEAT_JITTER * unit)


def beat_timeout(trust: Trust, now: BootSeconds) -> float:
    """Seconds to wait for the answer to a beat sent at ``now``.

    Half of the remaining trust at most, so that a connection gone silent leaves time for another attempt on a new
    one. Without trust there is nothing left to protect but the pace.
    """
    limit = BEATS_PER_TIMEOUT * trust.terms.beat
    return min(limit, trust.remaining(now) / 2) if trust.trusted(now) else limit


# ---- the main loop (O11) -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Watch:
    """The heartbeat's watch over the main loop: at most one ping in flight, sent at ``asked_at``."""

    terms: Terms
    asked_at: BootSeconds | None = None
    stalled: bool = False

    def answered(self) -> Watch:
        """The loop has answered the ping: it runs, whatever was thought of it before."""
        return replace(self, asked_at=None, stalled=False)

    def reading(self, *, due: BootSeconds, now: BootSeconds) -> Watched:
        """What to do at a reading planned for ``due`` and taken at ``now``.

        A heartbeat that is itself late by more than a beat was stopped together with the loop, or starved, or slept:
        how long the ping has been in flight then says nothing about the loop, and the measuring starts again.
        """
        if self.asked_at is None:
            return Watched(replace(self, asked_at=now), ping=True)
        if now - due > self.terms.beat:
            return Watched(replace(self, asked_at=now))
        stalled = self.stalled or now - self.asked_at >= self.terms.max_stall
        return Watched(replace(self, stalled=stalled), dump=stalled and not self.stalled)


@final
@dataclass(frozen=True, slots=True)
class Watched:
    """A reading's outcome. ``ping``: ask the loop now. ``dump``: log all stacks (once for every stall)."""

    watch: Watch
    ping: bool = False
    dump: bool = False

    @property
    def renew(self) -> bool:
        """Whether the session may be renewed: a wedged loop must not look healthy."""
        return not self.watch.stalled
