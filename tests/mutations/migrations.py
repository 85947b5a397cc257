"""What an upgrade promises, broken one promise at a time."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

_TABLES = "migrations/versions/0001_tables.py"
_INDEXES = "migrations/versions/0002_active_run_indexes.py"
_MIGRATE = "src/deerflow_runs/store/migrate.py"
_LOCK = "src/deerflow_runs/store/migrate_lock.py"
_CONNECT = "src/deerflow_runs/store/migrate_connect.py"

_SCHEMA = "tests/migrations/test_schema.py::"
_REPAIR = "tests/migrations/test_repair.py::"
_UPGRADE = "tests/migrations/test_upgrade.py::"
_CHECK = "tests/migrations/test_check.py::"
_PROCESSES = "tests/migrations/test_processes.py::"

MUTATIONS: Final = [
    # --- What is built ----------------------------------------------------------------------------------------------
    Mutation(
        name="a column of 0001 takes more than the metadata says",
        rule="migrations build exactly the metadata",
        path=_TABLES,
        old='sa.Column("idempotency_scope", sa.String(600), nullable=False)',
        new='sa.Column("idempotency_scope", sa.String(600))',
        tests=(_SCHEMA + "test_the_migrations_build_the_tables_of_the_metadata_column_by_column",),
    ),
    Mutation(
        name="the generated column knows one active status only",
        rule="I1",
        path=_TABLES,
        old="\"status IN ('pending', 'running')\"",
        new="\"status IN ('running')\"",
        tests=(_SCHEMA + "test_the_migrations_build_the_tables_of_the_metadata_column_by_column",),
    ),
    Mutation(
        name="sessions hoard turns",
        rule="O15",
        path=_TABLES,
        old='"CREATE SEQUENCE dr_turn CACHE 1"',
        new='"CREATE SEQUENCE dr_turn CACHE 20"',
        tests=(_SCHEMA + "test_no_session_of_postgres_hoards_numbers",),
    ),
    Mutation(
        name="the session's pages are full",
        rule="renewals are heap-only updates",
        path=_TABLES,
        old='postgresql_with={"fillfactor": "50"},',
        new="",
        tests=(_SCHEMA + "test_postgres_leaves_room_on_the_pages_that_change",),
    ),
    Mutation(
        name="the unique index has another predicate than its conflict target",
        rule="I1",
        path=_INDEXES,
        old='("uq_dr_runs_active_thread", ["thread_id"], "active", True)',
        new='("uq_dr_runs_active_thread", ["thread_id"], "status = \'running\'", True)',
        tests=(_SCHEMA + "test_the_migrations_build_the_indexes_of_the_metadata_word_by_word",),
    ),
    Mutation(
        name="the index that admits one is not unique",
        rule="I1",
        path=_INDEXES,
        old='["thread_id"], "active", True)',
        new='["thread_id"], "active", False)',
        tests=(_SCHEMA + "test_one_active_operation_a_thread_is_the_predicate_of_a_unique_index",),
    ),
    # --- What is repaired -------------------------------------------------------------------------------------------
    Mutation(
        name="the repair takes a dead owner for a live one",
        rule="F62",
        path=_INDEXES,
        old="WHEN w.worker_id IS NULL OR w.state = 'dead' THEN 2",
        new="WHEN w.worker_id IS NULL THEN 2",
        tests=(_REPAIR + "test_the_run_of_a_live_session_is_kept_although_others_are_newer",),
    ),
    Mutation(
        name="the repair takes an expired lease for one that stands",
        rule="F62",
        path=_INDEXES,
        old="WHEN w.expires_at < {now} THEN 1 ELSE 0 END",
        new="ELSE 0 END",
        tests=(_REPAIR + "test_a_lease_that_stands_beats_one_that_expired_and_that_beats_a_dead_session",),
    ),
    Mutation(
        name="the repair keeps the oldest",
        rule="B253",
        path=_INDEXES,
        old="r.created_at DESC",
        new="r.created_at",
        tests=(_REPAIR + "test_without_a_live_owner_the_newest_is_kept_by_time_then_number_then_id",),
    ),
    Mutation(
        name="the repair does not fence",
        rule="O14",
        path=_INDEXES,
        old="epoch = epoch + 1",
        new="epoch = epoch",
        tests=(_REPAIR + "test_the_others_end_as_errors_that_explain_themselves_and_fence_their_owners",),
    ),
    Mutation(
        name="the repair ends what has ended",
        rule="I5",
        path=_INDEXES,
        old="WHERE active AND run_id IN ({surplus})",
        new="WHERE run_id IN ({surplus})",
        tests=(_PROCESSES + "test_a_run_that_ends_by_itself_while_the_repair_waits_for_it_keeps_its_end",),
    ),
    Mutation(
        name="the repair leaves no receipt",
        rule="O28",
        path=_INDEXES,
        old="(RELEASE, END, WRITE_RECEIPT, ASK_FOR_DELIVERIES,",
        new="(RELEASE, END, ASK_FOR_DELIVERIES,",
        tests=(_REPAIR + "test_the_others_leave_a_receipt_like_every_run_that_ended",),
    ),
    Mutation(
        name="the repair forgets an owed rollback",
        rule="I16",
        path=_INDEXES,
        old="THEN 'rollback_failed' ELSE",
        new="THEN 'orphan_recovered' ELSE",
        tests=(_REPAIR + "test_an_owed_rollback_that_cannot_be_carried_out_any_more_is_said_so",),
    ),
    Mutation(
        name="the repair ends a reservation as if it were a run",
        rule="B058",
        path=_INDEXES,
        old="(RELEASE, END,",
        new="(END,",
        tests=(_REPAIR + "test_a_surplus_reservation_goes_without_a_trace",),
    ),
    Mutation(
        name="a key given twice goes to the last",
        rule="I14",
        path=_INDEXES,
        old="ORDER BY created_at, seq, run_id\n",
        new="ORDER BY created_at DESC, seq, run_id\n",
        tests=(_REPAIR + "test_a_key_given_twice_stays_with_the_run_that_had_it_first",),
    ),
    Mutation(
        name="an index that exists is an obstacle",
        rule="B253",
        path=_INDEXES,
        old="if_not_exists=True",
        new="if_not_exists=False",
        tests=(_REPAIR + "test_an_index_that_is_there_already_is_no_obstacle",),
    ),
    # --- What is interrupted ----------------------------------------------------------------------------------------
    Mutation(
        name="indexes are built while nobody may write",
        rule="F62",
        path=_INDEXES,
        old="postgresql_concurrently=concurrently",
        new="postgresql_concurrently=False",
        tests=(_PROCESSES + "test_workers_write_while_an_index_is_built",),
    ),
    Mutation(
        name="an index half built is taken for a good one",
        rule="F62",
        path=_INDEXES,
        old="        _drop_half_built_indexes()\n",
        new="",
        tests=(_PROCESSES + "test_an_index_whose_building_was_broken_off_is_built_again",),
    ),
    Mutation(
        name="SQLite makes tables outside of the transaction",
        rule="an interrupted upgrade stands at a revision",
        path=_CONNECT,
        old='    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))\n',
        new="",
        tests=(_PROCESSES + "test_an_upgrade_killed_anywhere_stands_at_a_revision_and_is_finished_by_the_next",),
    ),
    Mutation(
        name="one transaction for the whole history",
        rule="an interrupted upgrade stands at a revision",
        path="migrations/env.py",
        old='"transaction_per_migration": True',
        new='"transaction_per_migration": False',
        tests=(_PROCESSES + "test_an_upgrade_killed_anywhere_stands_at_a_revision_and_is_finished_by_the_next",),
    ),
    # --- Under one lock ---------------------------------------------------------------------------------------------
    Mutation(
        name="SQLite's lock lets everybody in",
        rule="one upgrade at a time",
        path=_LOCK,
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        tests=(_UPGRADE + "test_further_set_up_runs_under_the_lock_of_the_upgrade",),
    ),
    Mutation(
        name="a second name of the file is a second lock",
        rule="one upgrade at a time",
        path=_LOCK,
        old="database = path.resolve()",
        new="database = path",
        tests=(_UPGRADE + "test_two_names_of_one_file_are_one_lock",),
    ),
    Mutation(
        name="PostgreSQL's lock lets everybody in",
        rule="one upgrade at a time",
        path=_LOCK,
        old="        if taken:\n",
        new="        if taken is not None:\n",
        tests=(_UPGRADE + "test_further_set_up_runs_under_the_lock_of_the_upgrade",),
    ),
    Mutation(
        name="the lock is waited for in a statement",
        rule="nobody who waits is waited for",
        path=_LOCK,
        old="SELECT pg_try_advisory_lock(:class, :number)",
        new="SELECT CAST(pg_advisory_lock(:class, :number) AS text) IS NOT NULL",
        tests=(_PROCESSES + "test_processes_that_upgrade_at_once_all_succeed_and_apply_the_history_once",),
    ),
    Mutation(
        name="further set-up runs after the lock is gone",
        rule="one upgrade at a time",
        path=_MIGRATE,
        old="        for set_up in also:\n            set_up(dsn)\n",
        new="    for set_up in also:\n        set_up(dsn)\n",
        tests=(_UPGRADE + "test_further_set_up_runs_under_the_lock_of_the_upgrade",),
    ),
    Mutation(
        name="a cancelled upgrade goes on behind the caller's back",
        rule="an upgrade that has begun is finished first",
        path=_MIGRATE,
        old="        await asyncio.wait({task})\n",
        new="        await asyncio.wait({task}, timeout=0)\n",
        tests=(_UPGRADE + "test_an_upgrade_that_has_begun_is_finished_before_its_cancellation_is_told",),
    ),
    Mutation(
        name="two upgrades of one process share Alembic's global variables",
        rule="several databases in one process",
        path=_MIGRATE,
        old="    with _ALEMBIC:\n",
        new="    if _ALEMBIC:\n",
        tests=(_UPGRADE + "test_two_databases_are_upgraded_at_once_in_one_process",),
    ),
    # --- Whom it serves ---------------------------------------------------------------------------------------------
    Mutation(
        name="the upgrade goes through the pooler",
        rule="direct_url",
        path=_MIGRATE,
        old="    session = database.session()\n",
        new="    session = database\n",
        tests=(_UPGRADE + "test_a_pooler_is_bypassed_by_the_direct_address",),
    ),
    Mutation(
        name="the schema of the address is not looked for",
        rule="optional schema on Postgres",
        path=_MIGRATE,
        old="return database.schema if isinstance(database, Postgres) else None",
        new="return None",
        tests=(_CHECK + "test_a_check_of_an_open_connection_looks_into_the_schema_of_the_address",),
    ),
    Mutation(
        name="a server's time limit cuts the upgrade off",
        rule="nothing cuts an upgrade off",
        path=_CONNECT,
        old='("statement_timeout", "lock_timeout", "idle_session_timeout")',
        new='("lock_timeout", "idle_session_timeout")',
        tests=(_UPGRADE + "test_a_time_limit_of_the_server_does_not_cut_an_upgrade_off",),
    ),
    Mutation(
        name="looking makes a file",
        rule="a check changes nothing",
        path=_MIGRATE,
        old="if database.path is None or not database.path.exists():",
        new="if database.path is None:",
        tests=(_UPGRADE + "test_asking_for_the_revision_creates_no_file",),
    ),
    # --- Releases side by side --------------------------------------------------------------------------------------
    Mutation(
        name="a newer schema stops the older worker",
        rule="expand, then contract",
        path=_MIGRATE,
        old="    if found.revision < needed:\n",
        new="    if found.revision != needed:\n",
        tests=(_CHECK + "test_an_older_worker_goes_on_beside_a_newer_schema_that_it_can_read",),
    ),
    Mutation(
        name="an older upgrade tries to go on from a newer schema",
        rule="expand, then contract",
        path=_MIGRATE,
        old="found.revision is None or found.revision < target",
        new="found.revision != target",
        tests=(_CHECK + "test_an_older_worker_goes_on_beside_a_newer_schema_that_it_can_read",),
    ),
    Mutation(
        name="a schema that asks for a newer reader is used",
        rule="dr_meta.min_reader",
        path=_MIGRATE,
        old="    if found.min_reader > READER:\n",
        new="    if found.min_reader > READER + 1:\n",
        tests=(_CHECK + "test_a_schema_that_needs_a_newer_reader_is_refused_and_left_alone",),
    ),
    Mutation(
        name="a database that is behind is used",
        rule="the library checks and refuses",
        path=_MIGRATE,
        old="    if found.revision < needed:\n",
        new="    if found.revision < HEAD[:0]:\n",
        tests=(_CHECK + "test_a_database_that_is_behind_is_refused_with_a_command_that_helps",),
    ),
]
