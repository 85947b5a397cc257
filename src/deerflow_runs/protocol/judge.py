"""Who may be declared dead: one worker's judgement of all the others, as a frozen memory (O24–O27).

A judge is told how its own beats went and what it saw of the sessions; it answers with verdicts, each of them exactly
what the store's compare-and-set needs. The store alone decides whether a verdict is carried out; what then becomes of
the runs is decided in ``recovery``, and how long a final ending waits, in ``lifecycle``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, final

from deerflow_runs.model import Micros, Session, SessionState, WorkerId, micros
from deerflow_runs.protocol.trust import BEATS_PER_TIMEOUT, BootSeconds, Terms

MICROSECOND: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """How sure a judge must be. The defaults are the protocol's; a smaller number kills live workers (see the tests).

    ``grace`` is in seconds, ``look`` in leases, ``short_look`` in beats of the judged session, ``steady`` in lease +
    grace, ``gap`` in beats of the judge itself.
    """

    grace: float
    look: float = 1.0
    short_look: float = 2.0
    steady: float = 1.0
    gap: float = BEATS_PER_TIMEOUT


class Sign(Enum):
    """What the kernel says about a session's process: it frees a lock within milliseconds when the process dies."""

    NONE = "none"
    HINT = "hint"
    PROOF = "proof"


def hint(session: Session, *, free: bool | None) -> Sign:
    """The sign of an advisory lock on Postgres; ``free`` is None where such locks mean nothing (a pooler).

    It is freed with the connection, so it proves nothing, and it speaks only of a session that said it held it (O27).
    """
    return Sign.HINT if free and session.hinted else Sign.NONE


def proof(session: Session, *, free: bool | None, boot_id: str) -> Sign:
    """The sign of a ``flock`` on SQLite, where all processes run on one host; ``boot_id`` is this host's now.

    A lock that its session never managed to take proves nothing. Nothing survives a reboot (O27).
    """
    rebooted = bool(boot_id and session.boot_id) and session.boot_id != boot_id
    return Sign.PROOF if rebooted or (free and session.hinted) else Sign.NONE


@final
@dataclass(frozen=True, slots=True)
class Look:
    """One look at all sessions: a single query, sent at ``asked_at`` and answered at ``answered_at``.

    ``store_now`` is the store's clock in that query; ``signs`` holds what was found at the locks.
    """

    sessions: tuple[Session, ...]
    asked_at: BootSeconds
    answered_at: BootSeconds
    store_now: Micros
    signs: Mapping[WorkerId, Sign] = field(default_factory=dict)


class How(Enum):
    """On what ground a session is declared dead; it decides what the compare-and-set asks for."""

    EXPIRY = "expiry"
    """``beat = seen and expires_at < now - grace``"""
    HINT = "hint"
    """``beat = seen and hinted``"""
    PROOF = "proof"
    """``beat = seen``; the death is marked as proven"""


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """This session may be declared dead, if its beat is still the one seen."""

    worker_id: WorkerId
    beat: int
    how: How
    grace: Micros


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """The ``beat`` of a session and since when this judge has seen nothing newer."""

    beat: int
    since: BootSeconds


