"""Mutations of what is read, of threads and of the outbox."""

from __future__ import annotations

from typing import Final

from tests.mutations import AnyMutation, Mutation

STORE = "src/deerflow_runs/store/"
READS = "tests/contract/test_reads.py::"
PLANS = "tests/contract/test_read_plans.py::"
HISTORY = "tests/contract/test_history.py::"
THREADS = "tests/contract/test_threads.py::"
OUTBOX = "tests/contract/test_outbox.py::"


def change(name: str, rule: str, module: str, old: str, new: str, test: str) -> Mutation:
    """One change of text in one of the store's modules, and the one test that must see it."""
    return Mutation(name, rule, f"{STORE}{module}.py", old, new, (test,), quick=test.startswith(HISTORY))


SCOPES: Final = [
    change(
        "a user reaches everybody's rows",
        "F63",
        "scopes",
        "if mine else []",
        "if not mine and mine else []",
        READS + "test_a_foreign_run_looks_like_a_missing_one",
    ),
    change(
        "a single read answers a reservation",
        "F65",
        "reads",
        "where(at_key(), IS_RUN, *in_scope",
        "where(at_key(), *in_scope",
        READS + "test_no_read_for_callers_answers_a_reservation",
    ),
    change(
        "a list answers reservations",
        "B057",
        "pages",
        "where(ALL_HERE, IS_RUN, older, *where)",
        "where(ALL_HERE, older, *where)",
        READS + "test_no_read_for_callers_answers_a_reservation",
    ),
    change(
        "ids are looked for on every thread",
        "B185",
        "reads",
        "where(these, HERE, IS_RUN",
        "where(these, IS_RUN",
        READS + "test_ids_are_looked_for_on_one_thread_only",
    ),
    change(
        "a receipt is everybody's",
        "B202",
        "outbox",
        "found.where(*in_scope(R.user_id, mine=mine))",
        "found",
        OUTBOX + "test_a_receipt_is_its_users_only",
    ),
    change(
        "a foreign thread may be deleted",
        "B202",
        "threads",
        "if restricted(scope) and _foreign",
        "if not restricted(scope) and _foreign",
        THREADS + "test_nobody_deletes_what_is_foreign",
    ),
    change(
        "a thread is changed for anybody",
        "B202",
        "threads",
        "row = _one(dialect, mine=restricted(scope), locked=True)",
        "row = _one(dialect, mine=False, locked=True)",
        THREADS + "test_a_foreign_thread_looks_like_a_missing_one",
    ),
    change(
        "a search finds everybody's threads",
        "B202",
        "thread_search",
        "*in_scope(T.user_id, mine=shape.mine),",
        "",
        THREADS + "test_a_foreign_thread_looks_like_a_missing_one",
    ),
]

LISTS: Final = [
    change(
        "a cursor knows the instant only",
        "F57",
        "pages",
        "tuple_(R.created_at, R.run_id) < tuple_(created_at, run_id)",
        "R.created_at < created_at",
        READS + "test_runs_of_one_instant_are_neither_lost_nor_doubled_between_pages",
    ),
    change(
        "a made-up cursor is taken for one",
        "F57",
        "pages",
        "if position.cursor() != cursor or not 0",
        "if not 0",
        READS + "test_a_cursor_that_was_made_up_is_refused",
    ),
    change(
        "an unreadable row ends the list",
        "B184",
        "lenient",
        "UNREADABLE: Final = (ValueError, TypeError,",
        "UNREADABLE: Final = (TypeError,",
        READS + "test_an_unreadable_row_spoils_neither_the_list_nor_the_cursor",
    ),
    change(
        "the database reads a list's JSON",
        "B184",
        "lenient",
        "if isinstance(one.type, JsonText) else one for one in columns",
        "if not isinstance(one.type, JsonText) else one for one in columns",
        READS + "test_an_unreadable_row_spoils_neither_the_list_nor_the_cursor",
    ),
    change(
        "a search in metadata takes a hint for the answer",
        "F57",
        "reads",
        "elif wanted.matches(row.metadata):",
        "else:",
        READS + "test_a_list_can_be_restricted_to_runs_whose_metadata_contain_something",
    ),
    change(
        "a filter's wildcards are not escaped",
        "F57",
        "pages",
        'needle.replace("/", "//").replace("%", "/%").replace("_", "/_")',
        'needle.replace("%", "/%").replace("_", "/_")',
        READS + "test_a_list_can_be_restricted_to_runs_whose_metadata_contain_something",
    ),
    change(
        "open runs of a thread are looked for among all of its runs",
        "F57",
        "reads",
        "if not statuses <= OPEN or not statuses:",
        "if statuses or not statuses:",
        PLANS + "test_no_question_about_open_runs_looks_at_ended_ones",
    ),
]

