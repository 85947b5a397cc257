"""Mutations of the routines around the table: how stores end runs, let them in, keep sessions, and take values."""

from __future__ import annotations

from typing import Final

from tests.mutations import AnyMutation
from tests.mutations.contract import change, says

# --- Endings --------------------------------------------------------------------------------------------------------

DELETE = "the end of a delete ends what waits behind it"
ENDINGS: Final[list[AnyMutation]] = [
    change(
        "the end of one run lets nobody in",
        "I7",
        "endings",
        "    if TRANSITIONS[event].frees:\n        let_in_the_next(connection, dialect, by, (ended,))\n",
        "",
        says("the end of a holder that succeeds gives the thread to the next at once"),
    ),
    change(
        "the end of many runs lets nobody in",
        "I7",
        "endings",
        "    if TRANSITIONS[event].frees:\n        let_in_the_next(connection, dialect, by, ended)\n",
        "",
        says("the end of a holder that is forced by a sweep gives the thread to the next at once"),
    ),
    change(
        "the quick way ends a run that somebody waits behind",
        "O7",
        "endings",
        "alone = [~R.queue_behind, R.cancel_action.is_(null())] if nobody_waits else []",
        "alone = []",
        says("the end of a holder that was a reservation gives the thread to the next at once", store="postgres"),
    ),
    change(
        "a sweep takes all there is",
        "O26",
        "endings",
        '    limited = found.order_by(*order).limit(bindparam("p_limit", type_=BigInteger))\n',
        "    limited = found.order_by(*order)\n",
        says("a claim takes what is ready longest first with its input and no more than asked"),
    ),
    change(
        "a claim takes any of what is ready",
        "O31",
        "endings",
        "order = (R.not_before, R.run_id) if event is RunEvent.CLAIM else (R.seq,)",
        "order = (R.run_id,)",
        says("a claim takes what is ready longest first with its input and no more than asked"),
    ),
    change(
        "a claim brings no input",
        "O31",
        "endings",
        "columns = whole() if event is RunEvent.CLAIM else narrow()",
        "columns = narrow()",
        says("a claim takes what is ready longest first with its input and no more than asked"),
    ),
    change(
        "a session that leaves hands over local runs too",
        "O35",
        "endings",
        "        return [travels]\n",
        "        return []\n",
        says("a session that leaves hands over all that may resume and no attempt is lost"),
    ),
    change(
        "a session that leaves leaves only what is at one epoch",
        "O35",
        "endings",
        "    if event not in LEAVING:\n        return rule\n",
        "    if event not in LEAVING or rule:\n        return rule\n",
        says("a session that leaves hands over all that may resume and no attempt is lost"),
    ),
    change(
        "a session that leaves ends what others could go on with",
        "O35",
        "endings",
        "    return [~and_(travels, condition(Guard.NO_CANCEL, dialect))] "
        "if event is RunEvent.SETTLE_CANCELLED else []\n",
        "    return []\n",
        says("a session that leaves ends what nobody else can go on with"),
    ),
    change(
        "a session that leaves keeps what was cancelled and may resume",
        "O35",
        "endings",
        "    return [~and_(travels, condition(Guard.NO_CANCEL, dialect))] if",
        "    return [~travels] if",
        says("a session that leaves ends what nobody else can go on with"),
    ),
]
"""The routine that ends operations and frees threads."""


# --- Arrivals -------------------------------------------------------------------------------------------------------


def meets(strategy: str, incumbent: str, store: str = "sqlite") -> tuple[str, ...]:
    """A newcomer's sentence."""
    return says(f"a newcomer that asks to {strategy} meets {incumbent}", store=store)


