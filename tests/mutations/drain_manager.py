"""Mutations of how a worker leaves and of how ends are told."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

DRAIN = "tests/manager/test_drain.py::"
HOOKS = "tests/manager/test_deliveries.py::"


def drain(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, "src/deerflow_runs/manager/drain.py", old, new, (DRAIN + test,))


def deliveries(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, rule, "src/deerflow_runs/manager/deliveries.py", old, new, (HOOKS + test,))


MUTATIONS: Final = [
    drain(
        "a drain writes nothing for those that did not",
        "F21",
        "        await self._within(Step.RUNS, self._leave_the_rest, until=Step.POOLS)\n",
        "",
        "test_a_stubborn_run_costs_nobody_its_end_not_even_itself",
    ),
    drain(
        "a drain forgets granted runs that nobody took up",
        "F23",
        "                self._granting.end(held, Stopped(StopCause.DRAIN))\n",
        "                pass\n",
        "test_granted_runs_that_nobody_took_up_leave_at_once",
    ),
    drain(
        "a run that was just granted starts in a drain",
        "P060",
        "            if held.phase in (Phase.UNATTACHED, Phase.STARTING):\n",
        "            if held.phase is Phase.UNATTACHED:\n",
        "test_a_run_that_was_granted_a_moment_before_does_not_start",
    ),
    drain(
        "a cancelled caller leaves the drain behind",
        "F24",
        "                cancellation = error\n                self.hurry()\n",
        "                raise error\n",
        "test_a_cancellation_however_often_it_comes_skips_no_step_and_is_raised_at_the_end",
    ),
    drain(
        "an error of a step is not told",
        "B175",
        "        except Exception as error:  # noqa: BLE001 - what cannot",
        "        except KeyError as error:  # noqa: BLE001 - what cannot",
        "test_a_step_that_fails_keeps_no_other_from_being_tried",
    ),
    drain(
        "a drain lets others wait for what it ended",
        "O35",
        "            self._ground.registry.give_up(expected.key.run_id)\n",
        "            pass\n",
        "test_nobody_waits_for_ever_for_a_run_that_others_will_carry_out",
    ),
    drain(
        "another signal shortens nothing",
        "O35",
        "            self._plan = self._plan.signalled_again(self._now())\n",
        "",
        "test_another_signal_ends_the_grace_and_halves_what_is_left",
    ),
    drain(
        "a drain does not say that it drains before it ends what waits",
        "O35",
        "        await self._say_so()\n        await self._each_batch(self._ground.store.end_waiting)\n",
        "        await self._each_batch(self._ground.store.end_waiting)\n",
        "test_nothing_more_is_claimed_once_a_drain_has_begun",
    ),
    deliveries(
        "a hook that failed was called",
        "O28",
        "        task.result()\n",
        "",
        "test_a_hook_that_fails_is_called_again_later_and_stops_nobody",
    ),
    deliveries(
        "a run that its own worker gave up is told as recovered",
        "O28",
        "    return taken_over and run.settled_by != run.owner_worker_id\n",
        "    return taken_over\n",
        "test_a_run_that_its_own_worker_gave_up_is_no_recovered_one",
    ),
    deliveries(
        "an end that another hook waits for is done with",
        "O28",
        "        if ON_SETTLED in wanted or (recovered(run) and ON_RECOVERED in wanted):\n",
        "        if recovered(run) and ON_RECOVERED in wanted:\n",
        "test_an_end_that_another_hook_waits_for_is_left_to_who_has_it",
    ),
    deliveries(
        "all that is due is told at once",
        "O28",
        "            free = AT_ONCE - len(self._under_way)\n",
        "            free = 100\n",
        "test_no_more_hooks_are_under_way_than_may_be_and_all_are_called",
    ),
    deliveries(
        "what is broken off is hidden from others",
        "O28",
        "            await asyncio.shield(self._postpone(delivery, 0.0))\n",
        "",
        "test_what_a_worker_breaks_off_when_it_leaves_is_due_for_others_at_once",
    ),
]