OPEN: Final = [
    change(
        "a reservation counts as a run in flight",
        "B015",
        "reads",
        "where(HERE, R.active, IS_RUN).exists()",
        "where(HERE, R.active).exists()",
        READS + "test_a_reservation_is_no_run_in_flight",
    ),
    change(
        "a queue is in order of admission only",
        "I17",
        "reads",
        "where(HERE, WAITING).order_by(R.due_at, R.seq)",
        "where(HERE, WAITING).order_by(R.seq)",
        READS + "test_a_queue_is_in_order_of_due_time_then_admission",
    ),
    change(
        "a sweep promotes on held threads",
        "O7",
        "reads",
        "idle = and_(WAITING, due(R, dialect), ~thread_active())",
        "idle = and_(WAITING, due(R, dialect))",
        READS + "test_a_due_run_on_an_idle_thread_is_found_and_one_behind_another_is_not",
    ),
    change(
        "whoever has no capability may seize",
        "O4",
        "reads",
        "guards(TRANSITIONS[RunEvent.SEIZE], dialect)",
        "guards(TRANSITIONS[RunEvent.REQUEST_CANCEL], dialect)",
        READS + "test_who_may_seize_a_run_finds_it_by_the_rule_of_the_table",
    ),
    change(
        "a note reaches owned runs",
        "O31",
        "reads",
        "vacant = and_(status_in(RunStatus.PENDING), R.owner_worker_id.is_(null()))",
        "vacant = and_(status_in(RunStatus.PENDING), R.run_id.is_not(null()))",
        READS + "test_a_note_why_a_run_waits_reaches_vacant_runs_only",
    ),
    change(
        "ended runs are read to count the open ones",
        "F50",
        "reads",
        '_counted("run", R.status).where(R.active, IS_RUN)',
        '_counted("run", R.status).where(status_in(*ACTIVE), IS_RUN)',
        PLANS + "test_no_question_about_open_runs_looks_at_ended_ones",
    ),
]

PAST: Final = [
    change(
        "tokens of interrupted and timed-out runs are lost",
        "F64",
        "reads",
        "statuses = TERMINAL | ACTIVE if active else TERMINAL",
        "statuses = {RunStatus.SUCCESS, RunStatus.ERROR} | (ACTIVE if active else set())",
        READS + "test_tokens_count_however_a_run_ended_and_of_active_runs_on_request",
    ),
    change(
        "a run without details is counted under no model",
        "B198",
        "history",
        "return {self.model_name or UNKNOWN_MODEL: self.total_tokens}",
        "return {}",
        HISTORY + "test_a_run_that_named_no_models_counts_under_its_own_or_as_unknown",
    ),
    change(
        "any success ever hides its source",
        "B189",
        "history",
        "and (attempt.source, attempt.edit) not in decided:",
        "and decided is not None:",
        HISTORY + "test_a_newer_failure_brings_the_source_of_an_older_success_back",
    ),
    change(
        "a failed edit stays visible",
        "B190",
        "history",
        "if attempt.edit and attempt.failed:",
        "if attempt.edit and not attempt.failed:",
        HISTORY + "test_a_failed_edit_is_hidden_itself_and_shows_its_source_again",
    ),
    change(
        "a regeneration hides its source before it succeeded",
        "B188",
        "history",
        "return self.edit or self.status in TERMINAL",
        "return True",
        HISTORY + "test_a_regeneration_that_has_not_succeeded_hides_nothing",
    ),
    change(
        "a long past is read to its first batch",
        "B188",
        "pages",
        "if len(rows) < batch:",
        "if len(rows) <= batch:",
        READS + "test_a_long_past_is_added_up_and_searched_whole",
    ),
]

