"""The nouns of a run's life as plain values: statuses, actions, identifiers, and the row of a run.

Enums and frozen dataclasses only; no rule lives here (see ``protocol``) and nothing here does I/O. Values of the
enums are the words that are stored and, for run statuses, the words of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NewType, final

RunId = NewType("RunId", str)
ThreadId = NewType("ThreadId", str)
WorkerId = NewType("WorkerId", str)
"""One life of one manager: ``host:hex``, new at every open, never reused."""

Micros = NewType("Micros", int)
"""An instant or a duration in whole microseconds. Instants are always the store's clock."""

MICROS_PER_SECOND: Final = 1_000_000

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What both databases store alike; ``store.values`` makes or refuses it."""


def micros(seconds: float) -> Micros:
    """Seconds as whole microseconds, rounded to the nearest."""
    return Micros(round(seconds * MICROS_PER_SECOND))


class RunStatus(StrEnum):
    """Where a run stands. ``queued`` has never started; on the wire it and a vacant run both read as ``pending``."""

    QUEUED = "queued"
    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


ACTIVE: Final = frozenset({RunStatus.PENDING, RunStatus.RUNNING})
"""The statuses that hold a thread."""

TERMINAL: Final = frozenset({RunStatus.SUCCESS, RunStatus.ERROR, RunStatus.TIMEOUT, RunStatus.INTERRUPTED})
"""The statuses nothing ever leaves (I5)."""


class OperationKind(StrEnum):
    """What occupies a thread: a run, or a short reservation that excludes runs while it lasts."""

    RUN = "run"
    CHECKPOINT_WRITE = "checkpoint_write"
    ARTIFACT_WRITE = "artifact_write"
    DELETE = "delete"


class Strategy(StrEnum):
    """What a newcomer asks for when its thread is held (double texting)."""

    REJECT = "reject"
    ENQUEUE = "enqueue"
    INTERRUPT = "interrupt"
    ROLLBACK = "rollback"


class CancelAction(StrEnum):
    """What a cancel leaves behind: the checkpoints so far, or the state before the run. The first one recorded wins."""

    INTERRUPT = "interrupt"
    ROLLBACK = "rollback"


class OnOrphan(StrEnum):
    """What becomes of a run whose worker died (O29); fixed at admission."""

    FAIL = "fail"
    RESUME = "resume"


class OnDisconnect(StrEnum):
    """What the creator's disconnect does to its run."""

    CONTINUE = "continue"
    CANCEL = "cancel"


class SessionState(StrEnum):
    """State of a worker session. A dead session never beats again (I12)."""

    LIVE = "live"
    DRAINING = "draining"
    DEAD = "dead"


class ThreadOutcome(StrEnum):
    """How a thread's last ended run left it. "Busy" is never stored: it means that an operation exists."""

    IDLE = "idle"
    INTERRUPTED = "interrupted"
    ERROR = "error"


class StopReason(StrEnum):
    """Why a run ended other than by itself. Executors may give further words of their own."""

    INTERRUPT = "interrupt"
    ROLLBACK = "rollback"
    SHUTDOWN = "shutdown"
    CALLER_GONE = "caller_gone"
    NOT_ATTACHED = "not_attached"
    ORPHAN_RECOVERED = "orphan_recovered"
    POISON = "poison"
    ROLLBACK_FAILED = "rollback_failed"
    TIMEOUT = "timeout"


@final
@dataclass(frozen=True, slots=True)
class OneUser:
    """Reads and writes reach this user's rows only; anything else reads as missing."""

    user_id: str


@final
@dataclass(frozen=True, slots=True)
class Everyone:
    """No restriction by user; for operators and the manager's own work."""


