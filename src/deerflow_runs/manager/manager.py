"""``RunManager``: the public verbs. One manager is one worker: it admits, carries out, cancels, recovers and leaves.

A thin face: every verb names the part that does it. What may happen to a run is decided in ``protocol``, what is true
of it stands in the store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast, final

from deerflow_runs.clock import Clock, SystemClock
from deerflow_runs.config import RunsConfig
from deerflow_runs.errors import RunCancelled, UsageError
from deerflow_runs.manager.admitting import Request
from deerflow_runs.manager.answers import AdmittedRun, CancelResult, Start, Stats, key_of
from deerflow_runs.manager.attaching import Execution
from deerflow_runs.manager.body import Failed, Finished
from deerflow_runs.manager.executor import CAPABILITY, Executor, LocalExecutor, RestoreFunction, RunFunction
from deerflow_runs.manager.handle import RunHandle
from deerflow_runs.manager.hooks import ON_RECOVERED, ON_SETTLED, Hook, Hooks
from deerflow_runs.manager.mistakes import require_parts, require_work, unknown_options, word
from deerflow_runs.manager.outcome import SUCCEEDED, Outcome
from deerflow_runs.manager.parts import Parts, Setup
from deerflow_runs.manager.registry import Phase
from deerflow_runs.manager.reserving import Reservation
from deerflow_runs.manager.session import WorkerSession
from deerflow_runs.manager.whoami import this_process
from deerflow_runs.model import (
    EVERYONE,
    CancelAction,
    OnDisconnect,
    OnOrphan,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Scope,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.observe import Observer, Observers
from deerflow_runs.store.base import Page, RunFilter, Swept, TokenTotals, Visibility
from deerflow_runs.store.sql import SqlRunStore


class RunOptions(TypedDict, total=False):
    """What may be said about a run beside its thread and its work; what is left out is taken from the configuration.

    ``multitask_strategy``: reject, enqueue, interrupt or rollback. ``delay``: not before so long from now.
    ``idempotency_key``: the same key for the same user and thread is answered with the same run (O5); ``stateless``
    runs have their keys per user. ``deliveries``: what else the end puts into the outbox, kind to payload.
    """

    run_id: str | None
    multitask_strategy: Strategy | str | None
    user_id: str | None
    assistant_id: str | None
    model_name: str | None
    metadata: Mapping[str, Any]
    idempotency_key: str | None
    delay: timedelta
    run_timeout: timedelta | None
    on_disconnect: OnDisconnect | str | None
    on_orphan: OnOrphan | str | None
    max_attempts: int | None
    requirements: frozenset[str]
    stateless: bool
    temporary: bool
    deliveries: Mapping[str, Any]


@final
class RunManager:
    """One worker. Use it in ``async with`` (or ``start_heartbeat`` and ``shutdown``), in one event loop of the process
    that made it; a program may have several.

    ``store`` stays the caller's: open and close it around the manager. ``executors`` are what this worker can carry
    out, by name, and with ``capabilities`` what it may claim. ``observers`` are told of everything (see
    docs/observability.md). ``on_settled`` and ``on_recovered`` are called at least once for every run that was
    admitted by a manager with hooks, by any worker that has them, also when its own worker is gone.
    """

    def __init__(
        self,
        store: SqlRunStore,
        *,
        executors: Mapping[str, Executor] | None = None,
        config: RunsConfig | None = None,
        observers: Sequence[Observer] = (),
        on_settled: Hook | None = None,
        on_recovered: Hook | None = None,
        capabilities: Iterable[str] = (),
        labels: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        hooks = {ON_SETTLED: on_settled, ON_RECOVERED: on_recovered}
        require_parts(store, executors or {}, observers, hooks)
        self._store = store
        self._executors = dict(executors or {})
        config, clock = config or RunsConfig(), clock or SystemClock()
        able = frozenset(CAPABILITY + name for name in self._executors) | frozenset(capabilities)
        self._setup = Setup(
            store=store,
            session=WorkerSession(this_process(able, labels or {}), config, clock),
            executors=self._executors,
            capabilities=able,
            config=config,
            clock=clock,
            observe=Observers(observers).observed,
            hooks=Hooks(on_settled, on_recovered),
        )
        self._pid = os.getpid()
        self._parts: Parts | None = None
        self._left = False
        self._starting = asyncio.Lock()

    # --- Life of the manager ----------------------------------------------------------------------------------------

    async def start_heartbeat(self) -> None:
        """Open the worker's session and begin to recover and claim. Raises what the store says when it cannot be
        reached; then nothing was begun. Repeating it is harmless."""
        self._require_process()
        async with self._starting:
            if self._left:
                raise UsageError("this manager was shut down; make a new one")
            if self._parts is None:
                parts = Parts(self._setup)
                await parts.heartbeat.start()
                self._parts = parts
                parts.begin()

    async def stop_heartbeat(self) -> None:
        """The same as ``shutdown``: a worker without a heartbeat owns nothing."""
        await self.shutdown()

    async def shutdown(self, *, timeout: float | None = None) -> None:
        """Leave in order, within ``timeout`` seconds (default: ``config.drain``): no admissions, runs stop or are
        handed over, what they said is written, the session is closed (O35).

        A second call, a signal passed on with ``hurry``, or a cancellation make it shorter and never skip a step; a
        cancellation is raised when it is over. Repeating it is harmless.
        """
        self._require_process()
        self._left = True
        async with self._starting:  # a start under way is seen through, or there would be nothing here to end
            parts = self._parts
        if parts is None:
            return
        budget = timeout if timeout is not None else self._setup.config.drain.total_seconds()
        await parts.leave(budget)

    def hurry(self) -> None:
        """Somebody is waiting for a shutdown that is under way: what is left of its time is halved."""
        if self._parts is not None:
            self._parts.hurry()

    async def __aenter__(self) -> Self:
        await self.start_heartbeat()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def worker_id(self) -> WorkerId:
        """The present session's id; another one after the store had declared it dead (O13)."""
        return self._setup.session.worker_id

    @property
    def config(self) -> RunsConfig:
        """The settings in force."""
        return self._setup.config

    def stats(self) -> Stats:
        """This worker now. Costs no query."""
        return self._here(leaving=True).stats()

    # --- Admission --------------------------------------------------------------------------------------------------

    async def create_or_reject(
        self, thread_id: str, *, kwargs: Mapping[str, Any] | None = None, **options: Unpack[RunOptions]
    ) -> AdmittedRun:
        """Let a run in that the caller carries out itself, with ``execute`` or ``try_start``. Only this worker can.

        Raises ``ThreadBusy``, ``QueueFull``, ``UserBusy``, ``IdempotencyMismatch``, or ``InvalidValue`` for a request
        that cannot be stored; then nothing was. The run may have to wait (see its status). A caller that is cancelled
        here leaves no run behind (O6), and one that does not come for it within ``attach_deadline`` neither.
        """
        parts = self._here()
        request = _request(thread_id, options, kwargs=kwargs or {})
        return await parts.admitting.admit(request, None, for_caller=True)

    async def submit(
        self,
        thread_id: str,
        work: str | RunFunction,
        *,
        input: Any = None,  # noqa: A002 - the word of the field
        restore: RestoreFunction | None = None,
        **options: Unpack[RunOptions],
    ) -> RunHandle:
        """Let a run in and have it carried out in the background: by the executor named ``work`` on any worker that has
        it, or by an async function in this one.

        ``input`` is what the executor encodes. ``restore`` puts back what a function did before a rollback ends it.
        Raises as ``create_or_reject``. The run goes on whatever becomes of the caller, cancelled in here or not.
        """
        parts = self._here()
        if isinstance(work, str):
            executor = self._executors.get(work)
            if executor is None:
                known = ", ".join(sorted(self._executors)) or "none"
                raise UsageError(f"there is no executor {work!r} to encode the input; this manager has: {known}")
            stored = executor.encode(input)
            request = _request(
                thread_id, options, kwargs=stored, executor=work, payload_version=executor.payload_version
            )
        else:
            require_work(work)
            executor = LocalExecutor(work, restore)
            request = _request(thread_id, options, kwargs=executor.encode(input))
        admitted = await parts.admitting.admit(request, executor, for_caller=False)
        return RunHandle(admitted, parts.joining, parts.cancelling)

    async def resubmit(self, run: Any, **options: Unpack[RunOptions]) -> RunHandle:
        """Let a new run in with the stored input of one that has ended, for example as poison. Its executor, user,
        assistant and metadata are the old one's unless ``options`` says otherwise."""
        parts = self._here()
        old = await self._store.get(key_of(run), scope=EVERYONE)
        if old is None:
            raise UsageError("there is no such run")
        if not old.terminal:
            raise UsageError(f"run {old.run_id} has not ended; cancel it first")
        if old.executor is None:
            raise UsageError(f"run {old.run_id} was local code, which is not stored; submit it again yourself")
        kept = RunOptions(
            user_id=old.user_id, assistant_id=old.assistant_id, model_name=old.model_name, metadata=old.metadata
        )
        request = _request(
            old.thread_id,
            RunOptions(**{**kept, **options}),
            kwargs=old.kwargs or {},
            executor=old.executor,
            payload_version=old.payload_version,
        )
        admitted = await parts.admitting.admit(request, self._executors.get(old.executor), for_caller=False)
        return RunHandle(admitted, parts.joining, parts.cancelling)

    def reserve_thread_operation(
        self, thread_id: str, kind: OperationKind | str, *, user_id: str | None = None
    ) -> Reservation:
        """``async with``: hold a thread for something that is no run. See ``Reservation``."""
        parts = self._here()
        return Reservation(
            parts.ground,
            parts.admitting,
            parts.tasks.spawn,
            thread_id=thread_id,
            kind=word(OperationKind, kind, "kind"),
            user_id=user_id,
        )

    # --- Carrying out in the caller's task --------------------------------------------------------------------------

    def execute(self, run: Any, *, timeout: float | None = None) -> Execution:
        """``async with``: wait for the run's turn, for ``timeout`` seconds at most, and be its body. See
        ``Execution``."""
        return Execution(self._here().attaching, key_of(run), timeout)

    async def try_start(self, run: Any, *, timeout: float | None = None) -> Start:
        """Wait for the run's turn and start it: ``Started(lease)``, ``Ended(run)`` or, after ``timeout`` seconds,
        ``Waiting``. Whoever is answered ``Started`` ends it with ``settle`` and asks ``lease.check()`` on the way; who
        does not within ``cancel_grace`` after the run was told to stop is not waited for."""
        return await self._here().attaching.try_start(key_of(run), timeout)

    async def settle(self, run: Any, outcome: Outcome = SUCCEEDED) -> Run:
        """End a run that was started with ``try_start``; its last row, which a recorded cancel may have decided
        otherwise (O20). Waits for a store that is away. Raises ``RunCancelled`` if the run was lost."""
        key = key_of(run)
        ended = await self._here(leaving=True).attaching.finish(key, Finished(outcome))
        if ended is None:
            raise RunCancelled(run_id=key.run_id, thread_id=key.thread_id, stop_reason=None)
        return ended

    async def fail_start_if_pending(self, run: Any, error: str) -> bool:
        """End a granted run that could not be started, as an error; False: it has started, or is not held here."""
        parts = self._here(leaving=True)
        held = parts.ground.registry.get(key_of(run).run_id)
        if held is None or held.phase is not Phase.UNATTACHED:
            return False
        await parts.attaching.end_unattached(held, Failed(error))
        return held.ended is not None and held.ended.status is RunStatus.ERROR

    async def update_run_progress(
        self, run: Any, *, checkpoint: str | None = None, usage: Usage | None = None, model_name: str | None = None
    ) -> bool:
        """Record how far a run of this worker is. ``checkpoint`` marks that it wrote one, which forgives attempts
        (O30). False: the run is not this worker's any more; it has then been fenced."""
        return await self._here(leaving=True).reporting.progress(key_of(run), checkpoint, usage, model_name)

    async def update_model_name(self, run: Any, model_name: str | None) -> bool:
        """Record which model a run of this worker uses."""
        return await self.update_run_progress(run, model_name=model_name or "")

    # --- Any run, anywhere ------------------------------------------------------------------------------------------

    async def cancel(
        self,
        run: Any,
        action: CancelAction | str = CancelAction.INTERRUPT,
        *,
        wait: bool = False,
        timeout: float | None = None,
        scope: Scope = EVERYONE,
    ) -> CancelResult:
        """Ask a run to stop, wherever it is. The first action that was ever asked for stays in force (O19).

        With ``wait`` the answer comes when it has ended, or after ``timeout`` seconds (default: twice the grace of a
        cancel) as it then stands. Never raises for a run that is gone, ended or foreign: see ``CancelOutcome``.
        """
        return await self._here(leaving=True).cancelling.cancel(
            key_of(run), word(CancelAction, action, "action"), wait=wait, timeout=timeout, scope=scope
        )

    async def join(self, run: Any, *, timeout: float | None = None, scope: Scope = EVERYONE) -> Run | None:
        """Wait for a run's end, wherever it is carried out; its last row, or None if this reader has no such run.
        Raises ``TimeoutError``."""
        return await self._here(leaving=True).joining.join(key_of(run), scope=scope, timeout=timeout)

    async def reconcile_orphaned_inflight_runs(self) -> Swept:
        """One sweep now: what dead workers left is recovered, what is overdue is ended (O26). Sweeps come by
        themselves; this is for those who cannot wait."""
        return await self._here().reconciler.sweep()

    # --- Reads ------------------------------------------------------------------------------------------------------

    async def get(self, run: Any, *, scope: Scope = EVERYONE) -> Run | None:
        """One run; None: there is none, or it is foreign. While the store is away a run of this worker is answered from
        memory; of others ``StoreUnavailable`` is raised."""
        return await self._here(leaving=True).reading.get(key_of(run), scope=scope)

    async def get_many_by_thread(
        self, thread_id: str, run_ids: Collection[str], *, scope: Scope = EVERYONE
    ) -> dict[RunId, Run]:
        """Those of the runs that exist on this thread."""
        wanted = [RunId(run_id) for run_id in run_ids]
        return await self._here(leaving=True).reading.get_many(ThreadId(thread_id), wanted, scope=scope)

    async def list_by_thread(
        self,
        thread_id: str,
        *,
        scope: Scope = EVERYONE,
        only: RunFilter | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """Runs of a thread, newest first, a page at a time."""
        reading = self._here(leaving=True).reading
        return await reading.page(ThreadId(thread_id), scope=scope, only=only, limit=limit, after=after)

    async def has_inflight(self, thread_id: str) -> bool:
        """Whether a run is active or waits on the thread; a reservation is none."""
        self._here(leaving=True)
        return await self._store.has_inflight(ThreadId(thread_id))

    async def is_newest(self, run: Any) -> bool:
        """Whether no run was admitted to its thread after this one."""
        self._here(leaving=True)
        return await self._store.is_newest(key_of(run))

    async def aggregate_tokens_by_thread(
        self, thread_id: str, *, scope: Scope = EVERYONE, include_active: bool = False
    ) -> TokenTotals:
        """Tokens of a thread's ended runs, however they ended; of active ones on request."""
        self._here(leaving=True)
        return await self._store.tokens_by_thread(ThreadId(thread_id), scope=scope, include_active=include_active)

    async def list_successful_regenerate_sources(self, thread_id: str, *, scope: Scope = EVERYONE) -> Visibility:
        """Which runs a thread's history hides because a regeneration replaced them."""
        self._here(leaving=True)
        return await self._store.visibility(ThreadId(thread_id), scope=scope)

    async def list_edit_replay_visibility(self, thread_id: str, *, scope: Scope = EVERYONE) -> Visibility:
        """Which runs a thread's history hides because of edits; the same answer covers regenerations."""
        self._here(leaving=True)
        return await self._store.visibility(ThreadId(thread_id), scope=scope)

    # --- Erasing ----------------------------------------------------------------------------------------------------

    async def erase(self, *, thread_id: str | None = None, user_id: str | None = None) -> int:
        """Remove a thread, or all threads of a user, with every run and everything that hangs on it; how many threads.

        A run that is active there is cancelled first. Raises ``ThreadBusy`` if a thread stays held. Safe to repeat:
        what was removed stays removed.
        """
        parts = self._here()
        if (thread_id is None) == (user_id is None):
            raise UsageError("say either thread_id or user_id")
        if thread_id is not None:
            return int(await parts.erasing.thread(ThreadId(thread_id), EVERYONE))
        return await parts.erasing.user(user_id or "")

    # --- Inside -----------------------------------------------------------------------------------------------------

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("this manager was made before a fork; make another one, with its own store, in the child")

    def _here(self, *, leaving: bool = False) -> Parts:
        """The parts of a manager that is under way, in the loop to which it belongs."""
        self._require_process()
        if self._parts is None:
            raise UsageError("the manager is not running; use it in an async with block, or await start_heartbeat()")
        self._parts.require_loop()
        if self._left and not leaving:
            raise UsageError("the manager is shutting down and admits nothing; send the request to another worker")
        return self._parts


def _request(
    thread_id: str,
    options: RunOptions,
    *,
    kwargs: Mapping[str, Any],
    executor: str | None = None,
    payload_version: int = 1,
) -> Request:
    """The caller's words as one value. Raises ``UsageError`` naming an option that does not exist."""
    unknown = options.keys() - RunOptions.__annotations__.keys()
    if unknown:
        raise unknown_options(unknown, RunOptions.__annotations__)
    known = {"strategy" if name == "multitask_strategy" else name: value for name, value in options.items()}
    return Request(
        thread_id=thread_id, kwargs=kwargs, executor=executor, payload_version=payload_version, **cast("Any", known)
    )
