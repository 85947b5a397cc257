"""Mutations of how a manager lets in, carries out, cancels and hears: lives, leases, callers, the registry."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

HERE = "tests/manager/"
OUTCOMES = HERE + "test_flaws_outcomes.py::"
AVAILABILITY = HERE + "test_flaws_availability.py::"
TIME = HERE + "test_flaws_time.py::"
CASES = HERE + "test_public_cases.py::"
REQUESTS = HERE + "test_public_requests.py::"
HEARS = HERE + "test_listening.py::"
LIFE = HERE + "test_life.py::"
VERBS = HERE + "test_manager.py::"


def manager(name: str, rule: str, module: str, old: str, new: str, test: str) -> Mutation:
    path = f"src/deerflow_runs/manager/{module}.py"
    return Mutation(name, rule, path, old, new, (test if test.endswith("]") else f"{test}[sqlite]",))


ADMITTING: Final = [
    manager(
        "a run whose caller went during its admission is kept",
        "O6",
        "admitting",
        '                _ = self._spawn(self._withdraw(task), "withdrawal")\n',
        "                pass\n",
        AVAILABILITY + "test_a_caller_that_goes_while_its_admission_is_in_flight_leaves_the_thread_free"
        "[sqlite-after the insert]",
    ),
    manager(
        "a run is admitted without the hooks of its worker",
        "O28",
        "admitting",
        "            deliveries={**self._hooks, **request.deliveries},\n",
        "            deliveries=request.deliveries,\n",
        VERBS + "test_the_hook_of_any_worker_is_told_of_an_end",
    ),
    manager(
        "a reused run gets a second executor",
        "O5",
        "admitting",
        "                if not by_key and not run.terminal:  # our own lost reply: nobody else carries it out\n",
        "                if not run.terminal:\n",
        AVAILABILITY + "test_a_run_that_was_reused_elsewhere_blocks_nobody_there",
    ),
]

ATTACHING: Final = [
    manager(
        "a caller that goes while it waits leaves its run in the queue",
        "O6",
        "attaching",
        '            _ = self._spawn(self._withdraw(expected.key), "withdrawal")\n',
        "",
        VERBS + "test_a_caller_that_goes_while_it_waits_for_its_turn_takes_its_run_along",
    ),
    manager(
        "a block that lost its run is left in silence",
        "O18",
        "attaching",
        "            case Stopped() if lease.fenced:\n                raise OwnershipLost(",
        "            case Stopped() if lease.fenced:\n                return\n                raise OwnershipLost(",
        VERBS + "test_a_block_that_loses_its_run_is_stopped_with_ownership_lost",
    ),
]

CANCELLING: Final = [
    manager(
        "a local cancel waits for the store",
        "O19",
        "cancelling",
        "        done, _ = await asyncio.wait({recording}, timeout=PATIENCE)\n",
        "        done, _ = await asyncio.wait({recording})\n",
        AVAILABILITY + "test_a_local_cancel_stops_the_body_although_no_question_is_answered[sqlite-hung-interrupt]",
    ),
    manager(
        "the second action that is asked for is obeyed",
        "O19",
        "cancelling",
        "        in_force = decision.run.cancel_action if decision is not None else action\n",
        "        in_force = action\n",
        OUTCOMES + "test_a_second_action_is_answered_with_the_one_in_force_while_the_body_still_cleans_up",
    ),
    manager(
        "a cancel of an ended run says that it was cancelled",
        "O21",
        "cancelling",
        "            outcome = CancelOutcome.CANCELLED if interrupted else CancelOutcome.NOT_CANCELLABLE\n",
        "            outcome = CancelOutcome.CANCELLED\n",
        REQUESTS + "test_a_stop_that_comes_too_late_changes_nothing_and_the_next_message_is_let_in[sqlite-interrupt]",
    ),
    manager(
        "a held run is cancelled by any user",
        "O21",
        "cancelling",
        "            if not visible(held.run, scope):\n",
        "            if False:\n",
        CASES + "test_a_stranger_reads_and_cancels_nothing_by_any_pair_of_ids",
    ),
    manager(
        "a run that is cancelled while it waits is expected for ever",
        "O22",
        "cancelling",
        "            if isinstance(ended, Applied):\n                self._ground.registry.give_up(key.run_id)\n",
        "            if isinstance(ended, Applied):\n",
        TIME + "test_runs_that_end_while_they_wait_leave_nothing_in_memory_either",
    ),
]

LEASE: Final = [
    manager(
        "a lease does not ask for its session's trust",
        "O12",
        "lease",
        "        return open_here and self._session.trusted(self._run.owner_worker_id)\n",
        "        return open_here\n",
        LIFE + "test_a_suspended_run_starts_no_step_and_settles_nothing_until_trust_is_back",
    ),
    manager(
        "a lease of a lost session is trusted with the new one",
        "O13",
        "lease",
        "        return open_here and self._session.trusted(self._run.owner_worker_id)\n",
        "        return open_here and self._session.trusted()\n",
        HERE + "test_taking_back.py::test_whoever_waits_at_the_gate_goes_on_once_the_run_is_taken_back",
    ),
    manager(
        "a check does not know a loss",
        "O17",
        "lease",
        "        if self._fence_reason is not None:\n"
        "            raise OwnershipLost(self.run_id, self._fence_reason)\n",
        "",
        CASES + "test_an_attempt_that_is_over_changes_nothing_although_its_own_process_has_the_run_again",
    ),
    manager(
        "a check does not know a stop",
        "O17",
        "lease",
        "        if self._cause is not None:\n            raise RunStopped(self.run_id, self._cause)\n",
        "",
        REQUESTS + "test_a_thread_that_cannot_be_stopped_holds_nobody_and_its_late_write_is_refused",
    ),
    manager(
        "a loss does not stop the body",
        "O18",
        "lease",
        "            self._cause = StopCause.LOST\n            self._stop_from_anywhere()\n",
        "            self._cause = StopCause.LOST\n",
        CASES + "test_an_attempt_that_is_over_changes_nothing_although_its_own_process_has_the_run_again",
    ),
    manager(
        "a later cause takes the place of the first",
        "O19",
        "lease",
        "        if self._closed or self._ending or self._cause is not None:\n",
        "        if self._closed or self._ending:\n",
        HEARS + "test_a_cancel_stops_the_run_it_names_at_the_epoch_it_names",
    ),
]

LIVES: Final = [
    manager(
        "a run whose start was refused runs all the same",
        "O20",
        "life",
        "            case Refused():\n                await self._refused(decision)\n                return False\n",
        "            case Refused():\n                await self._refused(decision)\n                return True\n",
        LIFE + "test_a_run_cancelled_before_it_began_never_runs_its_body",
    ),
    manager(
        "one error at the end loses a success",
        "O20",
        "life",
        "                await ground.clock.sleep(pause_after(failures))\n                continue\n"
        "            lost = isinstance(decision, Refused)",
        "                return None\n            lost = isinstance(decision, Refused)",
        OUTCOMES + "test_errors_of_the_database_at_the_end_of_a_run_cost_no_success[sqlite-unavailable]",
    ),
    manager(
        "a cancel that the store never heard of is not recorded",
        "O19",
        "life",
        "            recorded = await self._ask(RunEvent.REQUEST_CANCEL, Given(action=action))\n",
        "            recorded = None\n",
        AVAILABILITY + "test_a_local_cancel_stops_the_body_although_no_question_is_answered[sqlite-away-rollback]",
    ),
    manager(
        "a run that a shutdown stops ends as if a user had cancelled it",
        "O23",
        "life",
        "Given(stop_reason=StopReason.SHUTDOWN.value)",
        "Given(stop_reason=StopReason.INTERRUPT.value)",
        LIFE + "test_a_local_run_stopped_by_a_drain_ends_as_shut_down",
    ),
    manager(
        "a run that waits for a human leaves its thread idle",
        "O28",
        "outcome",
        "            outcome=self.thread_outcome or waits,\n",
        "            outcome=self.thread_outcome,\n",
        CASES + "test_runs_that_wait_for_a_human_are_left_alone_by_every_restart",
    ),
    manager(
        "a body that does not stop is waited for",
        "O22",
        "life",
        "        if not _over(body) and not self.abandoned.done():\n",
        "        if False:\n",
        AVAILABILITY + "test_a_clean_up_that_never_ends_keeps_no_successor_waiting",
    ),
]

LISTENING: Final = [
    manager(
        "a suspension never ends a body",
        "O12",
        "listening",
        "                held.lease.stop(StopCause.SUSPENDED)\n",
        "                pass\n",
        HEARS + "test_bodies_are_aborted_after_the_longest_suspension_and_given_back_once_there_is_trust",
    ),
    manager(
        "a suspension ends also what is being settled",
        "O12",
        "listening",
        "            if held.phase in (Phase.STARTING, Phase.RUNNING) and not held.lease.fenced:\n",
        "            if not held.lease.fenced:\n",
        HEARS + "test_bodies_are_aborted_after_the_longest_suspension_and_given_back_once_there_is_trust",
    ),
    manager(
        "trust that is back wakes nobody",
        "O12",
        "listening",
        "            held.lease.wake()\n",
        "            pass\n",
        HEARS + "test_trust_that_is_back_in_time_aborts_nothing_and_wakes_who_waits",
    ),
    manager(
        "nothing is taken back under a new session",
        "O13",
        "listening",
        "        await self._reconciler.take_back(previous)\n",
        "",
        HEARS + "test_a_new_session_takes_back_what_the_old_one_owned",
    ),
    manager(
        "a cancel of an old epoch stops the new holder",
        "O19",
        "listening",
        "        if held is None or held.lease.epoch != request.epoch or held.phase is Phase.SETTLING:\n",
        "        if held is None or held.phase is Phase.SETTLING:\n",
        HEARS + "test_a_cancel_stops_the_run_it_names_at_the_epoch_it_names",
    ),
    manager(
        "a cancel stops what is being settled",
        "O20",
        "listening",
        "        if held is None or held.lease.epoch != request.epoch or held.phase is Phase.SETTLING:\n",
        "        if held is None or held.lease.epoch != request.epoch:\n",
        HEARS + "test_a_cancel_does_not_reach_what_is_being_settled",
    ),
    manager(
        "after a reconnect what peace has saved up is spent",
        "O32",
        "listening",
        "                self._reconciler.reconnected()\n",
        "",
        HEARS + "test_after_a_reconnect_runs_of_others_are_resumed_one_after_the_other",
    ),
]

REGISTRY: Final = [
    manager(
        "ended runs stay in memory",
        "O28",
        "registry",
        "        if self._held.get(held.run.run_id) is held:\n            del self._held[held.run.run_id]\n",
        "        if False:\n            del self._held[held.run.run_id]\n",
        TIME + "test_two_hundred_ended_runs_leave_nothing_in_memory_that_an_admission_would_look_through",
    ),
    manager(
        "whoever expects a run is not told that it was granted",
        "O2",
        "registry",
        "                expected.granted.set_result(held)\n",
        "                pass\n",
        VERBS + "test_whoever_waits_for_a_turn_keeps_the_place_and_gets_it",
    ),
]

MUTATIONS: Final = (*ADMITTING, *ATTACHING, *CANCELLING, *LEASE, *LIVES, *LISTENING, *REGISTRY)
