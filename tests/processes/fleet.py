"""Several workers on one database, each a process of its own, and all that a test may do to them.

A fleet remembers what callers were told; after the test one judge reads what the database has recorded (``judged``).
Nothing here measures time: helpers wait as long as it takes, and give up only when something must be wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import multiprocessing
import os
import secrets
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, text

import tests.migrations.processes  # noqa: F401 - decides, first, which server of forks there is
from deerflow_runs import EVERYONE, Run, RunId, RunKey, SqlRunStore, StoreUnavailable, ThreadId, WorkerId, store_at
from deerflow_runs.manager.answers import Stats
from deerflow_runs.testing.invariants import Expected, Report, StepLogged, check_history
from deerflow_runs.testing.postgres import PostgresCluster
from deerflow_runs.testing.recorded import History, RunChanged
from deerflow_runs.testing.recording import install_recording, read_history, steps_of
from tests.migrations.databases import ask, do, is_sqlite, on
from tests.processes.network import Wire
from tests.processes.worker_executors import EXECUTORS, steps_logged
from tests.processes.worker_programs import STEP, Plan, work

DEADLINE: Final = 60.0
"""Seconds after which a wait is given up. Only a failing test waits for them."""

PATIENT: Final[Mapping[str, Any]] = {"lease": 4.0, "beat": 0.16}
"""Settings for tests in which a busy machine must not be taken for a dead worker."""

COMPLAINTS: Final = ("Traceback", "never retrieved", "never awaited", "was destroyed")
"""Words of Python and asyncio about what somebody forgot."""

if sys.platform == "win32":
    _PROCESSES = multiprocessing.get_context("spawn")
else:
    _PROCESSES = multiprocessing.get_context("forkserver")
    _PROCESSES.set_forkserver_preload(["tests.migrations.processes", "tests.processes.worker_programs"])


class Refused(Exception):
    """A worker answered a command with an error; ``name`` is its type."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Gone(Exception):
    """The worker died before it had answered."""


# --- One worker -----------------------------------------------------------------------------------------------------


class Worker:
    """One process with a manager. Commands are awaited; signals are sent at once."""

    def __init__(self, plan: Plan, wire: Wire | None) -> None:
        self.plan = plan
        self.wire = wire
        self.spoiled = False
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process: BaseProcess = _PROCESSES.Process(target=work, args=(theirs, plan), daemon=True)
        self._answers: dict[int, asyncio.Future[Any]] = {0: asyncio.get_running_loop().create_future()}
        self._number = 0
        self._process.start()
        theirs.close()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._heard)

    def __repr__(self) -> str:
        return f"<Worker {self.plan.name}>"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def lives(self) -> bool:
        """Whether the process is there, stopped or not."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """How it ended."""
        return self._process.exitcode

    async def ready(self) -> WorkerId:
        """Wait until its session is open; the session's id."""
        return WorkerId(await asyncio.wait_for(self._answers[0], DEADLINE))

    async def tells(self, command: str, **arguments: Any) -> Any:
        """Send a command and wait for the answer. Raises ``Refused`` or ``Gone``."""
        self._number += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        try:
            self._pipe.send((self._number, command, arguments))
        except (BrokenPipeError, ConnectionError):
            raise Gone(repr(self)) from None
        return await asyncio.wait_for(answer, DEADLINE)

    def _heard(self) -> None:
        try:
            while self._pipe.poll():
                number, how, what = self._pipe.recv()
                answer = self._answers[number]
                if not answer.done():
                    answer.set_exception(Refused(*what)) if how == "error" else answer.set_result(what)
        except (EOFError, ConnectionError):
            self._hang_up()

    def _hang_up(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Gone(repr(self)))
                answer.exception()  # whoever waits is told; nobody needs to wait

    # --- What is done to it -------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Not one instruction more, until it is told to ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """As if nothing had happened."""
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to leave in order; it is not spoiled by that."""
        os.kill(self.pid, signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        self.spoiled = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def gone(self) -> int:
        """Wait until the process has ended; its exit code."""
        await asyncio.wait_for(asyncio.to_thread(self._process.join), DEADLINE)
        assert self.exit_code is not None
        return self.exit_code

    def close(self) -> None:
        """Whatever it does: end it."""
        self._process.kill()
        self._process.join()
        self._hang_up()
        self._pipe.close()

    # --- What it said -------------------------------------------------------------------------------------------------

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What it has observed so far, of these kinds or of all."""
        lines = self.plan.events.read_text().split("\n")[:-1] if self.plan.events.exists() else []
        told = [json.loads(line) for line in lines]
        return [event for event in told if not names or event["event"] in names]

    def sessions(self) -> set[WorkerId]:
        """The ids of all sessions it has had."""
        return {WorkerId(event["worker_id"]) for event in self.events("SessionOpened")}

    def trusted_throughout(self) -> bool:
        """Whether it was left alone and never had to doubt its session."""
        return not self.spoiled and not self.events("TrustEnded", "SessionReplaced")

    def complaints(self) -> str:
        """What it wrote on its standard error."""
        return self.plan.complaints.read_text() if self.plan.complaints.exists() else ""


