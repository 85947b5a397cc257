"""The one table of a run's life (ownership.md §3).

Everything that affects a run's status, owner or epoch is a row here, and the file does not know which database, worker
or task asks. A guard or an effect is a name; it is read twice, on values in ``decision`` and as SQL in
``store.clauses``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, final

from deerflow_runs.model import (
    ACTIVE,
    TERMINAL,
    RunStatus,
)


class RunEvent(StrEnum):
    """What can happen to an operation that exists. Arrivals (admit, admit behind) are in ``admission``."""

    PROMOTE = "promote"
    CLAIM = "claim"
    START = "start"
    PROGRESS = "progress"
    SETTLE_SUCCESS = "settle success"
    SETTLE_ERROR = "settle error"
    SETTLE_TIMEOUT = "settle timeout"
    SETTLE_CANCELLED = "settle cancelled"
    SETTLE_ROLLBACK_FAILED = "settle rollback failed"
    REQUEST_CANCEL = "request cancel"
    CANCEL_QUEUED = "cancel queued"
    FORCE = "force"
    SEIZE = "seize"
    TAKE_OVER_FAIL = "take over: fail"
    TAKE_OVER_FAIL_WAITING = "take over: fail, waiting"
    TAKE_OVER_RESUME = "take over: resume"
    TAKE_OVER_RESUME_WAITING = "take over: resume, waiting"
    TAKE_OVER_RELEASE = "take over: release"
    TAKE_BACK = "take back"
    HAND_OVER = "hand over"
    DEFER = "defer"
    GIVE_BACK_FAIL = "give back: fail"
    GIVE_BACK_RESUME = "give back: resume"
    RE_HOME = "re-home"
    END_WAITING = "end waiting"
    RELEASE = "release"
    REMOVE = "remove"


class Guard(StrEnum):
    """A named condition of the table, in the words the documentation shows."""

    IS_RUN = "it is a run"
    IS_RESERVATION = "it is a reservation"
    OWNER_IS_ME = "owner = me"
    EPOCH_IS_MINE = "epoch = mine"
    NO_CANCEL = "no cancel recorded"
    CANCEL_RECORDED = "a cancel is recorded"
    NOTHING_OWED = "no rollback owed"
    ROLLBACK_OWED = "a rollback is owed"
    OWED_ONLY_ONCE_RESTORED = "if a rollback is owed, pending and restored by me"
    ATTEMPTS_EXCEEDED = "attempt > max_attempts"
    UNOWNED = "owner null"
    DUE = "due, or never delayed"
    READY = "not_before passed"
    CAPABLE = "capabilities mine"
    HOME_ALLOWS_ME = "home null or mine"
    HOME_IS_MINE = "home = me"
    HOME_WAS_MINE = "home = my dead session"
    HOME_IS_DEAD = "home's session is dead"
    ACTOR_LIVE = "my session is live"
    ACTOR_DRAINING = "my session is draining"
    OWNER_IS_DEAD = "owner's session is dead"
    OWNER_WAS_ME = "owner = my dead session"
    UNHELD_OR_OVERDUE = "vacant, or owner dead, or cancel grace over"
    MINE_UNHELD_OR_OVERDUE = "owner = me, or vacant, or owner dead, or cancel grace over"
    FAILS_WHEN_ORPHANED = "on_orphan = fail, or attempts used up"
    FAILS_WHEN_HOMELESS = "on_orphan = fail"
    RESUMES_WHEN_ORPHANED = "on_orphan = resume, attempts left"
    RESUMES_WHEN_HOMELESS = "on_orphan = resume"
    OWNER_VERDICT_RIPE = "owner's death proven, or one lease old"
    HOME_VERDICT_RIPE = "home's death proven, or one lease old"
    NO_PROGRESS_THIS_EPOCH = "nothing recorded by this epoch"
    ASKS_FOR_MORE = "a requirement is added"
    THREAD_FREE = "no active operation on the thread"
    FIRST_DUE = "first of the due queue"


class Effect(StrEnum):
    """A named change of the table beside the status."""

    TAKE_OWNERSHIP = "owner = me, epoch + 1, granted now, not before a cancel"
    VACATE = "owner null, epoch + 1"
    RAISE_EPOCH = "epoch + 1"
    MOVE_TO_ME = "owner (and home, if set) = me, epoch + 1"
    NO_OWNER = "owner null"
    FLAG_BEHIND = "queue_behind set"
    FIRST_ATTEMPT = "attempt at least 1"
    COUNT_ATTEMPT = "attempt counted"
    FORGIVE_ATTEMPTS = "attempt 1 if this epoch made progress"
    COUNT_RESTORE = "attempt = number of this restore"
    BACK_OFF = "not_before = now + backoff"
    READY_NOW = "not_before = now"
    CLEAR_WAITS = "waits_for cleared"
    DRAW_TURN = "first time: turn drawn, base recorded"
    STAMP_START = "started now"
    RECORD_CANCEL = "first action and time recorded, after the grant"
    RECORD_PROGRESS = "progress recorded"
    CANCEL_DECIDES = "interrupted if a cancel is recorded"
    STAMP_END = "settled by me now"
    RECORD_OUTCOME = "error and usage recorded"
    REASON_CANCEL_OR_GIVEN = "stop_reason = the action, else as given"
    REASON_SHUTDOWN = "stop_reason = the action, else shutdown"
    REASON_ORPHAN = "stop_reason = orphan_recovered, or poison"
    REASON_GIVEN_BACK = "stop_reason as given, else orphan_recovered; or poison"
    REASON_ROLLBACK_FAILED = "stop_reason = rollback_failed"
    FREE_OF_HOME = "home cleared"
    HOME_TO_ME = "home = me"
    REQUIRE_MORE = "requirement added"


class Refusal(StrEnum):
    """Why an event did not happen. Values are stable: they travel in answers and logs."""

    UNKNOWN = "unknown"
    TERMINAL = "terminal"
    WRONG_STATUS = "wrong_status"
    NOT_A_RUN = "not_a_run"
    NOT_A_RESERVATION = "not_a_reservation"
    LOST = "lost"
    CANCEL_RECORDED = "cancel_recorded"
    NO_CANCEL = "no_cancel"
    ROLLBACK_OWED = "rollback_owed"
    NOTHING_OWED = "nothing_owed"
    HELD = "held"
    TOO_EARLY = "too_early"
    NOT_CAPABLE = "not_capable"
    AT_HOME_ELSEWHERE = "at_home_elsewhere"
    SESSION_NOT_LIVE = "session_not_live"
    SESSION_NOT_DRAINING = "session_not_draining"
    OTHER_POLICY = "other_policy"
    RECORDED = "recorded"
    NOTHING_NEW = "nothing_new"
    THREAD_BUSY = "thread_busy"
    NOT_FIRST = "not_first"


class Into(StrEnum):
    """Targets that are not a status."""

    STAYS = "stays"
    GONE = "row deleted"


class Repeat(StrEnum):
    """When the same event has visibly happened already: a lost reply, repeated (O8)."""

    RUNNING_AT_MY_EPOCH = "already running at my epoch"
    ENDED_BY_ME = "terminal at my epoch, settled by me"
    MOVED_TO_ME = "mine at the next epoch, and not by a seizure"
    HOME_IS_ME = "home is me already"
    CANCELLED_BY_ME = "interrupted over a cancel, settled by me"
    GIVEN_BACK_BY_ME = "terminal at the next epoch, settled by me"


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    sources: frozenset[RunStatus]
    target: RunStatus | Into
    guards: tuple[Guard, ...]
    effects: tuple[Effect, ...] = ()
    repeat: Repeat | None = None

    @property
    def ends(self) -> bool:
        """Whether it brings an operation to its end; every such event goes through the ending's routine (O28)."""
        return (self.target in TERMINAL or self.target is Into.GONE) and not self.sources <= TERMINAL

    @property
    def frees(self) -> bool:
        """Whether it can free a thread, so that a waiting run is promoted in the same transaction (O7)."""
        return self.ends and not self.sources.isdisjoint(ACTIVE)


