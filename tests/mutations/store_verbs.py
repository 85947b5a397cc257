"""Mutations of the limit of a user, of what is asked about users and order, and of what a purge may take."""

from __future__ import annotations

from typing import Final

from tests.mutations import AnyMutation, Mutation

PROTOCOL = "src/deerflow_runs/protocol/admission.py"
STORE = "src/deerflow_runs/store/"
CONTRACT = "tests/contract/test_store_contract.py::test_every_store_keeps_the_contract"
PLANS = "tests/protocol/test_admission.py::"
USERS = "tests/contract/test_user_reads.py::"
LIMITS = "tests/races/test_user_limit.py::"
STORED = "tests/contract/test_endings_stored.py::"
COSTS = "tests/costs/test_counts.py::"
REVIEW = "tests/review/test_errors_and_counts.py::"
SCHEMA = "tests/migrations/test_schema.py::"


def plan(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    """One change of text in the plans, and the test that must see it."""
    return Mutation(name, rule, PROTOCOL, old, new, (PLANS + test,))


def store(name: str, rule: str, module: str, old: str, new: str, *tests: str) -> Mutation:
    """The same in one of the store's modules."""
    return Mutation(name, rule, f"{STORE}{module}.py", old, new, tests)


def says(sentence: str, kind: str = "sqlite") -> str:
    """A sentence of the contract on one store."""
    return f"{CONTRACT}[{kind}-{sentence}]"


ON_WHATEVER_THREADS: Final = "a user has no more active runs than the limit on whatever threads"
ONLY_ACTIVE: Final = "only active runs of the same user are counted"
NOBODY: Final = "reservations and runs of nobody have no limit and a nameless user has"
AT_ONCE: Final = LIMITS + "test_of_twenty_newcomers_of_a_user_at_once_exactly_three_are_let_in"
TWO: Final = LIMITS + "test_of_two_newcomers_of_a_user_one_is_let_in_in_whatever_order_they_come"

DECISIONS: Final = [
    plan(
        "a user has one run more than the limit",
        "I19",
        "view.user_active >= limit",
        "view.user_active > limit",
        "test_a_user_at_the_limit_enters_no_free_thread",
    ),
    plan(
        "a user's newcomer is refused its place in a queue",
        "I19",
        "view.user_active >= limit and _becomes_active(plan):",
        "view.user_active >= limit:",
        "test_a_user_at_the_limit_may_wait_behind_another_run_and_for_another_time",
    ),
    plan(
        "who would displace gets past the limit",
        "I19",
        "return isinstance(plan, Enter) or (isinstance(plan, Displace) and plan.incumbent is None)",
        "return isinstance(plan, Enter)",
        "test_a_user_at_the_limit_enters_no_free_thread",
    ),
    plan(
        "who displaces a run is counted before it has its place",
        "I19",
        "(isinstance(plan, Displace) and plan.incumbent is None)",
        "isinstance(plan, Displace)",
        "test_a_user_at_the_limit_may_wait_behind_another_run_and_for_another_time",
    ),
    plan(
        "the runs of nobody are one user's",
        "I19",
        "return None if self.reservation or self.user_id is None else",
        "return None if self.reservation else",
        "test_a_limit_is_for_runs_of_somebody_only",
    ),
    plan(
        "a reservation is refused for its user's runs",
        "I19",
        "return None if self.reservation or self.user_id is None else",
        "return None if self.user_id is None else",
        "test_a_limit_is_for_runs_of_somebody_only",
    ),
]

COUNTING: Final = [
    store(
        "a statement counts no user",
        "I19",
        "arrivals",
        "take, and_(nobody_waits, room))",
        "take, nobody_waits)",
        says(ON_WHATEVER_THREADS),
    ),
    store(
        "a look counts no user",
        "I19",
        "arrivals",
        "user_active=0 if newcomer.user_limit is None else",
        "user_active=0 if newcomer.user_limit is not None else",
        says(ON_WHATEVER_THREADS),
    ),
    store(
        "SQL: a user may have one run more than the limit",
        "I19",
        "arrivals",
        '.scalar_subquery() < bindparam("p_max_active"',
        '.scalar_subquery() <= bindparam("p_max_active"',
        says(ON_WHATEVER_THREADS),
    ),
    store(
        "everybody's runs are counted",
        "I19",
        "arrivals",
        'theirs.c.user_id == bindparam("p_user_id", type_=R.user_id.type),',
        "theirs.c.user_id.is_not(null()),",
        says(ONLY_ACTIVE),
    ),
    store(
        "a user's ended runs are counted",
        "I19",
        "arrivals",
        "        theirs.c.active == true(),  # a bare column is no use of an index to SQLite\n",
        "",
        says(ONLY_ACTIVE),
    ),
    store(
        "a user's reservations are counted",
        "I19",
        "arrivals",
        "        theirs.c.operation_kind == word(OperationKind.RUN),\n    )\n    return select(func.count())",
        "    )\n    return select(func.count())",
        says(ONLY_ACTIVE),
    ),
    store(
        "a nameless user is nobody",
        "I19",
        "arrivals",
        "if newcomer.user_limit is None or newcomer.user_id is None:",
        "if newcomer.user_limit is None or not newcomer.user_id:",
        says(NOBODY),
    ),
    store(
        "newcomers of a user are counted side by side",
        "I19",
        "arrivals",
        "    dialect.lock_user(connection, newcomer.user_id)\n",
        "",
        TWO + "[postgres-reject]",
    ),
    store(
        "who displaces is counted without the user's lock",
        "I19",
        "arrivals",
        "    _lock_user(connection, dialect, newcomer)\n    dialect.lock_threads",
        "    dialect.lock_threads",
        TWO + "[postgres-interrupt]",
    ),
    store(
        "a user waits for a thread of the same name",
        "I19",
        "dialect",
        "hashtextextended(CAST(:name AS text), 1)",
        "hashtextextended(CAST(:name AS text), 0)",
        LIMITS + "test_users_and_threads_of_the_same_names_never_wait_in_a_ring",
    ),
    store(
        "the user's lock is gone before its run is counted",
        "I19",
        "sql",
        "how = self._units.once if newcomer.user_limit is None else self._units.transaction",
        "how = self._units.once",
        LIMITS + "test_a_newcomer_locks_its_user_until_it_is_committed[postgres]",
    ),
    store(
        "everybody pays for a limit",
        "I19",
        "sql",
        "how = self._units.once if newcomer.user_limit is None else self._units.transaction",
        "how = self._units.transaction",
        COSTS + "test_the_limit_of_a_user_costs_a_transaction_and_only_whoever_sets_it",
    ),
    Mutation(
        "the model counts reservations among a user's runs",
        "I19",
        "src/deerflow_runs/testing/world.py",
        "return run.active and not run.reservation",
        "return run.active",
        (says(ONLY_ACTIVE, "model"),),
    ),
]

READING: Final = [
    store(
        "a reservation is a newer run",
        "B057",
        "reads",
        "        later.c.operation_kind == word(OperationKind.RUN),\n",
        "",
        says("neither a reservation nor a run that is not there is the newest"),
    ),
    store(
        "a run of another thread is newer",
        "I17",
        "reads",
        "        later.c.thread_id == R.thread_id,\n",
        "",
        says("a run is the newest of its thread until another one is admitted however that ends"),
    ),
    store(
        "the newest run is read off the clock",
        "I17",
        "reads",
        "later.c.seq > R.seq,",
        "later.c.started_at > R.started_at,",
        says("a run is the newest of its thread until another one is admitted however that ends"),
    ),
    store(
        "who is the newest reads the whole thread",
        "F50",
        "reads",
        '        later.c.created_at >= literal_column("0"),  # names the predicate of its index\n',
        "",
        USERS + "test_sqlite_goes_through_the_same_indexes_with_all_that_it_knows",
    ),
    store(
        "a user's active runs name no thread",
        "F66",
        "reads",
        "        _first_threads(R.thread_id, *theirs, R.active == true()),\n",
        "",
        USERS + "test_a_user_s_threads_are_those_with_a_run_of_theirs_and_those_that_are_theirs",
    ),
    store(
        "a user's ended runs name no thread",
        "F66",
        "reads",
        "        _first_threads(R.thread_id, *theirs, R.active == false()),\n",
        "",
        USERS + "test_a_user_s_threads_are_those_with_a_run_of_theirs_and_those_that_are_theirs",
    ),
    store(
        "a user's thread rows are forgotten",
        "F66",
        "reads",
        "        _first_threads(threads.c.thread_id, threads.c.user_id == user),\n",
        "",
        USERS + "test_a_user_s_threads_are_those_with_a_run_of_theirs_and_those_that_are_theirs",
    ),
    store(
        "a page of threads begins with the last of the page before",
        "F66",
        "reads",
        ".where(*where, thread_id > after)",
        ".where(*where, thread_id >= after)",
        USERS + "test_pages_of_a_user_s_threads_neither_lose_nor_repeat_one",
    ),
    store(
        "an executor's own word is a rollback",
        "I16",
        "reads",
        'R.status == word(RunStatus.INTERRUPTED), func.coalesce(R.stop_reason, word("")) == word(StopReason.ROLLBACK)',
        'func.coalesce(R.stop_reason, word("")) == word(StopReason.ROLLBACK)',
        USERS + "test_a_list_leaves_out_what_was_rolled_back_or_everything_else_or_nothing",
    ),
    store(
        "what was rolled back is listed whatever is asked",
        "I16",
        "reads",
        "*statuses, *undone, *needles)",
        "*statuses, *needles)",
        USERS + "test_a_list_leaves_out_what_was_rolled_back_or_everything_else_or_nothing",
    ),
    Mutation(
        "a row takes every interruption for a rollback",
        "I16",
        "src/deerflow_runs/model.py",
        "self.status is RunStatus.INTERRUPTED and self.stop_reason == StopReason.ROLLBACK",
        "self.status is RunStatus.INTERRUPTED",
        (USERS + "test_the_row_says_itself_whether_it_was_rolled_back",),
    ),
]

KEEPING: Final = [
    store(
        "a purge forgets what is still to be delivered",
        "O28",
        "endings",
        'bindparam("p_before", type_=BigInteger), ~_OWES)',
        'bindparam("p_before", type_=BigInteger))',
        STORED + "test_a_purge_leaves_a_run_alone_until_everything_it_owes_is_delivered",
    ),
    store(
        "what was delivered keeps its run",
        "O28",
        "endings",
        ".where(outbox.c.run_id == R.run_id, outbox.c.delivered_at.is_(null()))",
        '.where(outbox.c.run_id == R.run_id, outbox.c.kind != word("receipt"))',
        STORED + "test_a_purge_leaves_a_run_alone_until_everything_it_owes_is_delivered",
    ),
    store(
        "errors on a host's engine show what somebody stored",
        "F67",
        "connections",
        "arranged.sync_engine.hide_parameters = True",
        "arranged.sync_engine.hide_parameters = False",
        REVIEW + "test_neither_an_error_nor_a_log_on_the_host_s_engine_shows_an_input",
    ),
    store(
        "the host's engine is told to hide its parameters too",
        "F67",
        "connections",
        "arranged.sync_engine.hide_parameters = True",
        "arranged.sync_engine.hide_parameters = engine.sync_engine.hide_parameters = True",
        REVIEW + "test_neither_an_error_nor_a_log_on_the_host_s_engine_shows_an_input",
    ),
    Mutation(
        "the index of users is another one than the metadata's",
        "migrations build exactly the metadata",
        "migrations/versions/0003_user_and_order_indexes.py",
        '["user_id", "active", "thread_id"]',
        '["user_id", "thread_id"]',
        (SCHEMA + "test_the_migrations_build_the_indexes_of_the_metadata_word_by_word",),
    ),
    Mutation(
        "a half-built index of users is taken for a good one",
        "an upgrade that was broken off is finished by the next",
        "migrations/versions/0003_user_and_order_indexes.py",
        "        _drop_half_built_indexes()\n",
        "",
        (
            "tests/migrations/test_processes.py::test_an_index_whose_building_was_broken_off_is_built_again[ix_dr_runs_user]",
        ),
    ),
]

MUTATIONS: Final[list[AnyMutation]] = [*DECISIONS, *COUNTING, *READING, *KEEPING]
