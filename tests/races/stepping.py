"""Verbs of the store that stop before every statement and go on when told, so that a test can try every order.

On PostgreSQL each player is a real store on a connection of its own; on SQLite, where BEGIN IMMEDIATE makes a unit of
work the smallest thing, it stops before every unit. Nothing here knows a rule; nothing waits for time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, Protocol, TypeVar

import asyncpg
from sqlalchemy import Connection, NullPool, event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import await_only

from deerflow_runs.store.connections import Limits, PostgresUnits
from deerflow_runs.store.database import Postgres, Sqlite
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.retry import RetryPolicy
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Unit, Units
from deerflow_runs.store.writer import SqliteUnits

T = TypeVar("T")
Verb = Callable[["Player"], Awaitable[Any]]
"""What a player does in one round."""

PATIENCE: Final = 20_000
"""Looks at the server until a statement has neither ended nor been found waiting: then the test fails."""

ONCE: Final = RetryPolicy(max_attempts=1)
"""An error that the store would hide by asking again is an error here: a deadlock must not happen at all."""


class Observer:
    """A connection that only looks: who waits for whom, and what has been committed."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection

    async def waits(self, pid: int) -> bool:
        """Whether this server process waits for a lock that another one holds."""
        return bool(await self._connection.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid))

    async def terminate(self, pid: int) -> None:
        """Cut a server process off; returns when it is gone and what it had begun is rolled back."""
        await self._connection.execute("SELECT pg_terminate_backend($1)", pid)
        for _ in range(PATIENCE):
            if not await self._connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid):
                return
        raise AssertionError(f"process {pid} did not end")


# --- One player -----------------------------------------------------------------------------------------------------


class Gate:
    """Where a player stands before its next statement until it is told to go on."""

    def __init__(self) -> None:
        self.stepping = False
        self.at: str | None = None
        self._go = asyncio.Event()
        self._stands = asyncio.Event()

    async def pause(self, what: str) -> None:
        """Stand before ``what``. Called by the player."""
        if not self.stepping:
            return
        self.at = what
        self._go.clear()
        self._stands.set()
        await self._go.wait()

    def open(self) -> None:
        """Let the player take its next step."""
        self.at = None
        self._stands.clear()
        self._go.set()

    async def reached(self, verb: asyncio.Future[Any]) -> None:
        """Return when the player stands before something, or its verb has ended."""
        stands = asyncio.ensure_future(self._stands.wait())
        await asyncio.wait({verb, stands}, return_when=asyncio.FIRST_COMPLETED)
        stands.cancel()


class SteppedUnits(Protocol):
    """Units that stop at a gate."""

    gate: Gate

    @property
    def units(self) -> Units:
        """What the store is given."""

    async def rests(self, verb: asyncio.Future[Any]) -> bool:
        """Return when the verb has ended or stands at the gate (True), or waits for another player (False)."""

    async def close(self) -> None:
        """Release everything."""


class Player:
    """A store, and the one verb it carries out in this round."""

    def __init__(self, stepped: SteppedUnits) -> None:
        self.stepped = stepped
        self.units = stepped.units
        self.store = SqlRunStore(stepped.units, jitter=lambda: 0.0)
        self._verb: asyncio.Future[Any] | None = None
        self._gate = stepped.gate

    async def transaction(self, function: Callable[..., T], *arguments: Any) -> T:
        """One of the store's units of work, as a transaction."""
        return await self.units.transaction(lambda connection: function(connection, self.units.dialect, *arguments))

    async def begin(self, verb: Verb) -> None:
        """Start the verb; it stands before its first statement when this returns."""
        self._gate.stepping = True
        self._gate.at = None
        self._verb = asyncio.ensure_future(verb(self))
        await self.comes_to_rest()

    @property
    def verb(self) -> asyncio.Future[Any]:
        """What it was told to do."""
        assert self._verb is not None
        return self._verb

    @property
    def stands(self) -> bool:
        """Ready for its next step."""
        return not self.verb.done() and self._gate.at is not None

    @property
    def at(self) -> str:
        """The statement before which it stands."""
        return self._gate.at or ""

    async def step(self) -> bool:
        """Carry out one statement; False: it waits for somebody, and goes on by itself once it may."""
        assert self.stands
        self._gate.open()
        return await self.comes_to_rest()

    async def comes_to_rest(self) -> bool:
        """Return when the verb stands before a statement, has ended (True), or waits for another player (False)."""
        return await self.stepped.rests(self.verb)

    async def finish(self) -> Any:
        """Go on without stopping any more; the answer, or the error."""
        self._gate.stepping = False
        self._gate.open()
        return await self.verb


