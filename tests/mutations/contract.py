"""Mutations of the stores: every guard read wrongly in SQL, and the parts that guards are made of.

Each is killed by one sentence of the shipped contract, on SQLite where both databases read alike.
"""

from __future__ import annotations

from typing import Final

from deerflow_runs.model import RunStatus
from deerflow_runs.protocol.lifecycle import RunEvent
from tests.mutations import AnyMutation, Mutation

STORE = "src/deerflow_runs/store/"
CONTRACT = "tests/contract/test_store_contract.py::test_every_store_keeps_the_contract"

E, S = RunEvent, RunStatus


def says(*sentences: str, store: str = "sqlite") -> tuple[str, ...]:
    """Sentences of the contract on one store."""
    return tuple(f"{CONTRACT}[{store}-{sentence}]" for sentence in sentences)


def table(event: RunEvent, status: RunStatus) -> tuple[str, ...]:
    """What the table says of an event on a status."""
    return says(f"{event.value} on {status.value} happens exactly when the table says")


def guard(name: str, rule: str, case: str, wrong: str, tests: tuple[str, ...]) -> Mutation:
    """A guard whose condition is another one. ``case`` begins with its name in the match."""
    head, condition = case.split(" → ", 1)
    before = f"        case Guard.{head}:\n            return "
    return Mutation(name, rule, f"{STORE}clauses.py", f"{before}{condition}\n", f"{before}{wrong}\n", tests)


def change(name: str, rule: str, module: str, old: str, new: str, tests: tuple[str, ...]) -> Mutation:
    """A text of one module of the store replaced by another."""
    return Mutation(name, rule, f"{STORE}{module}.py", old, new, tests)


def clause(name: str, rule: str, old: str, new: str, tests: tuple[str, ...]) -> Mutation:
    """The same in the module of guards and effects."""
    return change(name, rule, "clauses", old, new, tests)


ANYTHING = "R.run_id.is_not(null())"

