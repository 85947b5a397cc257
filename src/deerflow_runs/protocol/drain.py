"""How a worker leaves: one budget split over the steps of a drain, and what becomes of each of its runs (O35).

The order of the steps is fixed here and nothing can change it: whoever is in a hurry gets shorter steps, never fewer.
Listening to signals and carrying the steps out belongs to the manager.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, assert_never, final

from deerflow_runs.model import OnOrphan, Run, WorkerId
from deerflow_runs.protocol.trust import BootSeconds


class Step(Enum):
    """The steps of a drain, in their order. Every step needs what the later ones take away."""

    RUNS = "runs"
    """Runs stop between two steps or are cancelled, and are handed over or ended; what finishes keeps its status."""
    EVENT_LOG = "event log"
    """What the runs said is written."""
    SAVERS = "savers"
    """The last checkpoints land, then the savers close."""
    POOLS = "pools"
    """Connections to the store close, but for the session's own."""
    SESSION = "session"
    """Beats stop, and the session's row is closed, so that nobody waits for its expiry."""


ORDER: Final = tuple(Step)

SHARES: Final[Mapping[Step, float]] = MappingProxyType(
    {Step.RUNS: 0.75, Step.EVENT_LOG: 0.1, Step.SAVERS: 0.05, Step.POOLS: 0.05, Step.SESSION: 0.05}
)
"""Parts of the budget. What a step leaves over, the later ones may use."""

GRACE_SHARE: Final = 0.5
"""The part of the budget in which runs may still stop between steps, before their tasks are cancelled."""

LEAST: Final = 0.1
"""Seconds that every step is given even when the budget is gone: an order of steps that are not tried is no order."""


@final
@dataclass(frozen=True, slots=True)
class DrainPlan:
    """When each step of one drain must be over. ``grace_ends``: runs that have not stopped by then are cancelled."""

    grace_ends: BootSeconds
    deadlines: Mapping[Step, BootSeconds]

    @classmethod
    def begun(cls, *, at: BootSeconds, budget: float) -> DrainPlan:
        """The plan of a drain that begins at ``at`` and may take ``budget`` seconds in all."""
        return cls(BootSeconds(at + GRACE_SHARE * budget), MappingProxyType(_split(at, budget)))

    @property
    def ends(self) -> BootSeconds:
        """When everything must be over."""
        return self.deadlines[ORDER[-1]]

    def deadline_for(self, step: Step) -> BootSeconds:
        """When ``step`` must be over."""
        return self.deadlines[step]

    def allowed(self, step: Step, now: BootSeconds) -> float:
        """Seconds that ``step`` may take if it begins at ``now``; at least ``LEAST``."""
        return max(LEAST, self.deadlines[step] - now)

    def signalled_again(self, now: BootSeconds) -> DrainPlan:
        """The plan after another signal, or after a cancellation of the drain itself.

        Half of what is left is split anew and the grace is over: somebody is waiting. No step gets longer by it.
        """
        left = max(0.0, self.ends - now)
        anew = _split(now, left / 2)
        sooner = {step: min(self.deadlines[step], anew[step]) for step in ORDER}
        return replace(self, grace_ends=min(self.grace_ends, now), deadlines=MappingProxyType(sooner))


def _split(at: BootSeconds, budget: float) -> dict[Step, BootSeconds]:
    """The end of every step: later steps' shares are kept free, whatever the earlier ones do."""
    return {
        step: BootSeconds(at + budget * (1 - sum(SHARES[later] for later in ORDER[place + 1 :])))
        for place, step in enumerate(ORDER)
    }


# ---- runs ----------------------------------------------------------------------------------------------------------


class Parting(Enum):
    """What becomes of an operation when the worker that holds it, or that is its home, drains."""

    KEEP = "keep"
    """It is over, or it finished by itself: its status stands."""
    STAY = "stay"
    """It waits for a worker and may go on waiting for another one."""
    HAND_OVER = "hand over"
    """Another worker goes on from the last finished step; no attempt is spent (I18)."""
    END_SHUTDOWN = "end with shutdown"
    """Nobody else can run it: interrupted, stop_reason shutdown. Never the outcome of a user's cancel (O23)."""
    END_WAITING = "end waiting"
    """The same for one that only waits here, queued or vacant."""
    SETTLE_CANCELLED = "settle cancelled"
    """Its cancel was asked for before the drain and is what it ends by."""
    RESTORE = "restore"
    """A rollback is owed: seized and restored here if time allows, else by whoever finds it."""
    RELEASE = "release"
    """A reservation ends with the work it was made for."""


def parting(run: Run, *, me: WorkerId) -> Parting:
    """What becomes of ``run`` when session ``me`` drains and the run's task, if it had one, has stopped.

    One that is neither held by ``me`` nor waits with ``me`` as its home stays untouched.
    """
    if run.terminal:
        return Parting.KEEP
    if run.owner_worker_id == me:
        return _held(run)
    return _waiting(run) if run.owner_worker_id is None and run.home_worker_id == me else Parting.STAY


def _held(run: Run) -> Parting:
    if run.reservation:
        return Parting.RELEASE
    if run.rollback_owed:
        return Parting.RESTORE
    if run.cancel_action is not None:
        return Parting.SETTLE_CANCELLED
    return _by_policy(run, travels=Parting.HAND_OVER, otherwise=Parting.END_SHUTDOWN)


def _waiting(run: Run) -> Parting:
    """One that may run elsewhere stays: its home is cleared once this session is closed (O31)."""
    if run.rollback_owed:
        return Parting.RESTORE
    if run.cancel_action is not None:
        return Parting.END_WAITING
    return _by_policy(run, travels=Parting.STAY, otherwise=Parting.END_WAITING)


def _by_policy(run: Run, *, travels: Parting, otherwise: Parting) -> Parting:
    match run.on_orphan:
        case OnOrphan.RESUME:
            return travels
        case OnOrphan.FAIL:
            return otherwise
        case _:
            assert_never(run.on_orphan)
