"""Every order of small sets of events, for one run and for several on one thread, on a world that only asks the table.

At every step the invariants hold, and from every state that is reached the workers that are left bring every run to
its end. Which moves there are is in ``country``, what is checked in ``exploring``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from deerflow_runs.model import CancelAction, Micros, OnOrphan, OperationKind, RunId, RunStatus, Strategy, ThreadId
from deerflow_runs.model import WorkerId as W
from deerflow_runs.protocol.admission import Newcomer
from tests.protocol import country as c
from tests.protocol.country import Country, E, Move
from tests.protocol.exploring import explore
from tests.rules import rule

T, R, N1, N2 = ThreadId("thread"), RunId("r"), RunId("n1"), RunId("n2")


def newcomer(run_id: RunId, strategy: Strategy = Strategy.REJECT, **more: Any) -> Newcomer:
    return Newcomer(run_id=run_id, thread_id=T, worker_id=W("whoever asks"), strategy=strategy, **more)


def moves(names: str, acts: Iterable[Callable[..., None]], **bound: Any) -> list[Move]:
    return [
        Move(" ".join([name, act.__name__, *map(str, bound.values())]), partial(act, name=name, **bound))
        for name in names
        for act in acts
    ]


def leavings(names: str, run: RunId, *events: E) -> list[Move]:
    return [move for event in events for move in moves(names, [c.lets_go], run=run, event=event)]


def cancels(run: RunId) -> list[Move]:
    return [
        Move(f"user cancels {run} with {action}", partial(c.is_cancelled, run=run, action=action))
        for action in CancelAction
    ]


TIME = Move("time passes", c.time_passes)
BACK = Move("the clock is set back", c.clock_is_set_back)


# --- One run --------------------------------------------------------------------------------------------------------

SESSIONS = moves("ab", [c.claims, c.is_declared_dead, c.crashes, c.opens, c.takes_over])
LIFE = [
    *moves("ab", [c.starts, c.writes, c.obeys, c.forgets, c.takes_back, c.gives_back, c.forces], run=R),
    *leavings("ab", R, E.SETTLE_SUCCESS, E.SETTLE_CANCELLED),
    *leavings("a", R, E.SETTLE_ERROR, E.SETTLE_TIMEOUT, E.HAND_OVER, E.DEFER, E.GIVE_BACK_RESUME),
]
ROLLBACK = moves("ab", [c.seizes, c.restores, c.ends_restored, c.gives_up_restoring], run=R)


def two_workers(**run: Any) -> Country:
    """Workers a and b; a has admitted the run and holds it."""
    country = Country()
    c.opens(country, "a")
    c.opens(country, "b")
    c.admits(country, "a", newcomer(R, **run))
    return country


def running(**run: Any) -> Country:
    country = two_workers(**run)
    c.starts(country, "a", R)
    c.writes(country, "a", R)
    return country


def to_be_rolled_back() -> Country:
    country = running(on_orphan=OnOrphan.RESUME)
    c.is_cancelled(country, R, CancelAction.ROLLBACK)
    return country


def resumed_elsewhere() -> Country:
    """a was wrongly declared dead; b has claimed the run and runs it, and a does not know."""
    country = running(on_orphan=OnOrphan.RESUME)
    c.is_declared_dead(country, "a")
    c.takes_over(country, "b")
    c.time_passes(country)
    c.claims(country, "b")
    return country


ONE_RUN: dict[str, tuple[Callable[[], Country], int]] = {
    "just admitted, to be resumed": (lambda: two_workers(on_orphan=OnOrphan.RESUME), 4),
    "running, to be resumed": (lambda: running(on_orphan=OnOrphan.RESUME), 4),
    "running, to fail": (lambda: running(on_orphan=OnOrphan.FAIL), 4),
    "resumed elsewhere": (resumed_elsewhere, 4),
}


@rule("I1", "I2", "I3", "I4", "I5", "I6", "I8", "I16", "O8", "O12", "O13", "O14", "O20", "O22", "O28")
@pytest.mark.parametrize("setup", ONE_RUN)
def test_whatever_happens_to_one_run_in_whatever_order_it_ends_once_and_rightly(setup: str) -> None:
    begin, depth = ONE_RUN[setup]
    assert explore(begin(), [*LIFE, *SESSIONS, *ROLLBACK, *cancels(R), TIME], depth).states > 900


@rule("I2", "I4", "I16", "I8", "O4")
def test_whoever_interrupts_a_rollback_it_leaves_nothing_behind_and_ends() -> None:
    around = moves("ab", [c.writes, c.takes_back, c.gives_back, c.forgets], run=R)
    deaths = moves("ab", [c.is_declared_dead, c.opens])
    assert explore(to_be_rolled_back(), [*ROLLBACK, *around, *deaths, TIME], 6).states > 3000


def claimed_again() -> Country:
    """A run that has started once is claimed for the second time, and not started yet."""
    country = running(on_orphan=OnOrphan.RESUME)
    c.lets_go(country, "a", R, E.HAND_OVER)
    c.claims(country, "b")
    return country


@rule("I2", "I4", "I16", "I8", "O4", "O8")
@pytest.mark.parametrize("begin", [to_be_rolled_back, running, claimed_again])
def test_no_rollback_is_lost_and_no_epoch_shared_whenever_the_clock_is_set_back(begin: Callable[[], Country]) -> None:
    around = moves("ab", [c.takes_back, c.starts], run=R)
    deaths = moves("a", [c.is_declared_dead, c.opens])
    rollback = moves("ab", [c.seizes, c.restores, c.ends_restored], run=R)
    assert explore(begin(), [*rollback, *around, *deaths, *cancels(R)[1:], TIME, BACK], 6).states > 300


@rule("I8", "O12", "O13", "O22")
def test_a_reservation_is_only_ever_released_whatever_happens_around_it() -> None:
    country = two_workers(kind=OperationKind.CHECKPOINT_WRITE)
    hands = moves("ab", [c.starts, c.forgets, c.takes_back, c.gives_back, c.forces, c.seizes, c.obeys], run=R)
    everything = [*leavings("a", R, E.RELEASE, E.SETTLE_SUCCESS, E.HAND_OVER), *hands, *SESSIONS, *cancels(R), TIME]
    assert explore(country, everything, 5).states > 300


@rule("O13", "O31", "O35", "I8")
@pytest.mark.parametrize("take", [True, False], ids=["owned", "vacant"])
@pytest.mark.parametrize("policy", OnOrphan)
def test_a_run_with_a_home_outlives_no_drain_and_no_death_of_it_in_limbo(take: bool, policy: OnOrphan) -> None:
    country = two_workers(pinned=True, take=take, on_orphan=policy)
    home = moves("a", [c.ends_waiting, c.re_homes, c.takes_back, c.starts, c.obeys], run=R)
    everything = [
        *home,
        *moves("a", [c.drains]),
        *leavings("a", R, E.SETTLE_SUCCESS, E.HAND_OVER),
        *SESSIONS,
        *cancels(R),
        TIME,
    ]
    assert explore(country, everything, 4).states > 200


# --- Several runs on one thread -------------------------------------------------------------------------------------


def arrivals(run: RunId) -> list[Move]:
    """b asks for the thread in each of the ways there are, and once for later."""
    ways = {strategy.value: newcomer(run, strategy, on_orphan=OnOrphan.RESUME) for strategy in Strategy}
    ways["later"] = newcomer(run, Strategy.ENQUEUE, delay=Micros(5_000_000), on_orphan=OnOrphan.RESUME)
    return [
        Move(f"b admits {run} ({way})", partial(c.admits, name="b", newcomer=asking)) for way, asking in ways.items()
    ]


THREAD = [
    *arrivals(N1),
    *arrivals(N2),
    *moves("a", [c.starts, c.obeys], run=R),
    *moves("a", [c.is_declared_dead, c.crashes]),
    *leavings("a", R, E.SETTLE_SUCCESS, E.RELEASE),
    *moves("b", [c.sweeps]),
    *moves("b", [c.starts], run=N1),
    *leavings("b", N1, E.SETTLE_SUCCESS),
    *cancels(R)[:1],
    *cancels(N1)[:1],
    TIME,
]


def queued_behind() -> Country:
    country = running(on_orphan=OnOrphan.RESUME)
    c.admits(country, "a", newcomer(RunId("q"), Strategy.ENQUEUE, on_orphan=OnOrphan.RESUME))
    return country


def only_delayed() -> Country:
    country = two_workers(strategy=Strategy.ENQUEUE, delay=Micros(5_000_000), on_orphan=OnOrphan.RESUME)
    assert country.world.runs[R].status is RunStatus.QUEUED
    return country


def dead_owner(policy: OnOrphan) -> Country:
    country = running(on_orphan=policy)
    c.is_declared_dead(country, "a")
    return country


def cancelled(action: CancelAction) -> Country:
    country = running(on_orphan=OnOrphan.RESUME)
    c.is_cancelled(country, R, action)
    return country


def over() -> Country:
    country = running()
    c.lets_go(country, "a", R, E.SETTLE_SUCCESS)
    return country


INCUMBENTS: dict[str, Callable[[], Country]] = {
    "over": over,
    "running": lambda: running(on_orphan=OnOrphan.RESUME),
    "running, one queued": queued_behind,
    "delayed": only_delayed,
    "vacant": lambda: two_workers(take=False, on_orphan=OnOrphan.RESUME),
    "cancelled with interrupt": lambda: cancelled(CancelAction.INTERRUPT),
    "cancelled with rollback": lambda: cancelled(CancelAction.ROLLBACK),
    "reserved": lambda: two_workers(kind=OperationKind.ARTIFACT_WRITE),
    "orphan to fail": lambda: dead_owner(OnOrphan.FAIL),
    "orphan to resume": lambda: dead_owner(OnOrphan.RESUME),
}


@rule("I1", "I5", "I6", "I7", "I8", "I14", "I16", "I17", "O1", "O2", "O3", "O5", "O7")
@pytest.mark.parametrize("incumbent", INCUMBENTS)
def test_newcomers_of_every_strategy_meet_every_kind_of_incumbent_in_every_order(incumbent: str) -> None:
    country = INCUMBENTS[incumbent]()
    assert explore(country, THREAD, 4).states > 500


def delayed_behind() -> Country:
    country = queued_behind()
    c.clock_is_set_back(country)
    later = newcomer(RunId("d"), Strategy.ENQUEUE, delay=Micros(5_000_000), on_orphan=OnOrphan.RESUME)
    c.admits(country, "a", later)
    return country


@rule("I1", "I7", "I8", "I17", "O2", "O7")
@pytest.mark.parametrize("begin", [queued_behind, delayed_behind, only_delayed, over])
def test_runs_that_were_never_delayed_come_in_order_and_at_once_whenever_the_clock_is_set_back(
    begin: Callable[[], Country],
) -> None:
    come = [*arrivals(N1)[1:2], *arrivals(N1)[-1:], *arrivals(N2)[1:2], *arrivals(N2)[-1:]]
    turns = [*leavings("a", R, E.SETTLE_SUCCESS), *moves("b", [c.sweeps])]
    assert explore(begin(), [*come, *turns, TIME, BACK], 5).states > 100
