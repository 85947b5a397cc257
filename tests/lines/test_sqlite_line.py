"""The session line of a SQLite file: its lock, its two connections, and what a free lock proves."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from deerflow_runs import store_at
from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.model import Session, WorkerId
from deerflow_runs.protocol.decision import Actor, Given
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store.base import RunStore
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.hints import boot_id
from deerflow_runs.store.line_sqlite import SqliteLines
from deerflow_runs.store.signals import Signal
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.writer import SqliteUnits
from tests.lines.support import LIVE, ME, OTHER, beat, beating, connected, ending, heard_out, holds, sign_of
from tests.rules import rule

if sys.platform != "win32":
    import fcntl


@pytest.fixture
def path(sqlite_dsn: str) -> Path:
    return Path(sqlite_dsn.removeprefix("sqlite:///"))


@pytest.fixture
async def store(sqlite_dsn: str) -> AsyncIterator[SqlRunStore]:
    async with store_at(sqlite_dsn) as opened:
        yield opened


def files(path: Path) -> list[Path]:
    """The locks beside a database."""
    return sorted(path.with_name(path.name + "-sessions").iterdir())


def left_behind(path: Path, worker_id: WorkerId) -> Path:
    """A file that nobody holds, as a killed process leaves it."""
    (file,) = (file for file in files(path) if file.name.startswith(worker_id.replace(":", "_")))
    return file


@contextmanager
def copied_back(file: Path) -> Iterator[None]:
    """What is done inside removes the file; it is there again afterwards, and nobody holds it."""
    yield
    file.touch()


# --- The lock -------------------------------------------------------------------------------------------------------


@rule("O27")
async def test_a_free_lock_proves_the_death_of_a_session_that_held_it(store: RunStore, path: Path) -> None:
    async with beating(store) as line:
        assert await sign_of(store) is Sign.NONE
        with copied_back(left_behind(path, ME)):
            await line.close()
    assert await sign_of(store) is Sign.PROOF


@rule("O27")
async def test_a_free_lock_proves_nothing_of_a_session_that_never_held_it(store: RunStore, path: Path) -> None:
    async with connected(store) as line:
        await store.open_session(Session(ME, hinted=False))
        with copied_back(left_behind(path, ME)):
            await line.close()
    assert await sign_of(store) is Sign.NONE


@rule("O27")
async def test_a_line_that_is_closed_in_order_proves_nothing(store: RunStore, path: Path) -> None:
    """Its process may still be at work; who wants the session to be dead closes that."""
    async with beating(store):
        pass
    assert files(path) == []
    assert await sign_of(store) is Sign.NONE


@rule("O27")
async def test_files_that_somebody_removed_prove_nothing(store: RunStore, path: Path) -> None:
    async with beating(store) as line:
        shutil.rmtree(files(path)[0].parent)
        assert await sign_of(store) is Sign.NONE
        assert not holds(line)
        assert await line.probe()
        assert holds(line)


@rule("O27", "I13")
async def test_connecting_again_never_frees_the_lock(store: RunStore, path: Path) -> None:
    async with beating(store) as line:
        (file,) = files(path)
        descriptor = os.open(file, os.O_RDONLY)
        for _ in range(3):
            await line.connect(ME)
        assert os.fstat(descriptor).st_nlink == 1  # the same file, never removed
        os.close(descriptor)
        assert await sign_of(store) is Sign.NONE


@rule("O13", "O27")
async def test_a_new_session_of_a_line_has_a_lock_of_its_own(store: RunStore, path: Path) -> None:
    async with beating(store) as line:
        await line.connect(OTHER)
        assert [file.name.split("-")[0] for file in files(path)] == ["host_other"]
        assert holds(line)


@rule("O27")
async def test_sessions_whose_ids_look_alike_in_a_file_s_name_have_different_locks(store: RunStore) -> None:
    async with beating(store, WorkerId("a/b")) as first, beating(store, WorkerId("a:b")) as second:
        assert (holds(first), holds(second)) == (True, True)


@rule("O27")
async def test_a_session_of_another_boot_is_proven_dead_by_that(store: RunStore) -> None:
    await store.open_session(Session(ME, boot_id="another"))
    await store.open_session(Session(OTHER, boot_id=boot_id()))
    assert await store.signs(await store.sessions()) == {ME: Sign.PROOF}


@rule("O27", "I13")
async def test_a_session_that_holds_its_lock_is_not_dead_whatever_its_boot_is_called(store: RunStore) -> None:
    """Some containers call the boot of one kernel by names of their own."""
    async with beating(store, boot_id="another"):
        assert await sign_of(store) is Sign.NONE


@rule("O27")
async def test_a_session_records_the_boot_in_which_it_lives(store: RunStore) -> None:
    async with beating(store):
        (session,) = await store.sessions()
        assert session.boot_id == boot_id()


@rule("O27")
async def test_the_file_of_a_killed_session_is_removed_once_the_session_is_dead(store: RunStore, path: Path) -> None:
    async with beating(store) as line:
        file = left_behind(path, ME)
        with copied_back(file):
            await line.close()
    assert await sign_of(store) is Sign.PROOF
    assert file.exists()
    await store.close_session(ME)
    assert await sign_of(store) is Sign.NONE
    assert not file.exists()


async def test_the_file_of_a_dead_session_stays_while_its_process_holds_it(store: RunStore, path: Path) -> None:
    async with beating(store):
        await store.close_session(ME)
        await sign_of(store)
        assert len(files(path)) == 1


async def test_only_their_owner_may_read_the_files(store: RunStore, path: Path) -> None:
    async with beating(store):
        (file,) = files(path)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@rule("O27")
async def test_where_no_file_can_be_locked_a_session_lives_without_a_hint(store: RunStore, path: Path) -> None:
    path.with_name(path.name + "-sessions").touch()
    async with beating(store) as line:
        assert not holds(line)
        await beat(line)
        assert await sign_of(store) is Sign.NONE


@pytest.mark.skipif(sys.platform == "win32", reason="no flock there")
async def test_two_who_look_at_once_do_not_take_each_other_for_the_session(store: RunStore, path: Path) -> None:
    async with beating(store) as line:
        file = left_behind(path, ME)
        with copied_back(file):
            await line.close()
    with file.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as a judge does
        assert await sign_of(store) is Sign.PROOF


# --- The connections ------------------------------------------------------------------------------------------------


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Meanwhile somebody else is inside a transaction that writes."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def kept_from_others(path: Path) -> Iterator[None]:
    """Meanwhile nobody else can even read."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
        yield


