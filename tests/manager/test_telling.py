"""Whoever waits because trust had ended is told that it is back, however short the time between (O12)."""

from __future__ import annotations

from deerflow_runs.config import RunsConfig
from deerflow_runs.manager.messages import Message, TrustEnded, TrustRegained
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.telling import TrustTeller
from deerflow_runs.model import Micros, Session, SessionState, WorkerId
from deerflow_runs.observe import Event
from deerflow_runs.protocol.trust import BootSeconds
from deerflow_runs.store.base import Renewed
from deerflow_runs.testing.clock import ManualClock
from tests.rules import rule

START = 1_000.0
RENEWED = Renewed(beat=1, expires_at=Micros(5), state=SessionState.LIVE)


class Told:
    """A session that was opened at 0 s, trusted until 13.5 s, and what its teller posts."""

    def __init__(self) -> None:
        self.clock = ManualClock(boot_time=START)
        self.session = WorkerSession(Session(WorkerId("")), RunsConfig(), self.clock)
        self.session.opened(self.session.session, sent_at=BootSeconds(START), answered_at=BootSeconds(START))
        self.messages: list[Message] = []
        self.events: list[Event] = []
        self.teller = TrustTeller(self.session, self.clock, self.messages.append, self.events.append)

    def beat_is_answered(self, *, sent: float, answered: float) -> None:
        """Nobody has looked since the beat was sent."""
        before = self.session.trust
        self.clock.jump(START + answered - self.clock.boot_time())
        self.session.confirmed(RENEWED, sent_at=BootSeconds(START + sent), answered_at=self.session.now())
        self.teller.look(before)


@rule("O9", "O12", "I8")
async def test_trust_that_had_ended_before_it_was_renewed_is_told_to_have_ended_and_to_be_back() -> None:
    """Otherwise a step that asked in between would wait for ever."""
    told = Told()
    told.beat_is_answered(sent=12.0, answered=13.6)
    assert [type(message) for message in told.messages] == [TrustEnded, TrustRegained]
    assert told.session.trusted()


@rule("O12")
async def test_trust_that_was_renewed_in_time_is_told_to_nobody() -> None:
    told = Told()
    told.beat_is_answered(sent=12.0, answered=13.4)
    assert told.messages == []


@rule("O9", "O12")
async def test_trust_that_a_late_answer_does_not_restore_has_ended_once() -> None:
    told = Told()
    told.beat_is_answered(sent=0.0, answered=20.0)
    told.beat_is_answered(sent=1.0, answered=20.5)
    assert [type(message) for message in told.messages] == [TrustEnded]
    told.beat_is_answered(sent=20.5, answered=21.0)
    assert [type(message) for message in told.messages] == [TrustEnded, TrustRegained]
