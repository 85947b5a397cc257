"""What units of work promise, broken one promise at a time."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

_WRITER = "src/deerflow_runs/store/writer.py"
_LANES = "src/deerflow_runs/store/lanes.py"
_SQLITE = "src/deerflow_runs/store/sqlite_connection.py"
_POSTGRES = "src/deerflow_runs/store/connections.py"
_SHIELD = "src/deerflow_runs/store/shield.py"
_DATABASE = "src/deerflow_runs/store/database.py"

_ON_BOTH = "tests/contract/test_units.py::"
_ON_SQLITE = "tests/contract/test_writer.py::"
_ON_POSTGRES = "tests/contract/test_connections.py::"
_POOLED = "tests/processes/test_pooler.py::"
_FORKED = "tests/processes/test_sqlite_processes.py::"


def _writer(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, _WRITER, old, new, (_ON_SQLITE + test,))


def _sqlite(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, _SQLITE, old, new, (_ON_SQLITE + test,))


def _postgres(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, _POSTGRES, old, new, (test,))


MUTATIONS: Final = [
    # --- SQLite: groups ---------------------------------------------------------------------------------------------
    _writer(
        "a transaction begins without the lock",
        "O34",
        'driver.execute("BEGIN IMMEDIATE")',
        'driver.execute("BEGIN")',
        "test_a_transaction_that_reads_before_it_writes_finds_nobody_in_between",
    ),
    _writer(
        "every unit has a commit of its own",
        "O34",
        "LARGEST_GROUP: Final = 256",
        "LARGEST_GROUP: Final = 1",
        "test_units_that_wait_together_are_committed_together",
    ),
    _writer(
        "what a failed unit has written is committed with its group",
        "O34",
        '        if outcome.error is not None:\n            driver.execute("ROLLBACK TO unit")\n',
        "",
        "test_a_failed_unit_of_several_statements_leaves_nothing_in_a_group_that_is_committed",
    ),
    _writer(
        "a transaction that is gone goes unnoticed",
        "O34",
        "    if not driver.in_transaction:\n        raise",
        "    if False:\n        raise",
        "test_a_unit_that_ends_the_transaction_takes_nobody_s_write_with_it_unnoticed",
    ),
    _writer(
        "a half read result stays open",
        "O34",
        "    driver.close_cursors()\n    if not driver",
        "    if not driver",
        "test_a_result_that_was_not_read_to_its_end_does_not_keep_the_group_from_its_commit",
    ),
    _writer(
        "locked is a failure at once",
        "O34",
        "return ErrorKind.TRANSIENT if is_locked(error) else ErrorKind.PERMANENT",
        "return ErrorKind.PERMANENT",
        "test_a_lock_that_is_given_back_in_time_costs_no_attempt",
    ),
    _writer(
        "neighbours of a full disk are not repeated",
        "O8",
        "retrying(self._policy, lambda: lane.ask(unit, together=together), _kind_of)",
        "lane.ask(unit, together=together)",
        "test_a_full_disk_that_undoes_the_group_is_the_answer_of_its_cause_only",
    ),
    _sqlite(
        "a commit has not reached the disk",
        "O34",
        '"PRAGMA synchronous = FULL"',
        '"PRAGMA synchronous = NORMAL"',
        "test_what_was_committed_has_reached_the_disk",
    ),
    # --- SQLite: reading --------------------------------------------------------------------------------------------
    _writer(
        "a read may write",
        "reads change nothing",
        "self._clock, query_only=True)",
        "self._clock, query_only=False)",
        "test_a_read_cannot_write",
    ),
    _writer(
        "a read sees what is committed meanwhile",
        "a read sees one state",
        '        driver_of(connection).execute("BEGIN")\n',
        "",
        "test_a_read_sees_one_state_however_often_it_looks",
    ),
    _writer(
        "a read waits for the writer",
        "reads go beside the writer",
        "        if self._database.path is not None:\n            connect",
        "        if self._database.path is None:\n            connect",
        "test_a_read_does_not_wait_for_the_writer",
    ),
    # --- SQLite: whose file, which version --------------------------------------------------------------------------
    Mutation(
        "our own threads count as another process",
        "O34",
        _SQLITE,
        "return bool(holders - {str(os.getpid())})",
        "return bool(holders)",
        (_FORKED + "test_a_file_that_another_process_has_open_is_warned_of_where_sqlite_may_damage_it",),
    ),
    _sqlite(
        "a version that may damage a shared file is not known",
        "O34",
        "RESET_MENDED: Final = (3, 51, 3)",
        "RESET_MENDED: Final = (3, 51, 2)",
        "test_sqlite_versions_that_may_damage_a_shared_file_are_known",
    ),
    _sqlite(
        "a version without our statements is used",
        "SQLite 3.35",
        "OLDEST: Final = (3, 35, 0)",
        "OLDEST: Final = (3, 34, 0)",
        "test_an_sqlite_without_our_statements_is_refused",
    ),
    Mutation(
        "a missing file is made by looking for its tables",
        "opening creates nothing",
        _WRITER,
        "if path is not None and not path.exists():",
        "if path is None:",
        (_ON_BOTH + "test_tables_that_are_missing_are_named_when_opening",),
    ),
    # --- SQLite: containment ----------------------------------------------------------------------------------------
    _sqlite(
        "true contains one",
        "containment is PostgreSQL's",
        "isinstance(have, bool) == isinstance(want, bool) and bool(have == want)",
        "bool(have == want)",
        "test_containment_means_what_it_means_to_postgres",
    ),
    _sqlite(
        "a list at the top does not contain its elements",
        "containment is PostgreSQL's",
        "return any(_equal(item, want) for item in have)",
        "return False",
        "test_containment_means_what_it_means_to_postgres",
    ),
    _sqlite(
        "numbers are compared as floats",
        "containment is PostgreSQL's",
        "json.loads(text, parse_float=Decimal)",
        "json.loads(text)",
        "test_containment_means_what_it_means_to_postgres",
    ),
    # --- Cancelling -------------------------------------------------------------------------------------------------
    Mutation(
        "a cancelled caller does not wait for the fate of its unit",
        "B021",
        _SHIELD,
        "return not self.done() and self._withdraw() and super().cancel(msg)",
        "return super().cancel(msg)",
        (_ON_SQLITE + "test_a_caller_cancelled_while_its_unit_runs_waits_for_its_end",),
    ),
    Mutation(
        "a cancellation reaches the connection",
        "B021",
        _POSTGRES,
        'see_through(lambda: retrying(self._policy, lambda: attempt(held)), name="deerflow-runs-unit")',
        "retrying(self._policy, lambda: attempt(held))",
        (_ON_POSTGRES + "test_after_300_random_cancellations_every_connection_is_back_and_none_is_in_a_transaction",),
    ),
    Mutation(
        "who waits for the writer cannot leave",
        "a caller leaves before its unit begins",
        _LANES,
        "Fate[T](withdraw=self.claim)",
        "Fate[T](withdraw=lambda: True)",
        (_ON_SQLITE + "test_a_unit_may_still_be_withdrawn_while_its_group_is_at_work",),
    ),
    _writer(
        "a unit runs although its caller has withdrawn it",
        "a caller leaves before its unit begins",
        "for job in jobs if job.claim()]",
        "for job in jobs]",
        "test_a_unit_may_still_be_withdrawn_while_its_group_is_at_work",
    ),
    # --- PostgreSQL: transactions -----------------------------------------------------------------------------------
    _postgres(
        "a statement has a transaction around it",
        "one round trip",
        'engine.execution_options(isolation_level="AUTOCOMMIT", **schemas)',
        'engine.execution_options(isolation_level="READ COMMITTED", **schemas)',
        _ON_POSTGRES + "test_a_unit_of_one_statement_is_one_round_trip",
    ),
    _postgres(
        "a failed transaction stays open",
        "O14",
        '                await driver.execute("ROLLBACK")\n',
        "                pass\n",
        _ON_BOTH + "test_a_transaction_that_fails_leaves_nothing_and_its_error_passes",
    ),
    _postgres(
        "a transaction that the server rolled back counts as committed",
        "all or nothing",
        'if await driver.execute("COMMIT") != "COMMIT":',
        'if await driver.execute("COMMIT") == "":',
        _ON_POSTGRES + "test_a_unit_that_hides_an_error_of_the_database_is_told_that_nothing_was_stored",
    ),
    _postgres(
        "the database's preferred isolation holds for statements",
        "O7",
        '        "default_transaction_isolation": "read committed",\n',
        "",
        _ON_POSTGRES + "test_the_statement_after_a_lock_sees_what_its_holder_committed_whatever_the_database_prefers",
    ),
    _postgres(
        "the database's preferred isolation holds for transactions",
        "O7",
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        "BEGIN",
        _ON_POSTGRES + "test_the_host_s_engine_lends_its_connections_and_stays_open",
    ),
    _postgres(
        "sessions have no limits",
        "O14",
        "        **limits.settings(),\n",
        "",
        _ON_POSTGRES + "test_every_session_has_limits",
    ),
    # --- PostgreSQL: connections ------------------------------------------------------------------------------------
    _postgres(
        "the connection that rested longest is taken",
        "few connections where few are enough",
        "return self._free.pop()",
        "return self._free.pop(0)",
        _ON_POSTGRES + "test_as_many_connections_are_open_as_are_wanted_at_once_and_no_more",
    ),
    _postgres(
        "a broken connection is used on",
        "O8",
        "                self._discard()\n            raise",
        "                pass\n            raise",
        _ON_POSTGRES + "test_a_server_that_is_away_is_no_answer_and_one_that_is_back_answers",
    ),
    _postgres(
        "a lost reply is the caller's",
        "O8",
        "lambda: retrying(self._policy, lambda: attempt(held))",
        "lambda: attempt(held)",
        _ON_POSTGRES + "test_whichever_reply_is_lost_the_unit_is_repeated_and_its_effect_is_there_once",
    ),
    _postgres(
        "what could not be opened stays open",
        "nobody closes what could not be opened",
        "                await self.close()  # nobody",
        "                pass  # nobody",
        _ON_BOTH + "test_what_could_not_be_opened_needs_no_closing",
    ),
    _postgres(
        "a forked child says farewell on its parent's connections",
        "P5",
        "        _LEFT_BEHIND.append(desk)\n",
        "        pass\n",
        _FORKED + "test_a_forked_child_is_refused_its_parent_s_store_and_may_open_its_own",
    ),
    # --- PostgreSQL: behind a pooler --------------------------------------------------------------------------------
    _postgres(
        "a pooler is told what it refuses",
        "pooler=true",
        "if database.pooler else _session(limits)",
        "if database is None else _session(limits)",
        _POOLED + "test_many_clients_over_few_connections_lose_and_mix_up_nothing",
    ),
    _postgres(
        "transactions behind a pooler have no limits",
        "O14",
        "limits if engine is not None or database.pooler else None",
        "limits if engine is not None else None",
        _POOLED + "test_transactions_have_limits_and_leave_none_to_others",
    ),
    _postgres(
        "limits behind a pooler are left to the next client",
        "O14",
        "SET LOCAL {name} = {value}",
        "SET {name} = {value}",
        _POOLED + "test_transactions_have_limits_and_leave_none_to_others",
    ),
    _postgres(
        "the schema of the address is not used",
        "optional schema on Postgres",
        '{"schema_translate_map": {None: database.schema}} if database.schema else {}',
        "{}",
        _POOLED + "test_tables_in_a_schema_of_their_own_are_found_there",
    ),
    Mutation(
        "statements behind a pooler have names",
        "pooler=true",
        _DATABASE,
        '    return ""\n',
        '    return f"dr_{id(object())}"\n',
        (_POOLED + "test_many_clients_over_few_connections_lose_and_mix_up_nothing",),
    ),
]