G, E, S = Guard, Effect, RunStatus
_HOLDER: Final = (G.IS_RUN, G.OWNER_IS_ME, G.EPOCH_IS_MINE)
_ENDS: Final = (E.STAMP_END, E.RECORD_OUTCOME)
_PENDING: Final = frozenset({S.PENDING})
_RUNNING: Final = frozenset({S.RUNNING})
_QUEUED: Final = frozenset({S.QUEUED})
_WAITING: Final = frozenset({S.QUEUED, S.PENDING})
_SETTLED: Final = (E.CANCEL_DECIDES, E.REASON_CANCEL_OR_GIVEN, *_ENDS)


def _settle(target: RunStatus, sources: frozenset[RunStatus]) -> Rule:
    return Rule(sources, target, (*_HOLDER, G.NOTHING_OWED), _SETTLED, Repeat.ENDED_BY_ME)


TRANSITIONS: Final[Mapping[RunEvent, Rule]] = MappingProxyType(
    {
        RunEvent.PROMOTE: Rule(
            _QUEUED,
            S.PENDING,
            (G.IS_RUN, G.DUE, G.FIRST_DUE, G.THREAD_FREE),
            (E.NO_OWNER, E.FLAG_BEHIND, E.READY_NOW),
        ),
        RunEvent.CLAIM: Rule(
            _PENDING,
            S.PENDING,
            (G.IS_RUN, G.UNOWNED, G.NO_CANCEL, G.READY, G.CAPABLE, G.HOME_ALLOWS_ME, G.ACTOR_LIVE),
            (E.TAKE_OWNERSHIP, E.FIRST_ATTEMPT, E.CLEAR_WAITS),
        ),
        RunEvent.START: Rule(
            _PENDING,
            S.RUNNING,
            (*_HOLDER, G.NO_CANCEL),
            (E.DRAW_TURN, E.STAMP_START),
            Repeat.RUNNING_AT_MY_EPOCH,
        ),
        RunEvent.PROGRESS: Rule(ACTIVE, Into.STAYS, _HOLDER, (E.RECORD_PROGRESS,)),
        RunEvent.SETTLE_SUCCESS: _settle(S.SUCCESS, _RUNNING),
        RunEvent.SETTLE_ERROR: _settle(S.ERROR, ACTIVE),
        RunEvent.SETTLE_TIMEOUT: _settle(S.TIMEOUT, _RUNNING),
        RunEvent.SETTLE_CANCELLED: Rule(
            ACTIVE,
            S.INTERRUPTED,
            (*_HOLDER, G.OWED_ONLY_ONCE_RESTORED),
            (E.REASON_CANCEL_OR_GIVEN, *_ENDS),
            Repeat.ENDED_BY_ME,
        ),
        RunEvent.SETTLE_ROLLBACK_FAILED: Rule(
            _PENDING,
            S.ERROR,
            (*_HOLDER, G.ROLLBACK_OWED, G.ATTEMPTS_EXCEEDED),
            (E.REASON_ROLLBACK_FAILED, *_ENDS),
            Repeat.ENDED_BY_ME,
        ),
        RunEvent.REQUEST_CANCEL: Rule(ACTIVE, Into.STAYS, (G.IS_RUN,), (E.RECORD_CANCEL,)),
        RunEvent.CANCEL_QUEUED: Rule(
            _QUEUED,
            S.INTERRUPTED,
            (G.IS_RUN,),
            (E.RECORD_CANCEL, E.REASON_CANCEL_OR_GIVEN, *_ENDS),
            Repeat.CANCELLED_BY_ME,
        ),
        RunEvent.FORCE: Rule(
            ACTIVE,
            S.INTERRUPTED,
            (G.IS_RUN, G.CANCEL_RECORDED, G.NOTHING_OWED, G.UNHELD_OR_OVERDUE),
            (E.RAISE_EPOCH, E.REASON_CANCEL_OR_GIVEN, *_ENDS),
            Repeat.CANCELLED_BY_ME,
        ),
        RunEvent.SEIZE: Rule(
            ACTIVE,
            S.PENDING,
            (G.IS_RUN, G.ROLLBACK_OWED, G.MINE_UNHELD_OR_OVERDUE, G.CAPABLE),
            (E.COUNT_RESTORE, E.TAKE_OWNERSHIP, E.CLEAR_WAITS),
        ),
        RunEvent.TAKE_OVER_FAIL: Rule(
            ACTIVE,
            S.ERROR,
            (G.IS_RUN, G.OWNER_IS_DEAD, G.NO_CANCEL, G.FAILS_WHEN_ORPHANED, G.OWNER_VERDICT_RIPE),
            (E.RAISE_EPOCH, E.REASON_ORPHAN, *_ENDS),
        ),
        RunEvent.TAKE_OVER_FAIL_WAITING: Rule(
            _WAITING,
            S.ERROR,
            (G.IS_RUN, G.UNOWNED, G.NO_CANCEL, G.FAILS_WHEN_HOMELESS, G.HOME_IS_DEAD, G.HOME_VERDICT_RIPE),
            (E.RAISE_EPOCH, E.REASON_ORPHAN, *_ENDS),
        ),
        RunEvent.TAKE_OVER_RESUME: Rule(
            ACTIVE,
            S.PENDING,
            (G.IS_RUN, G.OWNER_IS_DEAD, G.NO_CANCEL, G.RESUMES_WHEN_ORPHANED),
            (E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF, E.FREE_OF_HOME),
        ),
        RunEvent.TAKE_OVER_RESUME_WAITING: Rule(
            _WAITING,
            Into.STAYS,
            (G.IS_RUN, G.UNOWNED, G.NO_CANCEL, G.RESUMES_WHEN_HOMELESS, G.HOME_IS_DEAD),
            (E.FREE_OF_HOME,),
        ),
        RunEvent.TAKE_OVER_RELEASE: Rule(ACTIVE, Into.GONE, (G.IS_RESERVATION, G.OWNER_IS_DEAD)),
        RunEvent.TAKE_BACK: Rule(
            ACTIVE,
            Into.STAYS,
            (G.OWNER_WAS_ME, G.EPOCH_IS_MINE),
            (E.FORGIVE_ATTEMPTS, E.MOVE_TO_ME),
            Repeat.MOVED_TO_ME,
        ),
        RunEvent.HAND_OVER: Rule(
            ACTIVE,
            S.PENDING,
            (*_HOLDER, G.NO_CANCEL),
            (E.FORGIVE_ATTEMPTS, E.VACATE, E.READY_NOW),
        ),
        RunEvent.DEFER: Rule(
            ACTIVE,
            S.PENDING,
            (*_HOLDER, G.NO_CANCEL, G.NO_PROGRESS_THIS_EPOCH, G.ASKS_FOR_MORE),
            (E.VACATE, E.READY_NOW, E.REQUIRE_MORE),
        ),
        RunEvent.GIVE_BACK_FAIL: Rule(
            ACTIVE,
            S.ERROR,
            (*_HOLDER, G.NO_CANCEL, G.FAILS_WHEN_ORPHANED),
            (E.RAISE_EPOCH, E.REASON_GIVEN_BACK, *_ENDS),
            Repeat.GIVEN_BACK_BY_ME,
        ),
        RunEvent.GIVE_BACK_RESUME: Rule(
            ACTIVE,
            S.PENDING,
            (*_HOLDER, G.NO_CANCEL, G.RESUMES_WHEN_ORPHANED),
            (E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF),
        ),
        RunEvent.RE_HOME: Rule(
            _WAITING,
            Into.STAYS,
            (G.IS_RUN, G.UNOWNED, G.HOME_WAS_MINE),
            (E.HOME_TO_ME,),
            Repeat.HOME_IS_ME,
        ),
        RunEvent.END_WAITING: Rule(
            _WAITING,
            S.INTERRUPTED,
            (G.IS_RUN, G.UNOWNED, G.HOME_IS_MINE, G.ACTOR_DRAINING, G.NOTHING_OWED),
            (E.RAISE_EPOCH, E.REASON_SHUTDOWN, *_ENDS),
        ),
        RunEvent.RELEASE: Rule(ACTIVE, Into.GONE, (G.IS_RESERVATION, G.OWNER_IS_ME, G.EPOCH_IS_MINE)),
        RunEvent.REMOVE: Rule(TERMINAL, Into.GONE, ()),
    }
)
"""Every event, with where it may start, what must hold in the same statement, and what it changes."""


