"""Mutations of the table: every guard of every row, and then its effects, repetitions and readings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deerflow_runs.protocol.lifecycle import TRANSITIONS
from tests.mutations import AnyMutation, DropGuard, Mutation

FILES = ("src/deerflow_runs/protocol/lifecycle.py", "src/deerflow_runs/protocol/decision.py")
ROOT = Path(__file__).resolve().parents[2]
ROWS = ("tests/protocol/test_lifecycle_rows.py",)
_PROPERTY = "tests/protocol/test_lifecycle_properties.py::"
_ORDER = "tests/protocol/test_orderings.py::"
ONE_RUN = (_ORDER + "test_whatever_happens_to_one_run_in_whatever_order_it_ends_once_and_rightly",)
ROLLBACKS = (_ORDER + "test_whoever_interrupts_a_rollback_it_leaves_nothing_behind_and_ends",)
NEWCOMERS = (_ORDER + "test_newcomers_of_every_strategy_meet_every_kind_of_incumbent_in_every_order[over]",)

GUARDS: Final[list[AnyMutation]] = [
    DropGuard(event.value, guard.value, ROWS) for event, rule in TRANSITIONS.items() for guard in rule.guards
]
"""Generated from the table, so that no guard is forgotten; what must fail is written from the page."""


def change(name: str, rule: str, old: str, new: str, tests: tuple[str, ...] = ROWS) -> Mutation:
    """One change of text in the table, or in its reading on values."""
    in_table = old in (ROOT / FILES[0]).read_text(encoding="utf-8")
    return Mutation(name, rule, FILES[0] if in_table else FILES[1], old, new, tests)


SOURCES: Final = [
    change(
        "a run that was never started is settled as success",
        "I5",
        "_settle(S.SUCCESS, _RUNNING)",
        "_settle(S.SUCCESS, ACTIVE)",
    ),
    change("a pending run cannot fail", "B062", "_settle(S.ERROR, ACTIVE)", "_settle(S.ERROR, _RUNNING)"),
    change(
        "a terminal run is cancelled once more",
        "I5",
        "Rule(ACTIVE, Into.STAYS, (G.IS_RUN,), (E.RECORD_CANCEL,))",
        "Rule(ACTIVE | TERMINAL, Into.STAYS, (G.IS_RUN,), (E.RECORD_CANCEL,))",
        (_PROPERTY + "test_nothing_leaves_a_terminal_status",),
    ),
    change(
        "a run that lives is removed",
        "I15",
        "RunEvent.REMOVE: Rule(TERMINAL, Into.GONE, ())",
        "RunEvent.REMOVE: Rule(TERMINAL | ACTIVE, Into.GONE, ())",
    ),
    change(
        "a seized run goes on running",
        "I16",
        "            S.PENDING,\n            (G.IS_RUN, G.ROLLBACK_OWED, G.MINE_UNHELD_OR_OVERDUE, G.CAPABLE),",
        "            Into.STAYS,\n            (G.IS_RUN, G.ROLLBACK_OWED, G.MINE_UNHELD_OR_OVERDUE, G.CAPABLE),",
        ROLLBACKS,
    ),
]

EFFECTS: Final = [
    change(
        "a promoted run is not flagged",
        "O7",
        "(E.NO_OWNER, E.FLAG_BEHIND, E.READY_NOW)",
        "(E.NO_OWNER, E.READY_NOW)",
    ),
    change(
        "a claim is no attempt",
        "O30",
        "(E.TAKE_OWNERSHIP, E.FIRST_ATTEMPT, E.CLEAR_WAITS)",
        "(E.TAKE_OWNERSHIP, E.CLEAR_WAITS)",
    ),
    change("every claim is an attempt", "O30", '{"attempt": max(run.attempt, 1)}', '{"attempt": run.attempt + 1}'),
    change(
        "a claimed run still says what it waits for",
        "O31",
        "(E.TAKE_OWNERSHIP, E.FIRST_ATTEMPT, E.CLEAR_WAITS)",
        "(E.TAKE_OWNERSHIP, E.FIRST_ATTEMPT)",
    ),
    change(
        "a grant has the epoch of the one before",
        "I4",
        '{"owner_worker_id": by.worker_id, "epoch": run.epoch + 1, "granted_at": granted}',
        '{"owner_worker_id": by.worker_id, "epoch": run.epoch, "granted_at": granted}',
        ONE_RUN,
    ),
    change(
        "a grant is not stamped",
        "O4",
        '"epoch": run.epoch + 1, "granted_at": granted}',
        '"epoch": run.epoch + 1}',
    ),
    change(
        "whoever loses a run is not fenced",
        "I2",
        '{"owner_worker_id": None, "epoch": run.epoch + 1}',
        '{"owner_worker_id": None}',
        (_PROPERTY + "test_whoever_loses_a_run_is_fenced_and_whoever_gets_it_has_an_epoch_of_his_own",),
    ),
    change(
        "a run ended in its owner's place keeps its epoch",
        "I2",
        'return {"epoch": run.epoch + 1}',
        'return {"epoch": run.epoch}',
        (_PROPERTY + "test_whoever_loses_a_run_is_fenced_and_whoever_gets_it_has_an_epoch_of_his_own",),
    ),
    change(
        "a take-back keeps the epoch",
        "I4",
        '"home_worker_id": home, "epoch": run.epoch + 1}',
        '"home_worker_id": home}',
    ),
    change(
        "a take-back leaves the home behind",
        "O13",
        "home = by.worker_id if run.home_worker_id is not None else None",
        "home = run.home_worker_id",
    ),
    change(
        "a take-back pins every run",
        "O13",
        "home = by.worker_id if run.home_worker_id is not None else None",
        "home = by.worker_id",
    ),
    change(
        "a turn is drawn at every start",
        "O15",
        "return first if run.turn is None else {}",
        "return first",
        (_PROPERTY + "test_turn_and_base_are_recorded_once",),
    ),
    change(
        "the base is not recorded",
        "I16",
        '{"turn": facts.turn, "base_known": True, "base_heads": given.base_heads}',
        '{"turn": facts.turn}',
    ),
    change(
        "the last start is the start",
        "O15",
        "run.started_at if run.started_at is not None else facts.now",
        "facts.now",
    ),
    change(
        "the last cancel wins",
        "I6",
        "return first if run.cancel_action is None else {}",
        "return first",
        (_PROPERTY + "test_a_recorded_cancel_stays_and_never_ends_as_success",),
    ),
    change(
        "a cancel does not decide how a run ends",
        "I6",
        'return {} if run.cancel_action is None else {"status": RunStatus.INTERRUPTED}',
        "return {}",
        (_PROPERTY + "test_a_recorded_cancel_stays_and_never_ends_as_success",),
    ),
    change(
        "a cancelled run tells the executor's reason",
        "O20",
        '{"stop_reason": cancelled.value if cancelled else given.stop_reason}',
        '{"stop_reason": given.stop_reason or (cancelled.value if cancelled else None)}',
    ),
    change(
        "a queued run that is cancelled does not say why",
        "O22",
        "run.cancel_action or (given.action if run.status is RunStatus.QUEUED else None)",
        "run.cancel_action",
    ),
    change(
        "a cancelled queued run keeps no record of the cancel",
        "O3",
        "(E.RECORD_CANCEL, E.REASON_CANCEL_OR_GIVEN, *_ENDS)",
        "(E.REASON_CANCEL_OR_GIVEN, *_ENDS)",
    ),
    change(
        "a drain overwrites a user's cancel",
        "O23",
        "(run.cancel_action or StopReason.SHUTDOWN).value",
        "StopReason.SHUTDOWN.value",
    ),
    change(
        "poison is called an orphan",
        "O30",
        '{"stop_reason": (StopReason.POISON if poison else StopReason.ORPHAN_RECOVERED).value}',
        '{"stop_reason": StopReason.ORPHAN_RECOVERED.value}',
    ),
    change(
        "poison that is given back is not called so",
        "O30",
        '{"stop_reason": StopReason.POISON.value if poison else given.stop_reason or _ORPHAN}',
        '{"stop_reason": given.stop_reason or _ORPHAN}',
    ),
    change(
        "nobody signs an ending",
        "O8",
        '{"settled_by": by.worker_id, "settled_at": facts.now, "waits_for": None}',
        '{"settled_at": facts.now, "waits_for": None}',
    ),
    change(
        "an ending forgets the usage it knew",
        "B081",
        "usage = run.usage if given.usage == NO_USAGE else given.usage",
        "usage = given.usage",
    ),
    change(
        "a resume is no attempt",
        "I9",
        "(E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF, E.FREE_OF_HOME)",
        "(E.VACATE, E.BACK_OFF, E.FREE_OF_HOME)",
        (_PROPERTY + "test_a_run_that_makes_no_progress_is_granted_at_most_so_many_times",),
    ),
    change(
        "a resumed run stays with its dead home",
        "O31",
        "(E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF, E.FREE_OF_HOME)",
        "(E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF)",
    ),
    change(
        "a run that is given back is tried again at once",
        "O30",
        "(E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF),",
        "(E.COUNT_ATTEMPT, E.VACATE),",
    ),
    change(
        "a run that is given back costs no attempt",
        "I9",
        "(E.COUNT_ATTEMPT, E.VACATE, E.BACK_OFF),",
        "(E.VACATE, E.BACK_OFF),",
        (_PROPERTY + "test_a_run_that_makes_no_progress_is_granted_at_most_so_many_times",),
    ),
    change(
        "a hand-over costs an attempt",
        "I18",
        "(E.FORGIVE_ATTEMPTS, E.VACATE, E.READY_NOW)",
        "(E.COUNT_ATTEMPT, E.VACATE, E.READY_NOW)",
    ),
    change(
        "a hand-over forgets what was achieved",
        "O30",
        "(E.FORGIVE_ATTEMPTS, E.VACATE, E.READY_NOW)",
        "(E.VACATE, E.READY_NOW)",
        ("tests/protocol/test_forgiveness.py",),
    ),
    change(
        "a take-back forgets what was achieved",
        "O30",
        "(E.FORGIVE_ATTEMPTS, E.MOVE_TO_ME)",
        "(E.MOVE_TO_ME,)",
        ("tests/protocol/test_forgiveness.py",),
    ),
    change(
        "a deferred run asks for nothing more",
        "O31",
        "(E.VACATE, E.READY_NOW, E.REQUIRE_MORE)",
        "(E.VACATE, E.READY_NOW)",
    ),
    change(
        "a deferred run asks for nothing else",
        "O31",
        "run.required_capabilities | given.requirements",
        "given.requirements",
    ),
    change(
        "a seizure is not counted",
        "O4",
        "(E.COUNT_RESTORE, E.TAKE_OWNERSHIP, E.CLEAR_WAITS)",
        "(E.TAKE_OWNERSHIP, E.CLEAR_WAITS)",
        (_PROPERTY + "test_a_restore_that_always_fails_ends_as_rollback_failed_also_on_a_lone_worker",),
    ),
    change(
        "any progress forgives",
        "I9",
        '    if given.checkpoint is not None:\n        changes["progress_epoch"] = run.epoch',
        '    changes["progress_epoch"] = run.epoch',
    ),
    change(
        "a checkpoint forgives nothing",
        "O30",
        '        changes["progress_epoch"] = run.epoch',
        "        pass",
    ),
    change(
        "progress forgets what it is not told",
        "B083",
        "    if given.usage != NO_USAGE:\n",
        "    if True:\n",
    ),
]

READINGS: Final = [
    change(
        "a run that has never started owes its rollback",
        "O22",
        "            return run.rollback_owed\n",
        "            return run.cancel_action is CancelAction.ROLLBACK\n",
    ),
    change(
        "an owed run is settled from pending without a restore",
        "I16",
        "not run.rollback_owed or (given.restored and run.status is RunStatus.PENDING)",
        "not run.rollback_owed or run.status is RunStatus.PENDING",
        ONE_RUN,
    ),
    change(
        "an owed run is settled where it runs",
        "I16",
        "not run.rollback_owed or (given.restored and run.status is RunStatus.PENDING)",
        "not run.rollback_owed or given.restored",
    ),
    change(
        "a session that drains is as good as dead",
        "O26",
        "return session is not None and session.state is SessionState.DEAD",
        "return session is not None and session.state is not SessionState.LIVE",
    ),
    change(
        "an owner nobody knows is as good as dead",
        "O26",
        "return session is not None and session.state is SessionState.DEAD",
        "return session is None or session.state is SessionState.DEAD",
    ),
    change(
        "a proof is waited for although there is one",
        "O26",
        "(session.proven or session.dead_at + session.lease <= now)",
        "session.dead_at + session.lease <= now",
    ),
    change(
        "a verdict is ripe at once",
        "O26",
        "(session.proven or session.dead_at + session.lease <= now)",
        "(session.proven or session.dead_at <= now)",
    ),
    change(
        "the grace of a cancel begins before the grant",
        "O4",
        "max(run.cancel_requested_at, run.granted_at or 0) + given.cancel_grace",
        "run.cancel_requested_at + given.cancel_grace",
    ),
    change(
        "the grace of a cancel begins with the grant",
        "O4",
        "max(run.cancel_requested_at, run.granted_at or 0) + given.cancel_grace",
        "(run.granted_at or 0) + given.cancel_grace",
    ),
    change(
        "a run nobody holds is waited for",
        "O4",
        "            return run.vacant or _dead(facts.owner) or _grace_over(run, facts, given)\n",
        "            return _dead(facts.owner) or _grace_over(run, facts, given)\n",
    ),
    change(
        "its owner waits for its own grace",
        "O4",
        "return mine or run.vacant or",
        "return run.vacant or",
    ),
    change(
        "a run needs all that a worker can",
        "O31",
        "run.required_capabilities <= by.capabilities",
        "run.required_capabilities >= by.capabilities",
    ),
    change(
        "a used up run is resumed",
        "I9",
        "return run.on_orphan is OnOrphan.RESUME and not used_up(run)",
        "return run.on_orphan is OnOrphan.RESUME",
    ),
    change(
        "a used up run is not failed",
        "I8",
        "return run.on_orphan is OnOrphan.FAIL or used_up(run)",
        "return run.on_orphan is OnOrphan.FAIL",
        (_PROPERTY + "test_no_row_is_a_dead_end_for_the_last_worker_alive",),
    ),
]

REPEATS: Final = [
    change(
        "a repeated start is refused",
        "O8",
        "            (E.DRAW_TURN, E.STAMP_START),\n            Repeat.RUNNING_AT_MY_EPOCH,",
        "            (E.DRAW_TURN, E.STAMP_START),",
    ),
    change(
        "a start of another epoch is a repetition",
        "O8",
        "return mine and run.status is RunStatus.RUNNING and run.epoch == by.epoch",
        "return mine and run.status is RunStatus.RUNNING",
    ),
    change(
        "a repeated settle is refused",
        "O8",
        "(*_HOLDER, G.NOTHING_OWED), _SETTLED, Repeat.ENDED_BY_ME)",
        "(*_HOLDER, G.NOTHING_OWED), _SETTLED)",
    ),
    change(
        "whoever asks has settled it",
        "O8",
        "run.terminal and run.epoch == by.epoch and run.settled_by == by.worker_id",
        "run.terminal and run.epoch == by.epoch",
    ),
    change(
        "a settle of another epoch is a repetition",
        "O8",
        "run.terminal and run.epoch == by.epoch and run.settled_by == by.worker_id",
        "run.terminal and run.settled_by == by.worker_id",
    ),
    change(
        "a repeated take-back is refused",
        "O8",
        "            (E.FORGIVE_ATTEMPTS, E.MOVE_TO_ME),\n            Repeat.MOVED_TO_ME,",
        "            (E.FORGIVE_ATTEMPTS, E.MOVE_TO_ME),",
    ),
    change(
        "a copy goes on beside its own restore",
        "I16",
        "return mine and run.active and next_epoch and not being_restored(run)",
        "return mine and run.active and next_epoch",
        ROLLBACKS,
    ),
    change(
        "a run of any later epoch was taken back",
        "I4",
        "by.epoch is not None and run.epoch == by.epoch + 1\n            return mine",
        "by.epoch is not None and run.epoch > by.epoch\n            return mine",
    ),
    change(
        "a repeated re-homing is refused",
        "O8",
        "            (E.HOME_TO_ME,),\n            Repeat.HOME_IS_ME,",
        "            (E.HOME_TO_ME,),",
    ),
    change(
        "a run that is not there is a repetition",
        "B078",
        "        return Refused(Refusal.UNKNOWN)\n",
        "        raise LookupError\n",
    ),
]

WORLD: Final = [
    Mutation(
        "an ending promotes nobody",
        "I7",
        "src/deerflow_runs/testing/world.py",
        "        self.promote(ended.thread_id, by)\n",
        "",
        NEWCOMERS,
    ),
]
"""The model store stands on it, so it must not be weaker than a real one."""

MUTATIONS: Final[list[AnyMutation]] = [*GUARDS, *SOURCES, *EFFECTS, *READINGS, *REPEATS, *WORLD]