# --- The database ---------------------------------------------------------------------------------------------------


class Database:
    """A migrated database that records its history. ``cluster`` is its server, if that may be killed."""

    def __init__(self, dsn: str, logs: Path, cluster: PostgresCluster | None = None) -> None:
        self.dsn = dsn
        self.cluster = cluster
        self.clock: Path | None = None
        self._logs = logs
        install_recording(dsn)

    @property
    def sqlite(self) -> bool:
        """A file, not a server."""
        return is_sqlite(self.dsn)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query answers."""
        return ask(self.dsn, query)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """SQLite: meanwhile nobody can write, and everybody can read."""
        connection = sqlite3.connect(self.dsn.removeprefix("sqlite:///"), isolation_level=None, timeout=DEADLINE)
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
            connection.close()

    @contextmanager
    def table_locked(self, table: str) -> Iterator[None]:
        """Postgres: meanwhile nobody can even read the table."""
        locked, done = threading.Event(), threading.Event()

        def hold(connection: Connection) -> None:
            connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
            locked.set()
            done.wait(DEADLINE)

        holder = threading.Thread(target=on, args=(self.dsn, hold))
        holder.start()
        locked.wait(DEADLINE)
        try:
            yield
        finally:
            done.set()
            holder.join()

    def may_be_written(self) -> bool:
        """SQLite: whether nobody is inside a transaction that writes."""
        connection = sqlite3.connect(self.dsn.removeprefix("sqlite:///"), isolation_level=None, timeout=0.2)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return True

    def own_the_clock(self) -> None:
        """Before any worker starts: from now on ``step_clock`` decides what time it is in this database."""
        if self.sqlite:
            self.clock = self._logs / "clock"
            self.clock.write_bytes(STEP.pack(0))
            return
        do(self.dsn, "CREATE TABLE clock_step (microseconds bigint)")
        do(self.dsn, "INSERT INTO clock_step VALUES (0)")
        do(
            self.dsn,
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$"
            " SELECT pg_catalog.clock_timestamp() + (SELECT microseconds FROM public.clock_step) * interval '1 us' $$",
        )
        name = self.dsn.rpartition("/")[2]
        do(self.dsn, f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')

    def step_clock(self, seconds: float) -> None:
        """The database's clock is set: it says the true time and so many seconds. For all at the same instant."""
        microseconds = round(seconds * 1_000_000)
        if self.clock is not None:
            with self.clock.open("r+b") as file:
                file.write(STEP.pack(microseconds))
        else:
            do(self.dsn, f"UPDATE clock_step SET microseconds = {microseconds}")


