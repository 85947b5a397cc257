"""A database of worker sessions and runs as plain dicts: what every store must look like from outside.

Synchronous and alone in the world: each method is one transaction. It owns its clock and decides nothing itself; the
table's ``decide`` and ``plan_admission`` do, so it holds no rule that a real store could get wrong in another way. The
model store and the exhaustive orderings stand on it; it is not for production.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, assert_never, final

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.admission import (
    Clash,
    ClearFirst,
    Deny,
    DenyFull,
    DenyUser,
    Displace,
    Enter,
    Newcomer,
    PromoteFirst,
    Reuse,
    ThreadView,
    Wait,
    admitted_at,
    plan_admission,
)
from deerflow_runs.protocol.decision import (
    NOTHING_GIVEN,
    Actor,
    Applied,
    Decision,
    Facts,
    Given,
    SessionFacts,
    decide,
    is_due,
)
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import TRANSITIONS, Into, RunEvent
from deerflow_runs.testing.arrival import arrival

BEGINNING: Final = Micros(0)


def _occupies_user(run: Run) -> bool:
    """Counts among the active runs of its user (I19)."""
    return run.active and not run.reservation


TAKE_OVERS: Final = (
    RunEvent.TAKE_OVER_FAIL,
    RunEvent.TAKE_OVER_FAIL_WAITING,
    RunEvent.TAKE_OVER_RESUME,
    RunEvent.TAKE_OVER_RESUME_WAITING,
    RunEvent.TAKE_OVER_RELEASE,
)
"""What a sweep tries on an operation whose session may be dead; at most one of them can happen."""


@final
@dataclass(frozen=True, slots=True)
class Receipt:
    """What remains of an ending for whoever counts or bills: one per ended run, none for reservations."""

    run_id: RunId
    thread_id: ThreadId
    status: RunStatus
    stop_reason: str | None
    settled_by: WorkerId | None
    usage: Usage
    last_checkpoint: str | None
    settled_at: Micros | None

    @classmethod
    def of(cls, run: Run) -> Receipt:
        """The receipt of a run that has just ended."""
        whence = (run.run_id, run.thread_id, run.status, run.stop_reason, run.settled_by)
        return cls(*whence, run.usage, run.last_checkpoint, run.settled_at)


@final
@dataclass(frozen=True, slots=True)
class Admitted:
    """The newcomer's row as inserted, and the plan by which it came in."""

    run: Run
    plan: Enter | Wait | Displace


Answer = Admitted | Reuse | Clash | Deny | DenyFull | DenyUser


@final
@dataclass(frozen=True, slots=True)
class Renewed:
    """The session's row after its beat, and the cancel requests of the runs it owns (O10)."""

    session: Session
    signals: tuple[tuple[RunId, CancelAction], ...]