EVERYONE: Final = Everyone()
Scope = OneUser | Everyone


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """Token and message accounting of one run; ``by_model`` and ``by_caller`` map names to total tokens."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    llm_calls: int = 0
    message_count: int = 0
    by_model: Mapping[str, int] = field(default_factory=dict)
    by_caller: Mapping[str, int] = field(default_factory=dict)
    first_human_message: str | None = None
    last_ai_message: str | None = None


NO_USAGE: Final = Usage()


@final
@dataclass(frozen=True, slots=True)
class RunKey:
    """Where a run is found: all rows of a thread live together, so the thread comes first."""

    thread_id: ThreadId
    run_id: RunId


@final
@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One operation of a thread as the store knows it; a run unless ``kind`` says it is a reservation.

    ``epoch`` is the fencing token: it grows at every grant and whenever the run is taken from its owner. ``turn``
    orders the runs that write to a thread; None until the first start. Instants are microseconds of the store's
    clock. ``progress_epoch`` is the last epoch that wrote a checkpoint (O30). ``kwargs`` (input and configuration) is
    None where a read left it out: only claims, admissions and single reads carry it. ``deliveries`` names what the
    ending puts into the outbox beside the receipt: kind to payload.
    """

    run_id: RunId
    thread_id: ThreadId
    kind: OperationKind = OperationKind.RUN
    status: RunStatus = RunStatus.PENDING
    seq: int = 0
    due_at: Micros = Micros(0)
    turn: int | None = None
    executor: str | None = None
    payload_version: int = 1
    kwargs: Mapping[str, Any] | None = None
    assistant_id: str | None = None
    user_id: str | None = None
    model_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy = Strategy.REJECT
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    on_orphan: OnOrphan = OnOrphan.FAIL
    home_worker_id: WorkerId | None = None
    required_capabilities: frozenset[str] = frozenset()
    idempotency_key: str | None = None
    payload_digest: str | None = None
    owner_worker_id: WorkerId | None = None
    epoch: int = 0
    attempt: int = 0
    max_attempts: int = 3
    progress_epoch: int | None = None
    granted_at: Micros | None = None
    not_before: Micros = Micros(0)
    queue_behind: bool = False
    cancel_action: CancelAction | None = None
    cancel_requested_at: Micros | None = None
    base_known: bool = False
    base_heads: Mapping[str, str] = field(default_factory=dict)
    run_timeout: Micros | None = None
    temporary: bool = False
    waits_for: Mapping[str, Any] | None = None
    error: str | None = None
    stop_reason: str | None = None
    settled_by: WorkerId | None = None
    superseded_by: RunId | None = None
    progress_at: Micros | None = None
    last_checkpoint: str | None = None
    deliveries: Mapping[str, Any] = field(default_factory=dict)
    usage: Usage = NO_USAGE
    created_at: Micros = Micros(0)
    started_at: Micros | None = None
    settled_at: Micros | None = None
    updated_at: Micros = Micros(0)

    def __repr__(self) -> str:
        """Who and where, never the input: a run's repr ends in logs and tracebacks."""
        kind = "Run" if self.kind is OperationKind.RUN else f"Reservation {self.kind.value}"
        owner = f"owner {self.owner_worker_id}" if self.owner_worker_id else "no owner"
        cancel = f", cancel {self.cancel_action.value}" if self.cancel_action else ""
        return f"<{kind} {self.run_id} on {self.thread_id}: {self.status.value}, {owner}, epoch {self.epoch}{cancel}>"

    @property
    def key(self) -> RunKey:
        """Where it is found."""
        return RunKey(self.thread_id, self.run_id)

    @property
    def active(self) -> bool:
        """Pending or running: it holds its thread."""
        return self.status in ACTIVE

    @property
    def terminal(self) -> bool:
        """Over for good."""
        return self.status in TERMINAL

    @property
    def vacant(self) -> bool:
        """Holds its thread and waits for a worker."""
        return self.status is RunStatus.PENDING and self.owner_worker_id is None

    @property
    def reservation(self) -> bool:
        """Occupies the thread without being a run."""
        return self.kind is not OperationKind.RUN

    @property
    def delayed(self) -> bool:
        """Admitted for later: exact whatever the clock does, as both instants come from one reading of it."""
        return self.due_at > self.created_at

    @property
    def rolled_back(self) -> bool:
        """Ended by a rollback: its thread is as if it had never run, and its row is kept for audit."""
        return self.status is RunStatus.INTERRUPTED and self.stop_reason == StopReason.ROLLBACK

    @property
    def rollback_owed(self) -> bool:
        """A rollback is recorded and the run has started once: its restore must happen before it ends (O4)."""
        return self.cancel_action is CancelAction.ROLLBACK and self.turn is not None


@final
@dataclass(frozen=True, slots=True)
class Session:
    """One worker session as the store knows it. ``proven`` says that its death is a fact, not a verdict (O27)."""

    worker_id: WorkerId
    state: SessionState = SessionState.LIVE
    beat: int = 0
    lease: Micros = Micros(15 * MICROS_PER_SECOND)
    beat_interval: Micros = Micros(2_500_000)
    expires_at: Micros = Micros(0)
    hinted: bool = False
    started_at: Micros = Micros(0)
    dead_at: Micros | None = None
    proven: bool = False
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset()