class _GatedUnits:
    """Units that stop at a gate before what ``wrap`` says, and run on real units below."""

    def __init__(self, below: Units, gate: Gate, *, units_are_steps: bool) -> None:
        self._below = below
        self._gate = gate
        self._units_are_steps = units_are_steps

    @property
    def dialect(self) -> Dialect:
        return self._below.dialect

    async def once(self, unit: Unit[T]) -> T:
        await self._before(unit)
        return await self._below.once(unit)

    async def transaction(self, unit: Unit[T]) -> T:
        await self._before(unit)
        return await self._below.transaction(unit if self._units_are_steps else self._until_commit(unit))

    async def read(self, unit: Unit[T]) -> T:
        await self._before(unit)
        return await self._below.read(unit)

    async def open(self) -> None:
        await self._below.open()

    async def close(self) -> None:
        await self._below.close()

    async def _before(self, unit: Unit[Any]) -> None:
        if self._units_are_steps:
            await self._gate.pause(repr(unit))

    def _until_commit(self, unit: Unit[T]) -> Unit[T]:
        def stopping(connection: Connection) -> T:
            answer = unit(connection)
            await_only(self._gate.pause("COMMIT"))
            return answer

        return stopping


class PostgresSteps:
    """One connection on which every statement, and every COMMIT, is a step."""

    def __init__(self, dsn: str, observer: Observer, limits: Limits | None = None) -> None:
        database = parse_dsn(dsn)
        assert isinstance(database, Postgres)
        self.gate = Gate()
        self.pid = 0
        self._observer = observer
        self._engine = create_async_engine(
            database.sqlalchemy_url(), connect_args=database.connect_args(), poolclass=NullPool
        )
        event.listen(self._engine.sync_engine, "before_cursor_execute", self._stop)
        below = PostgresUnits(database, engine=self._engine, connections=1, limits=limits, policy=ONCE)
        self.units = _GatedUnits(below, self.gate, units_are_steps=False)

    async def open(self) -> None:
        await self.units.open()
        await self.meet()

    async def meet(self) -> None:
        """Find out by which server process the player is served now."""
        self.pid = await self.units.read(lambda connection: int(connection.exec_driver_sql(PID).scalar_one()))

    async def rests(self, verb: asyncio.Future[Any]) -> bool:
        for _ in range(PATIENCE):
            if verb.done() or self.gate.at is not None:
                return True
            if await self._observer.waits(self.pid):
                return False
        raise AssertionError("a step neither ended nor waited for anybody")

    async def close(self) -> None:
        await self.units.close()
        await self._engine.dispose()

    def _stop(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "dr_" in statement or "pg_advisory" in statement:  # the clock alone is nobody's business
            await_only(self.gate.pause(statement))


PID: Final = "SELECT pg_backend_pid()"


class SqliteSteps:
    """One writer of a file; every unit of work is a step."""

    def __init__(self, dsn: str) -> None:
        database = parse_dsn(dsn)
        assert isinstance(database, Sqlite)
        self.gate = Gate()
        self.units = _GatedUnits(SqliteUnits(database, policy=ONCE), self.gate, units_are_steps=True)

    async def open(self) -> None:
        await self.units.open()

    async def rests(self, verb: asyncio.Future[Any]) -> bool:
        await self.gate.reached(verb)  # nobody holds anything between two units
        return True

    async def close(self) -> None:
        await self.units.close()


# --- Every order ----------------------------------------------------------------------------------------------------

Seen = Hashable
"""What is committed, without instants and numbers that differ from one play to the next."""


async def every_order(
    players: Sequence[Player],
    begin: Callable[[], Awaitable[Sequence[Verb]]],
    look: Callable[[], Awaitable[Seen]],
    verdict: Callable[[Sequence[Any]], Awaitable[None]],
    *,
    preemptions: int | None = None,
) -> int:
    """Play the verbs that ``begin`` names once it has set the scene, in every order their steps can have.

    After every step ``look`` looks at what is committed; at the end of an order ``verdict`` gets the answers. An order
    is broken off where it comes to a place at which another one has been: the same is committed, and every player has
    taken the same steps and could see the same at each. ``preemptions`` is how often at most a player who could go on
    has to stand back; None: no limit. Returns how many orders came to an end.
    """
    book = _Book()
    ended = 0
    while True:
        order = _Order(players, book, look, preemptions)
        try:
            answers = await order.play(await begin())
            if answers is not None:
                await verdict(answers)
                ended += 1
        except Exception as error:
            error.add_note("the order was:\n" + "\n".join(order.steps))
            await order.leave()
            raise
        if not book.turn_page():
            return ended


class _Book:
    """Which choices lead to the next order, and at which places earlier ones have been."""

    def __init__(self) -> None:
        self._choices: list[tuple[int, int]] = []
        self._places: set[Hashable] = set()

    def choose(self, number: int, options: int, place: Hashable) -> int | None:
        """What to do at the ``number``-th place with a choice; None: all that can follow from here is known."""
        if number == len(self._choices):
            if place in self._places:
                return None
            self._places.add(place)
            self._choices.append((0, options))
        return self._choices[number][0]

    def turn_page(self) -> bool:
        """Go on to the next order; False: there is none."""
        while self._choices:
            choice, options = self._choices.pop()
            if choice + 1 < options:
                self._choices.append((choice + 1, options))
                return True
        return False


class _Order:
    """One play of the verbs."""

    def __init__(
        self,
        players: Sequence[Player],
        book: _Book,
        look: Callable[[], Awaitable[Seen]],
        preemptions: int | None,
    ) -> None:
        self.steps: list[str] = []
        self._players = players
        self._book = book
        self._look = look
        self._left = preemptions
        self._last: int | None = None
        self._past: list[list[Hashable]] = [[] for _ in players]

    async def play(self, verbs: Sequence[Verb]) -> list[Any] | None:
        """The answers; None if it was broken off."""
        for player, verb in zip(self._players, verbs, strict=True):
            await player.begin(verb)
        seen = await self._look()
        choices = 0
        while ready := self._ready():
            chosen = ready[0]
            if len(ready) > 1:
                place = (seen, tuple(map(tuple, self._past)), tuple(ready), self._left)
                option = self._book.choose(choices, len(ready), place)
                if option is None:
                    await self.leave()
                    return None
                chosen = ready[option]
                choices += 1
            if self._left is not None and self._last in ready and self._last != chosen:
                self._left -= 1
            self._last = chosen
            seen = await self._step(chosen, seen)
        return [await player.finish() for player in self._players]

    def _ready(self) -> list[int]:
        """Who may take the next step."""
        ready = [number for number, player in enumerate(self._players) if player.stands]
        return [self._last] if self._left == 0 and self._last in ready else ready

    async def leave(self) -> None:
        """Let everybody come to an end, whatever it is."""
        await asyncio.gather(*(player.finish() for player in self._players), return_exceptions=True)

    async def _step(self, chosen: int, seen: Seen) -> Seen:
        player = self._players[chosen]
        resting = [other.verb.done() or other.stands for other in self._players]
        at = " ".join(player.at.split())
        done = await player.step()
        self.steps.append(f"{chosen}: {at[:120]}{'' if done else ' ... waits'}")
        self._past[chosen].append((at, seen))
        released = [await other.comes_to_rest() for other in self._players]
        now = await self._look()
        for number, (rested, rests) in enumerate(zip(resting, released, strict=True)):
            if number != chosen and rests and not rested:
                self._past[number].append(("released", seen, now))
        return now