@final
@dataclass(frozen=True, slots=True)
class Judge:
    """What one session remembers of its own beats and of the others'. A new session is a new judge and remembers
    nothing: its looks begin when it opens (O25).

    ``steady_since``: own beats confirmed without a gap since then; None after a failure. ``asked_at``: when the last
    confirmed one was sent. ``unbroken``: none has failed so far, so that youth counts as health.
    """

    me: WorkerId
    terms: Terms
    limits: Limits
    steady_since: BootSeconds | None
    asked_at: BootSeconds
    unbroken: bool = True
    seen: Mapping[WorkerId, Seen] = field(default_factory=dict)

    @classmethod
    def opened(
        cls, me: WorkerId, terms: Terms, limits: Limits, *, sent_at: BootSeconds, answered_at: BootSeconds
    ) -> Judge:
        """A judge whose session has just been opened by a request sent and answered at these instants."""
        return cls(me, terms, limits, steady_since=answered_at, asked_at=sent_at)

    def beat_confirmed(self, *, sent_at: BootSeconds, answered_at: BootSeconds) -> Judge:
        """The judge's own beat was accepted. From the sending before to the answer now the store may have been away."""
        if self.steady_since is None or self._gap(answered_at):
            return replace(self, steady_since=answered_at, asked_at=sent_at, unbroken=False)
        return replace(self, asked_at=sent_at)

    def beat_failed(self) -> Judge:
        """The judge's own beat got no answer, or its session's connection broke: the store or the judge is not well."""
        return replace(self, steady_since=None)

    def looked(self, look: Look) -> Judge:
        """Remember what was seen. The dead are forgotten, and so are sessions whose rows are gone."""
        seen = {session.worker_id: self._remember(session, look) for session in self._others(look)}
        return replace(self, seen=seen)

    def verdicts(self, look: Look) -> tuple[Verdict, ...]:
        """Who may be declared dead after ``look``, which must have been remembered with ``looked`` before."""
        ways = ((session, self._way(session, look)) for session in self._others(look))
        grace = micros(self.limits.grace)
        return tuple(Verdict(session.worker_id, session.beat, how, grace) for session, how in ways if how)

    def ripens(self, look: Look) -> BootSeconds | None:
        """When there will be something to decide that this look could not, if nothing changes: a session whose hint is
        free has been silent for long enough (O27), or a death without proof is old enough to end runs for good (O26).
        None: there is no such time."""
        silent = (
            self.seen[session.worker_id].since + self._patience(session)
            for session in self._others(look)
            if look.signs.get(session.worker_id) is Sign.HINT and session.worker_id in self.seen
        )
        final = (
            look.answered_at + (session.dead_at + session.lease - look.store_now) * MICROSECOND
            for session in look.sessions
            if session.dead_at is not None and not session.proven
        )
        return min((BootSeconds(at) for at in (*silent, *final) if at > look.answered_at), default=None)

    def healthy(self, now: BootSeconds, judged: Session) -> bool:
        """Whether this judge may conclude anything about ``judged`` from silence (rule (c) of O24, and O25).

        A judge whose last beat is long ago has been asleep, or is about to learn that the store was away. After an
        outage everybody gets as long to come back as a lease lasts, the judge's or the judged one's.
        """
        if self.steady_since is None or self._gap(now):
            return False
        enough = self.limits.steady * (self._longest_lease(judged) + self.limits.grace)
        return self.unbroken or now - self.steady_since >= enough

    def _way(self, session: Session, look: Look) -> How | None:
        sign = look.signs.get(session.worker_id, Sign.NONE)
        if sign is Sign.PROOF:
            return How.PROOF
        if not self.healthy(look.asked_at, session):
            return None
        silent = self._silent_for(session, look)
        if _expired(session, look, self.limits) and silent >= self.limits.look * self._longest_lease(session):
            return How.EXPIRY
        return How.HINT if sign is Sign.HINT and silent >= self._patience(session) else None

    def _patience(self, session: Session) -> float:
        """Seconds of silence that a free hint needs beside it (O27)."""
        return self.limits.short_look * session.beat_interval * MICROSECOND

    def _silent_for(self, session: Session, look: Look) -> float:
        """Seconds for which ``beat`` surely stood still: from the answer of the first look to the question of this."""
        seen = self.seen.get(session.worker_id)
        return look.asked_at - seen.since if seen is not None and seen.beat == session.beat else 0.0

    def _remember(self, session: Session, look: Look) -> Seen:
        known = self.seen.get(session.worker_id)
        return known if known is not None and known.beat == session.beat else Seen(session.beat, look.answered_at)

    def _others(self, look: Look) -> Iterator[Session]:
        """A judge never judges itself; sessions that drain are judged like those that live (O24)."""
        return (s for s in look.sessions if s.worker_id != self.me and s.state is not SessionState.DEAD)

    def _gap(self, now: BootSeconds) -> bool:
        """Whether an outage since the last confirmed beat could have gone unnoticed for too long.

        What a judge cannot notice is shorter than ``gap`` beats. A live worker's beat then stands still for at most
        that and two beats of its own, which is less than a lease (``trust.BEATS_PER_TRUST``), so no look is fooled.
        """
        return now - self.asked_at > self.limits.gap * self.terms.beat

    def _longest_lease(self, judged: Session) -> float:
        """Seconds. Sessions may run with different settings: a judge that beats rarely must look longer."""
        return max(self.terms.lease, judged.lease * MICROSECOND)


def _expired(session: Session, look: Look, limits: Limits) -> bool:
    """Rule (a) of O24, by the store's clock alone; the compare-and-set asks it again."""
    return session.expires_at < look.store_now - micros(limits.grace)
