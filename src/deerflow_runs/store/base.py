"""What a store promises: the ``RunStore`` protocol and the values that go in and come out.

Nothing here knows a database. Losing a race is an answer, never an exception; ``StoreUnavailable`` says that there was
no answer, and every write may then be repeated with the same ids (O8). All methods are safe to cancel: the write
happens as a whole or not at all, and which of the two a repeat finds out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, final

from deerflow_runs.model import (
    CancelAction,
    Micros,
    Run,
    RunId,
    RunKey,
    RunStatus,
    Scope,
    Session,
    SessionState,
    ThreadId,
    WorkerId,
)
from deerflow_runs.protocol.admission import Clash, Deny, DenyFull, DenyUser, Newcomer, Reuse
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Decision, Given
from deerflow_runs.protocol.judge import Sign, Verdict
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.signals import Signal, SignalMode

# --- Admission ------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Admitted:
    """The newcomer is in. ``run`` is its row: owned, vacant, or queued. ``incumbent`` is the operation it waits for or
    displaces, as it was left, so that its owner can be woken; ``ended`` are the waiting runs it displaced."""

    run: Run
    incumbent: Run | None = None
    ended: tuple[Run, ...] = ()


Admission = Admitted | Reuse | Clash | Deny | DenyFull | DenyUser
"""The answer to a newcomer; see ``protocol.admission`` for the refusals."""


# --- Sessions -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A cancel recorded on a run that the beating session owns (O10)."""

    key: RunKey
    epoch: int
    action: CancelAction


