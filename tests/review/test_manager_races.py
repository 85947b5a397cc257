"""Orderings in which a manager might run code twice, hang a caller, forget what it holds, or say what is not true.

Every part is the real one on a real store; what comes before what is decided by gates on the questions. Sessions are
opened and lost by hand, and time is the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, final

import pytest

from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import ReservationLost, StoreUnavailable
from deerflow_runs.manager.admitting import Request
from deerflow_runs.manager.answers import AdmittedRun, CancelOutcome, Ended, Started
from deerflow_runs.manager.attaching import Execution
from deerflow_runs.manager.body import Finished
from deerflow_runs.manager.executor import CAPABILITY, Executor, LocalExecutor
from deerflow_runs.manager.hooks import Hooks
from deerflow_runs.manager.lease import RunLease
from deerflow_runs.manager.manager import RunManager
from deerflow_runs.manager.messages import TrustEnded, TrustRegained
from deerflow_runs.manager.outcome import SUCCEEDED
from deerflow_runs.manager.parts import Parts, Setup
from deerflow_runs.manager.registry import Held
from deerflow_runs.manager.reserving import Reservation
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    OperationKind,
    Run,
    RunStatus,
    Session,
    Strategy,
    ThreadId,
    WorkerId,
)
from deerflow_runs.observe import DrainHurried, DrainStepEnded, Event, ReservationReleased, RunAborted, RunClaimed
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Renewed
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.testing.clock import ManualClock
from deerflow_runs.testing.contract.stage import AT_ONCE, Stage
from deerflow_runs.testing.flaky_line import Ask, Faults, Gate, failing
from deerflow_runs.testing.flaky_store import FlakyStore
from tests.manager.conftest import store, store_dsn  # noqa: F401 - fixtures
from tests.rules import rule

E = TypeVar("E", bound=Event)

pytestmark = pytest.mark.timeout(30)


@final
class Code:
    """A body that lasts until it is let go or stopped, and counts what was done to it."""

    def __init__(self) -> None:
        self.begun = 0
        self.stopped = 0
        self.running = asyncio.Event()
        self.go_on = asyncio.Event()
        self.beside: list[bool] = []

    async def body(self, lease: RunLease) -> None:
        self.begun += 1
        self.running.set()
        try:
            await self.go_on.wait()
        finally:
            self.stopped += 1

    async def restore(self, lease: RunLease) -> None:
        """Remembers whether a body was under way meanwhile."""
        self.beside.append(self.begun > self.stopped)

    @property
    def executor(self) -> LocalExecutor:
        return LocalExecutor(self.body, self.restore)


@final
class One:
    """The parts of a manager without the thread that beats and without the tasks that go on by themselves."""

    def __init__(self, real: SqlRunStore, **settings: Any) -> None:
        self.real = real
        self.faults = Faults()
        self.clock = ManualClock()
        self.told: list[Event] = []
        self.stage = Stage(real)
        self.named = Code()
        config = RunsConfig(**settings)
        able = frozenset({CAPABILITY + "named"})
        template = Session(WorkerId(""), host="one", capabilities=able)
        self.session = WorkerSession(template, config, self.clock)
        executors: Mapping[str, Executor] = {"named": Named(self.named)}
        self.setup = Setup(
            store=FlakyStore.around(real, self.faults),
            session=self.session,
            executors=executors,
            capabilities=able,
            config=config,
            clock=self.clock,
            observe=self.told.append,
            hooks=Hooks(),
        )
        self.parts = Parts(self.setup)

    # --- Its session ------------------------------------------------------------------------------------------------

    @property
    def me(self) -> WorkerId:
        return self.session.worker_id

    async def opens(self) -> WorkerId:
        """The first session, or another one; the id of the one before."""
        before, sent_at = self.me, self.session.now()
        opened = await self.real.open_session(self.session.fresh())
        self.session.opened(opened, sent_at=sent_at, answered_at=self.session.now())
        return before

    async def beats(self) -> None:
        """One beat that is accepted at once."""
        sent_at = self.session.now()
        renewed = await self.real.renew(self.me, state=self.session.state)
        assert isinstance(renewed, Renewed)
        self.session.confirmed(renewed, sent_at=sent_at, answered_at=self.session.now())

    async def loses_its_session(self) -> WorkerId:
        """Its beat was answered "not live", and another session is open; the id of the lost one."""
        await self.stage.dies(self.me)
        self.session.refused()
        return await self.opens()

    # --- Its runs ---------------------------------------------------------------------------------------------------

    async def admits(self, executor: Executor | None = None, **asked: Any) -> AdmittedRun:
        request = Request(thread_id="thread", **asked)
        return await self.parts.admitting.admit(request, executor, for_caller=executor is None)

    async def runs(self, code: Code, **asked: Any) -> Held:
        """A run whose body is under way."""
        run = (await self.admits(code.executor, **asked)).run
        await code.running.wait()
        held = self.held(run)
        assert held is not None
        return held

    def held(self, run: Run | AdmittedRun) -> Held | None:
        return self.parts.ground.registry.get(run.run_id)

    async def row(self, run: Run | AdmittedRun) -> Run:
        found = await self.real.get(run.key, scope=EVERYONE)
        assert found is not None
        return found

    async def claims(self) -> int:
        """One question for work."""
        return await self.parts.reconciler._claiming.claim(10)  # noqa: SLF001 - one step of what runs by itself

    async def sweeps(self) -> None:
        await self.parts.reconciler.sweep()

    # --- What is spoiled, and what is told --------------------------------------------------------------------------

    def before(self, question: str) -> Gate:
        """The next question of this kind stands still before it reaches the store."""
        gate = Gate()
        self.faults.once(question, gate.before)
        return gate

    def after(self, question: str) -> Gate:
        """The next question of this kind is answered by the store, and its answer stands still."""
        gate = Gate()
        self.faults.once(question, gate.after)
        return gate

    async def asked_for(self, question: str) -> None:
        """Return when the store was asked for it."""
        while question not in self.faults.asked:  # noqa: ASYNC110 - nobody tells of a question
            await asyncio.sleep(0)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.told if isinstance(event, kind)]

    async def is_killed(self) -> None:
        self.faults.mend()
        for tasks in (self.parts.granting.lives(), self.parts.tasks._tasks):  # noqa: SLF001 - leave nothing behind
            for task in (left := set(tasks)):
                task.cancel()
            if left:
                await asyncio.wait(left)


@final
class Named(Executor):
    """The same code by a name, so that any worker may carry it out."""

    def __init__(self, code: Code) -> None:
        self._code = code

    async def run(self, lease: RunLease, payload: Any) -> None:
        await self._code.body(lease)

    async def restore(self, lease: RunLease) -> None:
        await self._code.restore(lease)


@pytest.fixture
async def one(store: SqlRunStore) -> AsyncIterator[One]:  # noqa: F811
    async with a_worker(store) as worker:
        yield worker


@asynccontextmanager
async def a_worker(store: SqlRunStore, **settings: Any) -> AsyncIterator[One]:  # noqa: F811
    worker = One(store, **settings)
    await worker.opens()
    try:
        yield worker
    finally:
        await worker.is_killed()


async def turns() -> None:
    """Let everything happen that needs neither time nor an answer."""
    for _ in range(50):
        await asyncio.sleep(0)


# --- Answers that are overtaken -------------------------------------------------------------------------------------


@rule("O13", "I8")
async def test_a_waiting_run_that_was_admitted_while_its_session_was_lost_gets_the_new_one_as_home(one: One) -> None:
    await one.runs(Code())
    gate = one.before("admit")
    admission = asyncio.create_task(one.admits(strategy=Strategy.ENQUEUE))
    await gate.reached()
    await one.parts.reconciler.take_back(await one.loses_its_session())
    gate.open()
    waiting = await admission
    await one.sweeps()
    assert (await one.row(waiting)).home_worker_id == one.me


@rule("O6", "I8")
async def test_a_function_whose_run_was_claimed_before_its_admission_was_answered_is_carried_out(one: One) -> None:
    first, second = Code(), Code()
    ended = await one.runs(first)
    gate = one.after("admit")
    admission = asyncio.create_task(one.admits(second.executor, strategy=Strategy.ENQUEUE))
    await gate.reached()
    first.go_on.set()
    await ended.over.wait()
    assert await one.claims() == 1
    gate.open()
    run = await admission
    await asyncio.wait_for(second.running.wait(), 10)
    assert (await one.row(run)).status is RunStatus.RUNNING
    assert one.parts.ground.registry.waiting() == ()


@rule("O4", "O13", "I16")
async def test_a_rollback_does_not_begin_beside_a_body_that_is_being_taken_back(one: One) -> None:
    code = Code()
    held = await one.runs(code)
    previous = await one.loses_its_session()
    gate = one.after(RunEvent.TAKE_BACK)
    taking_back = asyncio.create_task(one.parts.reconciler.take_back(previous))
    await gate.reached()
    await one.admits(strategy=Strategy.ROLLBACK)
    await turns()
    gate.open()
    await taking_back
    await asyncio.wait_for(held.over.wait(), 10)
    await asyncio.wait_for(ended(one, held.run), 10)
    assert code.beside == [False]


async def ended(one: One, run: Run) -> Run:
    """A run's last row. Asks until it is there."""
    while not (row := await one.row(run)).terminal:
        pass
    return row


