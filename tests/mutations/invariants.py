"""What the judge of recorded histories looks at, taken away one look at a time; and what a database writes down."""

from __future__ import annotations

from typing import Final

from tests.mutations import AnyMutation, Mutation

_TESTING = "src/deerflow_runs/testing/"
_BY_HAND = "tests/history/test_invariants.py::"
_BROKEN = _BY_HAND + "test_a_history_that_breaks_one_invariant_is_faulted_for_that_one"
_HONEST = _BY_HAND + "test_a_history_that_keeps_every_invariant_is_believed"
_TRUST = _BY_HAND + "test_a_step_that_lies_in_a_gap_between_two_leases_began_without_trust"
_REAL = "tests/history/test_recording.py::"


def look(name: str, rule: str, file: str, old: str, new: str, test: str = _BROKEN) -> Mutation:
    """A look of the judge changed; histories made by hand show it, and need no database."""
    return Mutation(f"the judge: {name}", rule, f"{_TESTING}{file}.py", old, new, (test,), quick=True)


def real(name: str, rule: str, file: str, old: str, new: str, test: str) -> Mutation:
    """The recording changed; only a database shows it."""
    return Mutation(f"the recording: {name}", rule, f"{_TESTING}{file}.py", old, new, (_REAL + test,))


MUTATIONS: Final[list[AnyMutation]] = [
    # --- One run ----------------------------------------------------------------------------------------------------
    look(
        "an epoch may fall",
        "I4",
        "judging/runs",
        "    if after.epoch < before.epoch:\n",
        "    if after.epoch < 0:\n",
    ),
    look("an epoch may jump", "I4", "judging/runs", "after.epoch > before.epoch + 1", "after.epoch > before.epoch + 9"),
    look(
        "a run may change hands within an epoch",
        "I4",
        "judging/runs",
        "after.epoch == before.epoch and after.owner_worker_id != before.owner_worker_id",
        "after.epoch == before.epoch and after.owner_worker_id is None",
    ),
    look(
        "a run may stop within an epoch",
        "I4",
        "judging/runs",
        "before.status is RunStatus.RUNNING and after.status is RunStatus.PENDING:",
        "before.status is RunStatus.RUNNING and after.status is RunStatus.QUEUED:",
    ),
    look(
        "a run may run without a turn",
        "I3",
        "judging/steps",
        "if change.started and change.after.turn is None:",
        "if change.vacated and change.after.turn is None:",
    ),
    look(
        "the living may be robbed",
        "I10",
        "judging/recovery",
        "if after.active and after.owner_worker_id not in (None, owner):",
        "if after.active and after.owner_worker_id is after.run_id:",
    ),
    look(
        "the healthy may lose attempts",
        "I10",
        "judging/recovery",
        "elif after.attempt > before.attempt and owner in",
        "elif after.attempt < before.attempt and owner in",
    ),
    look(
        "anybody may end what another holds",
        "I10",
        "judging/recovery",
        "elif after.terminal and after.settled_by != owner:",
        "elif after.terminal and after.settled_by is after.run_id:",
    ),
    look(
        "the dead may not be taken over from",
        "O26",
        "judging/recovery",
        "_state(self.world, owner) in (None, SessionState.DEAD)",
        "_state(self.world, owner) is None",
        _HONEST,
    ),
    look(
        "a run may be started twice under one epoch",
        "I14",
        "judging/runs",
        '        if first is not change:\n            yield fault("I14", run, f"was started',
        '        if first is None:\n            yield fault("I14", run, f"was started',
    ),
    look(
        "what has ended may change",
        "I5",
        "judging/runs",
        "and after is not None and before != after:",
        "and after is not None and before is after:",
    ),
    look(
        "a run may come as ended",
        "I5",
        "judging/runs",
        "if before is None and after is not None and after.terminal:",
        "if before is None and after is None:",
    ),
    look(
        "an open run may vanish",
        "I15",
        "judging/runs",
        "not (before.terminal or before.reservation):",
        "not (before.terminal or before.active):",
    ),
    look(
        "a reservation may not go",
        "O28",
        "judging/runs",
        "not (before.terminal or before.reservation):",
        "not before.terminal:",
        _HONEST,
    ),
    look("no receipt is asked for", "I5", "judging/runs", "ends.keys() - receipts.keys()", "ends.keys() - ends.keys()"),
    look(
        "a receipt needs no end",
        "I5",
        "judging/runs",
        "receipts.keys() - ends.keys()",
        "receipts.keys() - receipts.keys()",
    ),
    look(
        "a cancel may be replaced", "I6", "judging/runs", "if _cancel(before) != _cancel(after):", "if after is None:"
    ),
    look(
        "a cancelled run may succeed",
        "I6",
        "judging/runs",
        "after.status is not RunStatus.INTERRUPTED and not _rollback_failed(after)",
        "after.status is RunStatus.TIMEOUT and not _rollback_failed(after)",
    ),
    look(
        "a rollback may not be given up",
        "I16",
        "judging/runs",
        "after.status is not RunStatus.INTERRUPTED and not _rollback_failed(after)",
        "after.status is not RunStatus.INTERRUPTED",
        _HONEST,
    ),
    look(
        "an owed rollback may be left",
        "I16",
        "judging/runs",
        "if after.terminal and before.rollback_owed:",
        "if after.terminal and before.cancel_action is None:",
    ),
    look(
        "a running run counts as restored",
        "I16",
        "judging/runs",
        "elif before.status is not RunStatus.PENDING or before.owner_worker_id is None:",
        "elif before.owner_worker_id is None:",
    ),
    look(
        "a vacant run counts as restored",
        "I16",
        "judging/runs",
        "elif before.status is not RunStatus.PENDING or before.owner_worker_id is None:",
        "elif before.status is not RunStatus.PENDING:",
    ),
    look(
        "a rollback may be given up early",
        "I16",
        "judging/runs",
        "if before.attempt <= before.max_attempts:",
        "if before.attempt < 0:",
    ),
    look(
        "two runs may have one key",
        "I14",
        "judging/runs",
        "        elif first.run.run_id != change.run.run_id:\n",
        "        elif first.run.run_id is None:\n",
    ),
    look(
        "a removed run keeps its key",
        "O5",
        "judging/runs",
        "            del self._by_key[key]\n",
        "            pass\n",
        _HONEST,
    ),
    look(
        "what was acknowledged may be missing",
        "I15",
        "judging/runs",
        "            if run_id not in self._known:\n",
        "            if run_id is None:\n",
    ),
    look("callers may get two answers", "I14", "judging/runs", "len(set(answered)) > 1", "len(set(answered)) > 2"),
    # --- One thread -------------------------------------------------------------------------------------------------
    look(
        "two may be active",
        "I1",
        "judging/threads",
        "world.active(change.run.thread_id)) > 1",
        "world.active(change.run.thread_id)) > 2",
    ),
    look(
        "a run may wait on an idle thread",
        "I7",
        "judging/threads",
        "            if not self.world.active(thread_id):\n",
        "            if self.world.active(thread_id):\n",
    ),
    look(
        "a delayed run may not wait on an idle thread",
        "O7",
        "judging/threads",
        "for run in self.world.queued(thread_id) if not run.delayed]",
        "for run in self.world.queued(thread_id)]",
        _HONEST,
    ),
    look(
        "any run may be promoted",
        "I17",
        "judging/threads",
        "        if change.promoted:\n",
        "        if change.vacated:\n",
    ),
    look(
        "any run may start first",
        "I17",
        "judging/threads",
        "if change.started and (change.before is None",
        "if change.vacated and (change.before is None",
    ),
    look(
        "nothing need end",
        "I8",
        "judging/threads",
        "        if not self.expected.quiet:\n",
        "        if self.expected.quiet:\n",
    ),
    look("a queue may be too long", "I19", "judging/threads", "queues_up = arrived and", "queues_up = not arrived and"),
    look(
        "a user may have too many",
        "I19",
        "judging/threads",
        "other.active and other.user_id == run.user_id",
        "other.active and other is run",
    ),
    look(
        "a worker may run too many",
        "I19",
        "judging/threads",
        "        if change.started and expected.max_running is not None:\n",
        "        if change.vacated and expected.max_running is not None:\n",
    ),
    # --- Recovery ---------------------------------------------------------------------------------------------------
    look(
        "one more attempt",
        "I9",
        "judging/recovery",
        "if len(lost) >= after.max_attempts:",
        "if len(lost) > after.max_attempts:",
    ),
    look(
        "progress forgives nothing",
        "O30",
        "judging/recovery",
        "            lost.clear()\n",
        "            pass\n",
        _HONEST,
    ),
    look(
        "a death that is not counted costs nothing",
        "I9",
        "judging/recovery",
        "return after.attempt > before.attempt or _state(world, before.owner_worker_id) is SessionState.DEAD",
        "return after.attempt > before.attempt and world is not None",
    ),
    look(
        "an attempt that is counted costs nothing",
        "I9",
        "judging/recovery",
        "return after.attempt > before.attempt or _state",
        "return after.attempt < before.attempt or _state",
    ),
    look(
        "a drain may cost an attempt",
        "I18",
        "judging/recovery",
        "if draining and change.after.attempt > change.before.attempt:",
        "if draining and change.after.attempt < change.before.attempt:",
    ),
    # --- Sessions ---------------------------------------------------------------------------------------------------
    look(
        "the dead may beat",
        "I12",
        "judging/sessions",
        "            if replace(before, proven=after.proven) != after:\n",
        "            if replace(before, proven=after.proven) is after:\n",
    ),
    look(
        "an id may be used again",
        "I12",
        "judging/sessions",
        "        if first is not change and session.state",
        "        if first is None and session.state",
    ),
    look(
        "the living may be forgotten",
        "I12",
        "judging/sessions",
        "            if before.state is not SessionState.DEAD:\n",
        "            if before.proven:\n",
    ),
    look(
        "the healthy may be declared dead",
        "I10",
        "judging/sessions",
        "and after.worker_id in self.expected.healthy:",
        "and after.worker_id in ():",
    ),
    look(
        "an outage may kill",
        "I13",
        "judging/sessions",
        'name = "I13" if self.expected.outage else "I10"',
        'name = "I10"',
    ),
    # --- Steps ------------------------------------------------------------------------------------------------------
    look(
        "who has ended may write",
        "I2",
        "judging/steps",
        "    if run is None or not run.active:\n",
        "    if run is None:\n",
    ),
    look(
        "an old epoch may write",
        "I2",
        "judging/steps",
        "    elif step.epoch != run.epoch:\n",
        "    elif step.epoch > run.epoch:\n",
    ),
    look(
        "an old epoch may report progress",
        "I2",
        "judging/steps",
        "if after.progress_epoch not in (before.progress_epoch, before.epoch):",
        "if after.progress_epoch is before.run_id:",
    ),
    look(
        "an earlier turn may write",
        "I3",
        "judging/steps",
        "        if (turn, step.epoch) < before:\n",
        "        if (turn, step.epoch) == ():\n",
    ),
    look(
        "a writer may make its turn up",
        "I3",
        "judging/steps",
        "elif step.turn is not None and step.turn != run.turn:",
        "elif step.turn is not None and step.turn is run.run_id:",
    ),
    look(
        "a turn may change",
        "I3",
        "judging/steps",
        "if before.turn is not None or after.turn is None:",
        "if after.turn is None:",
    ),
    look(
        "turns may go back", "I3", "judging/steps", "        if after.turn <= last:\n", "        if after.turn < 0:\n"
    ),
    look(
        "a step may be recorded twice",
        "I20",
        "judging/steps",
        "        if first is not change:\n",
        "        if first is None:\n",
    ),
    look(
        "a recorded step may begin again",
        "I20",
        "judging/steps",
        "recorded is not None and logged.epoch > recorded.epoch",
        "recorded is not None and logged.epoch > recorded.epoch + 1",
        _BY_HAND + "test_a_step_that_was_recorded_may_not_begin_again_under_a_later_epoch",
    ),
    look(
        "a lease that has run out is trusted",
        "I11",
        "judging/steps",
        "return not _alive(change) or change.session.expires_at < at",
        "return not _alive(change)",
        _TRUST,
    ),
    look(
        "a dead session is trusted",
        "I11",
        "judging/steps",
        "return not _alive(change) or change.session.expires_at < at",
        "return change.session.expires_at < at",
        _TRUST,
    ),
    look(
        "who waits for trust has none",
        "O12",
        "judging/steps",
        "return last if _over_at(last, step.asked_at) and not renewed else None",
        "return last if _over_at(last, step.asked_at) else None",
        _TRUST,
    ),
    look(
        "a step may begin under an epoch that nobody held",
        "I11",
        "judging/steps",
        "            if holder is None:\n",
        "            if holder is None and step.asked_at is not None:\n",
        _BY_HAND + "test_a_step_under_an_epoch_that_nobody_held_began_without_trust",
    ),
    # --- The whole --------------------------------------------------------------------------------------------------
    look(
        "a history without grants proves something",
        "I9",
        "judging/__init__",
        "found = [] if grants else [fault",
        "found = [] if changes else [fault",
        _BY_HAND + "test_a_history_without_a_grant_proves_nothing",
    ),
    look(
        "what is suspended is judged all the same",
        "I7",
        "judging/__init__",
        "if violation.invariant not in expected.without",
        "if violation.invariant not in ()",
    ),
    look(
        "transactions stand in the order of their first changes",
        "I7",
        "recorded",
        "key=lambda changes: changes[-1].number",
        "key=lambda changes: changes[0].number",
        _BY_HAND + "test_transactions_stand_in_the_order_of_their_last_changes",
    ),
    look(
        "on SQLite every change is a transaction",
        "I7",
        "recorded",
        "        return change.ended or change.promoted\n",
        "        return change.ended and change.promoted\n",
        _BY_HAND + "test_an_ending_counts_as_one_transaction_where_the_database_does_not_tell",
    ),
    # --- The recording ----------------------------------------------------------------------------------------------
    real(
        "SQLite forgets what is removed",
        "I15",
        "triggers",
        '        "dr_runs": ("INSERT", "UPDATE", "DELETE"),\n',
        '        "dr_runs": ("INSERT", "UPDATE"),\n',
        "test_a_row_that_somebody_spoils_is_found",
    ),
    real(
        "a step whose reply was lost is recorded twice",
        "O8",
        "recording",
        "connection.execute(kept.returning(_STEPS.c.id), dict(bag))",
        'connection.execute(kept.returning(_STEPS.c.id), dict(bag) | {"p_write": uuid4().hex})',
        "test_a_step_whose_reply_was_lost_is_recorded_once",
    ),
    real(
        "a step needs no fence on SQLite",
        "O14",
        "recording",
        "    elif holds(connection, dialect, key, epoch):\n",
        "    elif key is not None or holds(connection, dialect, key, epoch):\n",
        "test_a_step_is_recorded_while_the_run_is_held_and_not_after_its_end[sqlite]",
    ),
    real(
        "a step needs no fence on PostgreSQL",
        "O14",
        "recording",
        ".select_from(held(dialect)))",
        ")",
        "test_a_step_is_recorded_while_the_run_is_held_and_not_after_its_end[postgres]",
    ),
]
