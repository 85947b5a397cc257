"""Processes over one database: what each believes to hold, and everything it may do at any moment, right or wrong.

The database is ``testing.World``. A process keeps what it was once granted until it learns better, so a stale owner
acts here whenever it likes. What the runs of a thread wrote is kept as one chain, as a checkpointer would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    SessionState,
    WorkerId,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Applied, Decision, Given
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.protocol.recovery import being_restored
from deerflow_runs.testing.world import Admitted, World

LEASE: Final = Micros(15_000_000)
PATIENCE: Final = Micros(30_000_000)
"""Longer than every wait there is: lease, grace, backoff and delay."""

STEP: Final = Micros(6_000_000)
"""Longer than a delay."""

BACKOFF: Final = Given(backoff=Micros(1_000_000))
STARTED_AT: Final = Micros(1_000_000_000)

E = RunEvent
Mine = tuple[str, RunId]


@dataclass(frozen=True)
class Copy:
    """A run in a process's memory: the epoch it was granted, and whether its task is running."""

    epoch: int
    started: bool = False


@dataclass(frozen=True)
class Restore:
    """A rollback that a process carries out at ``epoch``."""

    epoch: int
    done: bool = False


@dataclass
class Country:
    """One database, its processes by name, and the chain of what was written."""

    world: World = field(default_factory=lambda: World(now=STARTED_AT))
    sessions: dict[str, WorkerId] = field(default_factory=dict)
    previous: dict[str, WorkerId] = field(default_factory=dict)
    copies: dict[Mine, Copy] = field(default_factory=dict)
    restores: dict[Mine, Restore] = field(default_factory=dict)
    chain: tuple[tuple[RunId, int, int], ...] = ()
    bases: dict[RunId, int] = field(default_factory=dict)
    broken: str = ""

    def clone(self) -> Country:
        return replace(
            self,
            world=self.world.clone(),
            sessions=dict(self.sessions),
            previous=dict(self.previous),
            copies=dict(self.copies),
            restores=dict(self.restores),
            bases=dict(self.bases),
        )

    def key(self) -> object:
        """Two countries with the same key have the same future: of an instant only its age counts, and only as far
        as anything waits for it."""
        now = self.world.now
        runs = sorted(self.world.runs.values(), key=lambda run: (run.due_at, run.seq))
        return (
            tuple((_words(run), being_restored(run), *(_age(at, now) for at in _instants(run))) for run in runs),
            tuple((*_state(session), _age(session.dead_at, now)) for session in self.world.sessions.values()),
            frozenset(self.copies.items()),
            frozenset(self.restores.items()),
            self.chain,
        )

    def actor(self, name: str, epoch: int | None = None) -> Actor:
        return Actor(self.sessions[name], epoch, frozenset({"able"}), self.previous.get(name))

    def row(self, run: RunId) -> Run | None:
        return self.world.runs.get(run)

    def is_live(self, name: str) -> bool:
        return self.world.sessions[self.sessions[name]].state is SessionState.LIVE


_words = attrgetter(
    "run_id", "status", "owner_worker_id", "home_worker_id", "epoch", "attempt", "progress_epoch", "queue_behind",
    "cancel_action", "turn", "stop_reason", "settled_by", "delayed",
)  # fmt: skip
_instants = attrgetter("granted_at", "not_before", "due_at", "cancel_requested_at")
_state = attrgetter("worker_id", "state", "proven")


def _age(at: int | None, now: int) -> int | None:
    return None if at is None else max(-PATIENCE, min(PATIENCE, now - at))


@dataclass(frozen=True)
class Move:
    """Something that may happen at any moment; it does nothing where it makes no sense."""

    name: str
    act: Callable[[Country], Any]

    def __str__(self) -> str:
        return self.name


# --- Sessions -------------------------------------------------------------------------------------------------------


def opens(country: Country, name: str) -> None:
    """A first session, or a new one once the present one is dead; it remembers which it was."""
    old = country.sessions.get(name)
    if old is not None and country.world.sessions[old].state is not SessionState.DEAD:
        return
    session = WorkerId(f"{name}{len(country.world.sessions)}")
    country.world.open_session(Session(session, lease=LEASE, hinted=True))
    country.sessions[name] = session
    if old is not None:
        country.previous[name] = old


def is_declared_dead(country: Country, name: str) -> None:
    """By a judge who is wrong: the process goes on."""
    session = country.world.sessions[country.sessions[name]]
    country.world.declare_dead(Verdict(session.worker_id, session.beat, How.HINT, Micros(0)))


