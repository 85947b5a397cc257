"""Mutations of what a worker does for the others and for its own runs: sweeping, giving back, taking back, claiming."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

HERE = "tests/manager/"
SWEEPS = HERE + "test_reconciler.py::"
PACE = HERE + "test_pace.py::"
CLAIMS = HERE + "test_claiming.py::"
BACK = HERE + "test_taking_back.py::"


def manager(name: str, rule: str, module: str, old: str, new: str, test: str) -> Mutation:
    path = f"src/deerflow_runs/manager/{module}.py"
    return Mutation(name, rule, path, old, new, (test if test.endswith("]") else f"{test}[sqlite]",))


SWEEPING: Final = [
    manager(
        "a step that fails ends the sweep",
        "O26",
        "sweeping",
        "                    errors.append(error_code(error))\n",
        "                    errors.append(error_code(error))\n                    break\n",
        SWEEPS + "test_a_step_that_fails_keeps_no_other_from_running",
    ),
    manager(
        "a sweep takes over the runs that its own worker is about to take back",
        "O13",
        "sweeping",
        "            return 0  # O13: our own orphans come back by their epoch, and not as somebody's\n",
        "            pass\n",
        SWEEPS + "test_runs_held_here_under_a_lost_session_are_not_recovered_as_somebodys",
    ),
    manager(
        "a sweep does not try to take back",
        "O13",
        "sweeping",
        "            self._taking_back.once,\n",
        "",
        BACK + "test_a_grant_that_arrives_after_its_session_was_lost_is_taken_back_by_the_next_sweep",
    ),
    manager(
        "a sweep does not compare what is owned with what is held",
        "O12",
        "sweeping",
        "            self._giving_back.reconcile,\n",
        "",
        SWEEPS + "test_a_run_that_nobody_comes_for_is_given_back",
    ),
    manager(
        "owners that never had a session are not buried",
        "O26",
        "sweeping",
        "            self._bury,\n",
        "",
        SWEEPS + "test_runs_of_an_owner_that_never_had_a_session_are_recovered",
    ),
    manager(
        "orphans are resumed at once",
        "O30",
        "sweeping",
        "            backoff=micros(config.backoff_min.total_seconds()),\n",
        "",
        SWEEPS + "test_what_is_resumed_stays_away_for_a_while",
    ),
    manager(
        "a held run that was forced goes on",
        "O4",
        "sweeping",
        '            fence(self._ground, held, "forced: the grace of its cancel was over")\n',
        "            pass\n",
        SWEEPS + "test_a_held_run_that_is_forced_is_stopped",
    ),
    manager(
        "the grace of a cancel is not said",
        "O4",
        "sweeping",
        "            cancel_grace=micros(config.cancel_grace.total_seconds()),\n",
        "            cancel_grace=Micros(0),\n",
        SWEEPS + "test_a_cancelled_run_is_left_to_its_owner_for_the_grace",
    ),
    manager(
        "runs are seized without a slot",
        "I19",
        "sweeping",
        "            if not ground.registry.take_slot():\n                break\n",
        "            ground.registry.take_slot()\n",
        SWEEPS + "test_nothing_is_seized_without_a_free_slot",
    ),
    manager(
        "a worker that drains seizes",
        "O35",
        "sweeping",
        "        return session.trusted() and session.state is SessionState.LIVE\n",
        "        return session.trusted()\n",
        SWEEPS + "test_a_worker_that_drains_seizes_nothing",
    ),
    manager(
        "a worker seizes what it restores already",
        "O4",
        "sweeping",
        "            if run.owner_worker_id == ground.worker_id or ground.registry.get(run.run_id) is not None:\n"
        "                continue\n",
        "",
        SWEEPS + "test_a_rollback_that_this_worker_is_about_to_carry_out_is_not_seized_once_more",
    ),
    manager(
        "a promotion wakes nobody",
        "O7",
        "sweeping",
        "            if promoted:\n                await ground.work_appeared()\n",
        "",
        SWEEPS + "test_a_delayed_run_comes_to_life_once_it_is_due",
    ),
    manager(
        "nobody is told of runs that ended while they waited",
        "O28",
        "unclaimed",
        "        gone = [run_id for run_id in expected if over.get(run_id)]\n",
        "        gone: list[RunId] = []\n",
        SWEEPS + "test_whoever_waits_for_a_run_that_others_ended_is_told",
    ),
    manager(
        "a run that is not there yet is given up at once",
        "O28",
        "unclaimed",
        "        return [run_id for run_id, since in self._absent.items() if now - since >= patience]\n",
        "        return [run_id for run_id, since in self._absent.items() if now - since >= 0 * patience]\n",
        SWEEPS + "test_whoever_waits_for_a_run_that_is_gone_altogether_is_told_in_the_end",
    ),
    manager(
        "the reason why a run waits is told with every sweep",
        "O31",
        "unclaimed",
        '        news, checked_at = known.get("message") != why.message, known.get("checked_at")\n',
        '        news, checked_at = True, known.get("checked_at")\n',
        SWEEPS + "test_the_same_reason_is_told_once_and_written_once",
    ),
    manager(
        "a wrong note stays",
        "O31",
        "unclaimed",
        "                await ground.store.note_waiting(run.key, {})\n",
        "                pass\n",
        SWEEPS + "test_a_note_that_has_become_wrong_is_taken_away",
    ),
    manager(
        "every sweep looks at the same vacant runs",
        "O31",
        "unclaimed",
        "        self._explained = found[-1] if len(found) == EXPLAINED else None\n",
        "        self._explained = None\n",
        SWEEPS + "test_however_many_wait_for_a_slot_each_that_cannot_be_taken_is_found",
    ),
    manager(
        "what is kept is looked at in every sweep",
        "O26",
        "sweeping",
        "        if self._tidied_at is not None and now - self._tidied_at < TIDY_EVERY:\n            return 0\n",
        "",
        SWEEPS + "test_sessions_of_the_long_dead_are_forgotten_but_only_now_and_then",
    ),
]

GIVING_BACK: Final = [
    manager(
        "what is missing is given back at once",
        "O12",
        "giving_back",
        "if now - self._missing[grant] >= self._patience]\n",
        "if now - self._missing[grant] >= 0]\n",
        SWEEPS + "test_it_is_missing_since_it_was_missed_and_not_since_it_was_granted",
    ),
    manager(
        "what turned up and is missing again counts from the first time",
        "O12",
        "giving_back",
        "        self._missing = {grant: self._missing.get(grant, now) for grant in missing}\n",
        "        self._missing |= {grant: self._missing.get(grant, now) for grant in missing}\n",
        SWEEPS + "test_a_grant_that_turned_up_in_between_has_to_be_missed_anew",
    ),
    manager(
        "a suspended worker gives back",
        "O12",
        "giving_back",
        "            if not self._ground.session.trusted():\n                return 0\n",
        "",
        SWEEPS + "test_a_suspended_worker_gives_nothing_back",
    ),
    manager(
        "what is held and not owned goes on",
        "O18",
        "giving_back",
        "            fence(self._ground, one.held, NOT_OURS)\n",
        "            pass\n",
        SWEEPS + "test_a_run_that_the_store_calls_somebody_elses_is_stopped",
    ),
    manager(
        "a run that nobody came for is given back before its deadline",
        "O12",
        "giving_back",
        "        late = registry.unattached(before=now - self._patience)\n",
        "        late = registry.unattached(before=now)\n",
        SWEEPS + "test_a_run_that_somebody_may_still_come_for_is_kept",
    ),
    manager(
        "a cancelled run that is missing is not ended",
        "O12",
        "giving_back",
        "        Recovery.FORCE: RunEvent.SETTLE_CANCELLED,\n",
        "",
        SWEEPS + "test_what_is_missing_and_cancelled_is_ended_as_its_cancel_says[sqlite-interrupt]",
    ),
    manager(
        "a missing reservation is not released",
        "F25",
        "giving_back",
        "        Recovery.RELEASE: RunEvent.RELEASE,\n",
        "",
        SWEEPS + "test_a_reservation_whose_release_was_lost_is_released",
    ),
]

TAKING_BACK: Final = [
    manager(
        "held runs are taken back before what waits has moved",
        "O13",
        "taking_back",
        "            moved = await self._move_homes()\n",
        "            moved = 0\n            self._homes.clear()\n",
        BACK + "test_what_waits_at_home_moves_to_the_new_session",
    ),
    manager(
        "only one batch of what waits moves",
        "O13",
        "taking_back",
        "            while runs := await self._ground.store.re_home(by, BATCH):\n",
        "            if runs := await self._ground.store.re_home(by, 10):\n",
        BACK + "test_nothing_is_left_of_many",
    ),
    manager(
        "a refused take back changes nothing",
        "O18",
        "taking_back",
        '                fence(self._ground, held, f"not taken back: {reason.value}")\n',
        "                self._homes.clear()\n                held.lease.close()\n"
        "                self._ground.registry.let_go(held)\n",
        BACK + "test_a_run_that_others_took_meanwhile_is_stopped_and_writes_nothing",
    ),
    manager(
        "a take back that a lost session made is not known again",
        "O8",
        "taking_back",
        "        moved = run.active and run.owner_worker_id in self._mine and run.epoch == held.lease.epoch + 1\n",
        "        moved = False\n",
        BACK + "test_a_take_back_whose_answer_was_lost_with_the_session_that_asked_is_gone_on_from",
    ),
    manager(
        "a body goes on beside its own rollback",
        "I16",
        "taking_back",
        "        return moved and (held.phase is Phase.SETTLING or not being_restored(run))\n",
        "        return moved\n",
        BACK + "test_a_body_that_runs_beside_its_own_rollback_is_stopped",
    ),
    manager(
        "what is told of an end by the row is forgotten",
        "O13",
        "taking_back",
        "                held.ended = run if run is not None and run.terminal else held.ended\n",
        "",
        BACK + "test_a_run_that_others_ended_meanwhile_is_known_by_its_end",
    ),
    manager(
        "a store that is away ends the taking back",
        "O13",
        "taking_back",
        "                await self._ground.clock.sleep(pause_after(failures))\n",
        "                return\n",
        BACK + "test_it_goes_on_until_the_store_answers_again",
    ),
    manager(
        "a lost run that nobody had come for keeps its slot",
        "O18",
        "fencing",
        "    if held.phase is Phase.UNATTACHED:\n        ground.registry.let_go(held)\n",
        "",
        BACK + "test_a_run_that_nobody_had_come_for_and_that_is_lost_takes_no_slot_any_more",
    ),
]

CLAIMING: Final = [
    manager(
        "claims precede the first sweep",
        "O27",
        "reconciler",
        "        await self._seen_through(self.sweep)\n        async with asyncio.TaskGroup() as parts:\n",
        "        async with asyncio.TaskGroup() as parts:\n            parts.create_task(self.sweep())\n",
        CLAIMS + "test_one_sweep_precedes_the_first_claim",
    ),
    manager(
        "a claim asks for more than there are slots",
        "I19",
        "claiming",
        "        while kept < limit and registry.take_slot():\n            kept += 1\n",
        "        while kept < 100 and (registry.take_slot() or True):\n            kept += 1\n",
        CLAIMS + "test_a_worker_takes_no_more_than_it_has_slots_for",
    ),
    manager(
        "a claim leaves no slot to admissions",
        "I19",
        "claiming",
        "        return min(BATCH, free, max(1, free // 2), ",
        "        return min(BATCH, free, ",
        CLAIMS + "test_a_claim_leaves_slots_to_admissions_that_come_meanwhile",
    ),
    manager(
        "slots are kept for ever after a claim",
        "I8",
        "claiming",
        "            for _ in range(kept):\n                registry.arrived()\n",
        "            pass\n",
        CLAIMS + "test_a_worker_takes_no_more_than_it_has_slots_for",
    ),
    manager(
        "a slot that is free again without a word is not seen",
        "I8",
        "claiming",
        "            await self._first(self._ground.registry.slot_freed())\n",
        "            await self._ground.registry.slot_freed()\n",
        CLAIMS + "test_a_slot_that_is_kept_for_an_admission_is_not_claimed_for",
    ),
    manager(
        "a worker that may not go on claims",
        "O35",
        "claiming",
        "if not ground.session.trusted() or ground.session.state is not SessionState.LIVE:\n",
        "if not ground.session.trusted():\n",
        CLAIMS + "test_a_worker_that_may_not_go_on_claims_nothing[sqlite-draining]",
    ),
    manager(
        "resuming costs nothing",
        "O32",
        "claiming",
        "        resumed = sum(1 for run in claimed if was_begun(run))\n",
        "        resumed = 0\n",
        CLAIMS + "test_right_after_it_opened_a_worker_resumes_slowly",
    ),
    manager(
        "a fresh run counts as resumed",
        "O32",
        "claiming",
        "    return run.attempt > 1 or run.turn is not None\n",
        "    return run.attempt > 0\n",
        CLAIMS + "test_runs_that_nobody_has_begun_cost_nothing_of_it",
    ),
    manager(
        "a reconnect leaves what was saved up",
        "O32",
        "claiming",
        "        self._budget = self._budget.reconnected(self._ground.session.now())\n",
        "        pass\n",
        CLAIMS + "test_after_a_reconnect_what_peace_has_saved_up_is_gone",
    ),
    manager(
        "nobody listens for work",
        "O33",
        "claiming",
        "            await self._first(ground.work.wait())\n",
        "            await ground.clock.sleep(LOOK_EVERY)\n",
        CLAIMS + "test_a_run_is_taken_up_as_soon_as_somebody_says_that_there_is_work",
    ),
    manager(
        "a failed claim ends the claims",
        "I8",
        "claiming",
        "                await self._ground.clock.sleep(pause_after(failures))\n                continue\n",
        "                return\n",
        CLAIMS + "test_a_claim_that_failed_is_tried_again",
    ),
    manager(
        "what is claimed while the drain begins runs on",
        "O35",
        "granting",
        "                held.lease.stop(StopCause.DRAIN)\n",
        "                pass\n",
        CLAIMS + "test_what_is_claimed_while_the_drain_begins_is_handed_over",
    ),
]

WHEN: Final = [
    manager(
        "sweeps know no phase",
        "O32",
        "reconciler",
        "        await ground.clock.sleep(sweep_phase(ground.worker_id, self._interval))\n",
        "",
        PACE + "test_the_sweep_after_the_first_comes_at_the_phase_of_the_worker",
    ),
    manager(
        "a known delayed run brings no sweep forward",
        "O7",
        "reconciler",
        "        known = [] if due is None else [due / MICROS_PER_SECOND]\n",
        "        known: list[float] = []\n",
        PACE + "test_a_delayed_run_that_is_known_brings_the_next_sweep_forward",
    ),
    manager(
        "a failed sweep comes again in its interval",
        "O26",
        "reconciler",
        "                await ground.clock.sleep(pause_after(failures))\n",
        "                await self._rest(await self._until_next())\n",
        PACE + "test_after_a_failure_sweeps_come_again_at_longer_and_longer_pauses",
    ),
    manager(
        "sweeps of one worker run into each other",
        "O26",
        "sweeping",
        "        async with self._one_at_a_time:\n            changed, errors = 0, []\n",
        "        if True:\n            changed, errors = 0, []\n",
        PACE + "test_sweeps_of_one_worker_never_run_into_each_other",
    ),
    manager(
        "nobody looks at the time of runs",
        "I8",
        "reconciler",
        "                held.lease.stop(StopCause.TIMEOUT)\n",
        "                pass\n",
        PACE + "test_a_run_whose_time_is_up_is_stopped_and_ends_as_timed_out",
    ),
]

MUTATIONS: Final = [*SWEEPING, *GIVING_BACK, *TAKING_BACK, *CLAIMING, *WHEN]