@rule("O4")
async def test_a_rollback_that_its_own_holder_is_seizing_is_not_seized_once_more(one: One) -> None:
    code = Code()
    held = await one.runs(code)
    gate = one.after(RunEvent.SEIZE)
    await one.parts.cancelling.cancel(held.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    await gate.reached()
    await one.parts.cancelling.cancel(held.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    gate.open()
    await held.over.wait()
    assert code.beside == [False]
    assert one.faults.count(RunEvent.SEIZE) == 1
    assert (await one.row(held.run)).status is RunStatus.INTERRUPTED


@rule("O4", "O8")
async def test_a_claim_whose_answer_comes_after_a_seizure_does_not_replace_the_newer_grant(one: One) -> None:
    neighbour = await one.stage.opens(WorkerId("host:neighbour"))
    asked: dict[str, Any] = {"executor": "named", "required_capabilities": frozenset({CAPABILITY + "named"})}
    run = await one.stage.starts("run", worker_id=neighbour, on_orphan="resume", **asked)
    await one.stage.happens(RunEvent.HAND_OVER, run)
    claimed, restoring = one.after("claim"), one.before(RunEvent.SETTLE_CANCELLED)
    claim = asyncio.create_task(one.claims())
    await claimed.reached()
    await one.parts.cancelling.cancel(run.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    await restoring.reached()
    newer = one.held(run)
    claimed.open()
    await claim
    await turns()
    assert one.held(run) is newer
    assert newer is not None
    restoring.open()
    await newer.over.wait()
    assert (one.named.begun, one.named.beside) == (0, [False])


class Careful(Executor):
    """One whose restore asks the lease before each of its steps, as it should."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.restoring = asyncio.Event()
        self.go_on = asyncio.Event()
        self.restored = 0

    async def run(self, lease: RunLease, payload: Any) -> None:
        await self._code.body(lease)

    async def restore(self, lease: RunLease) -> None:
        self.restoring.set()
        await self.go_on.wait()
        await lease.check()
        self.restored += 1


@rule("O4", "O22")
@pytest.mark.parametrize("how", ["cancel", "drain"])
async def test_nothing_but_a_loss_stops_a_restore_that_asks_its_lease(how: str, one: One) -> None:
    code = Code()
    careful = Careful(code)
    run = await one.admits(careful)
    await code.running.wait()
    await one.parts.cancelling.cancel(run.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    await careful.restoring.wait()
    leaving = None
    if how == "cancel":
        await one.parts.cancelling.cancel(run.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    else:
        leaving = asyncio.create_task(one.parts.leave(20.0))
        await one.clock.advance(12.0)
    careful.go_on.set()
    row = await asyncio.wait_for(ended(one, run.run), 10)
    assert (row.status, row.stop_reason, careful.restored) == (RunStatus.INTERRUPTED, "rollback", 1)
    if leaving is not None:
        await passes_until(one, leaving)


@rule("O4", "O18")
async def test_a_restore_that_takes_too_long_stops_once_another_worker_has_seized_its_run(one: One) -> None:
    careful = Careful(code := Code())
    run = await one.admits(careful)
    await code.running.wait()
    await one.parts.cancelling.cancel(run.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    await careful.restoring.wait()
    held = one.held(run)
    assert held is not None
    await one.sweeps()
    assert not held.lease.fenced
    neighbour = await one.stage.opens(WorkerId("host:neighbour"))
    await one.stage.happens(RunEvent.SEIZE, await one.row(run), AT_ONCE, by=Actor(neighbour))
    await one.sweeps()
    await held.over.wait()
    assert (held.lease.fenced, careful.restored) == (True, 0)


# --- Cancels --------------------------------------------------------------------------------------------------------


@rule("O22")
async def test_a_run_that_nobody_has_come_for_is_ended_by_its_cancel_at_once(one: One) -> None:
    run = await one.admits()
    result = await one.parts.cancelling.cancel(run.key, CancelAction.INTERRUPT, wait=True, timeout=5.0, scope=EVERYONE)
    assert result.outcome is CancelOutcome.CANCELLED
    assert isinstance(await one.parts.attaching.try_start(run.key, 0), Ended)


@rule("O22")
async def test_whoever_comes_for_a_run_while_its_cancel_ends_it_is_told_that_it_ended(one: One) -> None:
    run = await one.admits()
    gate = one.before(RunEvent.SETTLE_CANCELLED)
    await one.parts.cancelling.cancel(run.key, CancelAction.INTERRUPT, wait=False, timeout=None, scope=EVERYONE)
    await gate.reached()
    starting = asyncio.create_task(one.parts.attaching.try_start(run.key, 0))
    await turns()
    gate.open()
    started = await starting
    assert isinstance(started, Ended)
    assert started.run is not None
    assert started.run.status is RunStatus.INTERRUPTED


@rule("O4", "O28")
async def test_a_started_run_whose_caller_never_comes_back_ends_without_it_after_the_grace(one: One) -> None:
    run = await one.admits()
    assert isinstance(await one.parts.attaching.try_start(run.key, 0), Started)
    held = one.held(run)
    assert held is not None
    await one.parts.cancelling.cancel(run.key, CancelAction.INTERRUPT, wait=False, timeout=None, scope=EVERYONE)
    await one.clock.advance(one.setup.config.cancel_grace.total_seconds() + 1)
    await held.over.wait()
    assert (await one.row(run)).status is RunStatus.INTERRUPTED
    assert one.held(run) is None
    assert await one.parts.attaching.finish(run.key, Finished(SUCCEEDED)) is None


@rule("O28")
async def test_whoever_joins_a_run_that_others_ended_does_not_wait_for_its_old_holder(one: One) -> None:
    run = await one.admits()
    assert isinstance(await one.parts.attaching.try_start(run.key, 0), Started)
    joining = asyncio.create_task(one.parts.joining.join(run.key, scope=EVERYONE, timeout=30))
    await turns()
    neighbour = Actor(WorkerId("host:neighbour"))
    cancelled = await one.stage.happens(
        RunEvent.REQUEST_CANCEL, await one.row(run), Given(action=CancelAction.INTERRUPT), by=neighbour
    )
    await one.stage.happens(RunEvent.FORCE, cancelled, AT_ONCE, by=neighbour)
    await one.sweeps()
    for _ in range(100):
        await one.clock.advance(0.1)
        await asyncio.sleep(0)
    found = await asyncio.wait_for(joining, 10)
    assert found is not None
    assert found.status is RunStatus.INTERRUPTED


async def test_a_cancellation_by_the_host_that_came_together_with_the_runs_own_is_not_lost(one: One) -> None:
    run = await one.admits()
    inside, after = asyncio.Event(), asyncio.Event()

    async def caller() -> None:
        async with Execution(one.parts.attaching, run.key, None) as lease:
            inside.set()
            await one.parts.cancelling.cancel(
                lease.key, CancelAction.INTERRUPT, wait=False, timeout=None, scope=EVERYONE
            )
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await turns_without_noticing()
        after.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(caller())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert inside.is_set()
    assert not after.is_set()


async def test_an_error_of_the_block_passes_although_both_cancelled_it(one: One) -> None:
    run = await one.admits()

    async def caller() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with Execution(one.parts.attaching, run.key, None) as lease:
            await one.parts.cancelling.cancel(
                lease.key, CancelAction.INTERRUPT, wait=False, timeout=None, scope=EVERYONE
            )
            task.cancel()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("what the block makes of it") from None

    with pytest.raises(ValueError, match="what the block makes of it"):
        await asyncio.create_task(caller())


async def turns_without_noticing() -> None:
    """Ends before either cancellation is delivered."""


# --- Leaving --------------------------------------------------------------------------------------------------------


@rule("O35")
async def test_a_run_whose_admission_is_answered_while_its_worker_leaves_does_not_start(one: One) -> None:
    other, code = Code(), Code()
    await one.runs(other)
    gate = one.after("admit")
    admission = asyncio.create_task(
        one.parts.admitting.admit(Request(thread_id="another"), code.executor, for_caller=False)
    )
    await gate.reached()
    leaving = asyncio.create_task(one.parts.leave(20.0))
    await turns()
    gate.open()
    run = await admission
    await turns()
    await passes_until(one, leaving)
    assert code.begun == 0
    row = await one.row(run)
    assert (row.status, row.stop_reason) == (RunStatus.INTERRUPTED, "shutdown")


async def passes_until(one: One, task: asyncio.Task[Any]) -> None:
    """Let time pass, and the store answer, until ``task`` is done."""
    while not task.done():
        await one.clock.advance(0.05)
        for _ in range(40):
            await asyncio.sleep(0)
    await task


@rule("O35")
async def test_an_admission_that_is_answered_when_all_runs_have_left_leaves_no_life_behind(one: One) -> None:
    code = Code()
    gate = one.after("admit")
    admission = asyncio.create_task(one.admits(code.executor))
    await gate.reached()
    leaving = asyncio.create_task(one.parts.leave(1.0))
    while not one.of(DrainStepEnded):
        await one.clock.advance(0.05)
    one.session.closing()  # as the heartbeat does at its end: from here on nothing is written
    gate.open()
    await asyncio.wait({admission})
    await passes_until(one, leaving)
    await turns()
    assert code.begun == 0
    assert not one.parts.granting.lives()


@rule("O35", "O4")
async def test_a_worker_that_leaves_seizes_nothing_for_a_cancel(one: One) -> None:
    neighbour = await one.stage.opens(WorkerId("host:neighbour"))
    asked: dict[str, Any] = {"executor": "named", "required_capabilities": frozenset({CAPABILITY + "named"})}
    run = await one.stage.starts("run", worker_id=neighbour, on_orphan="resume", **asked)
    await one.stage.happens(RunEvent.HAND_OVER, run)
    one.session.drain()
    result = await one.parts.cancelling.cancel(run.key, CancelAction.ROLLBACK, wait=False, timeout=None, scope=EVERYONE)
    assert result.outcome is CancelOutcome.REQUESTED
    row = await one.row(run)
    assert (row.status, row.owner_worker_id, row.rollback_owed) == (RunStatus.PENDING, None, True)


@rule("O35")
async def test_a_second_shutdown_halves_what_is_left_of_the_first(one: One) -> None:
    code = Code()
    await one.runs(code)
    first = asyncio.create_task(one.parts.leave(20.0))
    await turns()
    second = asyncio.create_task(one.parts.leave(20.0))
    await turns()
    assert len(one.of(DrainHurried)) == 1
    await passes_until(one, first)
    await second


async def test_a_manager_that_is_started_twice_at_once_has_one_heartbeat(store: SqlRunStore) -> None:  # noqa: F811
    manager = RunManager(store, config=RunsConfig.for_tests())
    await asyncio.gather(manager.start_heartbeat(), manager.start_heartbeat())
    try:
        assert [session.worker_id for session in await store.sessions()] == [manager.worker_id]
    finally:
        await manager.shutdown()


# --- Reservations ---------------------------------------------------------------------------------------------------


def reserved(one: One) -> Reservation:
    parts = one.parts
    return Reservation(
        parts.ground,
        parts.admitting,
        parts.tasks.spawn,
        thread_id="thread",
        kind=OperationKind.CHECKPOINT_WRITE,
        user_id=None,
    )


@rule("O13")
async def test_a_reservation_that_is_left_while_its_session_is_lost_is_released_all_the_same(one: One) -> None:
    async def block() -> None:
        async with reserved(one) as lease:
            held.append(lease)
            inside.set()
            await leave.wait()

    held: list[RunLease] = []
    inside, leave = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(block())
    await inside.wait()
    previous = await one.loses_its_session()
    gate = one.after(RunEvent.TAKE_BACK)
    taking_back = asyncio.create_task(one.parts.reconciler.take_back(previous))
    await gate.reached()
    leave.set()
    await one.asked_for(RunEvent.RELEASE)
    await turns()
    gate.open()
    await taking_back
    await passes_until(one, task)
    assert await one.real.owned(one.me) == ()
    assert await one.real.owned(previous) == ()
    assert len(one.of(ReservationReleased)) == 1


@rule("I11", "O12")
async def test_the_block_of_a_reservation_does_not_begin_without_trust(one: One) -> None:
    inside = asyncio.Event()

    async def block() -> None:
        async with reserved(one):
            inside.set()

    one.clock.jump(one.setup.config.lease.total_seconds())
    task = asyncio.create_task(block())
    while not one.parts.ground.registry.all():  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0)
    await turns()
    assert not inside.is_set()
    await one.beats()
    one.parts.listening.hear(TrustRegained(1.0))
    await task
    assert inside.is_set()


@rule("I11", "O13")
async def test_a_reservation_that_was_lost_before_its_block_began_is_told_as_lost(one: One) -> None:
    async def block() -> None:
        async with reserved(one):
            raise AssertionError("it was lost")

    one.clock.jump(one.setup.config.lease.total_seconds())
    task = asyncio.create_task(block())
    while not (held := one.parts.ground.registry.all()):  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0)
    await turns()
    await one.stage.dies(one.me)
    await one.real.take_over(Actor(WorkerId("host:neighbour")), AT_ONCE, 10)
    one.session.refused()
    await one.parts.reconciler.take_back(await one.opens())
    with pytest.raises(ReservationLost):
        await task
    assert held[0].over.is_set()
    assert one.parts.ground.registry.all() == ()


async def test_an_erasure_that_failed_leaves_its_thread_free(one: One) -> None:
    run = await one.runs(code := Code())
    code.go_on.set()
    await run.over.wait()
    one.faults.once("have_ended", failing())
    deleting = one.parts.ground.store.threads

    async def failed(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the test has cut it")

    original, deleting.delete = deleting.delete, failed  # type: ignore[method-assign]
    try:
        with pytest.raises(StoreUnavailable):
            await one.parts.erasing.thread(ThreadId("thread"), EVERYONE)
    finally:
        deleting.delete = original  # type: ignore[method-assign]
    await turns()
    assert (await one.admits(Code().executor)).run.status in (RunStatus.PENDING, RunStatus.RUNNING)


# --- What goes on by itself -----------------------------------------------------------------------------------------


@rule("O12")
async def test_runs_that_are_taken_back_without_trust_are_aborted_when_their_time_is_over(one: One) -> None:
    code = Code()
    await one.runs(code)
    previous = await one.loses_its_session()
    one.clock.jump(one.setup.config.lease.total_seconds())
    one.parts.listening.hear(TrustEnded())
    await one.parts.listening._take_back(previous)  # noqa: SLF001 - the end of what SessionReplaced begins
    one.clock.jump(one.setup.config.max_suspend.total_seconds() + 1)
    await turns()
    assert len(one.of(RunAborted)) == 1


async def cancelled_from_within(_: Ask) -> Any:
    raise asyncio.CancelledError


@rule("I8")
async def test_a_cancellation_that_comes_out_of_a_driver_ends_no_claims_and_no_sweeps(one: One) -> None:
    for question in ("claim", "next_due", "now"):
        one.faults.once(question, cancelled_from_within)
    running = asyncio.create_task(one.parts.reconciler.run())
    await one.stage.opens(WorkerId("host:neighbour"))
    asked: dict[str, Any] = {"executor": "named", "required_capabilities": frozenset({CAPABILITY + "named"})}
    await one.stage.arrives("run", take=False, **asked)
    for _ in range(400):
        await one.clock.advance(0.1)
        await one.beats()
        if one.of(RunClaimed):
            break
    running.cancel()
    await asyncio.wait({running})
    assert one.of(RunClaimed)