def hasty(path: Path, lock_timeout: float) -> SqlRunStore:
    database = parse_dsn(path)
    assert isinstance(database, Sqlite)
    return SqlRunStore(SqliteUnits(database), lines=SqliteLines(database, lock_timeout=lock_timeout))


@rule("O34")
async def test_a_file_that_stays_locked_is_no_answer_and_costs_neither_connection_nor_hint(path: Path) -> None:
    async with hasty(path, 0.02) as store, beating(store) as line:
        with written_to(path):
            with pytest.raises(StoreUnavailable):
                await line.renew(ME, state=LIVE)
            assert await line.requests(ME) == ()
        assert holds(line)
        assert (await beat(line)).beat == 1


@rule("O10", "O34")
async def test_a_beat_that_waits_for_the_file_lets_the_loop_go_on(path: Path) -> None:
    async with hasty(path, 10) as store, beating(store) as line:
        with written_to(path):
            waits = asyncio.create_task(beat(line))
            for _ in range(5):
                assert await line.wait(0.001) == frozenset()
            assert not waits.done()
        assert (await ending(waits)).beat == 1


@rule("O10")
async def test_a_beat_that_is_given_up_while_it_waits_for_the_file_leaves_it_free(path: Path) -> None:
    async with hasty(path, 10) as store, beating(store) as line:
        with written_to(path):
            waits = asyncio.create_task(beat(line))
            await line.wait(0.001)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await store.open_session(Session(OTHER))
        assert (await beat(line)).beat == 1


@rule("O10", "O34")
async def test_a_beat_does_not_wait_for_the_store_s_own_writer(path: Path) -> None:
    """Its connection is its own: what the writer has queued is behind it."""
    database = parse_dsn(path)
    assert isinstance(database, Sqlite)
    units = SqliteUnits(database)
    async with SqlRunStore(units, lines=SqliteLines(database)) as store, beating(store) as line:
        before = units.stats().units
        await beat(line)
        assert units.stats().units == before


@rule("O34")
async def test_own_store_s_commits_are_seen_by_the_line_beside_it(store: RunStore) -> None:
    async with beating(store) as line:
        await heard_out(line)
        await store.open_session(Session(OTHER))
        assert await ending(line.wait(60)) == {Signal.CANCEL, Signal.WORK}
        assert await line.wait(0) == frozenset()


async def test_a_file_that_nobody_else_may_open_is_no_answer_and_leaves_nothing_open(path: Path) -> None:
    async with hasty(path, 0.02) as store:
        line = store.session_line()
    async with hasty(path, 10) as store:
        patient = store.session_line()
    with kept_from_others(path):
        with pytest.raises(StoreUnavailable):
            await line.connect(ME)
        connecting = asyncio.create_task(patient.connect(OTHER))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        with pytest.raises(StoreUnavailable):
            await patient.wait(0)
    for one, worker_id in ((line, ME), (patient, OTHER)):
        await one.connect(worker_id)
        assert holds(one)
        await one.close()


async def test_a_file_that_is_gone_is_no_answer_and_is_not_made_anew(store: RunStore, path: Path) -> None:
    line = store.session_line()
    path.rename(path.with_name("moved"))
    with pytest.raises(StoreUnavailable, match="gone"):
        await line.connect(ME)
    assert not path.exists()
    path.with_name("moved").rename(path)
    await line.connect(ME)
    await line.close()


@rule("O33", "O34")
async def test_a_sweep_that_finds_nothing_is_no_signal(store: RunStore) -> None:
    """Or every worker that looks for work would send every other one looking."""
    async with beating(store) as line:
        await heard_out(line)
        me, nothing = Actor(ME), Given()
        await store.claim(me, 10)
        await store.take_over(me, nothing, 10)
        await store.force(me, nothing, 10)
        await store.promote(10)
        await store.re_home(Actor(ME, previous=OTHER), 10)
        await store.bury_strangers()
        await store.signs(await store.sessions())
        assert await line.wait(0) == frozenset()