def crashes(country: Country, name: str) -> None:
    """The process is gone, and that is known."""
    country.world.close_session(country.sessions[name])
    for mine in [mine for mine in country.copies if mine[0] == name]:
        del country.copies[mine]
    for mine in [mine for mine in country.restores if mine[0] == name]:
        del country.restores[mine]


def drains(country: Country, name: str) -> None:
    country.world.renew(country.sessions[name], state=SessionState.DRAINING, hinted=True)


def leaves(country: Country, name: str) -> None:
    """The last step of a drain; whatever it still holds in memory it holds as a stale owner."""
    country.world.close_session(country.sessions[name])


def time_passes(country: Country) -> None:
    """Every wait that there was is over afterwards."""
    country.world.advance(PATIENCE)


def clock_is_set_back(country: Country) -> None:
    """By less than any wait takes, so that whoever waits for time gets it by what passes later."""
    country.world.advance(-STEP)


# --- The life of a run ----------------------------------------------------------------------------------------------


def admits(country: Country, name: str, newcomer: Newcomer) -> None:
    """Admission by the process; asking again is a lost reply and must change nothing (I14)."""
    known = country.row(newcomer.run_id)
    before = country.key()
    answer = country.world.admit(replace(newcomer, worker_id=country.sessions[name]))
    if known is not None and country.key() != before:
        country.broken = "I14: a repeated admission changed something"
    if isinstance(answer, Admitted) and answer.run.owner_worker_id is not None:
        country.copies[name, newcomer.run_id] = Copy(answer.run.epoch)


def claims(country: Country, name: str) -> None:
    for run in country.world.claim(country.actor(name), 1):
        country.copies[name, run.run_id] = Copy(run.epoch)


def holder(country: Country, name: str, run: RunId, event: RunEvent, given: Given = BACKOFF) -> Decision | None:
    """The process asks as the holder it believes to be."""
    copy = country.copies.get((name, run))
    return None if copy is None else country.world.apply(run, event, country.actor(name, copy.epoch), given)


def starts(country: Country, name: str, run: RunId) -> None:
    decision = holder(country, name, run, E.START)
    if isinstance(decision, Applied):
        country.copies[name, run] = Copy(decision.run.epoch, started=True)
        country.bases.setdefault(run, len(country.chain))


def writes(country: Country, name: str, run: RunId) -> None:
    """A checkpoint; at most two in a history."""
    copy = country.copies.get((name, run))
    if copy is None or not copy.started or len(country.chain) == 2:
        return
    decision = holder(country, name, run, E.PROGRESS, Given(checkpoint="c"))
    if isinstance(decision, Applied):
        _append(country, (run, decision.run.turn or 0, copy.epoch))


def _append(country: Country, written: tuple[RunId, int, int]) -> None:
    if country.chain and country.chain[-1][1:] > written[1:]:
        country.broken = f"I3: {written} was written after {country.chain[-1]}"
    country.chain = (*country.chain, written)


def lets_go(country: Country, name: str, run: RunId, event: RunEvent) -> None:
    """Settle, hand over, defer, give back, release; the process forgets it once it is over or somebody else's."""
    decision = holder(country, name, run, event)
    if isinstance(decision, Applied) or (decision is not None and decision.reason in (Refusal.LOST, Refusal.TERMINAL)):
        del country.copies[name, run]


def obeys(country: Country, name: str, run: RunId) -> None:
    """The task was told to stop and stopped: settle as cancelled, unless a restore comes first."""
    row = country.row(run)
    if row is not None and row.cancel_action is not None:
        lets_go(country, name, run, E.SETTLE_CANCELLED)


def forgets(country: Country, name: str, run: RunId) -> None:
    """A reply was lost for good, or the run was aborted locally: the process lives on without it."""
    country.copies.pop((name, run), None)
    country.restores.pop((name, run), None)


def takes_back(country: Country, name: str, run: RunId) -> None:
    copy = country.copies.get((name, run))
    if copy is None or name not in country.previous:
        return
    decision = holder(country, name, run, E.TAKE_BACK)
    if isinstance(decision, Applied):
        country.copies[name, run] = replace(copy, epoch=decision.run.epoch)
    else:
        del country.copies[name, run]