REASONS: Final[Mapping[Guard, Refusal]] = MappingProxyType(
    {
        Guard.IS_RUN: Refusal.NOT_A_RUN,
        Guard.IS_RESERVATION: Refusal.NOT_A_RESERVATION,
        Guard.OWNER_IS_ME: Refusal.LOST,
        Guard.EPOCH_IS_MINE: Refusal.LOST,
        Guard.NO_CANCEL: Refusal.CANCEL_RECORDED,
        Guard.CANCEL_RECORDED: Refusal.NO_CANCEL,
        Guard.NOTHING_OWED: Refusal.ROLLBACK_OWED,
        Guard.ROLLBACK_OWED: Refusal.NOTHING_OWED,
        Guard.OWED_ONLY_ONCE_RESTORED: Refusal.ROLLBACK_OWED,
        Guard.ATTEMPTS_EXCEEDED: Refusal.TOO_EARLY,
        Guard.UNOWNED: Refusal.HELD,
        Guard.DUE: Refusal.TOO_EARLY,
        Guard.READY: Refusal.TOO_EARLY,
        Guard.CAPABLE: Refusal.NOT_CAPABLE,
        Guard.HOME_ALLOWS_ME: Refusal.AT_HOME_ELSEWHERE,
        Guard.HOME_IS_MINE: Refusal.AT_HOME_ELSEWHERE,
        Guard.HOME_WAS_MINE: Refusal.AT_HOME_ELSEWHERE,
        Guard.HOME_IS_DEAD: Refusal.HELD,
        Guard.ACTOR_LIVE: Refusal.SESSION_NOT_LIVE,
        Guard.ACTOR_DRAINING: Refusal.SESSION_NOT_DRAINING,
        Guard.OWNER_IS_DEAD: Refusal.HELD,
        Guard.OWNER_WAS_ME: Refusal.LOST,
        Guard.UNHELD_OR_OVERDUE: Refusal.HELD,
        Guard.MINE_UNHELD_OR_OVERDUE: Refusal.HELD,
        Guard.FAILS_WHEN_ORPHANED: Refusal.OTHER_POLICY,
        Guard.FAILS_WHEN_HOMELESS: Refusal.OTHER_POLICY,
        Guard.RESUMES_WHEN_ORPHANED: Refusal.OTHER_POLICY,
        Guard.RESUMES_WHEN_HOMELESS: Refusal.OTHER_POLICY,
        Guard.OWNER_VERDICT_RIPE: Refusal.TOO_EARLY,
        Guard.HOME_VERDICT_RIPE: Refusal.TOO_EARLY,
        Guard.NO_PROGRESS_THIS_EPOCH: Refusal.RECORDED,
        Guard.ASKS_FOR_MORE: Refusal.NOTHING_NEW,
        Guard.THREAD_FREE: Refusal.THREAD_BUSY,
        Guard.FIRST_DUE: Refusal.NOT_FIRST,
    }
)
"""What a failed guard is called in the answer."""
