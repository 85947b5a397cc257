"""Mutations of sweeps that come because something is known: a lock was let go, a silence or a death is old enough."""

from __future__ import annotations

from typing import Final

from tests.mutations import AnyMutation, Mutation

JUDGE: Final = "src/deerflow_runs/protocol/judge.py"
RECONCILER: Final = "src/deerflow_runs/manager/reconciler.py"
SOONER: Final = "tests/manager/test_looking_sooner.py::"
JUDGED: Final = "tests/protocol/test_judge.py::"

MUTATIONS: Final[list[AnyMutation]] = [
    Mutation(
        "a lock that was let go is found by the next sweep only",
        "O27",
        RECONCILER,
        "            if await self._sweeping.sees_death():\n                return\n",
        "",
        (SOONER + "test_a_lock_on_a_file_that_is_let_go_is_seen_long_before_the_next_sweep",),
    ),
    Mutation(
        "a silence that will be long enough brings no sweep forward",
        "O27",
        RECONCILER,
        "            known.append(ripens_at - self._ground.clock.boot_time())\n",
        "            pass\n",
        (SOONER + "test_a_free_advisory_lock_is_judged_as_soon_as_two_beats_have_been_silent",),
    ),
    Mutation(
        "a session whose lock is held is watched like one whose lock is free",
        "O27",
        JUDGE,
        "            if look.signs.get(session.worker_id) is Sign.HINT and session.worker_id in self.seen\n",
        "            if session.worker_id in self.seen\n",
        (JUDGED + "test_a_judge_knows_when_a_session_whose_lock_is_free_will_have_been_silent_for_long_enough",),
    ),
    Mutation(
        "a proven death is waited for like one without proof",
        "O26",
        JUDGE,
        "            if session.dead_at is not None and not session.proven\n",
        "            if session.dead_at is not None\n",
        (JUDGED + "test_a_judge_knows_when_a_death_without_proof_is_old_enough_to_end_runs_for_good",),
    ),
]
