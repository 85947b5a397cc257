"""A witness of what happened in a store: told of answers and shown rows, it says which invariant they break.

It needs no model and no order of its own: whoever runs many workers against one store can show it the rows now and
then, and tell it of the answers that callers got. What is allowed at all is decided in ``protocol``, not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Final, final

from deerflow_runs.model import Micros, Run, RunId, RunStatus, StopReason, WorkerId
from deerflow_runs.protocol.admission import Newcomer, Reuse
from deerflow_runs.protocol.decision import Applied, Decision, is_due
from deerflow_runs.protocol.lifecycle import TRANSITIONS, RunEvent
from deerflow_runs.store.base import Admission, Admitted

Life = tuple[RunId, int]
"""One life of a run id: a removed run's id may be given again, its ``seq`` never is."""

Key = tuple[str, str]
"""An idempotency key within its scope."""


class HistoryBroken(AssertionError):
    """What was seen cannot have happened if the invariants hold (ownership.md §13)."""


@final
class HistoryChecker:
    """Judges one store from its first row to its last. Raises ``HistoryBroken`` at the first contradiction.

    Checked: I1 and I7 on every look; I4, I5, I6 and I16 between any two looks, however much happened in between; I14
    and I17 over everything seen. Removed runs are simply no longer shown.
    """

    def __init__(self) -> None:
        self._delayed: set[RunId] = set()
        self._keys: dict[RunId, Key | None] = {}
        self._ended: set[Life] = set()
        self._holders: dict[tuple[Life, int], WorkerId] = {}
        self._rows: Mapping[RunId, Run] = {}

    # --- Answers ----------------------------------------------------------------------------------------------------

    def admitted(self, newcomer: Newcomer, answer: Admission) -> None:
        """A newcomer got this answer. Tell of every admission: which runs were for later cannot be read off rows."""
        if isinstance(answer, Admitted):
            if newcomer.delayed:
                self._delayed.add(newcomer.run_id)
            else:
                self._delayed.discard(newcomer.run_id)
            self._keys[newcomer.run_id] = _key_of(newcomer)
        elif isinstance(answer, Reuse) and answer.by_key:
            theirs = self._keys.get(answer.run.run_id)
            _require(theirs in (None, _key_of(newcomer)), f"I14: {newcomer.run_id} was answered with {answer.run}")

    def decided(self, event: RunEvent, decision: Decision) -> None:
        """An event got this answer."""
        if not isinstance(decision, Applied) or decision.repeated or not TRANSITIONS[event].ends:
            return
        life = _life(decision.run)
        _require(life not in self._ended, f"I5: {decision.run} ended a second time, by {event.value}")
        self._ended.add(life)

    # --- Rows -------------------------------------------------------------------------------------------------------

    def saw(self, runs: Iterable[Run]) -> None:
        """These are all operations that the store holds now, read in one statement."""
        rows = {run.run_id: run for run in runs}
        for problem in (*self._now(rows), *self._since(rows)):
            raise HistoryBroken(problem)
        self._rows = rows

    def swept(self, runs: Iterable[Run], now: Micros) -> None:
        """The same right after a sweep that promoted wherever it could, begun at ``now`` by the store's clock."""
        rows = list(runs)
        self.saw(rows)
        held = {run.thread_id for run in rows if run.active}
        for run in rows:
            late = run.status is RunStatus.QUEUED and is_due(run, now) and run.thread_id not in held
            _require(not late, f"I7: {run} is due on an idle thread after a sweep")

    def _now(self, rows: Mapping[RunId, Run]) -> Iterator[str]:
        threads: defaultdict[str, list[Run]] = defaultdict(list)
        for run in rows.values():
            threads[run.thread_id].append(run)
        for thread_id, runs in threads.items():
            active = [run for run in runs if run.active]
            if len(active) > 1:
                yield f"I1: {active} are all active on {thread_id}"
            prompt = [run for run in runs if run.run_id not in self._delayed and not run.reservation]
            if not active:
                yield from (f"I7: {run} waits on an idle thread" for run in prompt if run.status is RunStatus.QUEUED)
            yield from _out_of_order(prompt)
        for run in rows.values():
            yield from _contradicts_itself(run)
        yield from self._shared_keys(rows)
        turns = [run.turn for run in rows.values() if run.turn is not None]
        if len(set(turns)) != len(turns):
            yield "O15: two runs share a turn"

    def _shared_keys(self, rows: Mapping[RunId, Run]) -> Iterator[str]:
        holding: defaultdict[Key, list[Run]] = defaultdict(list)
        for run in rows.values():
            if (key := self._keys.get(run.run_id)) is not None:
                holding[key].append(run)
        yield from (f"I14: {runs} came in under one key" for runs in holding.values() if len(runs) > 1)

    def _since(self, rows: Mapping[RunId, Run]) -> Iterator[str]:
        for run_id, run in rows.items():
            holder = self._holders.setdefault((_life(run), run.epoch), run.owner_worker_id or NOBODY)
            if run.owner_worker_id is not None and holder not in (NOBODY, run.owner_worker_id):
                yield f"I4: epoch {run.epoch} of {run} was held by {holder}"
            if run.owner_worker_id is not None:
                self._holders[_life(run), run.epoch] = run.owner_worker_id
            before = self._rows.get(run_id)
            if before is not None and _life(before) == _life(run):
                yield from _broken_between(before, run)


