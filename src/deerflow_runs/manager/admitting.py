"""How a run comes in (O1–O6): the request made storable, the store asked, and what follows from its answer.

The insert is finished in a task of the manager, whatever becomes of the caller. Who may enter is decided in
``protocol.admission``; this module only carries answers on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, assert_never, final

from deerflow_runs.errors import IdempotencyMismatch, InvalidValue, QueueFull, ThreadBusy, UserBusy
from deerflow_runs.manager.answers import AdmittedRun
from deerflow_runs.manager.executor import CAPABILITY, Executor
from deerflow_runs.manager.granting import Granting
from deerflow_runs.manager.ground import Ground
from deerflow_runs.manager.ids import new_id
from deerflow_runs.manager.lease import StopCause
from deerflow_runs.manager.mistakes import word
from deerflow_runs.model import (
    CancelAction,
    OnDisconnect,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunKey,
    SessionState,
    Strategy,
    ThreadId,
    micros,
)
from deerflow_runs.observe import RunAdmitted, RunDenied, RunReused
from deerflow_runs.protocol.admission import Clash, Deny, DenyFull, DenyUser, Newcomer, Reuse
from deerflow_runs.protocol.decision import Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admission, Admitted

T = TypeVar("T")


class Spawn(Protocol):
    """Starts a task that the manager keeps and awaits when it leaves."""

    def __call__(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begin ``work``; a failure nobody awaits is logged."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller may say about a run. What is None is taken from the configuration.

    ``executor`` is a name, or None for code of the caller's own, which makes the run local: only this worker can carry
    it out, and it fails with it. ``kwargs`` is what is stored of the input. ``webhook`` and other ``deliveries`` are
    made when the run has ended.
    """

    thread_id: str
    executor: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    payload_version: int = 1
    run_id: str | None = None
    strategy: Strategy | str | None = None
    user_id: str | None = None
    assistant_id: str | None = None
    model_name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    idempotency_key: str | None = None
    delay: timedelta = timedelta(0)
    run_timeout: timedelta | None = None
    on_disconnect: OnDisconnect | str | None = None
    on_orphan: OnOrphan | str | None = None
    max_attempts: int | None = None
    requirements: frozenset[str] = frozenset()
    stateless: bool = False
    temporary: bool = False
    deliveries: Mapping[str, Any] = field(default_factory=dict, repr=False)


