"""Events of a worker's session: its life, its beats, its trust, its main loop, and how signals reach it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, final

from deerflow_runs.model import WorkerId
from deerflow_runs.observe.base import About, ErrorCode, Event, Failures, SuspendedFor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(Event):
    """A worker has opened its session, once at its start. From now on it may own runs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReplaced(Event):
    """A worker's session was declared dead and a new one took its place; its runs are taken back next (O13).

    Rare. If it recurs, the worker's connection or its machine stands still for longer than a lease: look at both.
    """

    level = logging.WARNING

    previous: Annotated[WorkerId, About("the session that is dead; `worker_id` is the new one")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed(Event):
    """A worker has closed its session at the end of its drain, so that nobody waits for its expiry (O35).

    Once. Where it is missing, the worker was killed or the store was away.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BeatFailed(Event):
    """A beat got no answer, or an error; another follows soon. Told from the heartbeat's thread, every time.

    A few are harmless. If they go on, trust ends in less than a lease: look at the database and the network.
    """

    level = logging.WARNING

    error: ErrorCode
    failures: Failures


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrustEnded(Event):
    """No beat was confirmed in time: every run of this worker is suspended and starts nothing new (O12).

    Once for each outage. Nothing is lost yet; see whether the store can be reached from this worker.
    """

    level = logging.WARNING


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegained(Event):
    """The store confirmed the session again, and its runs go on. Once for each `TrustEnded` that ended well."""

    suspended_for: SuspendedFor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStalled(Event):
    """The main loop does not answer; the heartbeat has logged all stacks and stopped renewing (O11). Once for a stall.

    Something blocks the loop: the stacks show what. Move it to a thread, or raise `max_stall` if it must be.
    """

    level = logging.ERROR

    seconds: Annotated[float, About("how long the loop had not answered", "seconds")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecovered(Event):
    """The main loop answers again and beats are sent again. Once for each `LoopStalled` that ended."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SignalModeChanged(Event):
    """Signals from other workers reach this one another way from now on (O33). Told at each change.

    `polling` on Postgres means that notifications do not arrive, as behind a transaction pooler: a foreign cancel then
    takes up to one beat.
    """

    counted_by = "mode"

    mode: Annotated[str, About("the way now in force, a word of `SignalMode`")]
