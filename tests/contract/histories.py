"""Random histories: the same moves on the model store and on another, compared after each of them.

An author writes one move after the other, looking at the model so that most of them make sense; everything is drawn
from one seed. Nothing here knows what a move should do: the model and the invariants do.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

from deerflow_runs.model import (
    CancelAction,
    Micros,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    Session,
    SessionState,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
    micros,
)
from deerflow_runs.protocol.admission import Clash, Deny, DenyFull, DenyUser, Newcomer, Reuse
from deerflow_runs.protocol.decision import Actor, Applied, Given, Refused, decide
from deerflow_runs.protocol.judge import How, Verdict
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted, NotLive, OwnershipStore, Renewed, Settlement, Swept
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.history import HistoryChecker
from deerflow_runs.testing.model_store import ModelStore

HOUR: Final = micros(3600)
ALL: Final = 100
THREADS: Final = tuple(map(ThreadId, ("a", "b", "c")))
SKILLS: Final = ("agent", "gpu")


UNLIKELY: Final = {
    RunEvent.START: -0.6,
    RunEvent.SEIZE: -0.8,
    RunEvent.SETTLE_SUCCESS: -0.2,
    RunEvent.REQUEST_CANCEL: 0.4,
    RunEvent.FORCE: 0.2,
    RunEvent.DEFER: 0.2,
}
"""Which events come later than others when several could happen: runs shall get somewhere before they end."""


@dataclass(frozen=True)
class Move:
    """One question to a store. ``told`` is what the history's witness is told of the answer; ``event`` is what it
    may let happen to one run."""

    text: str
    ask: Callable[[OwnershipStore], Awaitable[Any]]
    told: Callable[[HistoryChecker, Any], None] = lambda _checker, _answer: None
    event: RunEvent | None = None

    def events(self, answer: Any) -> set[RunEvent]:
        """What did happen."""
        return {self.event} if self.event and isinstance(answer, Applied) and not answer.repeated else set()

    def __str__(self) -> str:
        return self.text


# --- The author -----------------------------------------------------------------------------------------------------


class Author:
    """Writes moves that mostly make sense, given how the model stands."""

    def __init__(self, seed: int, model: ModelStore) -> None:
        self._chance = random.Random(seed)
        self._world = model.world
        self._newcomers: list[Newcomer] = []
        self._workers: list[WorkerId] = [WorkerId("host:stranger")]
        self._numbers = 0

    def next_move(self) -> Move:
        """What is asked next."""
        kinds: dict[Callable[[], Move], int] = {
            self._opens: 2 if len(self._living()) < 4 else 0,
            self._renews: 2,
            self._dies: 3,
            self._buries: 1,
            self._arrives: 14,
            self._asks_again: 2,
            self._happens: 26,
            self._in_sets: 12,
            self._settles_many: 2,
            self._purges: 1,
        }
        if not self._living():
            return self._opens()
        return self._chance.choices(list(kinds), list(kinds.values()))[0]()

    def _often(self, odds: float) -> bool:
        return self._chance.random() < odds

    def _living(self) -> list[WorkerId]:
        return [one.worker_id for one in self._world.sessions.values() if one.state is not SessionState.DEAD]

    def _dead(self) -> list[WorkerId]:
        return [one.worker_id for one in self._world.sessions.values() if one.state is SessionState.DEAD]

    def _worker(self) -> WorkerId:
        return self._chance.choice(self._living() if self._often(0.9) and self._living() else self._workers)

    def _some_skills(self) -> frozenset[str]:
        return frozenset(skill for skill in SKILLS if self._often(0.8))

    # Sessions

    def _opens(self) -> Move:
        self._numbers += 1
        worker_id = WorkerId(f"host:{self._numbers}")
        self._workers.append(worker_id)
        session = Session(worker_id, lease=self._chance.choice((HOUR, Micros(1))), hinted=self._often(0.7))
        return Move(f"open {short(session)}", lambda store: store.open_session(session))

    def _renews(self) -> Move:
        worker_id, hinted = self._worker(), self._often(0.7)
        state = SessionState.DRAINING if self._often(0.25) else SessionState.LIVE
        return Move(
            f"{worker_id} beats as {state}, hinted {hinted}",
            lambda store: store.renew(worker_id, hinted=hinted, state=state),
        )

    def _dies(self) -> Move:
        worker_id = self._worker()
        if self._often(0.4):
            return Move(f"{worker_id} closes", lambda store: store.close_session(worker_id))
        known = self._world.sessions.get(worker_id)
        beat = (known.beat if known else 0) + (0 if self._often(0.8) else 1)
        verdict = Verdict(worker_id, beat, self._chance.choice(tuple(How)), Micros(0))
        return Move(short(verdict), lambda store: store.declare_dead(verdict))

    def _buries(self) -> Move:
        return Move("strangers are buried", lambda store: store.bury_strangers())

    # Arrivals

    def _arrives(self) -> Move:
        self._numbers += 1
        newcomer = self._reservation() if self._often(0.12) else self._run()
        self._newcomers.append(newcomer)
        return self._admits(newcomer)

    def _asks_again(self) -> Move:
        if not self._newcomers:
            return self._arrives()
        newcomer = self._chance.choice(self._newcomers)
        if self._often(0.4):
            newcomer = replace(newcomer, thread_id=self._chance.choice(THREADS))
        return self._admits(newcomer)

    def _admits(self, newcomer: Newcomer) -> Move:
        given = Given(cancel_grace=self._grace())
        return Move(
            f"admit {short(newcomer)} with {given.cancel_grace} of grace",
            lambda store: store.admit(newcomer, given),
            lambda checker, answer: checker.admitted(newcomer, answer),
        )

    def _reservation(self) -> Newcomer:
        kind = self._chance.choice([kind for kind in OperationKind if kind is not OperationKind.RUN])
        run_id, thread_id = RunId(f"reservation-{self._numbers}"), self._chance.choice(THREADS)
        return Newcomer(run_id=run_id, thread_id=thread_id, worker_id=self._worker(), kind=kind)

    def _run(self) -> Newcomer:
        chance = self._chance
        return Newcomer(
            run_id=RunId(f"run-{self._numbers}"),
            thread_id=chance.choice(THREADS),
            worker_id=self._worker(),
            strategy=chance.choice(tuple(Strategy)) if self._often(0.6) else Strategy.ENQUEUE,
            take=self._often(0.75),
            pinned=self._often(0.3),
            delay=chance.choice((Micros(0),) * 6 + (Micros(1), HOUR)),
            on_orphan=chance.choice(tuple(OnOrphan)),
            required_capabilities=frozenset({"agent"} if self._often(0.3) else ()),
            idempotency_key=chance.choice(("k1", "k2")) if self._often(0.25) else None,
            payload_digest=chance.choice(("p1", "p1", "p2")),
            user_id=chance.choice((None, "ann")),
            stateless=self._often(0.3),
            max_attempts=chance.randrange(1, 4),
            max_queued=chance.choice((None, 2)),
            max_active_per_user=chance.choice((None, 1, 2)),
            deliveries={"webhook": {"to": "somebody"}} if self._often(0.3) else {},
        )

    def _grace(self) -> Micros:
        return Micros(0) if self._often(0.3) else HOUR

    # Events

    def _target(self) -> Run | None:
        runs = list(self._world.runs.values())
        lively = [run for run in runs if run.active] or [run for run in runs if not run.terminal] or runs
        return self._chance.choice(lively if self._often(0.75) else runs) if runs else None

    def _happens(self) -> Move:
        run = self._target()
        if run is None:
            return self._arrives()
        event, by, given = self._something(run)
        key = replace(run.key, thread_id=ThreadId("elsewhere")) if self._often(0.02) else run.key
        return Move(
            f"{event.value} to {run} by {short(by)}, {short(given)}",
            lambda store: store.apply(key, event, by, given),
            lambda checker, answer: checker.decided(event, answer),
            event,
        )

    def _something(self, run: Run) -> tuple[RunEvent, Actor, Given]:
        """An event, an actor and what it carries; more often than not one that the table allows."""
        order = sorted(RunEvent, key=lambda event: self._chance.random() + UNLIKELY.get(event, 0.0))
        drawn = [(event, self._actor(run), self._given()) for event in order]
        allowed = (one for one in drawn if self._allows(run, *one))
        return next(allowed, drawn[0]) if self._often(0.65) else drawn[0]

    def _allows(self, run: Run, event: RunEvent, by: Actor, given: Given) -> bool:
        return isinstance(decide(run, event, by, self._world.facts(run, by), given), Applied)

    def _actor(self, run: Run) -> Actor:
        mine = run.owner_worker_id is not None and self._often(0.75)
        worker_id = run.owner_worker_id if mine and run.owner_worker_id else self._worker()
        epoch = run.epoch if self._often(0.9) else run.epoch + self._chance.choice((-1, 1))
        dead = self._dead()
        previous = run.owner_worker_id or run.home_worker_id if self._often(0.5) else None
        if previous is None and dead and self._often(0.5):
            previous = self._chance.choice(dead)
        return Actor(worker_id, epoch, self._some_skills(), previous)

    def _given(self) -> Given:
        chance = self._chance
        return Given(
            action=chance.choice(tuple(CancelAction)),
            cancel_grace=self._grace(),
            restored=self._often(0.7),
            stop_reason=chance.choice((None, "tokens")),
            error=chance.choice((None, "broke")),
            usage=Usage(total_tokens=chance.randrange(9), by_model={"m": 1}) if self._often(0.3) else Usage(),
            base_heads={"": "head"} if self._often(0.5) else {},
            backoff=chance.choice((Micros(0), Micros(0), HOUR)),
            requirements=frozenset({"gpu"}) if self._often(0.5) else frozenset(),
            checkpoint=f"checkpoint-{self._numbers}" if self._often(0.3) else None,
            model_name=chance.choice((None, "small")),
        )

    # Sets

    def _in_sets(self) -> Move:
        dead = self._dead()
        previous = self._chance.choice(dead) if dead else None
        by, given = Actor(self._worker(), None, self._some_skills(), previous), self._given()
        asked: Mapping[str, Callable[[OwnershipStore], Awaitable[Any]]] = {
            "claim": lambda store: store.claim(by, ALL),
            "take over": lambda store: store.take_over(by, given, ALL),
            "force": lambda store: store.force(by, given, ALL),
            "promote": lambda store: store.promote(ALL),
            "hand over": lambda store: store.hand_over(by, ALL),
            "re-home": lambda store: store.re_home(by, ALL),
            "end waiting": lambda store: store.end_waiting(by, ALL),
            "end held": lambda store: store.end_held(by, ALL),
            "release held": lambda store: store.release_held(by, ALL),
        }
        name = self._chance.choice((*asked, "claim", "claim", "take over"))
        return Move(f"{name} by {short(by)}, {short(given)}", asked[name])

    def _settles_many(self) -> Move:
        active = [run for run in self._world.runs.values() if run.active]
        ends = (RunEvent.SETTLE_SUCCESS, RunEvent.SETTLE_ERROR, RunEvent.SETTLE_TIMEOUT)
        asked = [
            Settlement(run.key, self._chance.choice(ends), self._actor(run), self._given())
            for run in active
            if self._often(0.7)
        ]
        return Move(f"settle many: {[short(one) for one in asked]}", lambda store: store.settle_many(asked))

    def _purges(self) -> Move:
        return Move("ended runs are removed", purged)


async def purged(store: OwnershipStore) -> int:
    """How many ended runs were removed: all that owe no delivery. The model has no verb for it."""
    if isinstance(store, SqlRunStore):
        return await store.purge(before=Micros(2**62), limit=ALL)
    assert isinstance(store, ModelStore)
    ended = [run for run in store.world.runs.values() if run.terminal and not run.deliveries]
    return len([await store.apply(run.key, RunEvent.REMOVE, Actor(WorkerId(""))) for run in ended])


def short(value: Any) -> str:
    """A question without what it leaves at its default."""
    if not is_dataclass(value) or isinstance(value, Run):
        return str(value)
    told = {one.name: getattr(value, one.name) for one in fields(value)}
    usual = {one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields(value)}
    said = ", ".join(f"{name}={short(one)}" for name, one in told.items() if one != usual[name])
    return f"{type(value).__name__}({said})"


# --- What is compared -----------------------------------------------------------------------------------------------

INSTANTS: Final = frozenset(
    {
        "due_at",
        "granted_at",
        "not_before",
        "cancel_requested_at",
        "progress_at",
        "created_at",
        "started_at",
        "settled_at",
        "updated_at",
    }
)
"""Compared by whether there is one: the model's clock is another."""

