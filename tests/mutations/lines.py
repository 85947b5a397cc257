"""What session lines promise, broken one promise at a time."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

_FORKS = "src/deerflow_runs/store/forks.py"
_HINTS = "src/deerflow_runs/store/hints.py"
_SIGNALS = "src/deerflow_runs/store/signals.py"
_SQLITE = "src/deerflow_runs/store/line_sqlite.py"
_POSTGRES = "src/deerflow_runs/store/line_postgres.py"

_EVERYWHERE = "tests/lines/test_lines.py::"
_FORKING = "tests/lines/test_forks.py::"
_ON_SQLITE = "tests/lines/test_sqlite_line.py::"
_ON_POSTGRES = "tests/lines/test_postgres_line.py::"
_POOLED = "tests/lines/test_pooled_line.py::"
_PROCESSES = "tests/lines/test_processes.py::"


def _sqlite(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, _SQLITE, old, new, (_ON_SQLITE + test,))


def _postgres(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, _POSTGRES, old, new, (_ON_POSTGRES + test,))


MUTATIONS: Final = [
    # --- Forked children --------------------------------------------------------------------------------------------
    Mutation(
        "a forked child keeps the hint of its parent",
        "O27",
        _FORKS,
        "after_in_child=DESCRIPTORS.in_child",
        "after_in_child=DESCRIPTORS.now",
        (_PROCESSES + "test_a_child_that_lives_on_does_not_keep_its_dead_parent_s_hint",),
    ),
    Mutation(
        "a child that was forked while a descriptor was made goes unnoticed",
        "O27",
        _FORKS,
        "since.begun == since.ended and self.now() == since",
        "since.begun == since.ended",
        (_FORKING + "test_a_descriptor_is_not_safe_if_a_child_was_forked_before_it_was_kept",),
    ),
    Mutation(
        "a fork that is under way goes unnoticed",
        "O27",
        _FORKS,
        "since.begun == since.ended and self.now() == since",
        "self.now() == since",
        (_FORKING + "test_a_descriptor_is_not_safe_if_a_child_was_forked_before_it_was_kept",),
    ),
    Mutation(
        "a child gives the number of a closed descriptor away",
        "O27",
        _FORKS,
        "os.dup2(nothing, descriptor, inheritable=False)",
        "os.close(descriptor)",
        (_FORKING + "test_a_child_closes_what_is_kept_and_lets_the_number_stand_for_nothing",),
    ),
    Mutation(
        "a child closes whatever has got the number meanwhile",
        "O27",
        _FORKS,
        "            if one.is_at(descriptor):\n",
        "            if one:\n",
        (_FORKING + "test_a_number_that_stands_for_something_else_by_now_is_left_alone",),
    ),
    _postgres(
        "a connection that a child may have is kept",
        "O27",
        "if self._listens and not link.safe:",
        "if self._listens and link is None:",
        "test_a_connection_that_a_forked_child_may_have_is_not_kept",
    ),
    # --- SQLite: the lock -------------------------------------------------------------------------------------------
    Mutation(
        "a line that is closed in order leaves a free lock",
        "O27",
        _HINTS,
        "                self._path.unlink()\n",
        "                pass\n",
        (_ON_SQLITE + "test_a_line_that_is_closed_in_order_proves_nothing",),
    ),
    Mutation(
        "a lock on a removed file counts as held",
        "O27",
        _HINTS,
        "self._descriptor is not None and _is_at(self._descriptor, self._path)",
        "self._descriptor is not None",
        (_ON_SQLITE + "test_files_that_somebody_removed_prove_nothing",),
    ),
    Mutation(
        "two who look at once take each other for the session",
        "O27",
        _HINTS,
        "free = _locked(descriptor, shared=True)",
        "free = _locked(descriptor, shared=False)",
        (_ON_SQLITE + "test_two_who_look_at_once_do_not_take_each_other_for_the_session",),
    ),
    Mutation(
        "the file of a dead session is removed under its living process",
        "O27",
        _HINTS,
        "        if _locked(descriptor, shared=False) and _is_at(descriptor, path):\n            path",
        "        if _is_at(descriptor, path):\n            path",
        (_ON_SQLITE + "test_the_file_of_a_dead_session_stays_while_its_process_holds_it",),
    ),
    Mutation(
        "the files of sessions are everybody's to read",
        "O27",
        _HINTS,
        "0o600)",
        "0o644)",
        (_ON_SQLITE + "test_only_their_owner_may_read_the_files",),
    ),
    Mutation(
        "ids that look alike share a lock",
        "O27",
        _HINTS,
        '{readable}-{_digest(worker_id).hex()[:16]}.lock"',
        '{readable}-0.lock"',
        (_ON_SQLITE + "test_sessions_whose_ids_look_alike_in_a_file_s_name_have_different_locks",),
    ),
    _sqlite(
        "connecting again frees the lock for a moment",
        "O27",
        "if self._lock is not None and self._lock.worker_id == worker_id and self._lock.held:",
        "if self._lock is None and self.hinted:",
        "test_connecting_again_never_frees_the_lock",
    ),
    _sqlite(
        "a new session goes by the lock of the old one",
        "O27",
        "self._lock.worker_id == worker_id and self._lock.held",
        "self._lock.held",
        "test_a_new_session_of_a_line_has_a_lock_of_its_own",
    ),
    _sqlite(
        "the files of the dead stay for ever",
        "O27",
        "            hints.remove_if_free(path)\n",
        "            pass\n",
        "test_the_file_of_a_killed_session_is_removed_once_the_session_is_dead",
    ),
    _sqlite(
        "another name for the boot outweighs a lock that is held",
        "O27",
        "            if free is not False:",
        "            if free is not path:",
        "test_a_session_that_holds_its_lock_is_not_dead_whatever_its_boot_is_called",
    ),
    _sqlite(
        "the boot is not recorded",
        "O27",
        "boot_id=session.boot_id or hints.boot_id()",
        "boot_id=session.boot_id",
        "test_a_session_records_the_boot_in_which_it_lives",
    ),
    Mutation(
        "a beat on SQLite says nothing of its hint",
        "O27",
        _SQLITE,
        "worker_id=worker_id, hinted=self.hinted",
        "worker_id=worker_id, hinted=False",
        (_EVERYWHERE + "test_every_beat_says_whether_the_hint_is_held",),
    ),
    # --- SQLite: the connections ------------------------------------------------------------------------------------
    _sqlite(
        "a locked file is no answer at once",
        "O34",
        'await self._patiently(lambda: driver.execute("BEGIN IMMEDIATE"))',
        'driver.execute("BEGIN IMMEDIATE")',
        "test_a_beat_that_waits_for_the_file_lets_the_loop_go_on",
    ),
    Mutation(
        "what others commit is not looked at",
        "O34",
        _SQLITE,
        "changed, link.seen = version != link.seen, version",
        "changed, link.seen = False, version",
        (_PROCESSES + "test_a_commit_of_another_process_wakes_a_line_on_the_same_file",),
    ),
    _sqlite(
        "a change is a change for ever",
        "O34",
        "changed, link.seen = version != link.seen, version",
        "changed = version != link.seen",
        "test_own_store_s_commits_are_seen_by_the_line_beside_it",
    ),
    _sqlite(
        "a line makes a file that is gone",
        "a line makes no database",
        "if path is None or not path.exists():",
        "if path is None:",
        "test_a_file_that_is_gone_is_no_answer_and_is_not_made_anew",
    ),
    # --- PostgreSQL: the connection ---------------------------------------------------------------------------------
    _postgres(
        "a question that is given up waits for the network",
        "O10",
        "            link.cut()\n            return False\n\n        try:\n            task",
        "            return False\n\n        try:\n            task",
        "test_a_question_that_gets_no_answer_ends_as_soon_as_it_is_given_up[renew]",
    ),
    _postgres(
        "connecting that is given up waits for the network",
        "O10",
        "                making.cancel()\n",
        "                pass\n",
        "test_a_question_that_gets_no_answer_ends_as_soon_as_it_is_given_up[connect]",
    ),
    _postgres(
        "cutting a connection off leaves its question open",
        "O10",
        "            self.driver.terminate()\n",
        "            pass\n",
        "test_a_question_that_gets_no_answer_ends_as_soon_as_it_is_given_up[requests]",
    ),
    _postgres(
        "an error of the server costs the connection",
        "O27",
        "            if not answered(error):\n                link.cut()\n",
        "            link.cut()\n",
        "test_a_row_that_stays_locked_is_no_answer_and_costs_neither_connection_nor_hint",
    ),
    _postgres(
        "a broken connection still holds the hint",
        "O27",
        "link is not None and link.open and link.held",
        "link is not None and link.held",
        "test_a_connection_that_the_server_ends_ends_the_wait_and_the_hint_and_is_made_anew",
    ),
    _postgres(
        "a wait outlasts its connection",
        "O10",
        "        link.driver.add_termination_listener(lambda _: link.wake())\n",
        "",
        "test_a_connection_that_the_server_ends_ends_the_wait_and_the_hint_and_is_made_anew",
    ),
    # --- PostgreSQL: hints ------------------------------------------------------------------------------------------
    _postgres(
        "every lock is taken for free",
        "O27",
        "hint(one, free=key not in held)",
        "hint(one, free=True)",
        "test_a_lock_that_its_session_held_is_a_hint_when_it_is_free_and_never_a_proof",
    ),
    _postgres(
        "a hint that could not be taken at first is never taken",
        "O27",
        "elif not link.held and link.safe:",
        "elif link is None:",
        "test_a_hint_that_somebody_else_held_is_taken_by_a_later_probe",
    ),
    Mutation(
        "a free lock means something behind a pooler",
        "O27",
        _POSTGRES,
        "if not asked or self._database.session() is None:",
        "if not asked:",
        (_POOLED + "test_behind_a_pooler_a_free_lock_means_nothing",),
    ),
    Mutation(
        "behind a pooler a line listens",
        "O33",
        _POSTGRES,
        "self._listens = direct is not None",
        "self._listens = True",
        (_POOLED + "test_behind_a_pooler_a_line_beats_and_polls_and_claims_no_hint",),
    ),
    # --- Signals ----------------------------------------------------------------------------------------------------
    _postgres(
        "who hears nothing is believed to hear",
        "O33",
        "            self._connected()\n            return False\n",
        "            self._connected()\n            return True\n",
        "test_a_line_polls_until_it_has_heard_itself_and_again_when_it_hears_nothing",
    ),
    _postgres(
        "who hears nothing still claims the hint",
        "O27",
        "            link.held = False\n",
        "            pass\n",
        "test_a_line_polls_until_it_has_heard_itself_and_again_when_it_hears_nothing",
    ),
    _postgres(
        "all tables of a database share a channel",
        "O33",
        "CAST(CAST(to_regclass(:workers) AS oid) AS text)",
        "substr(:workers, 1, 0)",
        "test_signals_stay_within_one_set_of_tables_however_it_is_addressed",
    ),
    _postgres(
        "a channel goes by how the tables are addressed",
        "O33",
        "CAST(CAST(to_regclass(:workers) AS oid) AS text)",
        "md5(:workers)",
        "test_signals_stay_within_one_set_of_tables_however_it_is_addressed",
    ),
    _postgres(
        "a signal waits for the network",
        "O33",
        "timeout=SEND_SECONDS",
        "timeout=None",
        "test_a_signal_never_raises_and_is_given_up_on_a_network_that_swallows_everything",
    ),
    Mutation(
        "a signal for one wakes everybody",
        "O33",
        _SIGNALS,
        "if to in {None, self.worker_id}:",
        "if to is None or self.worker_id:",
        (_EVERYWHERE + "test_a_signal_wakes_the_worker_it_is_for_and_nobody_else",),
    ),
    Mutation(
        "a signal from another thread does not wake the loop",
        "O10",
        _SIGNALS,
        "self._loop.call_soon_threadsafe(self.hear, signal, to)",
        "self.hear(signal, to)",
        (_EVERYWHERE + "test_a_line_beats_and_hears_in_an_event_loop_of_another_thread[memory]",),
    ),
    Mutation(
        "a signal is heard twice",
        "O33",
        _SIGNALS,
        "        self._heard.clear()\n",
        "",
        (_EVERYWHERE + "test_a_signal_wakes_the_worker_it_is_for_and_nobody_else",),
    ),
]
