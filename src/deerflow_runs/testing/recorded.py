"""What a recording database remembers, as frozen values: every change of a run, a session or the outbox, every step.

No I/O and no judgement here: ``recording`` writes and reads the table, ``invariants`` judges. Histories can be made by
hand as well, which is how the judge itself is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self, final

from deerflow_runs.model import Micros, Run, RunId, RunKey, RunStatus, Session, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Where a change stands: ``number`` ascends in the order in which rows were changed, ``at`` is the database's
    clock, ``transaction`` is PostgreSQL's number; SQLite cannot tell (None)."""

    number: int
    at: Micros = Micros(0)
    transaction: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanged(Recorded):
    """A row of ``dr_runs`` before and after. ``scope`` is that of its idempotency key."""

    before: Run | None
    after: Run | None
    scope: str = ""

    @property
    def run(self) -> Run:
        """The row afterwards, or as it was when it went."""
        run = self.after or self.before
        assert run is not None, "a change of nothing"
        return run

    @property
    def owner_before(self) -> WorkerId | None:
        """Who held it before, if anybody."""
        return self.before.owner_worker_id if self.before is not None and self.before.active else None

    @property
    def granted(self) -> bool:
        """It was given to a session: admitted with an owner, claimed, seized, or taken back."""
        if self.after is None or not self.after.active or self.after.owner_worker_id is None:
            return False
        return self.before is None or self.after.epoch > self.before.epoch

    @property
    def started(self) -> bool:
        """It began to run under its present epoch."""
        running = self.after is not None and self.after.status is RunStatus.RUNNING
        return running and (self.before is None or self.before.status is not RunStatus.RUNNING)

    @property
    def vacated(self) -> bool:
        """It was taken from its owner and goes on without one."""
        return self.owner_before is not None and self.after is not None and self.after.vacant

    @property
    def promoted(self) -> bool:
        """It came out of the queue and holds its thread."""
        queued = self.before is not None and self.before.status is RunStatus.QUEUED
        return queued and self.after is not None and self.after.active

    @property
    def ended(self) -> bool:
        """It was open and is over; a reservation that was released is over as well."""
        open_before = self.before is not None and not self.before.terminal
        return open_before and (self.after is None or self.after.terminal)

    def __str__(self) -> str:
        return f"#{self.number} {self.before or 'nothing'} -> {self.after or 'nothing'}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChanged(Recorded):
    """A row of ``dr_workers`` before and after."""

    before: Session | None
    after: Session | None

    @property
    def session(self) -> Session:
        """The row afterwards, or as it was when it went."""
        session = self.after or self.before
        assert session is not None, "a change of nothing"
        return session

    def __str__(self) -> str:
        return f"#{self.number} session {self.session.worker_id}: {_told(self.before)} -> {_told(self.after)}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxChanged(Recorded):
    """A row of ``dr_outbox`` came, or was tried or delivered."""

    run_id: RunId
    kind: str
    attempts: int = 0
    delivered: bool = False
    new: bool = True

    def __str__(self) -> str:
        return f"#{self.number} {self.kind} of {self.run_id}: attempts {self.attempts}, delivered {self.delivered}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepWritten(Recorded):
    """A test's executor wrote a step under the fence (``recording.write_step``), with the token it believed to hold."""

    key: RunKey
    epoch: int
    turn: int | None
    step: str
    value: str | None = None

    def __str__(self) -> str:
        return f"#{self.number} step {self.step} of {self.key.run_id} at turn {self.turn}, epoch {self.epoch}"


Change = RunChanged | SessionChanged | OutboxChanged | StepWritten


def _told(session: Session | None) -> str:
    if session is None:
        return "nothing"
    proven = " (proven)" if session.proven else ""
    return f"{session.state.value}{proven}, beat {session.beat}, expires {session.expires_at}"


@final
@dataclass(frozen=True, slots=True)
class History:
    """All that was recorded, one tuple for each transaction, in the order in which they were committed.

    What is exact: the changes of one row, and of rows that one lock orders (a thread's operations by its active row,
    its unique index and the thread lock; a run and the writes under its fence). Transactions that share no lock may
    stand either way round. On SQLite there is one writer, so the order is exact throughout, but where one transaction
    ends is not recorded: ends, promotions and receipts that follow each other count as one.
    """

    transactions: tuple[tuple[Change, ...], ...] = field(default=())

    @classmethod
    def of(cls, changes: Iterable[Change]) -> Self:
        """Put into the order of commits what was recorded, in any order."""
        ordered = sorted(changes, key=lambda change: change.number)
        known = [change for change in ordered if change.transaction is not None]
        return cls(_by_transaction(ordered) if len(known) == len(ordered) else tuple(_by_guess(ordered)))

    @property
    def changes(self) -> Iterator[Change]:
        """One after the other."""
        return (change for transaction in self.transactions for change in transaction)

    def about(self, run_id: RunId) -> tuple[Change, ...]:
        """What was recorded of one run, for a test that wants to look itself."""
        return tuple(change for change in self.changes if run_of(change) == run_id)


def run_of(change: Change) -> RunId | None:
    """The run that a change is about, if it is about one."""
    match change:
        case RunChanged():
            return change.run.run_id
        case OutboxChanged():
            return change.run_id
        case StepWritten():
            return change.key.run_id
        case SessionChanged():
            return None


def _by_transaction(ordered: Sequence[Change]) -> tuple[tuple[Change, ...], ...]:
    """A transaction holds its locks from its first change to its commit. So of two that met on a lock, the one that
    committed first has also made its last change first: order by the last change."""
    together: dict[int | None, list[Change]] = {}
    for change in ordered:
        together.setdefault(change.transaction, []).append(change)
    return tuple(tuple(one) for one in sorted(together.values(), key=lambda changes: changes[-1].number))


def _by_guess(ordered: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    for ending, changes in groupby(ordered, key=_may_be_part_of_an_ending):
        together = tuple(changes)
        yield from [together] if ending else [(change,) for change in together]


def _may_be_part_of_an_ending(change: Change) -> bool:
    """O28: an ending changes one or more runs, writes their receipts, and promotes, all in one transaction."""
    if isinstance(change, RunChanged):
        return change.ended or change.promoted
    return isinstance(change, OutboxChanged) and change.new
