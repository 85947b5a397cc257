"""Every order of up to so many moves, breadth first, with the invariants of ownership.md §13 checked at every step.

States that have the same future are visited once, so a failure is reported with the shortest history that leads there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deerflow_runs.model import CancelAction, Run, RunStatus
from deerflow_runs.protocol.decision import is_due
from deerflow_runs.testing.world import World
from tests.protocol.country import Country, Move, crashes, leaves, opens, sweeps, time_passes

ROUNDS = 40
"""More sweeps than any thread of three runs can need."""


@dataclass
class Tally:
    """How much was looked at: a test that explores nothing proves nothing."""

    states: int = 0
    steps: int = 0


def explore(start: Country, moves: Sequence[Move], depth: int) -> Tally:
    """Make every move in every state that fewer than ``depth`` moves lead to; a failure tells the history."""
    seen = {start.key()}
    frontier: list[tuple[Country, tuple[Move, ...]]] = [(start, ())]
    tally, ending = Tally(states=1), Endings()
    ending.check(start, ())
    for _ in range(depth):
        reached: list[tuple[Country, tuple[Move, ...]]] = []
        for country, history in frontier:
            here = country.key()
            for move in moves:
                after = country.clone()
                move.act(after)
                key = after.key()
                if key == here and not after.broken:
                    continue  # it made no sense here
                tally.steps += 1
                check(country, after, (*history, move))
                if key not in seen:
                    seen.add(key)
                    reached.append((after, (*history, move)))
                    ending.check(after, (*history, move))
        frontier = reached
    tally.states = len(seen)
    return tally


# --- Safety ---------------------------------------------------------------------------------------------------------


def check(before: Country, after: Country, history: Sequence[Move]) -> None:
    """One step: ``before`` became ``after`` by the last move of ``history``."""
    problem = after.broken or _broken(before, after)
    assert not problem, f"{problem}\nafter: {' · '.join(map(str, history))}\n{after.world.runs}"


def _broken(before: Country, after: Country) -> str:
    for run_id, old in before.world.runs.items():
        new = after.world.runs.get(run_id)
        if new is not old and (problem := _life_broken(old, new, after)):
            return problem
    for run_id in after.world.runs.keys() - before.world.runs.keys():
        if problem := _arrival_broken(after.world.runs[run_id], after.world):
            return problem
    return _threads_broken(after.world) or _receipts_broken(after.world) or _holders_broken(after)


def _life_broken(old: Run, new: Run | None, after: Country) -> str:
    if new is None:
        return "" if old.reservation else "a run's row is gone"
    if old.terminal:
        return "I5: something left a terminal status"
    if new.epoch < old.epoch:
        return "I4: an epoch fell"
    if old.cancel_action not in (None, new.cancel_action):
        return "I6: another cancel won"
    if new.attempt > new.max_attempts and not new.rollback_owed and not new.terminal:
        return "I9: more attempts than allowed"
    if old.status is RunStatus.QUEUED and new.active and (problem := _overtaken(new, after.world)):
        return problem
    return _ending_broken(old, new, after) if new.terminal else ""


def _ending_broken(old: Run, new: Run, after: Country) -> str:
    if new.status is RunStatus.SUCCESS and new.cancel_action is not None:
        return "I6: a cancelled run succeeded"
    if not old.rollback_owed or new.stop_reason == "rollback_failed":
        return ""
    if new.status is not RunStatus.INTERRUPTED or new.stop_reason != CancelAction.ROLLBACK:
        return "I16: a run ended while a rollback was owed"
    return "I16: a rollback left something" if any(wrote == new.run_id for wrote, _, _ in after.chain) else ""


def _arrival_broken(newcomer: Run, world: World) -> str:
    if newcomer.status is RunStatus.PENDING and world.first_due(newcomer.thread_id) is not None:
        return "I17: a newcomer passed a run that waits"
    return ""


def _overtaken(run: Run, world: World) -> str:
    for waiting in world.queue(run.thread_id):
        if waiting.seq < run.seq and not waiting.delayed and not run.delayed:
            return "I17: a run that was never delayed was promoted before one that came first"
        if is_due(waiting, world.now) and (waiting.due_at, waiting.seq) < (run.due_at, run.seq):
            return "I17: a later run was promoted first"
    return ""


def _threads_broken(world: World) -> str:
    active = [run.thread_id for run in world.runs.values() if run.active]
    if len(active) != len(set(active)):
        return "I1: two operations are active on one thread"
    for run in world.runs.values():
        if run.status is RunStatus.QUEUED and not run.delayed and run.thread_id not in active:
            return "I7: a run that was never delayed waits on an idle thread"
    return ""


def _receipts_broken(world: World) -> str:
    ended = sorted(run.run_id for run in world.runs.values() if run.terminal)
    return "" if sorted(receipt.run_id for receipt in world.receipts) == ended else "O28: a run and its receipt differ"


def _holders_broken(country: Country) -> str:
    """I4: whoever believes in the present epoch is its owner, and nobody else in his process does."""
    held = [(*mine, copy.epoch) for mine, copy in country.copies.items()]
    held += [(*mine, restore.epoch) for mine, restore in country.restores.items()]
    present = [
        (name, row)
        for name, run, epoch in held
        if (row := country.row(run)) is not None and row.active and row.epoch == epoch
    ]
    if len(present) != len({row.run_id for _, row in present}):
        return "I4: two hold the same epoch"
    for name, row in present:
        if row.owner_worker_id is None or not row.owner_worker_id.startswith(name):
            return "I4: an epoch is held by somebody else than its owner"
    return ""


# --- Liveness -------------------------------------------------------------------------------------------------------


class Endings:
    """I8: from every state, what is left of the workers brings every run to its end and every thread to rest.

    Two futures are tried: all processes crash and one that has held nothing carries on alone; and all of them live
    on, those that drain or were declared dead with a new session, and do their duty.
    """

    def __init__(self) -> None:
        self._good: set[object] = set()

    def check(self, country: Country, history: Sequence[Move]) -> None:
        for future in (self._alone, self._together):
            last = future(country.clone())
            stuck = [run for run in last.world.runs.values() if not run.terminal]
            assert not stuck, f"I8: {stuck}\nafter: {' · '.join(map(str, history))}"

    def _alone(self, country: Country) -> Country:
        for name in country.sessions:
            crashes(country, name)
        opens(country, "rescuer")
        return self._run(country, ["rescuer"])

    def _together(self, country: Country) -> Country:
        for name in list(country.sessions):
            if not country.is_live(name):
                leaves(country, name)
            opens(country, name)
        return self._run(country, list(country.sessions))

    def _run(self, country: Country, names: list[str]) -> Country:
        path: list[object] = []
        for _ in range(ROUNDS):
            time_passes(country)
            key = country.key()
            if key in self._good or all(run.terminal for run in country.world.runs.values()):
                self._good.update(path)
                self._good.add(key)
                return Country()
            path.append(key)
            for name in names:
                sweeps(country, name)
        return country
