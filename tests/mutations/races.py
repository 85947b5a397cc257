"""Mutations of what the database is trusted with under contention: locks, snapshots, indexes, statements' shapes."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

RACES = "tests/races/"
ARRIVALS = RACES + "test_arrivals.py::"
ENDINGS = RACES + "test_endings.py::"
FENCE = RACES + "test_fence.py::"
MANY = RACES + "test_many.py::"
SHAPES = RACES + "test_shapes.py::"
PLANS = RACES + "test_plans.py::"
STRANDED = ARRIVALS + "test_nobody_is_stranded_between_an_enqueue_and_an_end"
STALE = FENCE + "test_a_stale_writer_writes_before_its_epoch_ends_or_not_at_all"


def store(name: str, rule: str, module: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, rule, f"src/deerflow_runs/store/{module}.py", old, new, tests)


def migration(name: str, rule: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, rule, f"migrations/versions/{file}.py", old, new, tests)


LOCKS: Final = [
    store(
        "an admission under the lock takes no lock",
        "O3",
        "arrivals",
        "    dialect.lock_threads(connection, [newcomer.thread_id])\n",
        "",
        ARRIVALS + "test_the_limit_of_a_queue_counts_delayed_runs_that_come_at_once",
    ),
    store(
        "a promotion of an idle thread takes no lock",
        "O7",
        "endings",
        "    dialect.lock_threads(connection, thread_ids)\n",
        "",
        ARRIVALS + "test_a_newcomer_and_the_promotion_of_a_due_run_agree_on_one_holder",
    ),
    store(
        "what ends waiting runs takes no lock",
        "O7",
        "endings",
        "        dialect.lock_threads(connection, found)\n",
        "",
        ARRIVALS + "test_ends_of_waiting_runs_and_an_interrupt_never_wait_in_a_ring",
    ),
    store(
        "a promotion locks waiting runs of threads that somebody holds",
        "O7",
        "endings",
        "        ~busy.correlate(wanted).exists(),\n",
        "",
        ARRIVALS + "test_sweeps_over_the_same_threads_never_wait_in_a_ring",
    ),
    store(
        "a transaction sees one snapshot for all its statements",
        "O7",
        "connections",
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        "BEGIN ISOLATION LEVEL REPEATABLE READ",
        ARRIVALS + "test_of_two_interrupts_one_survives_and_all_others_end",
    ),
    store(
        "statements of a transaction are committed one by one",
        "O28",
        "connections",
        "            await driver.execute(begin)  # not",
        "            await driver.execute('SELECT 1')  # not",
        RACES + "test_broken_off.py",
    ),
    store(
        "a batch waits for rows that somebody is busy with",
        "O26",
        "endings",
        "limited.with_for_update(skip_locked=True, of=runs, key_share=True)",
        "limited.with_for_update(of=runs, key_share=True)",
        ENDINGS + "test_a_sweep_passes_over_a_run_that_somebody_is_busy_with",
    ),
    store(
        "an owner that stops inside a transaction is never cut off",
        "O14",
        "connections",
        '"idle_in_transaction_session_timeout": self.idle_in_transaction,',
        '"idle_in_transaction_session_timeout": 0.0,',
        RACES
        + "test_stopped.py::test_an_owner_that_stops_inside_its_transaction_is_cut_off_and_nothing_of_it_happened",
    ),
]

QUEUE: Final = [
    store(
        "the fast settle does not ask whether somebody waits",
        "O7",
        "endings",
        "alone = [~R.queue_behind, R.cancel_action.is_(null())] if nobody_waits else []",
        "alone = [R.cancel_action.is_(null())] if nobody_waits else []",
        STRANDED,
    ),
    store(
        "settles that go together do not ask whether somebody waits",
        "O7",
        "together",
        "alone = (~R.queue_behind, R.cancel_action.is_(null())) if rule.ends else ()",
        "alone = (R.cancel_action.is_(null()),) if rule.ends else ()",
        RACES + "test_arrivals.py::test_settles_that_go_together_strand_nobody",
    ),
    store(
        "an enqueue does not flag whom it waits for",
        "O2",
        "arrivals",
        "update(runs).where(*wanted).values(queue_behind=true(), updated_at",
        "update(runs).where(*wanted).values(updated_at",
        STRANDED,
    ),
    store(
        "an end promotes nobody",
        "O28",
        "endings",
        "    return promote(connection, dialect, sorted({run.thread_id for run in ended}.difference(deleted)))",
        "    return ()",
        STRANDED,
    ),
    store(
        "a reject does not look at the queue",
        "O1",
        "arrivals",
        "true() if only_due is None else nobody_waits",
        "true() if not only_due else nobody_waits",
        ARRIVALS + "test_a_newcomer_and_the_promotion_of_a_due_run_agree_on_one_holder",
    ),
    store(
        "an interrupt displaces whom it saw at first",
        "O3",
        "arrivals",
        "    ended = end_queue(connection, dialect, newcomer.thread_id, by, given, spare=newcomer.run_id)\n",
        "    from deerflow_runs.store.endings import end_these\n\n"
        "    ids = [run.run_id for run in plan.ended]\n"
        "    ended = end_these(connection, dialect, RunEvent.CANCEL_QUEUED, by, given, ids)\n",
        ARRIVALS + "test_an_interrupt_displaces_whoever_was_enqueued_before_it",
    ),
    store(
        "a queue's limit is not looked at once its incumbent is held",
        "I19",
        "arrivals",
        "    queueing = _queueing(dialect, newcomer.delayed, newcomer.max_queued is not None)\n"
        "    return Admitted(_insert_or_again(connection, dialect, newcomer, queueing), to_run(behind))\n",
        "    queueing = _queueing(dialect, newcomer.delayed, False)\n"
        "    return Admitted(_insert_or_again(connection, dialect, newcomer, queueing), to_run(behind))\n",
        ARRIVALS + "test_a_queue_never_grows_beyond_its_limit",
    ),
    store(
        "a promotion that lost its thread is an error",
        "O7",
        "sql",
        "            return await self._units.transaction(self._unit(endings.promote_under_lock, threads))\n"
        "        except IntegrityError:\n            return None",
        "            return await self._units.transaction(self._unit(endings.promote_under_lock, threads))\n"
        "        except StoreUnavailable:\n            return None",
        ARRIVALS + "test_a_promotion_that_lost_its_thread_while_it_looked_is_no_error",
    ),
]

INDEXES: Final = [
    store(
        "an admission that finds its place taken is an error",
        "O1",
        "arrivals",
        "insertion.on_conflict_do_nothing().returning(*narrow())",
        "insertion.returning(*narrow())",
        ARRIVALS + "test_of_two_newcomers_one_gets_the_thread_and_the_other_is_told_who",
    ),
    migration(
        "a thread may have two active runs",
        "I1",
        "0002_active_run_indexes",
        '("uq_dr_runs_active_thread", ["thread_id"], "active", True)',
        '("uq_dr_runs_active_thread", ["thread_id"], "active", False)',
        ARRIVALS + "test_of_two_newcomers_one_gets_the_thread_and_the_other_is_told_who",
    ),
    migration(
        "a key may have two runs",
        "I14",
        "0002_active_run_indexes",
        '["idempotency_scope", "idempotency_key"], "idempotency_key IS NOT NULL", True)',
        '["idempotency_scope", "idempotency_key"], "idempotency_key IS NOT NULL", False)',
        ARRIVALS + "test_one_request_that_comes_twice_at_once_is_one_run",
    ),
    migration(
        "a session hoards turns",
        "O15",
        "0001_tables",
        "CREATE SEQUENCE dr_turn CACHE 1",
        "CREATE SEQUENCE dr_turn CACHE 20",
        MANY + "test_turns_on_one_thread_never_go_backwards_whoever_draws_them",
    ),
    migration(
        "the list's index serves everybody",
        "P2",
        "0001_tables",
        'listed = sa.text("seq >= 0")',
        'listed = sa.text("true")',
        PLANS + "test_what_is_open_is_found_without_reading_what_has_ended",
    ),
]

SHAPES_AND_PLANS: Final = [
    store(
        "a batch is chosen with IN",
        "O26",
        "endings",
        "    return R.run_id == func.any(func.array(_candidates(event, dialect).scalar_subquery()))",
        "    return R.run_id.in_(_candidates(event, dialect))",
        SHAPES + "test_a_claim_takes_no_more_than_it_asked_for",
    ),
    store(
        "heads are chosen with IN",
        "O7",
        "endings",
        "_promotion(dialect).where(R.run_id == func.any(func.array(heads)))",
        "_promotion(dialect).where(R.run_id.in_(heads))",
        SHAPES + "test_one_end_promotes_one_head",
    ),
    store(
        "a waiting run is looked for where the queue's index is",
        "P2",
        "clauses",
        "    if set(statuses) == {RunStatus.QUEUED}:",
        "    if not statuses:",
        PLANS + "test_a_guard_by_key_goes_by_the_primary_key_however_often_it_was_planned",
    ),
    store(
        "the fence speaks of what is active",
        "P2",
        "fence",
        '    mine = and_(at_key(), R.epoch == bindparam("p_epoch", type_=BigInteger), status_in(*HOLDING))',
        '    mine = and_(at_key(), R.epoch == bindparam("p_epoch", type_=BigInteger), R.active)',
        PLANS + "test_the_fence_goes_by_the_primary_key",
    ),
]

OWNERS: Final = [
    store(
        "an orphan is a run whose owner is not seen alive",
        "O26",
        "clauses",
        "workers.c.worker_id == worker_id, workers.c.state == word(state)).exists()",
        "workers.c.worker_id == worker_id, workers.c.state == word(state)).exists() if state != 'dead' else"
        " ~select(literal_column('1')).where(workers.c.worker_id == worker_id, workers.c.state != 'dead').exists()",
        ENDINGS + "test_a_sweep_steals_nothing_from_a_session_it_cannot_see_yet",
    ),
    store(
        "a verdict counts whatever the session did since",
        "O24",
        "sessions",
        'unchanged = and_(NOT_DEAD, W.beat == bindparam("p_beat"))',
        "unchanged = NOT_DEAD",
        ENDINGS + "test_a_session_beats_or_dies_and_a_verdict_on_an_old_beat_is_void",
    ),
    store(
        "a dead session beats, in a race",
        "I12",
        "sessions",
        '.where(W.worker_id == bindparam("p_worker"), NOT_DEAD)\n        .values(\n            beat',
        '.where(W.worker_id == bindparam("p_worker"))\n        .values(\n            beat',
        ENDINGS + "test_a_session_beats_or_dies_and_a_verdict_on_an_old_beat_is_void",
    ),
]

FENCES: Final = [
    store(
        "the fence takes a lock that an update passes",
        "O14",
        "dialect",
        "share_lock=lambda statement: statement.with_for_update(read=True),",
        "share_lock=lambda statement: statement.with_for_update(read=True, key_share=True),",
        STALE,
    ),
    store(
        "the fence takes no lock",
        "O14",
        "dialect",
        "share_lock=lambda statement: statement.with_for_update(read=True),",
        "share_lock=lambda statement: statement,",
        STALE,
    ),
    store(
        "the fence does not ask for the epoch",
        "O14",
        "fence",
        '    mine = and_(at_key(), R.epoch == bindparam("p_epoch", type_=BigInteger), status_in(*HOLDING))',
        "    mine = and_(at_key(), status_in(*HOLDING))",
        STALE,
    ),
    store(
        "the fence lets ended runs write",
        "O14",
        "fence",
        '    mine = and_(at_key(), R.epoch == bindparam("p_epoch", type_=BigInteger), status_in(*HOLDING))',
        '    mine = and_(at_key(), R.epoch == bindparam("p_epoch", type_=BigInteger))',
        STALE,
    ),
    store(
        "the fence's text lets any epoch write",
        "O14",
        "fence",
        "run_id = %(fence_run)s AND epoch = %(fence_epoch)s",
        "run_id = %(fence_run)s AND epoch <= %(fence_epoch)s",
        FENCE + "test_the_fence_as_text_writes_for_its_epoch_only",
    ),
    store(
        "a foreign fence is lowered",
        "O16",
        "fence",
        "    older = or_(fence.c.turn < turn, and_(fence.c.turn == turn, fence.c.epoch <= epoch))",
        "    older = fence.c.epoch <= epoch",
        FENCE + "test_a_foreign_fence_only_ever_rises",
    ),
    store(
        "a foreign fence is read without a lock",
        "O16",
        "fence",
        "    return Statement.of(dialect.share_lock(found))",
        "    return Statement.of(found)",
        FENCE + "test_a_stale_writer_in_another_database_writes_before_the_fence_rises_or_not_at_all",
    ),
]

MUTATIONS: Final = [*LOCKS, *QUEUE, *INDEXES, *SHAPES_AND_PLANS, *OWNERS, *FENCES]
