"""Thread rows: what is known of a conversation beside its runs. Runs of the library need none.

Whether a thread is busy is never stored but read off its runs; its outcome is written by the endings of its runs
(``endings``) and changes here on request only. A foreign thread looks like one that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Final, cast, final

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Delete,
    Select,
    and_,
    bindparam,
    literal_column,
    or_,
    select,
)
from sqlalchemy import delete as deletion
from sqlalchemy import update as changing

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import TERMINAL, Micros, OperationKind, Run, RunKey, Scope, ThreadId, ThreadOutcome
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Actor, Refused
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store import endings, reads
from deerflow_runs.store.clauses import R, status_in, word
from deerflow_runs.store.dialect import Dialect
from deerflow_runs.store.pages import ALL_HERE, HERE, IS_RUN
from deerflow_runs.store.rows import narrow, to_run
from deerflow_runs.store.schema import base_writes, outbox, runs, threads
from deerflow_runs.store.schema import events as event_log
from deerflow_runs.store.scopes import in_scope, restricted, scope_parameters
from deerflow_runs.store.statement import Statement
from deerflow_runs.store.values import METADATA_BYTES, cut_text, repaired, storable, text

T: Final = threads.c
THIS: Final = T.thread_id == bindparam("p_thread")


class ThreadStatus(StrEnum):
    """A thread as callers see it: busy while a run is active or waits, else as its last ended run left it."""

    IDLE = "idle"
    BUSY = "busy"
    INTERRUPTED = "interrupted"
    ERROR = "error"


@final
@dataclass(frozen=True, slots=True)
class Thread:
    """One thread. ``values`` and ``interrupts`` are its state as the last run left it; ``temporary`` ones belong to
    a run without a thread of its own and are in no list."""

    thread_id: ThreadId
    user_id: str | None
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    outcome: ThreadOutcome
    busy: bool
    values: Any
    interrupts: Any
    error: str | None
    temporary: bool
    created_at: Micros
    updated_at: Micros

    @property
    def status(self) -> ThreadStatus:
        """Derived, never stored."""
        return ThreadStatus.BUSY if self.busy else ThreadStatus(self.outcome)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NewThread:
    """A thread to be made. What a caller gave is refused where it cannot be stored (``InvalidValue``), ``values`` come
    from a graph and are repaired; either happens here, before anything is written."""

    thread_id: ThreadId
    user_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    values: Any = None
    temporary: bool = False

    def __post_init__(self) -> None:
        text(self.thread_id, "thread_id", nonempty=True)
        if self.user_id is not None:
            text(self.user_id, "user_id")
        object.__setattr__(self, "metadata", _object(self.metadata, "metadata"))
        object.__setattr__(self, "config", _object(self.config, "config"))
        object.__setattr__(self, "values", _produced(self.values, "values"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadChange:
    """What to change; None leaves a thing as it is. ``metadata`` is merged key by key at the top, the others replace.

    ``error`` goes with ``outcome``: an outcome that is given without a text clears the text. Checked as a new thread.
    """

    metadata: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    values: Any = None
    interrupts: Any = None
    outcome: ThreadOutcome | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        for name in ("metadata", "config"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _object(getattr(self, name), name))
        for name in ("values", "interrupts"):
            object.__setattr__(self, name, _produced(getattr(self, name), name))
        if self.error is not None:
            object.__setattr__(self, "error", cut_text(self.error))

    def columns(self, thread: Thread) -> dict[str, Any]:
        """The columns to set on a thread that stands as given. Raises ``InvalidValue`` if its metadata outgrow the
        limit."""
        changed = {name: getattr(self, name) for name in ("config", "values", "interrupts")}
        if self.metadata is not None:
            changed["metadata"] = _object({**thread.metadata, **self.metadata}, "metadata")
        columns = {name: value for name, value in changed.items() if value is not None}
        return columns if self.outcome is None else columns | {"outcome": self.outcome.value, "error": self.error}


def _object(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    made = storable(value, path, limit_bytes=METADATA_BYTES)
    if not isinstance(made, dict):
        raise InvalidValue(path, "must be an object")
    return made


def _produced(value: Any, path: str) -> Any:
    return None if value is None else repaired(value, path)[0]


# --- Reading --------------------------------------------------------------------------------------------------------


def get(connection: Connection, dialect: Dialect, thread_id: ThreadId, *, scope: Scope) -> Thread | None:
    """One thread; None for a foreign one. Raises on an unreadable row."""
    bag = {"p_thread": thread_id} | scope_parameters(scope)
    row = _one(dialect, mine=restricted(scope), locked=False).run(connection, bag).one_or_none()
    return None if row is None else to_thread(row._asdict())


@cache
def _one(_: Dialect, *, mine: bool, locked: bool) -> Statement:
    found = select(*columns()).where(THIS, *in_scope(T.user_id, mine=mine))
    return Statement.of(found.with_for_update(of=threads) if locked else found)


def columns(thread_id: ColumnElement[Any] = T.thread_id) -> list[Any]:
    """A thread's columns, and whether it is busy. ``thread_id`` is said otherwise where rows are returned by a change:
    SQLite cannot refer to the changed row from a subquery there."""
    return [*T, busy(thread_id).label("busy")]


def busy(thread_id: ColumnElement[Any] = T.thread_id) -> ColumnElement[bool]:
    """A run is active or waits on the thread; a reservation is none. Each arm asks the partial index of its own."""
    held, awaited = runs.alias("held"), runs.alias("awaited")
    is_held = and_(held.c.thread_id == thread_id, held.c.active, held.c.operation_kind == word(OperationKind.RUN))
    is_awaited = and_(awaited.c.thread_id == thread_id, awaited.c.status == word("queued"))
    return or_(_any(held, is_held), _any(awaited, is_awaited))


def _any(table: Any, where: ColumnElement[bool]) -> ColumnElement[bool]:
    return select(literal_column("1")).select_from(table).where(where).correlate(threads).exists()


def to_thread(data: Mapping[str, Any]) -> Thread:
    """A thread from the values of ``columns()``."""
    return Thread(
        thread_id=ThreadId(data["thread_id"]),
        user_id=data["user_id"],
        metadata=data["metadata"],
        config=data["config"],
        outcome=ThreadOutcome(data["outcome"]),
        busy=bool(data["busy"]),
        values=data["values"],
        interrupts=data["interrupts"],
        error=data["error"],
        temporary=bool(data["temporary"]),
        created_at=Micros(data["created_at"]),
        updated_at=Micros(data["updated_at"]),
    )


# --- Writing --------------------------------------------------------------------------------------------------------


def create(connection: Connection, dialect: Dialect, new: NewThread) -> Thread | None:
    """Make a thread, in one statement; None: the id is taken, by whom ``get`` says as far as its scope sees.

    After a lost reply a repeat finds its own thread: whoever made up the id alone may take it for theirs (O8).
    """
    names = ("thread_id", "user_id", "metadata", "config", "values", "temporary")
    bag = {f"p_{name}": getattr(new, name) for name in names}
    row = _creation(dialect).run(connection, bag).one_or_none()
    return None if row is None else to_thread(row._asdict())


@cache
def _creation(dialect: Dialect) -> Statement:
    given = ("thread_id", "user_id", "metadata", "config", "values", "temporary")
    fixed = {
        "outcome": word(ThreadOutcome.IDLE),
        "interrupts": word("{}"),
        "created_at": dialect.now,
        "updated_at": dialect.now,
    }
    row = {name: bindparam(f"p_{name}", type_=T[name].type) for name in given} | fixed
    return Statement.of(
        dialect.insert(threads).values(row).on_conflict_do_nothing().returning(*columns(bindparam("p_thread_id")))
    )


def update(
    connection: Connection, dialect: Dialect, thread_id: ThreadId, change: ThreadChange, *, scope: Scope
) -> Thread | None:
    """Change a thread, in a transaction; None: there is none, or it is foreign. Repeating it changes nothing more.

    Metadata are merged here, as PostgreSQL's own merge would reorder keys and rewrite numbers.
    """
    bag = {"p_thread": thread_id} | scope_parameters(scope)
    row = _one(dialect, mine=restricted(scope), locked=True).run(connection, bag).one_or_none()
    if row is None:
        return None
    values = change.columns(to_thread(row._asdict())) | {"updated_at": dialect.now}
    changed = changing(threads).where(THIS).values(values).returning(*columns(bindparam("p_thread")))
    return to_thread(connection.execute(changed, {"p_thread": thread_id}).one()._asdict())


# --- Deleting -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class ThreadDeleted:
    """Nothing of the thread is left. ``removed`` counts its runs, ``ended`` are those that still waited; a repeat
    after a lost reply finds none."""

    removed: int = 0
    ended: tuple[Run, ...] = ()


def delete(
    connection: Connection, dialect: Dialect, key: RunKey, by: Actor, *, scope: Scope
) -> ThreadDeleted | Refused:
    """Remove a thread and everything that hangs on it, in one transaction which also releases ``key``, the delete
    reservation that ``by`` holds on it.

    Because the reservation goes last, nothing arrives in between, and a thread of the same id inherits nothing (F66).
    Refused while another operation holds the thread, or once the reservation is lost. Checkpoints are the caller's.
    """
    dialect.lock_threads(connection, [key.thread_id])
    bag = {"p_thread": key.thread_id} | scope_parameters(scope)
    if restricted(scope) and _foreign(dialect).run(connection, bag).scalar():
        return Refused(Refusal.UNKNOWN)
    held = _holder(dialect).run(connection, bag).one_or_none()
    if held is None:
        return Refused(Refusal.UNKNOWN) if _left(dialect).run(connection, bag).scalar() else ThreadDeleted()
    holder = to_run(held)
    if holder.run_id != key.run_id or holder.kind is not OperationKind.DELETE:
        return Refused(Refusal.THREAD_BUSY, holder)
    waiting = reads.queue(connection, dialect, key.thread_id)
    released = endings.end_locked(connection, dialect, key, RunEvent.RELEASE, by, NOTHING_GIVEN)
    if isinstance(released, Refused):
        return released
    return ThreadDeleted(_erase(connection, dialect, key.thread_id), waiting)


@cache
def _foreign(_: Dialect) -> Statement:
    """The thread's row decides whose it is; without one, its runs do."""
    is_foreign = T.user_id.is_distinct_from(bindparam("p_user"))
    others_run = and_(ALL_HERE, IS_RUN, R.user_id.is_distinct_from(bindparam("p_user")))
    return Statement.of(select(or_(_exists(THIS, is_foreign), and_(~_exists(THIS), _exists(others_run)))))


