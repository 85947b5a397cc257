"""The session line of PostgreSQL: one connection for beats, LISTEN and the advisory lock (O10, O27, O33).

Losing it is one event: no beat, no signal, no hint. A server that does not answer is never waited for when a question
is given up or the line is closed. No rule of the protocol is known here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, final

import asyncpg
from sqlalchemy import Connection, Text, bindparam, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from deerflow_runs.errors import DeerflowRunsError, StoreUnavailable
from deerflow_runs.model import Session, SessionState, WorkerId
from deerflow_runs.protocol.judge import Sign, hint
from deerflow_runs.store import hints, sessions, signals
from deerflow_runs.store.base import CancelRequest, Renewal
from deerflow_runs.store.connections import Limits, answered, arrange, own_engine
from deerflow_runs.store.database import Postgres
from deerflow_runs.store.dialect import POSTGRES
from deerflow_runs.store.failures import driver_error, error_code
from deerflow_runs.store.forks import DESCRIPTORS, Moment
from deerflow_runs.store.schema import workers
from deerflow_runs.store.shield import fate_of
from deerflow_runs.store.signals import Inbox, Signal, SignalMode
from deerflow_runs.store.units import Unit, Units

T = TypeVar("T")

APPLICATION: Final = "deerflow_runs session"
PROBE_SECONDS: Final = 1.0
SEND_SECONDS: Final = 1.0
SENDING: Final = 16
"""How many signals may be under way; during an outage the others are not worth their place."""

FAILURES: Final = (OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

# One channel for each set of our tables: by its number, since the same schema may be addressed by name or by default.
_CHANNEL: Final = "'deerflow_runs_' || CAST(CAST(to_regclass(:workers) AS oid) AS text)"
_NOTIFY: Final = text(f"SELECT pg_notify({_CHANNEL}, :payload)").bindparams(
    bindparam("workers", type_=Text), bindparam("payload", type_=Text)
)
_ASK_CHANNEL: Final = text(f"SELECT {_CHANNEL}").bindparams(bindparam("workers", type_=Text))


@final
class PostgresLines:
    """``Lines`` on PostgreSQL. Signals and looks go through the store's own units, in the loop of the store."""

    def __init__(self, database: Postgres, units: Units, *, limits: Limits | None = None) -> None:
        self._database = database
        self._units = units
        self._limits = limits or Limits()
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def proves(self) -> bool:
        """See ``Lines.proves``."""
        return False

    def line(self) -> PostgresLine:
        """See ``Lines.line``."""
        return PostgresLine(self._database, self._limits)

    async def send(self, signal: Signal, to: WorkerId | None) -> None:
        """See ``Lines.send``."""
        if len(self._under_way) >= SENDING:
            return
        notify = partial(_notify, self._database, signals.written(signal, to))
        task = asyncio.create_task(self._send(notify), name="deerflow-runs-signal")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.wait({task}, timeout=SEND_SECONDS)

    async def _send(self, notify: Unit[None]) -> None:
        try:
            await self._units.once(notify)
        except (DeerflowRunsError, *FAILURES):
            return  # O33: whatever the signal tells of is found with the next beat

    async def signs(self, sessions: Sequence[Session]) -> Mapping[WorkerId, Sign]:
        """See ``Lines.signs``; raises ``StoreUnavailable`` like any read."""
        asked = {hints.advisory_key(one.worker_id): one for one in sessions if _may_be_free(one)}
        if not asked or self._database.session() is None:
            return {}
        held = await self._units.read(partial(hints.held_keys, keys=asked.keys()))
        signs = {one.worker_id: hint(one, free=key not in held) for key, one in asked.items()}
        return {worker_id: sign for worker_id, sign in signs.items() if sign is not Sign.NONE}

    async def close(self) -> None:
        """See ``Lines.close``."""
        if self._under_way:
            await asyncio.wait(self._under_way)


def _may_be_free(session: Session) -> bool:
    return session.hinted and session.state is not SessionState.DEAD


def _notify(database: Postgres, payload: str, connection: Connection) -> None:
    connection.execute(_NOTIFY, {"workers": _table(database), "payload": payload})


def _table(database: Postgres) -> str:
    return f'"{database.schema}".{workers.name}' if database.schema else workers.name


