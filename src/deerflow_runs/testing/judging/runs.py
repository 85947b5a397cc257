"""Judges what may happen to one run: I4 and I14 (epochs and their holders), I5, I6 and I16 (its end), I15.

Order needed: that of one row, which is exact on both databases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Final, final

from deerflow_runs.model import Run, RunId, RunStatus, StopReason, WorkerId
from deerflow_runs.testing.invariants import Expected, Violation
from deerflow_runs.testing.judging.base import Judge, Life, World, fault, life_of
from deerflow_runs.testing.recorded import Change, OutboxChanged, RunChanged

RECEIPT: Final = "receipt"


@final
class Epochs(Judge):
    """I4: epochs only grow, by one, and each has one holder. I14: under one epoch a run is started once."""

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._holders: dict[tuple[Life, int], tuple[WorkerId, RunChanged]] = {}
        self._starts: dict[tuple[Life, int], RunChanged] = {}

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge every change of a run."""
        if not isinstance(change, RunChanged) or change.after is None:
            return
        if change.before is not None and not change.before.terminal:
            yield from _epoch_between(change, change.before, change.after)
        yield from self._held(change, change.after)
        yield from self._started(change, change.after)

    def _held(self, change: RunChanged, run: Run) -> Iterator[Violation]:
        if run.owner_worker_id is None:
            return
        token = (life_of(run), run.epoch)
        holder, granted = self._holders.setdefault(token, (run.owner_worker_id, change))
        if holder != run.owner_worker_id:
            yield fault("I4", run, f"epoch {run.epoch} was granted to {holder} before", granted, change)

    def _started(self, change: RunChanged, run: Run) -> Iterator[Violation]:
        if not change.started:
            return
        first = self._starts.setdefault((life_of(run), run.epoch), change)
        if first is not change:
            yield fault("I14", run, f"was started twice under epoch {run.epoch}", first, change)


def _epoch_between(change: RunChanged, before: Run, after: Run) -> Iterator[Violation]:
    if after.epoch < before.epoch:
        yield fault("I4", after, f"fell from epoch {before.epoch} to {after.epoch}", change)
    elif after.epoch > before.epoch + 1:
        yield fault("I4", after, f"jumped from epoch {before.epoch} to {after.epoch}", change)
    elif after.epoch == before.epoch and after.owner_worker_id != before.owner_worker_id:
        yield fault("I4", after, f"changed hands within epoch {after.epoch}", change)
    elif after.epoch == before.epoch and before.status is RunStatus.RUNNING and after.status is RunStatus.PENDING:
        yield fault("I4", after, f"stopped running within epoch {after.epoch}", change)


@final
class Ends(Judge):
    """I5: an end is final, and is written once, together with its receipt. I15: nothing goes before it has ended."""

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge what follows an end, and rows that come or go."""
        if not isinstance(change, RunChanged):
            return
        before, after = change.before, change.after
        if before is not None and before.terminal and after is not None and before != after:
            yield fault("I5", after, f"changed after its end: {_difference(before, after)}", change)
        if before is None and after is not None and after.terminal:
            yield fault("I5", after, "came as ended", change)
        if before is not None and after is None and not (before.terminal or before.reservation):
            yield fault("I15", before, "was removed before it ended", change)

    def committed(self, changes: tuple[Change, ...]) -> Iterator[Violation]:
        """Compare the ends of one transaction with its receipts."""
        ends = {one.run.run_id: one for one in changes if isinstance(one, RunChanged) and _is_end_of_run(one)}
        receipts = {one.run_id: one for one in changes if isinstance(one, OutboxChanged) and _is_new_receipt(one)}
        for run_id in ends.keys() - receipts.keys():
            yield fault("I5", run_id, "ended without its receipt", ends[run_id])
        for run_id in receipts.keys() - ends.keys():
            yield fault("I5", run_id, "got a receipt without an end", receipts[run_id])


def _is_end_of_run(change: RunChanged) -> bool:
    return change.ended and change.after is not None and not change.run.reservation


def _is_new_receipt(change: OutboxChanged) -> bool:
    return change.new and change.kind == RECEIPT


def _difference(before: Run, after: Run) -> dict[str, tuple[object, object]]:
    pairs = {field.name: (getattr(before, field.name), getattr(after, field.name)) for field in fields(Run)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@final
class Cancels(Judge):
    """I6: the first cancel stands and never yields success. I16: no run ends while a rollback is owed.

    What is judged of a restore is that somebody could have made it: the run was held and pending, or its restores were
    used up. Whether the state before the run is back is for the test to look at.
    """

    def saw(self, change: Change) -> Iterator[Violation]:
        """Judge every change of a run that was cancelled before it."""
        if not isinstance(change, RunChanged) or change.before is None or change.after is None:
            return
        before, after = change.before, change.after
        if before.cancel_action is None or before.terminal:
            return
        if _cancel(before) != _cancel(after):
            yield fault("I6", after, f"the cancel {_cancel(before)} did not stand", change)
        if after.terminal and after.status is not RunStatus.INTERRUPTED and not _rollback_failed(after):
            yield fault("I6", after, f"ended as {after.status.value} over a cancel", change)
        if after.terminal and before.rollback_owed:
            yield from _restored(change, before, after)


def _cancel(run: Run) -> tuple[str | None, int | None]:
    return (run.cancel_action.value if run.cancel_action else None, run.cancel_requested_at)


def _rollback_failed(run: Run) -> bool:
    return run.status is RunStatus.ERROR and run.stop_reason == StopReason.ROLLBACK_FAILED


def _restored(change: RunChanged, before: Run, after: Run) -> Iterator[Violation]:
    if _rollback_failed(after):
        if before.attempt <= before.max_attempts:
            yield fault("I16", after, f"gave its rollback up at attempt {before.attempt}", change)
    elif before.status is not RunStatus.PENDING or before.owner_worker_id is None:
        yield fault("I16", after, "ended although nobody had seized it to restore", change)


@final
class Admissions(Judge):
    """I14: one key, one run, and one answer. I15: what was acknowledged is there."""

    def __init__(self, expected: Expected, world: World) -> None:
        super().__init__(expected, world)
        self._by_key: dict[tuple[str, str], RunChanged] = {}
        self._known: set[RunId] = set()

    def saw(self, change: Change) -> Iterator[Violation]:
        """Take note of every key; a removal frees it."""
        if not isinstance(change, RunChanged):
            return
        self._known.add(change.run.run_id)
        if change.run.idempotency_key is None:
            return
        key = (change.scope, change.run.idempotency_key)
        first = self._by_key.setdefault(key, change)
        if change.after is None:
            del self._by_key[key]
        elif first.run.run_id != change.run.run_id:
            yield fault("I14", change.run, f"has the key of run {first.run.run_id}", first, change)

    def over(self) -> Iterator[Violation]:
        """Compare with what callers were told."""
        for run_id in self.expected.acknowledged:
            if run_id not in self._known:
                yield fault("I15", run_id, "was acknowledged and never stored")
        for key, answered in self.expected.answers.items():
            if len(set(answered)) > 1:
                yield fault("I14", None, f"key {key} was answered with the runs {sorted(set(answered))}")
