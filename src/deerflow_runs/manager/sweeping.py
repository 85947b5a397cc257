"""One sweep: look after dead sessions, orphans, overdue cancels, idle threads, owed rollbacks and runs nobody can take.

Level-triggered: every step asks the store what is true and does what is due, so nothing depends on having heard of
anything (O26). When a sweep comes is decided in ``reconciler``; what may happen to a run, by the table alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

from deerflow_runs.manager.fencing import fence
from deerflow_runs.manager.giving_back import GivingBack
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.registry import Phase
from deerflow_runs.manager.taking_back import TakingBack
from deerflow_runs.manager.unclaimed import Waiting
from deerflow_runs.model import Micros, Run, Session, SessionState, micros
from deerflow_runs.observe import (
    RunForced,
    RunPromoted,
    RunRecovered,
    RunSeized,
    SessionDeclaredDead,
    SweepEnded,
    SweepFailed,
    error_code,
)
from deerflow_runs.observe.recovery import RecoveredHow
from deerflow_runs.protocol.decision import Applied, Given
from deerflow_runs.protocol.judge import Look, Sign
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.protocol.trust import BootSeconds
from deerflow_runs.store.base import Swept

BATCH: Final = 500
"""Runs in one statement: few statements for the many orphans of one worker, short locks for everybody else."""

TIDY_EVERY: Final = 300.0
"""Seconds between two looks for what need not be kept any longer."""

PURGE: Final = 100
"""Ended runs that are removed in one transaction, with all that hangs on them."""


@final
class Sweeping:
    """Sweeps for one manager. Belongs to the main loop; one sweep at a time."""

    def __init__(self, ground: Ground, granting: Granting, giving_back: GivingBack, taking_back: TakingBack) -> None:
        self._ground = ground
        self._granting = granting
        self._giving_back = giving_back
        self._taking_back = taking_back
        self._waiting = Waiting(ground)
        self._one_at_a_time = asyncio.Lock()
        self._failures = 0
        self._swept = Swept()
        self._sessions: tuple[Session, ...] = ()
        self._store_now = Micros(0)
        self._ripens_at: BootSeconds | None = None
        self._tidied_at: float | None = None

    @property
    def failures(self) -> int:
        """How many sweeps in a row have failed in at least one step."""
        return self._failures

    @property
    def ripens_at(self) -> BootSeconds | None:
        """When a sweep could do for the runs of the dead what the last one could not yet (O26, O27)."""
        return self._ripens_at

    async def sees_death(self) -> bool:
        """Whether one of the sessions that were last seen is proven dead by now. Asks no database (O27)."""
        others = self._others(self._sessions)
        return bool(others) and Sign.PROOF in (await self._ground.store.signs(others)).values()

    async def sweep(self) -> Swept:
        """One whole sweep; what became of the runs of the dead. A step that fails keeps none of the others from
        running: it is told in an event, and nothing is raised."""
        async with self._one_at_a_time:
            changed, errors = 0, []
            self._swept = Swept()
            for step in self._steps():
                try:
                    changed += await step()
                except Exception as error:  # noqa: BLE001 - one bad row or statement must not stop all recovery (P105)
                    errors.append(error_code(error))
            self._ended(changed, errors)
            return self._swept

    def _steps(self) -> tuple[Callable[[], Awaitable[int]], ...]:
        """In the order in which one makes room for the next."""
        return (
            self._taking_back.once,
            self._giving_back.reconcile,
            self._judge,
            self._bury,
            self._take_over,
            self._force,
            self._promote,
            self._seize,
            self._waiting.give_up_ended,
            self._explain,
            self._tidy,
        )

    def _ended(self, changed: int, errors: Sequence[str]) -> None:
        ground = self._ground
        self._failures = self._failures + 1 if errors else 0
        for error in dict.fromkeys(errors):
            ground.observe(SweepFailed(worker_id=ground.worker_id, error=error, failures=self._failures))
        ground.observe(SweepEnded(worker_id=ground.worker_id, changed=changed))

    # --- Sessions ---------------------------------------------------------------------------------------------------

    async def _judge(self) -> int:
        """O24: one look, and whoever may be declared dead after it. The store's clock is read first: a lease that runs
        out between the two questions does not look as if it had run out before."""
        ground, session = self._ground, self._ground.session
        asked_at = session.now()
        self._sessions, self._ripens_at = (), None  # what is not known anew explains nothing
        store_now = self._store_now = await ground.store.now()
        seen = self._sessions = await ground.store.sessions()
        others = self._others(seen)
        signs = await ground.store.signs(others) if others else {}
        look, dead = Look(seen, asked_at, session.now(), store_now, signs), 0
        for verdict in session.judge_looked(look):
            if await ground.store.declare_dead(verdict):
                event = SessionDeclaredDead(worker_id=ground.worker_id, judged=verdict.worker_id, how=verdict.how)
                ground.observe(event)
                dead += 1
        self._ripens_at = session.judge.ripens(look)
        return dead

    def _others(self, sessions: Iterable[Session]) -> list[Session]:
        me = self._ground.worker_id
        return [one for one in sessions if one.worker_id != me and one.state is not SessionState.DEAD]

    async def _bury(self) -> int:
        return await self._ground.store.bury_strangers()

    # --- Runs of the dead -------------------------------------------------------------------------------------------

    async def _take_over(self) -> int:
        if self._taking_back.pending():
            return 0  # O13: our own orphans come back by their epoch, and not as somebody's
        ground, total = self._ground, 0
        for _ in self._rounds():
            swept = await ground.store.take_over(ground.actor(), self._given(), BATCH)
            total += swept.total
            self._swept = together(self._swept, swept)
            await self._recovered(swept)
            if max(map(len, (swept.ended, swept.resumed, swept.freed, swept.released))) < BATCH:
                break
        return total

    async def _recovered(self, swept: Swept) -> None:
        kinds: tuple[tuple[RecoveredHow, tuple[Run, ...]], ...] = (
            ("ended", swept.ended),
            ("resumed", swept.resumed),
            ("freed", swept.freed),
            ("released", swept.released),
        )
        for how, runs in kinds:
            for run in runs:
                self._ground.observe(RunRecovered(**self._names(run), how=how))
        for run in swept.ended:
            self._ground.registry.give_up(run.run_id)
        freed_a_thread = any(run.queue_behind for run in swept.ended + swept.released)
        if swept.resumed or swept.freed or freed_a_thread:
            await self._ground.work_appeared()

    async def _force(self) -> int:
        """O4: what was cancelled, and whose holder is gone or takes too long."""
        if self._taking_back.pending():
            return 0
        ground, total = self._ground, 0
        for _ in self._rounds():
            forced = await ground.store.force(ground.actor(), self._given(), BATCH)
            total += len(forced)
            for run in forced:
                self._forced(run)
            if any(run.queue_behind for run in forced):
                await ground.work_appeared()
            if len(forced) < BATCH:
                break
        return total

    def _forced(self, run: Run) -> None:
        registry = self._ground.registry
        self._ground.observe(RunForced(**self._names(run)))
        registry.give_up(run.run_id)
        held = registry.get(run.run_id)
        # What is being settled hears it from its own question.
        if held is not None and held.lease.epoch < run.epoch and held.phase is not Phase.SETTLING:
            held.ended = run
            fence(self._ground, held, "forced: the grace of its cancel was over")

    async def _promote(self) -> int:
        """O7: how delayed runs come to life, and whatever no end of a run has let in."""
        ground, total = self._ground, 0
        for _ in self._rounds():
            promoted = await ground.store.promote(BATCH)
            total += len(promoted)
            for run in promoted:
                ground.observe(RunPromoted(**self._names(run)))
            if promoted:
                await ground.work_appeared()
            if len(promoted) < BATCH:
                break
        return total

    async def _seize(self) -> int:
        """O4: owed rollbacks, as long as there are slots. Our own are seen to by their lives, or given back."""
        ground, seized = self._ground, 0
        if not self._may_take():
            return 0
        limit = len(ground.registry) + min(BATCH, ground.registry.free_slots)
        for run in await ground.store.seizable(ground.actor(), self._given(), limit):
            if run.owner_worker_id == ground.worker_id or ground.registry.get(run.run_id) is not None:
                continue
            if not ground.registry.take_slot():
                break
            try:
                seized += await self._seize_one(run)
            finally:
                ground.registry.arrived()
        return seized

    async def _seize_one(self, run: Run) -> bool:
        ground = self._ground
        decision = await ground.store.apply(run.key, RunEvent.SEIZE, ground.actor(run.epoch), self._given())
        if not isinstance(decision, Applied):
            return False
        run = decision.run
        ground.observe(RunSeized(**self._names(run), epoch=run.epoch, attempt=run.attempt))
        self._granting.restore(run)
        return True

    def _may_take(self) -> bool:
        session = self._ground.session
        return session.trusted() and session.state is SessionState.LIVE

    async def _explain(self) -> int:
        """O31, by the sessions that were seen in this sweep; without a look nothing is known."""
        if self._sessions:
            await self._waiting.explain(self._sessions, self._store_now)
        return 0

    # --- What is kept -----------------------------------------------------------------------------------------------

    async def _tidy(self) -> int:
        ground, config, now = self._ground, self._ground.config, self._ground.clock.boot_time()
        if self._tidied_at is not None and now - self._tidied_at < TIDY_EVERY:
            return 0
        self._tidied_at = now
        await ground.store.forget_dead(kept_for=micros(config.sessions_kept.total_seconds()))
        if config.runs_kept is not None:
            before = Micros(await ground.store.now() - micros(config.runs_kept.total_seconds()))
            for _ in self._rounds():
                if await ground.store.purge(before=before, limit=PURGE) < PURGE:
                    break
        return 0

    # --- Of all -----------------------------------------------------------------------------------------------------

    def _rounds(self) -> Iterator[None]:
        """One, and further ones until the time between two sweeps is used up: nobody waits for a flood."""
        clock = self._ground.clock
        until = clock.boot_time() + self._ground.config.sweep.total_seconds()
        yield
        while clock.boot_time() < until:
            yield

    def _given(self) -> Given:
        config = self._ground.config
        return Given(
            backoff=micros(config.backoff_min.total_seconds()),
            backoff_limit=micros(config.backoff_max.total_seconds()),
            cancel_grace=micros(config.cancel_grace.total_seconds()),
        )

    def _names(self, run: Run) -> dict[str, Any]:
        return {"worker_id": self._ground.worker_id, "run_id": run.run_id, "thread_id": run.thread_id}


def together(first: Swept, second: Swept) -> Swept:
    """What two passes did."""
    return Swept(
        ended=first.ended + second.ended,
        resumed=first.resumed + second.resumed,
        freed=first.freed + second.freed,
        released=first.released + second.released,
    )