@final
@dataclass(frozen=True, slots=True)
class Renewed:
    """The beat was accepted. ``requests`` are only read, so a lost reply loses nothing."""

    beat: int
    expires_at: Micros
    state: SessionState
    requests: tuple[CancelRequest, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class NotLive:
    """The session is dead or unknown and never beats again: open a new one and take the runs back (O13)."""


Renewal = Renewed | NotLive


class SessionLine(Protocol):
    """One session's own connection (O10), which no pool, no manager and no other write can keep busy.

    It belongs to the event loop in which it was connected. Everything that asks the database raises
    ``StoreUnavailable`` when the connection is broken, missing, or a lock stays; nothing is retried, and a beat that
    failed may or may not have been counted: ``connect`` again, then repeat it. Cancelling such a question (a
    time-out) ends at once, also on a dead network, but may break the connection off, so connect again after it too.
    """

    @property
    def mode(self) -> SignalMode:
        """How ``wait`` hears of signals now. On PostgreSQL POLLING until a ``probe`` has come back."""

    @property
    def hinted(self) -> bool:
        """Whether this connection holds the session's kernel-released hint now (O27). Never raises."""

    async def connect(self, worker_id: WorkerId) -> None:
        """Connect, listen, and take the hint; also to reconnect, or for a new session: the old connection is closed
        first. A hint that cannot be taken is no error, only not ``hinted``."""

    async def open_session(self, session: Session) -> Session:
        """See ``OwnershipStore.open_session``; the line fills in ``hinted``, and ``boot_id`` where it is empty."""

    async def renew(self, worker_id: WorkerId, *, state: SessionState) -> Renewal:
        """One beat, one statement, one round trip; the line says itself whether it is ``hinted``."""

    async def requests(self, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
        """The cancel requests a beat would answer, by one read that renews nothing."""

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``OwnershipStore.close_session``."""

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """The signals for this worker as soon as there are any, or none when the time is over. A signal that came
        between two waits is in the next. Safe to cancel: nothing is lost and nothing is broken off.

        On SQLite any commit of anybody, our own store's and our own beats included, means CANCEL and WORK."""

    async def probe(self) -> bool:
        """Whether signals still arrive (PostgreSQL: a NOTIFY to ourselves, within a second); sets ``mode``. Also
        takes a hint again that was held by somebody else. A line that answers nothing at all is broken off, and
        raises."""

    async def close(self) -> None:
        """Close the connection and let the hint go. Never raises and never waits for the network."""


# --- Recovery -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Swept:
    """What one pass over the orphans did (O26): runs ended, resumed or freed of a dead home, reservations released."""

    ended: tuple[Run, ...] = ()
    resumed: tuple[Run, ...] = ()
    freed: tuple[Run, ...] = ()
    released: tuple[Run, ...] = ()

    @property
    def total(self) -> int:
        """How many operations were changed."""
        return len(self.ended) + len(self.resumed) + len(self.freed) + len(self.released)


@final
@dataclass(frozen=True, slots=True)
class Settlement:
    """One run's end, to be written together with others'."""

    key: RunKey
    event: RunEvent
    by: Actor
    given: Given = NOTHING_GIVEN


# --- Reading --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list, newest first. ``after`` asks for what follows; None: this was the end. ``unreadable`` names
    rows that could not be read and were left out."""

    runs: tuple[Run, ...]
    after: str | None = None
    unreadable: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs of a list; what is None does not restrict. ``metadata`` must be contained in the run's;
    ``rolled_back`` is what ``Run.rolled_back`` must be."""

    statuses: Collection[RunStatus] | None = None
    metadata: Mapping[str, object] | None = None
    rolled_back: bool | None = None


@final
@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Tokens of a thread's runs. Runs of several models count once per model in ``runs_by_model``, so those overlap."""

    runs: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    by_model: Mapping[str, int] = field(default_factory=dict)
    by_caller: Mapping[str, int] = field(default_factory=dict)
    runs_by_model: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Counts:
    """Runs by status (``vacant`` are among the pending), why vacant runs wait, and sessions by state."""

    by_status: Mapping[RunStatus, int]
    vacant: int
    waiting_for: Mapping[str, int]
    sessions: Mapping[SessionState, int]


@final
@dataclass(frozen=True, slots=True)
class Visibility:
    """Which runs a thread's history hides after regenerations and edits (behaviours B188–B190)."""

    hidden: frozenset[RunId]


class OutboxKind(StrEnum):
    """What an ending leaves to be done. A receipt is a record; the others are delivered at least once."""

    RECEIPT = "receipt"
    WEBHOOK = "webhook"
    HOOK = "hook"
    CLEANUP = "cleanup"


# --- The store ------------------------------------------------------------------------------------------------------


class OwnershipStore(Protocol):
    """Sessions, operations and their one table of transitions: what decides who owns a run. The shipped contract
    (``testing.contract``) says what an implementation must do, and the model store is one."""

    async def open(self) -> None:
        """Connect and check the tables; raises ``SchemaMismatch`` with the command that mends them."""

    async def close(self) -> None:
        """Finish what was accepted and release every connection."""

    async def now(self) -> Micros:
        """The store's clock, the only one that stamps and judges durable instants."""

    # Sessions

    async def open_session(self, session: Session) -> Session:
        """Begin a session with a fresh lease. Repeating it with the same id answers the row that is there while it is
        live; an id that died is refused with ``UsageError``: ids are never reused (I12)."""

    async def renew(
        self, worker_id: WorkerId, *, hinted: bool = False, state: SessionState = SessionState.LIVE
    ) -> Renewal:
        """One beat: extend the lease and read the cancel requests (O10). One statement, whatever the number of runs.
        A draining session stays draining."""

    async def close_session(self, worker_id: WorkerId) -> bool:
        """The last word of a session that leaves in order: dead and proven, so nobody waits for its expiry (O35)."""

    async def declare_dead(self, verdict: Verdict) -> bool:
        """Carry out a judge's verdict by one compare-and-set (O24); False: it beat meanwhile, or was dead already."""

    async def sessions(self) -> tuple[Session, ...]:
        """All sessions that are kept, oldest first."""

    async def bury_strangers(self) -> int:
        """Give owners and homes without a row a tombstone, so that their runs can be found as orphans (O26)."""

    # Operations

    async def admit(self, newcomer: Newcomer, given: Given = NOTHING_GIVEN) -> Admission:
        """Let an operation into its thread by its strategy, or say who holds it (O1–O5)."""

    async def apply(self, key: RunKey, event: RunEvent, by: Actor, given: Given = NOTHING_GIVEN) -> Decision:
        """Let one event happen to one operation if the table allows it; endings promote, project and record (O28)."""

    async def settle_many(self, settlements: Sequence[Settlement]) -> tuple[Decision, ...]:
        """Several ends at once, answered in order; those that somebody waits behind take the long way one by one."""

    # Sets of operations

    async def claim(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """Take up to ``limit`` vacant runs that ``by`` can run, with their stored input (O31)."""

    async def take_over(self, by: Actor, given: Given, limit: int) -> Swept:
        """Recover up to ``limit`` orphans of each kind (O26, O29–O31)."""

    async def force(self, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """End cancelled runs that nobody holds or whose grace is over, where nothing is owed (O4)."""

    async def promote(self, limit: int) -> tuple[Run, ...]:
        """Make due waiting runs of up to ``limit`` idle threads active: how delayed runs come to life (O7)."""

    async def hand_over(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """Make every uncancelled run of a session that may resume elsewhere vacant, whatever its epoch (O35)."""

    async def end_held(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """End what a session holds and ``hand_over`` leaves to it, whatever the epochs: interrupted by the recorded
        cancel, else by shutdown. A run that owes a rollback stays as it is (O23, O35, I16)."""

    async def release_held(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """Release every reservation of a session, whatever its epoch (O35)."""

    async def re_home(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """Runs that wait with ``by.previous`` as home get ``by`` as home (O13)."""

    async def end_waiting(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """End what waits with a draining session as its home (O35)."""

    # Reads that ownership needs

    async def get(self, key: RunKey, *, scope: Scope) -> Run | None:
        """One run with its stored input; a foreign one reads as missing. Reservations are no runs."""

    async def get_many(self, thread_id: ThreadId, run_ids: Collection[RunId], *, scope: Scope) -> dict[RunId, Run]:
        """Those of the runs that exist on this thread."""

    async def owned(self, worker_id: WorkerId) -> tuple[Run, ...]:
        """The active operations that name this session as owner (O12's give back compares them with its own)."""

    async def active(self, thread_id: ThreadId) -> Run | None:
        """The operation that holds the thread, whatever its kind."""

    async def queue(self, thread_id: ThreadId) -> tuple[Run, ...]:
        """The runs that wait on the thread, in their order."""

    async def is_newest(self, key: RunKey) -> bool:
        """Whether no run was admitted to the thread after this one, however it ended; a reservation is none. False for
        a run that is not there."""


class RunStore(OwnershipStore, Protocol):
    """An ownership store that also keeps history: kept in a database that many processes share."""

    async def forget_dead(self, *, kept_for: Micros) -> int:
        """Remove sessions that died longer ago than ``kept_for`` and that no open run names."""

    async def purge(self, *, before: Micros, limit: int) -> int:
        """Remove up to ``limit`` operations that ended before an instant, with all that hangs on them. A run stays
        while one of its deliveries is still to be made: what an ending owes is delivered at least once."""

    async def list_runs(
        self,
        thread_id: ThreadId,
        *,
        scope: Scope,
        only: RunFilter | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """Runs of a thread, newest first, by a cursor that is stable while others come and go."""

    async def threads_of(
        self, user_id: str, *, limit: int = 100, after: ThreadId | None = None
    ) -> tuple[ThreadId, ...]:
        """The threads that belong to a user or on which the user has a run, in one order, at most ``limit`` after
        ``after``; fewer than ``limit``: there are no more. For erasing what is kept of a user."""

    async def seizable(self, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """Runs that owe a rollback and that ``by`` may seize (O4)."""

    async def has_inflight(self, thread_id: ThreadId) -> bool:
        """Whether a run is active or waits on the thread; a reservation is none."""

    async def next_due(self) -> Micros | None:
        """Microseconds until the next delayed run is due, by the store's clock; None: no run is delayed."""

    async def unclaimed(self, waited_for: Micros, *, limit: int, after: Run | None = None) -> tuple[Run, ...]:
        """Vacant runs that could have been claimed for so long and were not, the longest first, after ``after`` in that
        order. Cancelled ones are left out."""

    async def have_ended(self, run_ids: Collection[RunId]) -> Mapping[RunId, bool]:
        """Those of the runs that are there, whatever their threads, and whether they are over."""

    async def note_waiting(self, key: RunKey, waits_for: Mapping[str, object]) -> bool:
        """Write down why a vacant run is not claimed (O31); False: it is not vacant any more."""

    async def counts(self) -> Counts:
        """How many of what, for health and metrics; never scans ended runs."""

    async def tokens_by_thread(self, thread_id: ThreadId, *, scope: Scope, include_active: bool = False) -> TokenTotals:
        """Token accounting of a thread: ended runs of every kind, active ones on request."""

    async def visibility(self, thread_id: ThreadId, *, scope: Scope) -> Visibility:
        """Which runs regenerations and edits hide."""

    # Between workers

    def session_line(self) -> SessionLine:
        """A line for one worker session, not connected yet: no I/O. It may be used in any one event loop."""

    async def send(self, signal: Signal, to: WorkerId | None = None) -> None:
        """Wake the worker ``to``, or everybody. To be called after the commit it tells of. Never raises, and waits a
        second at most: a signal is a hint, and what it tells of is found with the next beat all the same (O33)."""

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:
        """What the kernel says about these sessions' processes, for a judge's look (O27); who is missing has none."""