@final
@dataclass(slots=True, kw_only=True)
class World:
    """All rows of one database. Rows are frozen: reading them is a look, ``clone`` is a snapshot."""

    now: Micros = BEGINNING
    sessions: dict[WorkerId, Session] = field(default_factory=dict)
    runs: dict[RunId, Run] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    keys: dict[tuple[str, str], RunId] = field(default_factory=dict)
    seq: int = 0
    turn: int = 0

    def clone(self) -> World:
        """An independent copy: what happens to one is not seen by the other."""
        return replace(
            self,
            sessions=dict(self.sessions),
            runs=dict(self.runs),
            receipts=list(self.receipts),
            keys=dict(self.keys),
        )

    def advance(self, by: int) -> None:
        """Let ``by`` microseconds pass."""
        self.now = Micros(self.now + by)

    # --- Reading ----------------------------------------------------------------------------------------------------

    def active(self, thread_id: ThreadId) -> Run | None:
        """The operation that holds the thread."""
        return next((run for run in self.runs.values() if run.active and run.thread_id == thread_id), None)

    def queue(self, thread_id: ThreadId) -> tuple[Run, ...]:
        """The runs that wait on the thread, in their order (I17)."""
        waiting = [r for r in self.runs.values() if r.status is RunStatus.QUEUED and r.thread_id == thread_id]
        return tuple(sorted(waiting, key=lambda run: (run.due_at, run.seq)))

    def first_due(self, thread_id: ThreadId) -> Run | None:
        """The run whose turn it is once the thread is free."""
        return next((run for run in self.queue(thread_id) if is_due(run, self.now)), None)

    def facts(self, run: Run | None, by: Actor) -> Facts:
        """What a statement about ``run`` would see beside its row."""
        actor = self.sessions.get(by.worker_id)
        state = actor.state if actor is not None else SessionState.DEAD
        if run is None:
            return Facts(self.now, actor=state, turn=self.turn + 1)
        holder = self.active(run.thread_id)
        return Facts(
            now=self.now,
            owner=self._session_facts(run.owner_worker_id),
            home=self._session_facts(run.home_worker_id),
            actor=state,
            thread_active=holder is not None and holder.run_id != run.run_id,
            first_due=self.first_due(run.thread_id) is run,
            turn=self.turn + 1,
        )

    def view(self, newcomer: Newcomer) -> ThreadView:
        """The look at a thread that an admission decides on."""
        active = self.active(newcomer.thread_id)
        owner = self.sessions.get(active.owner_worker_id) if active and active.owner_worker_id else None
        return ThreadView(
            facts=self.facts(active, Actor(newcomer.worker_id)),
            known=self.runs.get(newcomer.run_id) or self._with_key_of(newcomer),
            active=active,
            queued=self.queue(newcomer.thread_id),
            owner_expires_at=owner.expires_at if owner is not None else None,
            user_active=sum(run.user_id == newcomer.user_id for run in self.runs.values() if _occupies_user(run)),
        )

    def _with_key_of(self, newcomer: Newcomer) -> Run | None:
        if newcomer.idempotency_key is None:
            return None
        run_id = self.keys.get((newcomer.idempotency_scope, newcomer.idempotency_key))
        return None if run_id is None else self.runs[run_id]

    def _session_facts(self, worker_id: WorkerId | None) -> SessionFacts | None:
        session = self.sessions.get(worker_id) if worker_id is not None else None
        if session is None:
            return None
        return SessionFacts(session.state, session.proven, session.dead_at or Micros(0), session.lease)

    # --- Arrivals ---------------------------------------------------------------------------------------------------

    def admit(self, newcomer: Newcomer, given: Given = NOTHING_GIVEN) -> Answer:
        """Let ``newcomer`` in, or say why not. What O3 then does on the spot (force, seize) is left to the caller."""
        by = Actor(newcomer.worker_id)
        while True:
            plan = plan_admission(newcomer, self.view(newcomer), given)
            match plan:
                case Reuse() | Clash() | Deny() | DenyFull() | DenyUser():
                    return plan
                case ClearFirst(run, event):
                    self.apply(run.run_id, event, by, given)
                case PromoteFirst():
                    self.promote(newcomer.thread_id, by)
                case Enter():
                    return Admitted(self._insert(newcomer, RunStatus.PENDING), plan)
                case Wait(behind):
                    self._flag(behind)
                    return Admitted(self._insert(newcomer, RunStatus.QUEUED), plan)
                case Displace():
                    return Admitted(self._displace(newcomer, plan, by), plan)
                case _:
                    assert_never(plan)

    def _displace(self, newcomer: Newcomer, plan: Displace, by: Actor) -> Run:
        """O3: the cancel, the newcomer's place and the ends of those that waited are one transaction."""
        given = Given(action=plan.action, error=f"displaced by run {newcomer.run_id}")
        if plan.incumbent is not None:
            self.apply(plan.incumbent.run_id, RunEvent.REQUEST_CANCEL, by, given)
            self._flag(plan.incumbent)
            cancelled = self.runs[plan.incumbent.run_id]
            superseded_by = cancelled.superseded_by or newcomer.run_id
            self.runs[cancelled.run_id] = replace(cancelled, superseded_by=superseded_by)
        for run in plan.ended:
            self.apply(run.run_id, RunEvent.CANCEL_QUEUED, by, given)
        return self._insert(newcomer, RunStatus.PENDING if plan.incumbent is None else RunStatus.QUEUED)

    def _flag(self, incumbent: Run | None) -> None:
        """O2: its end must look at the queue."""
        if incumbent is not None:
            self.runs[incumbent.run_id] = replace(self.runs[incumbent.run_id], queue_behind=True)

    def _insert(self, newcomer: Newcomer, status: RunStatus) -> Run:
        self.seq += 1
        waiting = self.queue(newcomer.thread_id) if status is RunStatus.QUEUED else ()
        run = arrival(newcomer, status, now=admitted_at(newcomer, waiting, self.now), seq=self.seq)
        self.runs[run.run_id] = run
        if newcomer.idempotency_key is not None:
            self.keys[newcomer.idempotency_scope, newcomer.idempotency_key] = run.run_id
        return run

    # --- Events -----------------------------------------------------------------------------------------------------

    def apply(self, run_id: RunId, event: RunEvent, by: Actor, given: Given = NOTHING_GIVEN) -> Decision:
        """Let ``event`` happen to a run if the table allows it, with all that an ending brings (O28)."""
        run = self.runs.get(run_id)
        decision = decide(run, event, by, self.facts(run, by), given)
        if run is not None and isinstance(decision, Applied) and not decision.repeated:
            self._commit(run, decision.run, event, by)
        return decision

    def promote(self, thread_id: ThreadId, by: Actor) -> Run | None:
        """Give a free thread to the first due run that waits for it; level-triggered (O7)."""
        first = self.first_due(thread_id)
        if first is None or not isinstance(self.apply(first.run_id, RunEvent.PROMOTE, by), Applied):
            return None
        return self.runs[first.run_id]

    def claim(self, by: Actor, limit: int) -> tuple[Run, ...]:
        """Make at most ``limit`` vacant runs the asker's own, those that are ready longest first."""
        vacant = sorted((r for r in self.runs.values() if r.vacant), key=lambda run: (run.not_before, run.seq))
        return self._all_that_happen(vacant, (RunEvent.CLAIM,), by, NOTHING_GIVEN, limit)

    def take_over(self, by: Actor, given: Given, limit: int) -> tuple[Run, ...]:
        """Do to at most ``limit`` orphans and homeless runs what their policy says, oldest first (O26, O31)."""
        open_runs = sorted((r for r in self.runs.values() if not r.terminal), key=lambda run: run.seq)
        return self._all_that_happen(open_runs, TAKE_OVERS, by, given, limit)

    def _all_that_happen(
        self, runs: list[Run], events: tuple[RunEvent, ...], by: Actor, given: Given, limit: int
    ) -> tuple[Run, ...]:
        happened: list[Run] = []
        for run in runs:
            if len(happened) == limit:
                break
            decisions: Iterator[Decision] = (self.apply(run.run_id, event, by, given) for event in events)
            happened += [decision.run for decision in decisions if isinstance(decision, Applied)][:1]
        return tuple(happened)

    def _commit(self, before: Run, after: Run, event: RunEvent, by: Actor) -> None:
        gone = TRANSITIONS[event].target is Into.GONE
        if gone:
            self._delete(before)
        else:
            self.runs[after.run_id] = after
            self.turn = max(self.turn, after.turn or 0)
        if after.terminal and not before.terminal:
            self.receipts.append(Receipt.of(after))
        if TRANSITIONS[event].frees:
            self._let_in_the_next(before, by)

    def _let_in_the_next(self, ended: Run, by: Actor) -> None:
        """Promote whose turn it is; what waits on a deleted thread goes with it (O28)."""
        if ended.kind is OperationKind.DELETE:
            for run in self.queue(ended.thread_id):
                self.apply(run.run_id, RunEvent.CANCEL_QUEUED, by, Given(error="the thread was deleted"))
        self.promote(ended.thread_id, by)

    def _delete(self, run: Run) -> None:
        """A receipt is kept as long as its run, and so is its key (O5)."""
        del self.runs[run.run_id]
        self.receipts = [kept for kept in self.receipts if kept.run_id != run.run_id]
        self.keys = {key: run_id for key, run_id in self.keys.items() if run_id != run.run_id}

    # --- Sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, session: Session) -> Session:
        """Begin a session with a fresh lease. An id that was ever used is the caller's mistake (I12)."""
        if session.worker_id in self.sessions:
            raise ValueError(f"worker id {session.worker_id} was used before")
        expires = Micros(self.now + session.lease)
        opened = replace(session, state=SessionState.LIVE, started_at=self.now, expires_at=expires)
        self.sessions[session.worker_id] = opened
        return opened

    def renew(
        self, worker_id: WorkerId, *, state: SessionState = SessionState.LIVE, hinted: bool = False
    ) -> Renewed | None:
        """One beat; None if the session is not live or draining any more: a dead one never beats again (I12)."""
        session = self.sessions.get(worker_id)
        if session is None or session.state is SessionState.DEAD:
            return None
        expires = Micros(self.now + session.lease)
        beaten = replace(session, state=state, beat=session.beat + 1, expires_at=expires, hinted=hinted)
        self.sessions[worker_id] = beaten
        owned = [run for run in self.runs.values() if run.active and run.owner_worker_id == worker_id]
        return Renewed(beaten, tuple((r.run_id, r.cancel_action) for r in owned if r.cancel_action is not None))

    def close_session(self, worker_id: WorkerId) -> None:
        """The last word of a session that leaves in order: dead, and nobody needs to wait for it (O35)."""
        self._bury(worker_id, proven=True)

    def declare_dead(self, verdict: Verdict) -> bool:
        """Carry out a judge's verdict if it still holds; False if the session beat meanwhile, or was dead (O24)."""
        session = self.sessions.get(verdict.worker_id)
        if session is None or session.state is SessionState.DEAD or session.beat != verdict.beat:
            return False
        match verdict.how:
            case How.EXPIRY:
                holds = session.expires_at < self.now - verdict.grace
            case How.HINT:
                holds = session.hinted
            case How.PROOF:
                holds = True
            case _:
                assert_never(verdict.how)
        if holds:
            self._bury(verdict.worker_id, proven=verdict.how is How.PROOF)
        return holds

    def _bury(self, worker_id: WorkerId, *, proven: bool) -> None:
        session = self.sessions.get(worker_id)
        if session is not None and session.state is not SessionState.DEAD:
            dead = replace(session, state=SessionState.DEAD, dead_at=self.now, proven=proven)
            self.sessions[worker_id] = dead
