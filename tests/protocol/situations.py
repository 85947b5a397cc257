"""One situation per event in which ownership.md §3 lets it happen, written from that page and not from the table.

Each is as tight as can be: whatever the page asks for holds, and nothing more, so that a single change makes the page
say no. ``becomes`` names every field that the event changes, besides ``updated_at``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    SessionState,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.decision import Actor, Decision, Facts, Given, SessionFacts, decide
from deerflow_runs.protocol.lifecycle import RunEvent

ME, OTHER, OLD = WorkerId("me"), WorkerId("other"), WorkerId("old")
NOW: Final = Micros(1_000_000_000)
LEASE: Final = Micros(15_000_000)
GRACE: Final = Micros(10_000_000)
BACKOFF: Final = Micros(7_000_000)
USAGE: Final = Usage(total_tokens=12, llm_calls=1)

LIVE: Final = SessionFacts(SessionState.LIVE, lease=LEASE)
DRAINING: Final = SessionFacts(SessionState.DRAINING, lease=LEASE)
PROVEN: Final = SessionFacts(SessionState.DEAD, proven=True, dead_at=NOW, lease=LEASE)
RIPE: Final = SessionFacts(SessionState.DEAD, dead_at=Micros(NOW - LEASE), lease=LEASE)
UNRIPE: Final = SessionFacts(SessionState.DEAD, dead_at=Micros(NOW - LEASE + 1), lease=LEASE)

QUEUED, PENDING, RUNNING = RunStatus.QUEUED, RunStatus.PENDING, RunStatus.RUNNING
SUCCESS, ERROR, TIMEOUT, INTERRUPTED = RunStatus.SUCCESS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.INTERRUPTED
INTERRUPT, ROLLBACK = CancelAction.INTERRUPT, CancelAction.ROLLBACK
FAIL, RESUME = OnOrphan.FAIL, OnOrphan.RESUME

E = RunEvent


@dataclass(frozen=True)
class Situation:
    """A row, who asks, what a statement sees beside the row, and what the event carries."""

    run: Run
    by: Actor
    facts: Facts = Facts(NOW)  # noqa: RUF009 - frozen
    given: Given = field(default_factory=Given)
    becomes: Mapping[str, Any] = field(default_factory=dict)

    def but(
        self,
        *,
        by: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
        becomes: Mapping[str, Any] | None = None,
        **run: Any,
    ) -> Situation:
        """The same with something different; keywords are fields of the row."""
        return Situation(
            replace(self.run, **run),
            replace(self.by, **(by or {})),
            replace(self.facts, **(facts or {})),
            replace(self.given, **(given or {})),
            self.becomes if becomes is None else becomes,
        )

    def decide(self, event: RunEvent) -> Decision:
        return decide(self.run, event, self.by, self.facts, self.given)


def row(status: RunStatus, **fields: Any) -> Run:
    """A run of our thread that has been granted three times and waits for nothing."""
    granted: dict[str, Any] = {"owner_worker_id": ME, "epoch": 4, "attempt": 1, "granted_at": NOW - GRACE}
    return Run(RunId("run"), ThreadId("thread"), status=status, **(granted | fields))


def ended(status: RunStatus, reason: str | None = None, *, by: WorkerId = ME, **fields: Any) -> dict[str, Any]:
    """What every ending changes."""
    why = {} if reason is None else {"stop_reason": reason}
    return {"status": status, "settled_by": by, "settled_at": NOW} | why | fields


HOLDER: Final = Actor(ME, 4)
_WAITING: Final[dict[str, Any]] = {"owner_worker_id": None, "epoch": 0, "attempt": 0, "granted_at": None}
_RESERVED: Final[dict[str, Any]] = {"kind": OperationKind.CHECKPOINT_WRITE}
_ORPHAN: Final[dict[str, Any]] = {"owner_worker_id": OTHER, "turn": 7}
_OWED: Final[dict[str, Any]] = {"turn": 7, "cancel_action": ROLLBACK, "cancel_requested_at": NOW - GRACE}
_RESULT: Final = Given(usage=USAGE, checkpoint="c2", stop_reason="loop")
_RECORDED: Final[dict[str, Any]] = {"usage": USAGE, "last_checkpoint": "c2"}

HAPPENS: Final[Mapping[RunEvent, Situation]] = {
    E.PROMOTE: Situation(
        row(QUEUED, **_WAITING, due_at=NOW),
        Actor(OTHER),
        becomes={"status": PENDING, "queue_behind": True, "not_before": NOW},
    ),
    E.CLAIM: Situation(
        row(
            PENDING,
            owner_worker_id=None,
            not_before=NOW,
            home_worker_id=ME,
            required_capabilities=frozenset({"gpu"}),
            waits_for={"missing": ["gpu"]},
        ),
        Actor(ME, capabilities=frozenset({"gpu", "disk"})),
        becomes={"owner_worker_id": ME, "epoch": 5, "granted_at": NOW, "waits_for": None},
    ),
    E.START: Situation(
        row(PENDING),
        HOLDER,
        Facts(NOW, turn=9),
        Given(base_heads={"": "c1"}),
        {"status": RUNNING, "turn": 9, "base_known": True, "base_heads": {"": "c1"}, "started_at": NOW},
    ),
    E.PROGRESS: Situation(
        row(RUNNING, turn=7),
        HOLDER,
        given=Given(usage=USAGE, checkpoint="c2", model_name="m"),
        becomes={"progress_at": NOW, "progress_epoch": 4, "model_name": "m"} | _RECORDED,
    ),
    E.SETTLE_SUCCESS: Situation(
        row(RUNNING, turn=7), HOLDER, given=_RESULT, becomes=ended(SUCCESS, "loop", **_RECORDED)
    ),
    E.SETTLE_ERROR: Situation(
        row(RUNNING, turn=7), HOLDER, given=Given(error="boom"), becomes=ended(ERROR, error="boom")
    ),
    E.SETTLE_TIMEOUT: Situation(
        row(RUNNING, turn=7), HOLDER, given=Given(stop_reason="timeout"), becomes=ended(TIMEOUT, "timeout")
    ),
    E.SETTLE_CANCELLED: Situation(
        row(PENDING, **_OWED),
        HOLDER,
        given=Given(restored=True, error="rolled back"),
        becomes=ended(INTERRUPTED, "rollback", error="rolled back"),
    ),
    E.SETTLE_ROLLBACK_FAILED: Situation(
        row(PENDING, **_OWED, attempt=4),
        HOLDER,
        given=Given(error="no base"),
        becomes=ended(ERROR, "rollback_failed", error="no base"),
    ),
    E.REQUEST_CANCEL: Situation(
        row(RUNNING, turn=7),
        Actor(OTHER),
        given=Given(action=ROLLBACK),
        becomes={"cancel_action": ROLLBACK, "cancel_requested_at": NOW},
    ),
    E.CANCEL_QUEUED: Situation(
        row(QUEUED, **_WAITING),
        Actor(OTHER),
        given=Given(action=ROLLBACK),
        becomes=ended(INTERRUPTED, "rollback", by=OTHER, cancel_action=ROLLBACK, cancel_requested_at=NOW),
    ),
    E.FORCE: Situation(
        row(RUNNING, **_ORPHAN, cancel_action=INTERRUPT, cancel_requested_at=NOW),
        Actor(ME),
        Facts(NOW, owner=UNRIPE),
        becomes=ended(INTERRUPTED, "interrupt", epoch=5),
    ),
    E.SEIZE: Situation(
        row(
            RUNNING,
            **(_OWED | _ORPHAN | {"cancel_requested_at": NOW}),
            attempt=3,
            home_worker_id=OTHER,
            required_capabilities=frozenset({"gpu"}),
            waits_for={"missing": ["gpu"]},
        ),
        Actor(ME, capabilities=frozenset({"gpu"})),
        Facts(NOW, owner=UNRIPE, home=UNRIPE),
        becomes={
            "status": PENDING,
            "owner_worker_id": ME,
            "epoch": 5,
            "granted_at": NOW,
            "attempt": 1,
            "waits_for": None,
        },
    ),
    E.TAKE_OVER_FAIL: Situation(
        row(RUNNING, **_ORPHAN),
        Actor(ME),
        Facts(NOW, owner=RIPE),
        Given(error="its worker is gone"),
        ended(ERROR, "orphan_recovered", epoch=5, error="its worker is gone"),
    ),
    E.TAKE_OVER_FAIL_WAITING: Situation(
        row(QUEUED, **_WAITING, home_worker_id=OTHER),
        Actor(ME),
        Facts(NOW, home=RIPE),
        becomes=ended(ERROR, "orphan_recovered", epoch=1),
    ),
    E.TAKE_OVER_RESUME: Situation(
        row(RUNNING, **_ORPHAN, on_orphan=RESUME, attempt=2, home_worker_id=OTHER),
        Actor(ME),
        Facts(NOW, owner=UNRIPE, home=UNRIPE),
        Given(backoff=BACKOFF),
        {
            "status": PENDING,
            "owner_worker_id": None,
            "home_worker_id": None,
            "epoch": 5,
            "attempt": 3,
            "not_before": NOW + BACKOFF,
        },
    ),
    E.TAKE_OVER_RESUME_WAITING: Situation(
        row(QUEUED, **_WAITING, on_orphan=RESUME, home_worker_id=OTHER),
        Actor(ME),
        Facts(NOW, home=UNRIPE),
        becomes={"home_worker_id": None},
    ),
    E.TAKE_OVER_RELEASE: Situation(
        row(PENDING, **_RESERVED, owner_worker_id=OTHER), Actor(ME), Facts(NOW, owner=UNRIPE)
    ),
    E.TAKE_BACK: Situation(
        row(RUNNING, turn=7, owner_worker_id=OLD, home_worker_id=OLD),
        Actor(ME, 4, previous=OLD),
        Facts(NOW, owner=UNRIPE, home=UNRIPE),
        becomes={"owner_worker_id": ME, "home_worker_id": ME, "epoch": 5},
    ),
    E.HAND_OVER: Situation(
        row(RUNNING, turn=7, attempt=2),
        HOLDER,
        becomes={"status": PENDING, "owner_worker_id": None, "epoch": 5, "not_before": NOW},
    ),
    E.DEFER: Situation(
        row(RUNNING, turn=7, progress_epoch=3, required_capabilities=frozenset({"disk"})),
        HOLDER,
        given=Given(requirements=frozenset({"gpu"})),
        becomes={
            "status": PENDING,
            "owner_worker_id": None,
            "epoch": 5,
            "not_before": NOW,
            "required_capabilities": frozenset({"disk", "gpu"}),
        },
    ),
    E.GIVE_BACK_FAIL: Situation(
        row(PENDING), HOLDER, given=Given(stop_reason="not_attached"), becomes=ended(ERROR, "not_attached", epoch=5)
    ),
    E.GIVE_BACK_RESUME: Situation(
        row(RUNNING, turn=7, on_orphan=RESUME, attempt=2),
        HOLDER,
        given=Given(backoff=BACKOFF),
        becomes={"status": PENDING, "owner_worker_id": None, "epoch": 5, "attempt": 3, "not_before": NOW + BACKOFF},
    ),
    E.RE_HOME: Situation(
        row(QUEUED, **_WAITING, home_worker_id=OLD),
        Actor(ME, previous=OLD),
        Facts(NOW, home=UNRIPE),
        becomes={"home_worker_id": ME},
    ),
    E.END_WAITING: Situation(
        row(PENDING, owner_worker_id=None, home_worker_id=ME),
        Actor(ME),
        Facts(NOW, home=DRAINING, actor=SessionState.DRAINING),
        becomes=ended(INTERRUPTED, "shutdown", epoch=5),
    ),
    E.RELEASE: Situation(row(PENDING, **_RESERVED), HOLDER),
    E.REMOVE: Situation(row(SUCCESS, settled_by=OTHER), Actor(ME)),
}

MAY_START_FROM: Final[Mapping[RunEvent, frozenset[RunStatus]]] = {
    E.PROMOTE: frozenset({QUEUED}),
    E.CLAIM: frozenset({PENDING}),
    E.START: frozenset({PENDING}),
    E.PROGRESS: frozenset({PENDING, RUNNING}),
    E.SETTLE_SUCCESS: frozenset({RUNNING}),
    E.SETTLE_ERROR: frozenset({PENDING, RUNNING}),
    E.SETTLE_TIMEOUT: frozenset({RUNNING}),
    E.SETTLE_CANCELLED: frozenset({PENDING, RUNNING}),
    E.SETTLE_ROLLBACK_FAILED: frozenset({PENDING}),
    E.REQUEST_CANCEL: frozenset({PENDING, RUNNING}),
    E.CANCEL_QUEUED: frozenset({QUEUED}),
    E.FORCE: frozenset({PENDING, RUNNING}),
    E.SEIZE: frozenset({PENDING, RUNNING}),
    E.TAKE_OVER_FAIL: frozenset({PENDING, RUNNING}),
    E.TAKE_OVER_FAIL_WAITING: frozenset({QUEUED, PENDING}),
    E.TAKE_OVER_RESUME: frozenset({PENDING, RUNNING}),
    E.TAKE_OVER_RESUME_WAITING: frozenset({QUEUED, PENDING}),
    E.TAKE_OVER_RELEASE: frozenset({PENDING, RUNNING}),
    E.TAKE_BACK: frozenset({PENDING, RUNNING}),
    E.HAND_OVER: frozenset({PENDING, RUNNING}),
    E.DEFER: frozenset({PENDING, RUNNING}),
    E.GIVE_BACK_FAIL: frozenset({PENDING, RUNNING}),
    E.GIVE_BACK_RESUME: frozenset({PENDING, RUNNING}),
    E.RE_HOME: frozenset({QUEUED, PENDING}),
    E.END_WAITING: frozenset({QUEUED, PENDING}),
    E.RELEASE: frozenset({PENDING, RUNNING}),
    E.REMOVE: frozenset({SUCCESS, ERROR, TIMEOUT, INTERRUPTED}),
}
"""The column "from" of the page."""