MUTATIONS: Final[list[AnyMutation]] = [
    guard(
        "SQL: a reservation is a run",
        "O22",
        'IS_RUN → R.operation_kind == word("run")',
        ANYTHING,
        table(E.REQUEST_CANCEL, S.RUNNING),
    ),
    guard(
        "SQL: a run is a reservation",
        "O22",
        'IS_RESERVATION → R.operation_kind != word("run")',
        ANYTHING,
        table(E.RELEASE, S.RUNNING),
    ),
    guard(
        "SQL: any owner is me",
        "O14",
        'OWNER_IS_ME → R.owner_worker_id == bindparam("p_worker")',
        "R.owner_worker_id.is_not(null())",
        table(E.PROGRESS, S.RUNNING),
    ),
    guard(
        "SQL: an epoch that has passed is mine",
        "I2",
        'EPOCH_IS_MINE → R.epoch == bindparam("p_epoch")',
        'R.epoch >= bindparam("p_epoch")',
        table(E.PROGRESS, S.RUNNING),
    ),
    guard(
        "SQL: only a rollback is a cancel",
        "I6",
        "NO_CANCEL → R.cancel_action.is_(null())",
        'R.cancel_action.is_distinct_from(word("rollback"))',
        table(E.HAND_OVER, S.RUNNING),
    ),
    guard(
        "SQL: only an interrupt is a cancel",
        "O4",
        "CANCEL_RECORDED → R.cancel_action.is_not(null())",
        'R.cancel_action == word("interrupt")',
        table(E.FORCE, S.PENDING),
    ),
    clause(
        "SQL: a run that never started owes its rollback",
        "O4",
        'R.cancel_action != word("rollback"), R.turn.is_(null()))',
        'R.cancel_action != word("rollback"))',
        says("a rollback is not owed by a run that never started"),
    ),
    clause(
        "SQL: a started run owes nothing unless it is not cancelled at all",
        "I16",
        'or_(R.cancel_action.is_(null()), R.cancel_action != word("rollback"), ',
        "or_(R.cancel_action.is_not(null()), ",
        table(E.SETTLE_SUCCESS, S.RUNNING),
    ),
    guard(
        "SQL: whoever is to be rolled back owes it",
        "O4",
        'ROLLBACK_OWED → and_(R.cancel_action == word("rollback"), R.turn.is_not(null()))',
        'R.cancel_action == word("rollback")',
        says("a rollback is not owed by a run that never started"),
    ),
    clause(
        "SQL: a rollback may be restored by whoever still runs",
        "I16",
        'return or_(_nothing_owed(), and_(R.status == word("pending"), restored))',
        "return or_(_nothing_owed(), restored)",
        table(E.SETTLE_CANCELLED, S.RUNNING),
    ),
    clause(
        "SQL: a seized run need not be restored",
        "I16",
        'return or_(_nothing_owed(), and_(R.status == word("pending"), restored))',
        'return or_(_nothing_owed(), R.status == word("pending"))',
        table(E.SETTLE_CANCELLED, S.PENDING),
    ),
    guard(
        "SQL: the last attempt to restore is not made",
        "O4",
        "ATTEMPTS_EXCEEDED → R.attempt > R.max_attempts",
        "R.attempt >= R.max_attempts",
        says("a rollback that fails as often as it may ends the run as failed"),
    ),
    guard(
        "SQL: what I own is vacant",
        "O31",
        "UNOWNED → R.owner_worker_id.is_(null())",
        'or_(R.owner_worker_id.is_(null()), R.owner_worker_id == bindparam("p_worker"))',
        table(E.CLAIM, S.PENDING),
    ),
    guard(
        "SQL: only what is late is due",
        "O7",
        "DUE → due(R, dialect)",
        "R.due_at > dialect.now",
        table(E.PROMOTE, S.QUEUED),
    ),
    guard(
        "SQL: nothing stays away for its backoff",
        "O30",
        "READY → R.not_before <= dialect.now",
        "R.not_before >= 0",
        table(E.CLAIM, S.PENDING),
    ),
    guard(
        "SQL: everybody is able",
        "O31",
        'CAPABLE → dialect.contained(R.required_capabilities, "p_capabilities")',
        ANYTHING,
        table(E.CLAIM, S.PENDING),
    ),
    guard(
        "SQL: only at home",
        "O31",
        'HOME_ALLOWS_ME → or_(R.home_worker_id.is_(null()), R.home_worker_id == bindparam("p_worker"))',
        'R.home_worker_id == bindparam("p_worker")',
        table(E.CLAIM, S.PENDING),
    ),
    guard(
        "SQL: every home is mine",
        "O35",
        'HOME_IS_MINE → R.home_worker_id == bindparam("p_worker")',
        "R.home_worker_id.is_not(null())",
        table(E.END_WAITING, S.QUEUED),
    ),
    guard(
        "SQL: every home was mine",
        "O13",
        'HOME_WAS_MINE → R.home_worker_id == bindparam("p_previous")',
        "R.home_worker_id.is_not(null())",
        table(E.RE_HOME, S.QUEUED),
    ),
    guard(
        "SQL: a home that is not live is dead",
        "O26",
        "HOME_IS_DEAD → _session_is(R.home_worker_id, SessionState.DEAD)",
        "~_session_is(R.home_worker_id, SessionState.LIVE)",
        says("only the runs of the dead are orphans"),
    ),
    guard(
        "SQL: whoever is not dead is live",
        "O35",
        'ACTOR_LIVE → _session_is(bindparam("p_worker"), SessionState.LIVE)',
        '~_session_is(bindparam("p_worker"), SessionState.DEAD)',
        says("only a live session claims"),
    ),
    guard(
        "SQL: whoever is not live drains",
        "O35",
        'ACTOR_DRAINING → _session_is(bindparam("p_worker"), SessionState.DRAINING)',
        '~_session_is(bindparam("p_worker"), SessionState.LIVE)',
        table(E.END_WAITING, S.QUEUED),
    ),
    guard(
        "SQL: an owner that is not live is dead",
        "O26",
        "OWNER_IS_DEAD → _session_is(R.owner_worker_id, SessionState.DEAD)",
        "~_session_is(R.owner_worker_id, SessionState.LIVE)",
        table(E.TAKE_OVER_RESUME, S.RUNNING),
    ),
    guard(
        "SQL: every owner was me",
        "O13",
        'OWNER_WAS_ME → R.owner_worker_id == bindparam("p_previous")',
        "R.owner_worker_id.is_not(null())",
        table(E.TAKE_BACK, S.RUNNING),
    ),
    guard(
        "SQL: everybody is forced at once",
        "O4",
        "UNHELD_OR_OVERDUE → _unheld_or_overdue(dialect)",
        ANYTHING,
        table(E.FORCE, S.RUNNING),
    ),
    guard(
        "SQL: an owner may not seize its own run",
        "O4",
        'MINE_UNHELD_OR_OVERDUE → or_(R.owner_worker_id == bindparam("p_worker"), _unheld_or_overdue(dialect))',
        "_unheld_or_overdue(dialect)",
        table(E.SEIZE, S.RUNNING),
    ),
    clause(
        "SQL: nobody may seize what is vacant",
        "O4",
        "return or_(vacant, overdue, ",
        "return or_(overdue, ",
        says("a cancelled run that nobody holds is forced at once"),
    ),
    clause(
        "SQL: a cancel's grace does not count from the grant",
        "O4",
        "    since = case((R.cancel_requested_at > granted, R.cancel_requested_at), else_=granted)\n",
        "    since = func.coalesce(R.cancel_requested_at, granted)\n",
        table(E.SEIZE, S.RUNNING),
    ),
    guard(
        "SQL: a run that has used up its attempts does not fail",
        "I9",
        'FAILS_WHEN_ORPHANED → or_(R.on_orphan == word("fail"), next_attempt() > R.max_attempts)',
        'R.on_orphan == word("fail")',
        says("a run that kills its workers is poison once its attempts are used up"),
    ),
    guard(
        "SQL: attempts speak where a run only waits",
        "O31",
        'FAILS_WHEN_HOMELESS → R.on_orphan == word("fail")',
        'or_(R.on_orphan == word("fail"), next_attempt() > R.max_attempts)',
        says("what waits for a dead home follows its policy"),
    ),
    guard(
        "SQL: a run may resume as often as it likes",
        "I9",
        'RESUMES_WHEN_ORPHANED → and_(R.on_orphan == word("resume"), next_attempt() <= R.max_attempts)',
        'R.on_orphan == word("resume")',
        table(E.TAKE_OVER_RESUME, S.RUNNING),
    ),
    guard(
        "SQL: a run that only waits has used up its attempts",
        "O31",
        'RESUMES_WHEN_HOMELESS → R.on_orphan == word("resume")',
        'and_(R.on_orphan == word("resume"), next_attempt() <= R.max_attempts)',
        table(E.TAKE_OVER_RESUME_WAITING, S.PENDING),
    ),
    guard(
        "SQL: a run ends for good at once when its owner may be dead",
        "O26",
        "OWNER_VERDICT_RIPE → _ripe(R.owner_worker_id, dialect)",
        ANYTHING,
        table(E.TAKE_OVER_FAIL, S.RUNNING),
    ),
    guard(
        "SQL: a run ends for good at once when its home may be dead",
        "O26",
        "HOME_VERDICT_RIPE → _ripe(R.home_worker_id, dialect)",
        ANYTHING,
        says("what ends a run for good waits one lease after a death that is not proven"),
    ),
    clause(
        "SQL: a proven death waits too",
        "O26",
        "workers.c.worker_id == worker_id, or_(workers.c.proven, old)",
        "workers.c.worker_id == worker_id, old",
        table(E.TAKE_OVER_FAIL, S.RUNNING),
    ),
    clause(
        "SQL: a death is never old enough",
        "O26",
        "workers.c.worker_id == worker_id, or_(workers.c.proven, old)",
        "workers.c.worker_id == worker_id, workers.c.proven",
        table(E.TAKE_OVER_FAIL, S.RUNNING),
    ),
    guard(
        "SQL: progress of an earlier epoch keeps a run from being deferred",
        "O30",
        "NO_PROGRESS_THIS_EPOCH → or_(R.progress_epoch.is_(null()), R.progress_epoch != R.epoch)",
        "R.progress_epoch.is_(null())",
        table(E.DEFER, S.RUNNING),
    ),
    guard(
        "SQL: a run is deferred for nothing new",
        "O31",
        'ASKS_FOR_MORE → ~dialect.matches(R.required_capabilities, "p_requirements")',
        ANYTHING,
        table(E.DEFER, S.RUNNING),
    ),
    guard("SQL: a held thread is free", "I1", "THREAD_FREE → ~thread_active()", ANYTHING, table(E.PROMOTE, S.QUEUED)),
    guard(
        "SQL: everybody who is due is first",
        "I17",
        "FIRST_DUE → and_(R.run_id == first_due(R.thread_id, dialect))",
        ANYTHING,
        table(E.PROMOTE, S.QUEUED),
    ),
    clause(
        "SQL: who came first is first, whenever it is due",
        "I17",
        ".order_by(waiting.c.due_at, waiting.c.seq).limit(1)",
        ".order_by(waiting.c.seq).limit(1)",
        says("whoever is due first goes first in whatever order they came"),
    ),
    clause(
        "SQL: who is not due yet may be first",
        "O7",
        'waiting.c.status == word("queued"), due(waiting.c, dialect))',
        'waiting.c.status == word("queued"))',
        says("a run that is not due is not let in when the thread becomes free"),
    ),
    clause(
        "SQL: any status is a source",
        "I5",
        "    return status_in(*rule.sources)\n",
        "    return R.status.is_not(null())\n",
        table(E.REQUEST_CANCEL, S.SUCCESS),
    ),
    clause(
        "SQL: a run is found on any thread",
        "O28",
        'and_(R.run_id == bindparam("p_run"), R.thread_id == bindparam("p_thread"))',
        'and_(R.run_id == bindparam("p_run"))',
        says("what is not on the thread is unknown"),
    ),
]