NUMBERS: Final = frozenset({"seq", "turn"})
"""Compared by their order."""


def plain(run: Run | None) -> Any:
    """A row without what only a clock or a counter decides."""
    if run is None:
        return None
    names = [field.name for field in fields(run) if field.name != "kwargs"]
    values = {name: getattr(run, name) for name in names if name not in NUMBERS}
    values |= {name: values[name] is not None for name in INSTANTS}
    # Whether a run that has ended was promoted just before it ended, in the same verb, says nothing.
    return values | {"queue_behind": run.queue_behind and not run.terminal, "turn": run.turn is not None}


def state(runs: Sequence[Run]) -> dict[str, Any]:
    """All rows of a store, and what their numbers put in order."""
    rows = {run.run_id: plain(run) for run in runs}
    starts = [run.run_id for run in sorted(runs, key=lambda run: run.turn or 0) if run.turn is not None]
    arrivals = [run.run_id for run in sorted(runs, key=lambda run: run.seq)]
    queue = [run.run_id for run in sorted(runs, key=lambda run: (run.due_at, run.seq)) if run.status.value == "queued"]
    return {"rows": rows, "starts": starts, "arrivals": arrivals, "queue": queue}


def heard(answer: Any) -> Any:
    """An answer without what only a clock or a counter decides."""
    match answer:
        case Applied(run, repeated):
            return ("applied", repeated, plain(run))
        case Refused(reason, run):
            return ("refused", reason, plain(run))
        case Admitted(run, incumbent, ended):
            return ("admitted", plain(run), plain(incumbent), _by_id(ended))
        case Reuse(run, by_key) | Clash(run, by_key):
            return (type(answer).__name__, plain(run), by_key)
        case Deny(holder, retry_after):
            return ("denied", plain(holder), retry_after >= 1)
        case DenyFull(limit, retry_after) | DenyUser(limit, retry_after):
            return (type(answer).__name__, limit, retry_after >= 1)
        case Swept(ended, resumed, freed, released):
            return ("swept", *map(_by_id, (ended, resumed, freed, released)))
        case Renewed(beat, _, session_state, requests):
            return ("renewed", beat, session_state, sorted(requests, key=str))
        case NotLive() | bool() | int() | str():
            return answer
        case Session():
            return ("session", answer.worker_id, answer.state, answer.beat, answer.hinted)
        case tuple() if all(isinstance(one, Run) for one in answer):
            return _by_id(answer)
        case tuple():
            return [heard(one) for one in answer]
        case _:
            raise TypeError(answer)


def _by_id(runs: Sequence[Run]) -> dict[str, Any]:
    return {run.run_id: plain(run) for run in runs}