NOBODY: Final = WorkerId("")


def _key_of(newcomer: Newcomer) -> Key | None:
    return None if newcomer.idempotency_key is None else (newcomer.idempotency_scope, newcomer.idempotency_key)


def _life(run: Run) -> Life:
    return (run.run_id, run.seq)


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - a condition and what its absence means
    if not holds:
        raise HistoryBroken(otherwise)


def _out_of_order(runs: Iterable[Run]) -> Iterator[str]:
    """I17: those that were never for later start in the order in which they came."""
    started = sorted((run for run in runs if run.turn is not None), key=lambda run: run.seq)
    for earlier, later in pairwise(started):
        if (earlier.turn or 0) > (later.turn or 0):
            yield f"I17: {later} started before {earlier}"


def _contradicts_itself(run: Run) -> Iterator[str]:
    if run.status is RunStatus.SUCCESS and run.cancel_action is not None:
        yield f"I6: {run} succeeded over a cancel"
    if run.terminal != (run.settled_at is not None):
        yield f"I5: {run} and the time of its end contradict each other"
    failed = run.stop_reason == StopReason.ROLLBACK_FAILED
    if run.terminal and run.rollback_owed and not failed and run.status is not RunStatus.INTERRUPTED:
        yield f"I16: {run} owed a rollback and ended as {run.status.value}"


def _broken_between(before: Run, after: Run) -> Iterator[str]:
    if before.terminal and _said(before) != _said(after):
        yield f"I5: {before} changed after its end: {_difference(before, after)}"
    if after.epoch < before.epoch:
        yield f"I4: {after} fell from epoch {before.epoch}"
    same_epoch = after.epoch == before.epoch and before.owner_worker_id is not None
    if same_epoch and after.owner_worker_id != before.owner_worker_id:
        yield f"I4: {after} changed hands from {before.owner_worker_id} within one epoch"
    if before.cancel_action is not None and _cancel(before) != _cancel(after):
        yield f"I6: the cancel {_cancel(before)} of {after} did not stand"
    if before.turn is not None and before.turn != after.turn:
        yield f"O15: {after} had turn {before.turn} and has {after.turn}"
    unrestored = before.status is RunStatus.RUNNING or before.owner_worker_id is None
    if before.rollback_owed and unrestored and after.terminal and after.granted_at == before.granted_at:
        yield f"I16: {after} ended although nobody had restored it"


def _cancel(run: Run) -> tuple[object, ...]:
    return (run.cancel_action, run.cancel_requested_at)


def _said(run: Run) -> Mapping[str, object]:
    """The row but for the stored input, which not every read brings."""
    return {field.name: getattr(run, field.name) for field in fields(run) if field.name != "kwargs"}


def _difference(before: Run, after: Run) -> Mapping[str, tuple[object, object]]:
    was, now = _said(before), _said(after)
    return {name: (was[name], now[name]) for name in was if was[name] != now[name]}
