"""What this worker's session is now: its row, its trust, its judgement of others, and whether it drains.

The heartbeat's thread writes here and every thread reads. Nothing waits, asks the store or decides here: each change is
one step from a frozen value to the next, which ``protocol.trust`` and ``protocol.judge`` compute.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from deerflow_runs.clock import Clock
from deerflow_runs.config import RunsConfig
from deerflow_runs.model import Session, SessionState, WorkerId, micros
from deerflow_runs.protocol.judge import Judge, Look, Verdict
from deerflow_runs.protocol.trust import BootSeconds, Standing, Trust
from deerflow_runs.store.base import Renewed


def new_worker_id(host: str) -> WorkerId:
    """An id that no session had before and none will have again (I12)."""
    return WorkerId(f"{host[:200]}:{secrets.token_hex(8)}")


@final
@dataclass(frozen=True, slots=True)
class _Present:
    """All that belongs together, so that no reader sees one session's trust with another's id."""

    session: Session
    trust: Trust
    judge: Judge
    opened_at: BootSeconds
    draining: bool = False


@final
class WorkerSession:
    """The present session of one manager. Safe to ask from any thread; what changes it belongs to the heartbeat.

    ``template`` says what stays the same from one session to the next: host, boot id, pid, version, labels and
    capabilities. Ids are made here, lease and beat come from ``config``. Until it is opened it is not trusted.
    """

    def __init__(self, template: Session, config: RunsConfig, clock: Clock) -> None:
        self._terms = config.terms()
        self._limits = config.limits()
        self._clock = clock
        self._lock = threading.Lock()
        self._template = replace(
            template,
            state=SessionState.LIVE,
            beat=0,
            lease=micros(self._terms.lease),
            beat_interval=micros(self._terms.beat),
        )
        now = self.now()
        session = self.fresh()
        judge = Judge(session.worker_id, self._terms, self._limits, steady_since=None, asked_at=now)
        self._present = _Present(session, Trust(self._terms, ends=now), judge, opened_at=now)

    # --- Asked from any thread ----------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> WorkerId:
        """The present session's id; another one as soon as a new session was opened (O13)."""
        return self._present.session.worker_id

    @property
    def session(self) -> Session:
        """The row as the store last answered it."""
        return self._present.session

    @property
    def trust(self) -> Trust:
        """How long the present session may be believed in. Ask ``trusted`` rather than keep what this says (O9)."""
        return self._present.trust

    @property
    def judge(self) -> Judge:
        """What this session remembers of its own beats and of the others'."""
        return self._present.judge

    @property
    def state(self) -> SessionState:
        """The state that the next beat asks for."""
        return SessionState.DRAINING if self._present.draining else SessionState.LIVE

    def now(self) -> BootSeconds:
        """The clock that trust is made of."""
        return BootSeconds(self._clock.boot_time())

    def trusted(self, worker_id: WorkerId | None = None) -> bool:
        """Whether something new may start now (I11), on behalf of ``worker_id`` if one is given: trust in a session
        says nothing about what another one owned. Computed from the clock whenever it is asked (O9)."""
        present = self._present
        mine = worker_id is None or worker_id == present.session.worker_id
        return mine and present.trust.trusted(self.now())

    def standing(self) -> Standing:
        """Trusted, suspended, or suspended for too long (O12)."""
        return self._present.trust.standing(self.now())

    def fresh(self) -> Session:
        """A session like this one under an id of its own, to be opened."""
        return replace(self._template, worker_id=new_worker_id(self._template.host))

    # --- Changed by the heartbeat -------------------------------------------------------------------------------------

    def opened(self, session: Session, *, sent_at: BootSeconds, answered_at: BootSeconds) -> None:
        """The store opened ``session``: a new id, a new trust, and a judge that remembers nothing (O13, O25).

        ``sent_at`` was read before the *first* request under this id: a repeat extends no lease.
        """
        trust = Trust.opened(self._terms, sent_at=sent_at)
        judge = Judge.opened(session.worker_id, self._terms, self._limits, sent_at=sent_at, answered_at=answered_at)
        self._change(lambda now: replace(now, session=session, trust=trust, judge=judge, opened_at=answered_at))

    def confirmed(self, renewed: Renewed, *, sent_at: BootSeconds, answered_at: BootSeconds) -> None:
        """The store accepted a beat that was sent and answered at these instants."""
        self._change(
            lambda now: replace(
                now,
                session=replace(now.session, beat=renewed.beat, expires_at=renewed.expires_at, state=renewed.state),
                trust=now.trust.renewed(sent_at=sent_at, now=answered_at),
                judge=now.judge.beat_confirmed(sent_at=sent_at, answered_at=answered_at),
            )
        )

    def failed(self) -> None:
        """A beat got no answer, or the session's connection broke. Trust is what it was; the judge is not well."""
        self._change(lambda now: replace(now, judge=now.judge.beat_failed()))

    def refused(self) -> None:
        """A beat was answered "not live": trust ends at once and this session never has it again (O13, I12)."""
        at = self.now()
        self._change(lambda now: replace(now, trust=now.trust.not_live(at), judge=now.judge.beat_failed()))

    def closing(self) -> None:
        """The session is about to be closed: nothing may start on its behalf any more, whether that succeeds or not."""
        at = self.now()
        self._change(lambda now: replace(now, trust=now.trust.not_live(at)))

    # --- Changed by others --------------------------------------------------------------------------------------------

    def judge_looked(self, look: Look) -> tuple[Verdict, ...]:
        """Remember a look at all sessions; who may be declared dead after it (O24). A look that was asked for before
        this session was open is another judge's and shows nothing (O25)."""
        present = self._change(
            lambda now: replace(now, judge=now.judge.looked(look)) if look.asked_at >= now.opened_at else now
        )
        return present.judge.verdicts(look) if look.asked_at >= present.opened_at else ()

    def drain(self) -> None:
        """From the next beat on the session says that it drains (O35). There is no way back."""
        self._change(lambda now: replace(now, draining=True))

    def _change(self, change: Callable[[_Present], _Present]) -> _Present:
        """The lock is held for the change of one value and never while anything is waited for."""
        with self._lock:
            self._present = change(self._present)
            return self._present