ARRIVALS: Final[list[AnyMutation]] = [
    change(
        "a run passes those that wait",
        "O1",
        "arrivals",
        "    return _insertion(dialect, RunStatus.PENDING, take, true() if only_due is None else nobody_waits)\n",
        "    return _insertion(dialect, RunStatus.PENDING, take, true())\n",
        meets("reject", "a delayed run"),
    ),
    change(
        "an enqueued run waits for one that is for later",
        "O2",
        "arrivals",
        "    their_time = [due(waiting.c, dialect)] if only_due else []\n",
        "    their_time = []\n",
        meets("enqueue", "a delayed run"),
    ),
    change(
        "a queue takes one more than its limit",
        "I19",
        "arrivals",
        'length < bindparam("p_max_queued", type_=BigInteger)',
        'length <= bindparam("p_max_queued", type_=BigInteger)',
        says("a queue takes exactly as many as its limit says"),
    ),
    change(
        "nobody is told that somebody waits",
        "O2",
        "arrivals",
        "update(runs).where(*wanted).values(queue_behind=true(), updated_at=dialect.now)",
        "update(runs).where(*wanted).values(updated_at=dialect.now)",
        meets("enqueue", "a running run"),
    ),
    change(
        "an enqueued run waits behind the dead",
        "O1",
        "arrivals",
        "wanted = [here, cleared.is_not(true())] if unless_cleared else [here]",
        "wanted = [here]",
        meets("enqueue", "a dead session's run that can only fail"),
    ),
    change(
        "a newcomer that is not let in leaves its flag",
        "O5",
        "arrivals",
        "    return Admitted(_insert_or_again(connection, dialect, newcomer, queueing), to_run(behind))\n",
        "    run = _insert(connection, dialect, newcomer, queueing)\n"
        "    return None if run is None else Admitted(run, to_run(behind))\n",
        says("a known key answers its run whatever the strategy and changes nothing"),
    ),
    change(
        "whoever displaces lets the others wait on",
        "O3",
        "arrivals",
        "    ended = end_queue(connection, dialect, newcomer.thread_id, by, given, spare=newcomer.run_id)\n",
        "    ended = ()\n",
        meets("interrupt", "a run with a queue behind it"),
    ),
    change(
        "whoever is displaced is not told by whom",
        "B026",
        "arrivals",
        'error=f"displaced by run {newcomer.run_id}")',
        'error="displaced")',
        meets("interrupt", "a run with a queue behind it"),
    ),
    change(
        "a cancelled incumbent does not know who came",
        "B026",
        "arrivals",
        'values = assignments(rule, dialect, Shape()) | {"queue_behind": true(), "superseded_by": superseded}',
        'values = assignments(rule, dialect, Shape()) | {"queue_behind": true()}',
        meets("interrupt", "a running run"),
    ),
    change(
        "a displaced incumbent's end does not look at the queue",
        "O7",
        "arrivals",
        'values = assignments(rule, dialect, Shape()) | {"queue_behind": true(), "superseded_by": superseded}',
        'values = assignments(rule, dialect, Shape()) | {"superseded_by": superseded}',
        meets("interrupt", "a running run"),
    ),
    change(
        "what arrives vacant has had an attempt",
        "O30",
        "arrivals",
        '"attempt": one if take else zero,',
        '"attempt": one,',
        meets("enqueue", "a running run"),
    ),
    change(
        "whoever is taken in has no epoch",
        "I4",
        "arrivals",
        '"epoch": one if take else zero,',
        '"epoch": zero,',
        meets("reject", "a free thread"),
    ),
    change(
        "every newcomer is pinned",
        "O31",
        "arrivals",
        '"home_worker_id": newcomer.worker_id if newcomer.pinned else None,',
        '"home_worker_id": newcomer.worker_id,',
        says("a deferred run waits for somebody who can run it"),
    ),
    change(
        "a key is not looked for",
        "O5",
        "arrivals",
        "        known=mine or keyed,\n",
        "        known=mine,\n",
        says("a known key answers its run while that waits is vacant or has ended"),
    ),
    change(
        "the key speaks before the run id",
        "O8",
        "arrivals",
        "        known=mine or keyed,\n",
        "        known=keyed or mine,\n",
        says("the run id speaks before the key"),
    ),
    change(
        "a vacant incumbent is waited for",
        "O3",
        "sql",
        "        if not seen.unheld or not isinstance(\n",
        "        if seen.unheld or not isinstance(\n",
        meets("interrupt", "a vacant run"),
    ),
    change(
        "a newcomer whose incumbent was forced is left vacant",
        "O3",
        "sql",
        "        if newcomer.take:\n            await self.apply(answer.run.key, RunEvent.CLAIM, by)\n",
        "",
        meets("interrupt", "a vacant run"),
    ),
]
"""Who may enter, and how."""


# --- Sessions -------------------------------------------------------------------------------------------------------

