"""What becomes of a run whose worker is gone, who may take it up again, and how fast (O29–O32).

Attempts, backoff, the verdict over one orphan, the reason why a run waits, and the pace at which a worker resumes.
When a session may be declared dead is decided in ``judge``; which edges exist, in ``lifecycle``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self, final

from deerflow_runs.model import Json, Micros, OnOrphan, Run, RunStatus, Session, SessionState, WorkerId
from deerflow_runs.protocol.trust import BootSeconds

# ---- attempts (O30) ------------------------------------------------------------------------------------------------


def next_attempt(run: Run) -> int:
    """The attempt number once the present epoch is ended by take over: resume, or give back.

    Progress forgives: an epoch that wrote a checkpoint starts the count again, so a long run survives any number of
    deployments, while a run that kills its workers does not.
    """
    return 1 if made_progress(run) else run.attempt + 1


def forgiven_attempt(run: Run) -> int:
    """The attempt number once the present epoch ends without a fault: handed over, or taken back.

    No attempt is added, and progress forgives here as well. Otherwise the new epoch would not know of it, and a run
    that was drained after a checkpoint would be poison after a single later crash (O30).
    """
    return 1 if made_progress(run) else run.attempt


def made_progress(run: Run) -> bool:
    """The present epoch wrote a checkpoint."""
    return run.progress_epoch == run.epoch


def used_up(run: Run) -> bool:
    """Ending the present epoch leaves no attempt for another one (I9)."""
    return next_attempt(run) > run.max_attempts


def seizers_attempt(run: Run, *, by: WorkerId, epoch: int | None) -> int:
    """The attempt number of whoever seizes an owed run: restores are counted apart from the attempts of the run.

    The first seizure after the cancel starts at 1. Otherwise a rollback of a run on its last attempt would fail
    without ever having been tried (I16). A holder that tries again after a failed restore names the epoch it holds
    and is counted like anybody else, or a lone worker would go on for ever (I8); asking again after a lost reply is
    not another attempt (O8).
    """
    if not being_restored(run):
        return 1
    lost_reply = run.owner_worker_id == by and run.epoch != epoch
    return run.attempt if lost_reply else run.attempt + 1


def being_restored(run: Run) -> bool:
    """Whether the present epoch was granted by a seizure (O4).

    A seized run is pending and owned, and nothing else is ever granted once a cancel is recorded. A run that was
    claimed and then cancelled before it started looks alike; only there the order of two stamps decides. It is the
    order of the two events, whatever the clock did between them: a request is stamped after the grant that it finds,
    a grant not before the request (§0: an epoch mistaken for another's would be a second holder of it, I4).
    """
    if not run.rollback_owed or run.status is not RunStatus.PENDING or run.owner_worker_id is None:
        return False
    return (run.granted_at or 0) >= (run.cancel_requested_at or 0)


def backoff(attempt: int, *, unit: float, minimum: Micros, maximum: Micros) -> Micros:
    """How long a run taken over for its ``attempt``-th try stays away, with full jitter; ``unit`` is random in [0, 1).

    Anywhere between ``minimum`` and a ceiling that doubles with every attempt up to ``maximum``: the orphans of one
    dead worker do not come back in one wave.
    """
    ceiling = min(maximum, minimum * 2 ** min(max(attempt, 1), 40))
    return Micros(minimum + round(unit * (ceiling - minimum)))


SPREAD: Final = 1000
"""Steps into which a pause is spread."""

STRIDE: Final = 389
"""Prime to ``SPREAD``: neighbours in order of admission come far apart."""

DOUBLINGS: Final = 20


def spread_backoff(run: Run, *, minimum: Micros, maximum: Micros) -> Micros:
    """How long this run stays away after the epoch that ends, when many runs are taken over at once.

    As ``backoff``, but the runs of one statement differ by their order of admission instead of by chance, so that the
    statement and this function give the same number.
    """
    ceiling = max(minimum, min(maximum, minimum << min(next_attempt(run), DOUBLINGS)))
    return Micros(minimum + (ceiling - minimum) * (run.seq * STRIDE % SPREAD) // SPREAD)


# ---- the verdict (O29, O31) ----------------------------------------------------------------------------------------


class Recovery(Enum):
    """What is due for an operation whose owner's session, or, while it waits, whose home session is dead."""

    FAIL = "fail"
    POISON = "poison"
    RESUME = "resume"
    FREE_OF_HOME = "free of home"
    SEIZE = "seize"
    FORCE = "force"
    RELEASE = "release"
    NOTHING = "nothing"

    @property
    def final(self) -> bool:
        """Ends the run for good, so a death that is not proven is given time to turn out wrong (O26)."""
        return self in (Recovery.FAIL, Recovery.POISON)


def verdict(run: Run) -> Recovery:
    """What is due for ``run``, given that the session it depends on is dead.

    A recorded cancel decides before the policy: the user's word was first, and a rollback that is owed is carried
    out, not failed over (O4). A run that merely waits has ended no epoch, so attempts do not speak there.
    """
    if run.terminal:
        return Recovery.NOTHING
    if run.reservation:
        return Recovery.RELEASE
    if run.cancel_action is not None:
        return Recovery.SEIZE if run.rollback_owed else Recovery.FORCE
    if run.owner_worker_id is None and run.home_worker_id is None:
        return Recovery.NOTHING
    if run.on_orphan is OnOrphan.FAIL:
        return Recovery.FAIL
    if run.owner_worker_id is None:
        return Recovery.FREE_OF_HOME
    return Recovery.POISON if used_up(run) else Recovery.RESUME


# ---- who may run what (O31) ----------------------------------------------------------------------------------------


def can_run(run: Run, *, me: WorkerId, capabilities: frozenset[str]) -> bool:
    """Whether a worker may claim or seize ``run``: able, and not kept out by the run's home."""
    return run.home_worker_id in (None, me) and run.required_capabilities <= capabilities


@final
@dataclass(frozen=True, slots=True)
class WaitsFor:
    """Why no worker takes a run. Instants are the store's; ``checked_by`` is the session that looked."""

    missing: tuple[str, ...]
    message: str
    since: Micros
    checked_at: Micros
    checked_by: WorkerId

    def as_json(self) -> dict[str, Json]:
        """As stored in ``waits_for``."""
        return {
            "missing": list(self.missing),
            "message": self.message,
            "since": self.since,
            "checked_at": self.checked_at,
            "checked_by": self.checked_by,
        }


def why_waiting(run: Run, sessions: Iterable[Session], *, me: WorkerId, now: Micros) -> WaitsFor | None:
    """Why nobody can take ``run``, or None if some live session can; ``sessions`` are those the store knows.

    What is missing is what the best placed session lacks. ``since`` stays as stored while the reason is the same.
    """
    live = [session for session in sessions if session.state is SessionState.LIVE]
    if any(can_run(run, me=session.worker_id, capabilities=session.capabilities) for session in live):
        return None
    home = run.home_worker_id
    at_home = [session for session in live if home in (None, session.worker_id)]
    lacks = [tuple(sorted(run.required_capabilities - session.capabilities)) for session in at_home]
    missing = min(lacks, key=lambda names: (len(names), names), default=tuple(sorted(run.required_capabilities)))
    message = _reason(home, missing, anybody=bool(at_home))
    since = _known_since(run, missing, message)
    return WaitsFor(missing, message, since if since is not None else now, now, me)


def _reason(home: WorkerId | None, missing: tuple[str, ...], *, anybody: bool) -> str:
    if not anybody:
        return f"its home session {home} is not live" if home is not None else "no worker is live"
    whom = f"its home session {home} lacks" if home is not None else "no live worker has"
    return f"{whom} {', '.join(missing)}"


def _known_since(run: Run, missing: tuple[str, ...], message: str) -> Micros | None:
    known = run.waits_for or {}
    same = known.get("message") == message and tuple(known.get("missing", ())) == missing
    return Micros(known["since"]) if same and isinstance(known.get("since"), int) else None


# ---- pace (O32) ----------------------------------------------------------------------------------------------------

SWEEP_JITTER: Final = 0.2
"""A sweep comes up to this part early or late."""


def sweep_phase(worker_id: WorkerId, interval: float) -> float:
    """Seconds until a session's first sweep: spread over one interval by the worker id, the same in every process."""
    return interval * zlib.crc32(worker_id.encode()) / 2**32


def next_sweep(interval: float, *, unit: float, until_due: float | None = None) -> float:
    """Seconds until the next sweep, or until a known delayed run comes due if that is earlier; ``unit`` in [0, 1)."""
    jittered = interval * (1 - SWEEP_JITTER + 2 * SWEEP_JITTER * unit)
    return jittered if until_due is None else min(jittered, max(0.0, until_due))


@final
@dataclass(frozen=True, slots=True)
class ResumeBudget:
    """A token bucket: how many runs a worker may resume now. Empty after a reconnect, when everybody is in a hurry.

    ``rate`` is tokens per second, ``burst`` the most that peace saves up, ``tokens`` what there was at ``at``.
    """

    rate: float
    burst: int
    tokens: float
    at: BootSeconds

    @classmethod
    def empty(cls, *, rate: float, burst: int, at: BootSeconds) -> Self:
        """As it is when a session opens or has reconnected."""
        return cls(rate, burst, 0.0, at)

    def available(self, now: BootSeconds) -> int:
        """Whole tokens at ``now``: the limit of the next claim of runs that were taken over."""
        return int(self._filled(now))

    def spent(self, count: int, now: BootSeconds) -> Self:
        """After ``count`` runs were resumed; asking for more than was available leaves it empty, not in debt."""
        return replace(self, tokens=max(0.0, self._filled(now) - count), at=max(now, self.at))

    def reconnected(self, now: BootSeconds) -> Self:
        """What peace saved up is not spent on a store that has just come back."""
        return replace(self, tokens=0.0, at=max(now, self.at))

    def _filled(self, now: BootSeconds) -> float:
        return min(float(self.burst), self.tokens + self.rate * max(0.0, now - self.at))