@final
class Admitting:
    """Lets runs in. Belongs to the main loop."""

    def __init__(
        self,
        ground: Ground,
        granting: Granting,
        *,
        hooks: Mapping[str, Any],
        spawn: Spawn,
        withdraw: Callable[[RunKey], Awaitable[None]],
    ) -> None:
        self._ground = ground
        self._granting = granting
        self._hooks = hooks
        self._spawn = spawn
        self._withdraw_run = withdraw

    async def admit(self, request: Request, executor: Executor | None, *, for_caller: bool) -> AdmittedRun:
        """Let a run in. ``executor`` carries it out if this worker gets it; ``for_caller``: the caller will come for
        it, so it ends with a caller that is gone before it came (O6). Raises what ``refuse`` raises."""
        newcomer = self._newcomer(request, pinned=request.executor is None)
        task = self._spawn(self._admitted(newcomer, executor, expect=request.executor is None), "admission")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if for_caller:
                _ = self._spawn(self._withdraw(task), "withdrawal")
            raise

    # --- The request ------------------------------------------------------------------------------------------------

    def _newcomer(self, request: Request, *, pinned: bool) -> Newcomer:
        config = self._ground.config
        kwargs, named = request.kwargs, request.executor is not None
        on_orphan = _word(OnOrphan, request.on_orphan, config.on_orphan, "on_orphan")
        requirements = request.requirements | ({CAPABILITY + str(request.executor)} if named else set())
        timeout = request.run_timeout if request.run_timeout is not None else config.run_timeout
        _positive(_duration(timeout, "run_timeout"), "run_timeout")
        if _duration(request.delay, "delay") < timedelta(0):
            raise InvalidValue("delay", "must not be negative")
        return Newcomer(
            run_id=RunId(request.run_id if request.run_id is not None else new_id()),
            thread_id=ThreadId(request.thread_id),
            worker_id=self._ground.worker_id,
            strategy=_word(Strategy, request.strategy, config.strategy, "multitask_strategy"),
            take=False,  # decided when it is asked for
            pinned=pinned,
            delay=micros(request.delay.total_seconds()),
            executor=request.executor,
            payload_version=request.payload_version,
            kwargs=kwargs,
            assistant_id=request.assistant_id,
            user_id=request.user_id,
            model_name=request.model_name,
            metadata=self._metadata(request.metadata),
            on_disconnect=_word(OnDisconnect, request.on_disconnect, config.on_disconnect, "on_disconnect"),
            on_orphan=on_orphan if named else OnOrphan.FAIL,
            required_capabilities=frozenset(requirements),
            idempotency_key=request.idempotency_key,
            payload_digest=_digest(request) if request.idempotency_key is not None else None,
            stateless=request.stateless,
            max_attempts=request.max_attempts if request.max_attempts is not None else config.max_attempts,
            run_timeout=micros(timeout.total_seconds()),
            temporary=request.temporary,
            deliveries={**self._hooks, **request.deliveries},
            max_queued=config.max_queued_per_thread,
            max_active_per_user=config.max_active_per_user,
        )

    def _metadata(self, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        limit = self._ground.config.max_metadata
        if metadata and len(json.dumps(metadata, default=str).encode(errors="replace")) > limit:
            raise InvalidValue("metadata", f"is larger than {limit} bytes as JSON; store the large part elsewhere")
        return metadata

    # --- The answer -------------------------------------------------------------------------------------------------

    async def _admitted(self, newcomer: Newcomer, executor: Executor | None, *, expect: bool) -> AdmittedRun:
        ground = self._ground
        able = newcomer.required_capabilities <= ground.capabilities and ground.session.trusted()
        take = able and newcomer.delay == 0 and ground.registry.take_slot()
        try:
            asked = replace(newcomer, take=take)
            answer = await ground.store.admit(asked, self._given())
            return await self._answered(asked, answer, executor, expect=expect)
        finally:
            if take:
                ground.registry.arrived()

    async def _answered(
        self, newcomer: Newcomer, answer: Admission, executor: Executor | None, *, expect: bool
    ) -> AdmittedRun:
        match answer:
            case Admitted(run, incumbent, ended):
                run = _with_input(run, newcomer)
                self._take_in(newcomer, run, executor, expect=expect)
                names = self._names(run)
                self._ground.observe(RunAdmitted(**names, status=run.status, strategy=newcomer.strategy))
                await self._displaced(incumbent, ended)
                if run.vacant:
                    await self._ground.work_appeared()
                return AdmittedRun(run)
            case Reuse(run, by_key):
                run = _with_input(run, newcomer)
                if not by_key and not run.terminal:  # our own lost reply: nobody else carries it out
                    self._take_in(newcomer, run, executor, expect=expect)
                else:
                    self._ground.observe(RunReused(**self._names(run)))
                return AdmittedRun(run, reused=by_key)
            case Clash() | Deny() | DenyFull() | DenyUser():
                raise self._refusal(newcomer, answer)
            case _:
                assert_never(answer)

    def _take_in(self, newcomer: Newcomer, run: Run, executor: Executor | None, *, expect: bool) -> None:
        """A run that is ours begins; a local one that waits is expected here and nowhere else. Ours is also what was
        asked for under a session that was lost meanwhile: it is taken back like everything that is held (O13); and what
        waited when it was let in and has been claimed before we heard of that."""
        if run.owner_worker_id == newcomer.worker_id or self._ground.registry.get(run.run_id) is not None:
            self._granting.take_up(run, executor)
        elif expect and not run.terminal:
            self._ground.registry.expect(run.key, executor, home=newcomer.worker_id)

    async def _displaced(self, incumbent: Run | None, ended: tuple[Run, ...]) -> None:
        """O3: whoever holds the incumbent stops it; one that nobody holds is seized on the spot (O4)."""
        for run in ended:
            self._ground.registry.give_up(run.run_id)
        if incumbent is not None and incumbent.cancel_action is not None:
            await self.stop_holder(incumbent, incumbent.cancel_action)

    async def stop_holder(self, run: Run, action: CancelAction) -> bool:
        """Let a cancel that is recorded on ``run`` take effect. True: nobody held it, and it is being restored here."""
        held = self._ground.registry.get(run.run_id)
        if held is not None:  # at whatever epoch: it is being taken back or seized, or will hear that it is lost
            held.lease.stop(StopCause.CANCEL, action)
            if run.owner_worker_id in (held.lease.worker_id, self._ground.worker_id):
                return False
        await self._ground.wake_owner(run.owner_worker_id)
        if run.rollback_owed and self._may_take():
            seized = await self._ground.store.apply(run.key, RunEvent.SEIZE, self._ground.actor(), self._given())
            if isinstance(seized, Applied):
                self._granting.restore(seized.run)
                return True
        return False

    def _may_take(self) -> bool:
        """Nothing is taken on without trust, nor by a worker that leaves: it would be an orphan soon (O12, O35)."""
        session = self._ground.session
        return session.trusted() and session.state is SessionState.LIVE

    def _given(self) -> Given:
        return Given(cancel_grace=micros(self._ground.config.cancel_grace.total_seconds()))

    def _refusal(self, newcomer: Newcomer, answer: Clash | Deny | DenyFull | DenyUser) -> Exception:
        thread_id = newcomer.thread_id
        match answer:
            case Clash(run, by_key):
                if by_key:
                    return IdempotencyMismatch(run.run_id, newcomer.idempotency_key or "")
                return InvalidValue("run_id", "belongs to another run already; choose a new one, or leave it out")
            case Deny(holder, retry_after):
                self._denied(newcomer, holder, retry_after)
                return ThreadBusy(
                    thread_id=thread_id,
                    holder=holder.run_id,
                    owner=holder.owner_worker_id,
                    retry_after=retry_after,
                )
            case DenyFull(limit, retry_after):
                self._denied(newcomer, None, retry_after)
                return QueueFull(thread_id=thread_id, limit=limit, retry_after=retry_after)
            case DenyUser(limit, retry_after):
                self._denied(newcomer, None, retry_after)
                return UserBusy(user_id=newcomer.user_id or "", limit=limit, retry_after=retry_after)
            case _:
                assert_never(answer)

    def _denied(self, newcomer: Newcomer, holder: Run | None, retry_after: int) -> None:
        event = RunDenied(
            worker_id=self._ground.worker_id,
            run_id=newcomer.run_id,
            thread_id=newcomer.thread_id,
            holder=holder.run_id if holder else None,
            owner=holder.owner_worker_id if holder else None,
            retry_after=retry_after,
        )
        self._ground.observe(event)

    # --- Reservations -----------------------------------------------------------------------------------------------

    async def reserve(self, thread_id: str, kind: OperationKind, user_id: str | None) -> Run:
        """Take a thread for something that is no run. Raises ``ThreadBusy``. A caller that is gone meanwhile leaves no
        reservation behind."""
        newcomer = Newcomer(
            run_id=RunId(new_id()),
            thread_id=ThreadId(thread_id),
            worker_id=self._ground.worker_id,
            kind=kind,
            user_id=user_id,
        )
        task = self._spawn(self._reserved(newcomer), "reservation")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _ = self._spawn(self._release(task), "release")
            raise

    async def _reserved(self, newcomer: Newcomer) -> Run:
        answer = await self._ground.store.admit(newcomer, self._given())
        match answer:
            case Admitted(run) | Reuse(run):
                self._granting.take_up(run)
                if isinstance(answer, Admitted):
                    await self._displaced(None, answer.ended)
                return run
            case Clash() | Deny() | DenyFull() | DenyUser():
                raise self._refusal(newcomer, answer)
            case _:
                assert_never(answer)

    async def _release(self, task: asyncio.Task[Run]) -> None:
        await self.release(await task)

    async def release(self, run: Run) -> None:
        """Give a reservation up; one that is gone already is as good."""
        held = self._ground.registry.get(run.run_id)
        await self._ground.store.apply(run.key, RunEvent.RELEASE, self._ground.actor(run.epoch))
        if held is not None:
            self._ground.registry.let_go(held)

    # --- A caller that is gone --------------------------------------------------------------------------------------

    async def _withdraw(self, task: asyncio.Task[AdmittedRun]) -> None:
        """O6: nobody will come for it. A reused run is somebody else's and goes on."""
        admitted = await task
        if not admitted.reused:
            await self._withdraw_run(admitted.key)

    def _names(self, run: Run) -> dict[str, Any]:
        return {"worker_id": self._ground.worker_id, "run_id": run.run_id, "thread_id": run.thread_id}


def _with_input(run: Run, newcomer: Newcomer) -> Run:
    """The row with the input that is stored in it, which is not sent back only to be known here already."""
    return run if run.kwargs is not None else replace(run, kwargs=newcomer.kwargs)


def _positive(value: timedelta, path: str) -> None:
    if value <= timedelta(0):
        raise InvalidValue(path, "must be longer than nothing")


def _duration(value: Any, path: str) -> timedelta:
    if not isinstance(value, timedelta):
        raise InvalidValue(path, f"must be a timedelta, not a value of type {type(value).__name__}")
    return value


Word = TypeVar("Word", Strategy, OnDisconnect, OnOrphan)


def _word(kind: type[Word], given: Word | str | None, otherwise: Word, path: str) -> Word:
    return otherwise if given is None else word(kind, given, path)


def _digest(request: Request) -> str:
    """What makes two requests the same request (O5): what would be run, and where, not what it is called."""
    said: dict[str, Any] = {"executor": request.executor, "version": request.payload_version, "kwargs": request.kwargs}
    said |= {"assistant": request.assistant_id, "delay": request.delay.total_seconds()}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode(errors="replace")).hexdigest()