CONVERSATIONS: Final = [
    change(
        "a waiting run leaves its thread idle",
        "O28",
        "threads",
        "return or_(_any(held, is_held), _any(awaited, is_awaited))",
        "return or_(_any(held, is_held), and_(~_any(awaited, is_awaited), _any(held, is_held)))",
        THREADS + "test_a_thread_is_busy_while_a_run_is_active_or_waits",
    ),
    change(
        "a thread is deleted under a run",
        "F66",
        "threads",
        "if holder.run_id != key.run_id or holder.kind is not OperationKind.DELETE:",
        "if holder.kind is OperationKind.DELETE and holder.run_id != key.run_id:",
        THREADS + "test_a_thread_that_something_else_holds_is_not_deleted",
    ),
    change(
        "a lost reservation deletes all the same",
        "O14",
        "threads",
        "if isinstance(released, Refused):",
        "if isinstance(released, Refused) and released.reason is Refusal.UNKNOWN:",
        THREADS + "test_a_delete_whose_reservation_was_lost_changes_nothing",
    ),
    change(
        "a deleted thread leaves its receipts",
        "F66",
        "threads",
        "for table in (base_writes, outbox, event_log)]",
        "for table in (base_writes, event_log)]",
        THREADS + "test_a_deleted_thread_leaves_nothing_and_others_are_untouched",
    ),
    change(
        "a delete does not hold its reservation while others queue behind it",
        "O2",
        "threads",
        "where(HERE, R.active).with_for_update())",
        "where(HERE, R.active))",
        THREADS + "test_a_delete_ends_who_is_just_queueing_behind_it",
    ),
    change(
        "temporary threads are listed",
        "B202",
        "thread_search",
        "        ~T.temporary,\n",
        "",
        THREADS + "test_temporary_threads_are_in_no_list",
    ),
]

DELIVERIES: Final = [
    change(
        "what is taken stays due",
        "O28",
        "outbox",
        '"not_before": hidden_until}',
        '"not_before": BOX.not_before}',
        OUTBOX + "test_what_is_taken_comes_back_once_its_lease_has_passed_and_is_counted",
    ),
    change(
        "a taker waits for another one",
        "O28",
        "outbox",
        ".with_for_update(skip_locked=True)",
        ".with_for_update()",
        OUTBOX + "test_postgres_passes_over_what_another_taker_has_in_hand",
    ),
    change(
        "a slow taker cuts the next one's hold short",
        "O28",
        "outbox",
        'mine = and_(THIS, BOX.attempts == bindparam("p_attempt"))',
        'mine = and_(THIS, BOX.attempts >= bindparam("p_attempt"))',
        OUTBOX + "test_who_took_too_long_cannot_cut_the_next_takers_hold_short",
    ),
    change(
        "an unreadable delivery stops all",
        "B184",
        "outbox",
        "*as_text([BOX.payload])",
        "BOX.payload",
        OUTBOX + "test_an_unreadable_delivery_stops_no_other",
    ),
    change(
        "a delivery is looked for among all that is undelivered",
        "F50",
        "outbox",
        'func.coalesce(BOX.delivered_at, literal_column("0")) == literal_column("0"),',
        "UNDELIVERED,",
        PLANS + "test_deliveries_are_found_among_many_receipts",
    ),
]

MUTATIONS: Final[list[AnyMutation]] = [*SCOPES, *LISTS, *OPEN, *PAST, *CONVERSATIONS, *DELIVERIES]