# --- The fleet ------------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Workers that are closed at the end. What a test knows and no row tells is said in ``knows``."""

    database: Database
    store: SqlRunStore
    logs: Path
    workers: list[Worker] = field(default_factory=list)
    submitted: dict[RunId, RunKey] = field(default_factory=dict)
    answers: dict[str, set[RunId]] = field(default_factory=dict)
    knows: dict[str, Any] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    # --- Workers ----------------------------------------------------------------------------------------------------

    async def starts(
        self, count: int = 1, *, wired: bool = False, muted: bool = False, **settings: Any
    ) -> list[Worker]:
        """So many workers, when their sessions are open. ``wired``: each has a network of its own (Postgres);
        ``muted``: one that lets no notification through. ``executors``, ``dsn``: other ones than usual."""
        started = [await self._start(settings, wired=wired or muted, muted=muted) for _ in range(count)]
        await asyncio.gather(*(worker.ready() for worker in started))
        return started

    async def start(self, *, wired: bool = False, **settings: Any) -> Worker:
        """One worker."""
        return (await self.starts(1, wired=wired, **settings))[0]

    async def _start(self, settings: Mapping[str, Any], *, wired: bool, muted: bool) -> Worker:
        known = dict(settings)
        dsn, executors = known.pop("dsn", self.database.dsn), tuple(known.pop("executors", EXECUTORS))
        wire = None
        if wired and not self.database.sqlite:
            wire = await self.stack.enter_async_context(Wire())
            dsn = wire.dsn(dsn)
            if muted:
                wire.mute()
        name = f"worker-{len(self.workers)}"
        worker = Worker(Plan(name, dsn, self.logs, known, executors, clock=self.database.clock), wire)
        self.workers.append(worker)
        return worker

    # --- Runs -------------------------------------------------------------------------------------------------------

    async def submits(
        self, worker: Worker, thread: str | None = None, work: str = "steps", *, payload: Any = None, **options: Any
    ) -> RunKey:
        """A run through one worker; raises what it is refused with. Remembered for the judge from now on."""
        thread_id = ThreadId(thread or f"thread-{secrets.token_hex(4)}")
        run_id, _ = await worker.tells("submit", thread=thread_id, work=work, payload=payload or {}, options=options)
        key = RunKey(thread_id, RunId(run_id))
        self.submitted[key.run_id] = key
        if "idempotency_key" in options:
            self.answers.setdefault(options["idempotency_key"], set()).add(key.run_id)
        return key

    async def cancels(
        self, worker: Worker, key: RunKey, action: str = "interrupt", *, wait: bool = True, timeout: float | None = 30.0
    ) -> tuple[str, str | None]:
        """What a worker answers to a cancel: the outcome and the action in force."""
        outcome, in_force = await worker.tells("cancel", key=key, action=action, wait=wait, timeout=timeout)
        return outcome, in_force

    async def stats(self, worker: Worker) -> Stats:
        """What a worker says of itself."""
        stats: Stats = await worker.tells("stats")
        return stats

    async def row(self, key: RunKey) -> Run:
        """The run as it is stored now. Raises ``StoreUnavailable``."""
        run = await self.store.get(key, scope=EVERYONE)
        assert run is not None, key
        return run

    async def steps(self, key: RunKey) -> tuple[str, ...]:
        """The steps that are recorded of a run."""
        return await steps_of(self.store, key)

    # --- Waiting ----------------------------------------------------------------------------------------------------

    async def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Ask until the answer is true, and return it. A store that is away has not answered."""
        deadline = asyncio.get_running_loop().time() + DEADLINE
        while asyncio.get_running_loop().time() < deadline:
            with suppress(StoreUnavailable):
                answer = holds()
                found = await answer if inspect.isawaitable(answer) else answer
                if found:
                    return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"waited in vain until {what}\n{self.told()}")

    async def until_running(self, *keys: RunKey, steps: int = 1) -> None:
        """Until each of the runs has recorded so many steps, or has ended."""

        async def all_run() -> bool:
            rows = [await self.row(key) for key in keys]
            found = [len(await self.steps(key)) for key in keys]
            return all(run.terminal or number >= steps for run, number in zip(rows, found, strict=True))

        await self.until(all_run, f"{len(keys)} runs have {steps} steps")

    async def until_started(self, *keys: RunKey) -> list[Run]:
        """Until each of the runs has an owner that has started it."""

        async def all_started() -> list[Run] | None:
            rows = [await self.row(key) for key in keys]
            return rows if all(run.terminal or run.status.value == "running" for run in rows) else None

        rows: list[Run] = await self.until(all_started, f"{len(keys)} runs have started")
        return rows

    async def until_ended(self, *keys: RunKey) -> list[Run]:
        """Until the runs (all that were submitted, if none is named) have ended; their last rows."""
        wanted = keys or tuple(self.submitted.values())

        async def all_ended() -> list[Run] | None:
            rows = [await self.row(key) for key in wanted]
            return rows if all(run.terminal for run in rows) else None

        rows: list[Run] = await self.until(all_ended, f"{len(wanted)} runs have ended")
        return rows

    async def until_event(self, worker: Worker, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Until a worker has observed so many events of a kind."""

        def observed() -> list[dict[str, Any]] | None:
            found = worker.events(name)
            return found if len(found) >= count else None

        events: list[dict[str, Any]] = await self.until(observed, f"{worker} observes {name}")
        return events

    # --- Faults -----------------------------------------------------------------------------------------------------

    @contextmanager
    def hung(self, workers: Sequence[Worker]) -> Iterator[None]:
        """Meanwhile the database answers none of the (wired) workers, and takes nothing from them; what was sent
        arrives late. On a file, its lock is held."""
        wires = [worker.wire for worker in workers if worker.wire is not None]
        with self.database.locked() if self.database.sqlite else nullcontext():
            for wire in wires:
                wire.hold()
            try:
                yield
            finally:
                for wire in wires:
                    wire.release()

    # --- Load -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def under_load(
        self, workers: Sequence[Worker], payload: Any, *, works: Sequence[str] = ("steps",), pause: float = 0.03
    ) -> AsyncIterator[list[RunKey]]:
        """Meanwhile callers ask for run after run, of whichever worker answers; those that were let in so far."""
        admitted: list[RunKey] = []
        caller = asyncio.create_task(self._call(workers, payload, works, pause, admitted))
        try:
            yield admitted
        finally:
            caller.cancel()
            await asyncio.wait({caller})
        if not caller.cancelled():
            caller.result()

    async def _call(
        self, workers: Sequence[Worker], payload: Any, works: Sequence[str], pause: float, admitted: list[RunKey]
    ) -> None:
        number = 0
        while True:
            for worker in list(workers):
                number += 1
                work = works[number % len(works)]
                with suppress(Refused, Gone):
                    admitted.append(await self.submits(worker, None, work, payload=payload))
                await asyncio.sleep(pause)

    # --- The end ----------------------------------------------------------------------------------------------------

    async def comes_to_rest(self) -> None:
        """Everything is let go on, comes to its end, and every worker that lives leaves in order."""
        for worker in self.workers:
            if worker.lives:
                if worker.spoiled:
                    worker.go_on()
                if worker.wire is not None:
                    worker.wire.mend()

        async def nothing_is_open() -> bool:
            ended = "('success', 'error', 'timeout', 'interrupted')"
            query = f"SELECT run_id FROM dr_runs WHERE status NOT IN {ended}"
            return not await asyncio.to_thread(self.database.rows, query)

        await self.until(nothing_is_open, "no run is open")
        living = [worker for worker in self.workers if worker.lives]
        for worker in living:
            worker.terminate()
        codes = await asyncio.gather(*(worker.gone() for worker in living))
        assert codes == [0] * len(living), f"workers left with {codes}\n{self.told()}"

    async def judged(self) -> Report:
        """All that was recorded, before the judge of I1–I20; raises ``HistoryBroken``."""
        history = await asyncio.to_thread(read_history, self.database.dsn)
        logged = [step for worker in self.workers for step in steps_logged(worker.plan.steps)]
        report = check_history(history, expected=Expected(**{**self._expected(logged), **self.knows}))
        assert not report.violations, f"{report}\n{self.told()}"
        ends = Counter(_ends(history))
        assert {ends[run_id] for run_id in self.submitted} <= {1}, f"each ends once: {ends}\n{self.told()}"
        return report

    def _expected(self, logged: Sequence[StepLogged]) -> Mapping[str, Any]:
        healthy = [session for worker in self.workers if worker.trusted_throughout() for session in worker.sessions()]
        return {
            "quiet": True,
            "healthy": healthy,
            "acknowledged": list(self.submitted),
            "answers": self.answers,
            "steps": logged,
        }

    def require_no_complaints(self) -> None:
        """No worker left a task whose failure nobody looked at, or that was lost."""
        for worker in self.workers:
            said = worker.complaints()
            found = [words for words in COMPLAINTS if words in said]
            assert not found, f"{worker} complains:\n{said[-4000:]}"

    def told(self) -> str:
        """What every worker has observed lately, for the message of a failing test."""
        return "\n".join(_lately(worker) for worker in self.workers)

    async def close(self) -> None:
        """Whatever happened: nothing of it is left."""
        for worker in self.workers:
            worker.close()
        await self.stack.aclose()


@contextmanager
def killing(pid: int) -> Iterator[None]:
    """End a process that a worker has made, whatever happens."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def _ends(history: History) -> Iterator[RunId]:
    return (change.run.run_id for change in history.changes if isinstance(change, RunChanged) and change.ended)


def _lately(worker: Worker) -> str:
    events = [json.dumps(event) for event in worker.events() if event["event"] != "SweepEnded"][-25:]
    state = "lives" if worker.lives else f"ended with {worker.exit_code}"
    return "\n  ".join([f"{worker} {state}", *events, worker.complaints()[-1500:]])


@asynccontextmanager
async def fleet_on(database: Database, logs: Path) -> AsyncIterator[Fleet]:
    """A fleet without workers. When the test is through, it must come to rest, and its history is judged."""
    async with store_at(database.dsn) as store:
        fleet = Fleet(database, store, logs)
        try:
            yield fleet
            await fleet.comes_to_rest()
            await fleet.judged()
            fleet.require_no_complaints()
        finally:
            await fleet.close()