def _exists(*where: ColumnElement[bool]) -> ColumnElement[bool]:
    found: Select[Any] = select(literal_column("1")).where(*where)
    return found.exists()


@cache
def _holder(_: Dialect) -> Statement:
    # Locked: an admission that flags it (O2) waits until the reservation is gone, and then finds nothing to wait for.
    return Statement.of(select(*narrow()).where(HERE, R.active).with_for_update())


@cache
def _left(_: Dialect) -> Statement:
    return Statement.of(select(or_(_exists(THIS), _exists(ALL_HERE))))


def _erase(connection: Connection, dialect: Dialect, thread_id: ThreadId) -> int:
    *hanging, own_runs, row = _erasures(dialect)
    bag = {"p_thread": thread_id}
    for statement in hanging:
        statement.run(connection, bag)
    removed = cast("CursorResult[Any]", own_runs.run(connection, bag))
    row.run(connection, bag)
    return removed.rowcount


@cache
def _erasures(_: Dialect) -> tuple[Statement, ...]:
    over = and_(ALL_HERE, status_in(*TERMINAL))
    ids = select(R.run_id).where(over)
    hanging = [deletion(table).where(table.c.run_id.in_(ids)) for table in (base_writes, outbox, event_log)]
    everything: list[Delete] = [*hanging, deletion(runs).where(over), deletion(threads).where(THIS)]
    return tuple(map(Statement.of, everything))