def gives_back(country: Country, name: str, run: RunId) -> None:
    """O12: what the store says is mine and I do not have goes back to everybody, or ends as its cancel says."""
    row = country.row(run)
    if row is None or row.owner_worker_id != country.sessions[name]:
        return
    if (name, run) in country.copies or (name, run) in country.restores:
        return
    country.copies[name, run] = Copy(row.epoch)
    for event in (E.GIVE_BACK_RESUME, E.GIVE_BACK_FAIL, E.RELEASE):
        lets_go(country, name, run, event)
    obeys(country, name, run)
    seizes(country, name, run)


def ends_waiting(country: Country, name: str, run: RunId) -> None:
    country.world.apply(run, E.END_WAITING, country.actor(name))


def re_homes(country: Country, name: str, run: RunId) -> None:
    country.world.apply(run, E.RE_HOME, country.actor(name))


# --- Cancel and rollback --------------------------------------------------------------------------------------------


def is_cancelled(country: Country, run: RunId, action: CancelAction) -> None:
    """By a user, through any process."""
    for event in (E.REQUEST_CANCEL, E.CANCEL_QUEUED):
        country.world.apply(run, event, Actor(WorkerId("user")), Given(action=action))


def forces(country: Country, name: str, run: RunId) -> None:
    country.world.apply(run, E.FORCE, country.actor(name))


def seizes(country: Country, name: str, run: RunId) -> None:
    """The owner stops its own task first; anybody else knows nothing of the other's."""
    row, copy, restore = country.row(run), country.copies.get((name, run)), country.restores.get((name, run))
    epoch = restore.epoch if restore else copy.epoch if copy else None
    decision = country.world.apply(run, E.SEIZE, country.actor(name, epoch))
    if not isinstance(decision, Applied):
        return
    if row is not None and row.owner_worker_id == country.sessions[name]:
        country.copies.pop((name, run), None)
    country.restores[name, run] = Restore(decision.run.epoch)


def restores(country: Country, name: str, run: RunId) -> None:
    """A fenced write like any other: cut the chain where the run began."""
    mine, copy = country.restores.get((name, run)), country.copies.get((name, run))
    if mine is None and copy is not None and not copy.started:
        mine = Restore(copy.epoch)  # granted and not started at this epoch: nothing of it can be in flight
    row = country.row(run)
    if mine is None or row is None or not row.rollback_owed or row.status is not RunStatus.PENDING:
        return
    if isinstance(country.world.apply(run, E.PROGRESS, country.actor(name, mine.epoch)), Applied):
        base = country.bases[run]
        if any(written[0] != run for written in country.chain[base:]):
            country.broken = "I16: a restore removed what another run wrote"
        country.chain = country.chain[:base]
        country.copies.pop((name, run), None)
        country.restores[name, run] = Restore(mine.epoch, done=True)
    else:
        country.restores.pop((name, run), None)


def ends_restored(country: Country, name: str, run: RunId) -> None:
    """Settle after the restore; whoever did not restore may not."""
    mine = country.restores.get((name, run))
    if mine is not None and mine.done:
        country.world.apply(run, E.SETTLE_CANCELLED, country.actor(name, mine.epoch), Given(restored=True))
        del country.restores[name, run]


def gives_up_restoring(country: Country, name: str, run: RunId) -> None:
    mine = country.restores.get((name, run))
    if mine is not None:
        country.world.apply(run, E.SETTLE_ROLLBACK_FAILED, country.actor(name, mine.epoch))


# --- Sweeps ---------------------------------------------------------------------------------------------------------


def takes_over(country: Country, name: str) -> None:
    if country.is_live(name):
        country.world.take_over(country.actor(name), BACKOFF, limit=1)


def promotes(country: Country, name: str) -> None:
    for thread in sorted({run.thread_id for run in country.world.runs.values()}):
        country.world.promote(thread, country.actor(name))


def sweeps(country: Country, name: str) -> None:
    """Everything a healthy worker does in a round, for every run it finds; its tasks end at once."""
    for run in list(country.world.runs):
        gives_back(country, name, run)
        takes_over(country, name)
        forces(country, name, run)
        if (name, run) not in country.restores:
            seizes(country, name, run)
        restores(country, name, run)
        ends_restored(country, name, run)
        obeys(country, name, run)
        starts(country, name, run)
        lets_go(country, name, run, _last_event(country, run))
    promotes(country, name)
    claims(country, name)


def _last_event(country: Country, run: RunId) -> RunEvent:
    row = country.row(run)
    return E.RELEASE if row is not None and row.kind is not OperationKind.RUN else E.SETTLE_SUCCESS