SESSIONS: Final[list[AnyMutation]] = [
    change(
        "a dead session may open again",
        "I12",
        "sessions",
        "    if opened.state is SessionState.DEAD:\n",
        "    if opened.state is SessionState.DEAD and opened.proven:\n",
        says("an id that has died is never used again"),
    ),
    change(
        "a dead session beats",
        "I12",
        "sessions",
        '        .where(W.worker_id == bindparam("p_worker"), NOT_DEAD)\n',
        '        .where(W.worker_id == bindparam("p_worker"))\n',
        says("the dead and the unknown never beat"),
    ),
    change(
        "a beat leaves the lease where it was",
        "O10",
        "sessions",
        "            expires_at=dialect.now + W.lease,\n",
        "            expires_at=W.expires_at,\n",
        says("a beat counts moves the lease and says whether the hint is held"),
    ),
    change(
        "a beat is not counted",
        "O24",
        "sessions",
        "            beat=W.beat + 1,\n",
        "            beat=W.beat,\n",
        says("a beat counts moves the lease and says whether the hint is held"),
    ),
    change(
        "a late beat ends the drain",
        "O35",
        "sessions",
        'state = case((W.state == draining, draining), else_=bindparam("p_state", type_=W.state.type))',
        'state = bindparam("p_state", type_=W.state.type)',
        says("a session that drains goes on draining and beating"),
    ),
    change(
        "a beat tells of everybody's cancels",
        "O10",
        "sessions",
        'and_(R.owner_worker_id == bindparam("p_worker"), R.active, R.cancel_requested_at.is_not(null()))',
        "and_(R.active, R.cancel_requested_at.is_not(null()))",
        says("a beat tells of every cancel on the session's own active runs as often as it is asked"),
    ),
    change(
        "a beat tells of ended runs",
        "O10",
        "sessions",
        'and_(R.owner_worker_id == bindparam("p_worker"), R.active, R.cancel_requested_at.is_not(null()))',
        'and_(R.owner_worker_id == bindparam("p_worker"), R.cancel_requested_at.is_not(null()))',
        says("a beat tells of every cancel on the session's own active runs as often as it is asked"),
    ),
    change(
        "a session that closes is only believed dead",
        "O35",
        "sessions",
        "closed = _death(dialect, true(), NOT_DEAD)",
        "closed = _death(dialect, false(), NOT_DEAD)",
        says("a session that closes is dead as a fact and may say so twice"),
    ),
    change(
        "closing proves a death that was only believed",
        "O26",
        "sessions",
        "closed = _death(dialect, true(), NOT_DEAD)",
        "closed = _death(dialect, true(), true())",
        says("a session that was believed dead does not prove it by closing"),
    ),
    change(
        "a verdict counts for any beat",
        "O24",
        "sessions",
        '    unchanged = and_(NOT_DEAD, W.beat == bindparam("p_beat"))\n',
        "    unchanged = NOT_DEAD\n",
        says("a verdict counts only for the beat that was seen"),
    ),
    change(
        "a verdict by time has no grace",
        "O24",
        "sessions",
        "and_(unchanged, W.expires_at < dialect.now - grace)",
        "and_(unchanged, W.expires_at < dialect.now, grace >= 0)",
        says("a verdict by time needs an expired lease and its grace"),
    ),
    change(
        "a verdict by hint needs no hint",
        "O27",
        "sessions",
        "return _death(dialect, false(), and_(unchanged, W.hinted))",
        "return _death(dialect, false(), unchanged)",
        says("a verdict by hint needs a session that said it held it"),
    ),
    change(
        "a hint proves a death",
        "O26",
        "sessions",
        "return _death(dialect, false(), and_(unchanged, W.hinted))",
        "return _death(dialect, true(), and_(unchanged, W.hinted))",
        says("what ends a run for good waits one lease after a death that is not proven"),
    ),
    change(
        "a proof is only a belief",
        "O27",
        "sessions",
        "return _death(dialect, true(), unchanged)",
        "return _death(dialect, false(), unchanged)",
        says("a verdict counts only for the beat that was seen"),
    ),
    change(
        "strangers' homes are not found",
        "O26",
        "sessions",
        'union(owners, homes.where(R.active), homes.where(R.status == word("queued")))',
        'union(owners, homes.where(R.status == word("queued")))',
        says("a session without a row gets a tombstone and its runs are found"),
    ),
]
"""How sessions open, beat and die."""


# --- What comes in --------------------------------------------------------------------------------------------------

VALUES = "tests/contract/test_values_stored.py::"
REFUSED = (VALUES + "test_what_cannot_be_stored_alike_is_refused_by_its_path_and_the_thread_stays_free",)


def produced(name: str) -> tuple[str, ...]:
    """What a run produced, by its kind."""
    return (f"{VALUES}test_nothing_that_a_run_produced_keeps_it_from_its_end[{name}]",)


INCOMING: Final[list[AnyMutation]] = [
    change(
        "a worker may have any name",
        "O1",
        "incoming",
        '    text(newcomer.worker_id, "worker_id", nonempty=True)\n',
        "",
        REFUSED,
    ),
    change(
        "a number may be as large as it likes",
        "O1",
        "incoming",
        "    if type(value) is not int or not lowest <= value <= highest:\n",
        "    if type(value) is not int or not lowest <= value:\n",
        REFUSED,
    ),
    change(
        "a delivery may be called a receipt",
        "O28",
        "incoming",
        '        if kind == "receipt":\n',
        '        if kind == "bill":\n',
        REFUSED,
    ),
    change(
        "metadata may be as large as input",
        "O1",
        "incoming",
        '_mapping(newcomer.metadata, "metadata", METADATA_BYTES)',
        '_mapping(newcomer.metadata, "metadata")',
        REFUSED,
    ),
    change(
        "an error is stored as it is",
        "B088",
        "incoming",
        "error=None if given.error is None else cut_text(_clean(given.error)),",
        "error=given.error,",
        produced("texts"),
    ),
    change(
        "a count is stored as it is",
        "B088",
        "incoming",
        "        return min(max(int(number), 0), largest)\n",
        "        return int(number)\n",
        produced("numbers"),
    ),
    change(
        "a state is stored as it is",
        "B088",
        "incoming",
        'values=None if given.values is None else repaired(given.values, "values")[0],',
        "values=given.values,",
        produced("state"),
    ),
    change(
        "heads are stored as they are",
        "B088",
        "incoming",
        "base_heads={_clean(namespace): _clean(head) for namespace, head in given.base_heads.items()},",
        "base_heads=given.base_heads,",
        produced("heads"),
    ),
]
"""What callers and runs hand in."""

MUTATIONS: Final[list[AnyMutation]] = [*ENDINGS, *ARRIVALS, *SESSIONS, *INCOMING]