@final
@dataclass(slots=True, eq=False)
class _Link:
    """One connection, from the beginning of its making. ``driver`` is there before ``connection`` is.

    ``safe``: no forked child has it. ``held``: it holds the hint. ``heard``: the last probe came back.
    """

    inbox: Inbox
    since: Moment = field(default_factory=DESCRIPTORS.now)
    driver: Any = None
    connection: AsyncConnection | None = None
    descriptor: int | None = None
    channel: str = ""
    safe: bool = False
    held: bool = False
    heard: bool = False
    word: str = ""
    echo: asyncio.Event = field(default_factory=asyncio.Event)
    asking: int = 0

    @property
    def open(self) -> bool:
        """False once anybody has noticed that it is broken."""
        return self.driver is not None and not self.driver.is_closed()

    async def ask(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """In a task that nobody cancels: the driver would take its time to tell the server."""
        assert self.connection is not None, "asked before it was made"
        self.asking += 1
        try:
            return await work(self.connection)
        finally:
            self.asking -= 1
            if not self.open:
                self._discard()

    def cut(self) -> None:
        """Close the socket without a word to the server, which would have to be awaited. A question fails at once."""
        if self.descriptor is not None:
            DESCRIPTORS.forget(self.descriptor)
        if self.driver is not None:
            self.driver.terminate()
        self.wake()
        if not self.asking:
            self._discard()

    def wake(self) -> None:
        """Whoever waits looks whether it is still open."""
        self.inbox.wake()
        self.echo.set()

    def notified(self, payload: str) -> None:
        """Something was said on our channel."""
        if payload == _probing(self.word):
            self.echo.set()
        elif (said := signals.read(payload)) is not None:
            self.inbox.hear(*said)

    def _discard(self) -> None:
        """Let SQLAlchemy know, once nobody is inside."""
        connection, self.connection = self.connection, None
        if connection is not None and connection.sync_connection is not None:
            connection.sync_connection.invalidate()
            connection.sync_connection.close()


def _probing(word: str) -> str:
    return f"probe {word}"


@final
class PostgresLine:
    """``SessionLine`` on PostgreSQL, for one question at a time. Behind a pooler with no way around it only beats."""

    def __init__(self, database: Postgres, limits: Limits) -> None:
        direct = database.session()
        self._listens = direct is not None
        self._database = direct or database
        named = replace(self._database, application_name=self._database.application_name or APPLICATION)
        self._limits = limits
        engine = own_engine(named, limits)
        event.listen(engine.sync_engine, "do_connect", self._watch)
        self._engine = arrange(engine, self._database)
        self._making: _Link | None = None
        self._link: _Link | None = None

    @property
    def mode(self) -> SignalMode:
        """See ``SessionLine.mode``."""
        link = self._link
        return SignalMode.NOTIFY if link is not None and link.open and link.heard else SignalMode.POLLING

    @property
    def hinted(self) -> bool:
        """See ``SessionLine.hinted``."""
        link = self._link
        return link is not None and link.open and link.held

    async def connect(self, worker_id: WorkerId) -> None:
        """See ``SessionLine.connect``."""
        self._cut()
        link = await self._made(worker_id)
        if self._listens and not link.safe:  # a child that was forked meanwhile may keep this one alive
            link.cut()
            link = await self._made(worker_id)
        self._link = link

    async def open_session(self, session: Session) -> Session:
        """See ``SessionLine.open_session``."""
        told = replace(session, hinted=self.hinted, boot_id=session.boot_id or hints.boot_id())
        return await self._run(lambda connection: sessions.open_session(connection, POSTGRES, told))

    async def renew(self, worker_id: WorkerId, *, state: SessionState) -> Renewal:
        """See ``SessionLine.renew``."""
        beat = partial(sessions.renew, dialect=POSTGRES, worker_id=worker_id, hinted=self.hinted, state=state)
        return await self._run(beat)

    async def requests(self, worker_id: WorkerId) -> tuple[CancelRequest, ...]:
        """See ``SessionLine.requests``."""
        return await self._run(partial(sessions.requests, worker_id=worker_id))

    async def close_session(self, worker_id: WorkerId) -> bool:
        """See ``SessionLine.close_session``."""
        return await self._run(lambda connection: sessions.close_session(connection, POSTGRES, worker_id))

    async def wait(self, seconds: float) -> frozenset[Signal]:
        """See ``SessionLine.wait``. A connection that breaks meanwhile ends it."""
        heard = await self._connected().inbox.wait(seconds)
        if not heard:
            self._connected()
        return heard

    async def probe(self) -> bool:
        """See ``SessionLine.probe``."""
        link = self._connected()
        if not self._listens:
            return False
        link.heard = await self._comes_back(link)
        if not link.heard:  # then neither may the lock be ours: whoever listens in vain is not alone on a connection
            link.held = False
        elif not link.held and link.safe:
            link.held = await self._run(partial(hints.try_advisory_lock, key=_key(link)))
        return link.heard

    async def close(self) -> None:
        """See ``SessionLine.close``."""
        self._cut()
        await asyncio.sleep(0)  # the socket is closed at the next turn of the loop

    # --- Asking -----------------------------------------------------------------------------------------------------

    def _connected(self) -> _Link:
        if self._link is None or not self._link.open:
            raise StoreUnavailable("the session's connection is not open; connect it")
        return self._link

    async def _run(self, unit: Unit[T]) -> T:
        return await self._see(self._connected(), lambda connection: connection.run_sync(unit))

    async def _see(self, link: _Link, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """What becomes of a question. One that is given up, or gets no answer, costs the connection."""

        def give_up() -> bool:
            link.cut()
            return False

        try:
            task = asyncio.create_task(link.ask(work), name="deerflow-runs-session-question")
            return await fate_of(task, withdraw=give_up)
        except FAILURES as error:
            if not answered(error):
                link.cut()
            raise _unavailable(error) from driver_error(error)

    async def _comes_back(self, link: _Link) -> bool:
        """Whether we hear ourselves. Raises if there is no answer at all."""
        link.word = secrets.token_hex(8)
        link.echo.clear()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._run(partial(_notify, self._database, _probing(link.word)))
                await link.echo.wait()
        except TimeoutError:
            self._connected()
            return False
        self._connected()
        return True

    def _cut(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.cut()

    # --- Connecting -------------------------------------------------------------------------------------------------

    async def _made(self, worker_id: WorkerId) -> _Link:
        link = self._making = _Link(Inbox(worker_id))
        making = asyncio.create_task(self._make(link), name="deerflow-runs-session-connect")

        def give_up() -> bool:
            if link.driver is None:
                making.cancel()
            else:
                link.cut()
            return False

        try:
            async with asyncio.timeout(self._limits.connect):
                await fate_of(making, withdraw=give_up)
        except FAILURES as error:
            link.cut()
            raise _unavailable(error) from driver_error(error)
        except BaseException:
            link.cut()
            raise
        return link

    async def _make(self, link: _Link) -> None:
        link.connection = await self._engine.connect()
        if self._listens:
            await link.ask(partial(self._begin, link))

    async def _begin(self, link: _Link, connection: AsyncConnection) -> None:
        link.channel = await connection.scalar(_ASK_CHANNEL, {"workers": _table(self._database)})
        if link.channel is None:
            raise StoreUnavailable(f"{self._database}: the tables are gone")
        link.driver.add_termination_listener(lambda _: link.wake())
        await link.driver.add_listener(link.channel, lambda *said: link.notified(said[-1]))
        for _ in range(hints.TRIES if link.safe else 0):
            link.held = await connection.run_sync(partial(hints.try_advisory_lock, key=_key(link)))
            if link.held:
                break
            await asyncio.sleep(hints.PAUSE)

    def _watch(self, _dialect: object, _record: object, _arguments: object, options: dict[str, Any]) -> None:
        """A listener for ``do_connect``: SQLAlchemy shows a connection only after having asked it several questions."""
        options["async_creator_fn"] = self._connect

    async def _connect(self, *arguments: Any, **options: Any) -> Any:
        driver = await asyncpg.connect(*arguments, **options)
        if (link := self._making) is not None:
            link.driver = driver
            link.descriptor = _descriptor_of(driver)
            if link.descriptor is not None:
                link.safe = DESCRIPTORS.keep(link.descriptor, driver, since=link.since)
        return driver


def _key(link: _Link) -> int:
    return hints.advisory_key(link.inbox.worker_id)


def _descriptor_of(driver: Any) -> int | None:
    """The socket below, for which there is no public name; without it there is no hint."""
    transport = getattr(driver, "_transport", None)
    socket = transport.get_extra_info("socket") if transport is not None else None
    return socket.fileno() if socket is not None else None


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"no answer on the session's connection: {error_code(error)}; connect again and repeat it")
