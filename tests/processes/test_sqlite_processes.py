"""Several processes on one SQLite file, and forked ones on either database."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from deerflow_runs.errors import StoreUnavailable
from deerflow_runs.store.database import Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sqlite_connection import opened_elsewhere, wal_reset_risk
from deerflow_runs.store.units import open_units
from deerflow_runs.store.writer import SqliteUnits
from tests.migrations.processes import process
from tests.processes.sqlite_programs import add_often, fork, hold_open, wait_inside
from tests.rules import rule
from tests.support.units import look, put


def units_on(dsn: str, *, lock_timeout: float = 5.0) -> SqliteUnits:
    database = parse_dsn(dsn)
    assert isinstance(database, Sqlite)
    return SqliteUnits(database, lock_timeout=lock_timeout)


def path_of(dsn: str) -> Path:
    return Path(dsn.removeprefix("sqlite:///"))


@rule("O34", "P012", "F61")
async def test_four_processes_that_read_and_then_write_lose_nothing(sqlite_dsn: str) -> None:
    units = units_on(sqlite_dsn)
    await units.open()
    await units.once(put("sum"))
    with ExitStack() as stack:
        pipes = [stack.enter_context(process(add_often, sqlite_dsn, "4", "25"))[1] for _ in range(4)]
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 4
        for pipe in pipes:
            pipe.send("go")
        assert [pipe.recv() for pipe in pipes] == ["done"] * 4
    assert await units.read(look) == {"sum": 4 * 4 * 25}
    await units.close()


@rule("O14", "O34")
async def test_a_process_stopped_inside_its_transaction_is_no_verdict_only_no_answer(sqlite_dsn: str) -> None:
    """Nobody can write until it goes on, everybody can read, and nothing of it is lost."""
    units = units_on(sqlite_dsn, lock_timeout=0.2)
    await units.open()
    with process(wait_inside, sqlite_dsn) as (_, pipe):
        pid = pipe.recv()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await units.once(put("mine"))
        assert await units.read(look) == {}
        os.kill(pid, signal.SIGCONT)
        pipe.send("go on")
        assert pipe.recv() == "done"
    await units.once(put("mine"))
    assert await units.read(look) == {"stopped": 0, "mine": 0}
    await units.close()


@rule("O14", "O34")
async def test_a_process_killed_inside_its_transaction_leaves_nothing_and_blocks_nobody(sqlite_dsn: str) -> None:
    units = units_on(sqlite_dsn)
    await units.open()
    with process(wait_inside, sqlite_dsn) as (_, pipe):
        os.kill(pipe.recv(), signal.SIGKILL)
        await units.once(put("mine"))
    assert await units.read(look) == {"mine": 0}
    await units.close()


def test_a_forked_child_is_refused_its_parent_s_store_and_may_open_its_own(dsn: str) -> None:
    """Nor does it end the parent's connections when it clears up."""
    with process(fork, dsn) as (_, pipe):
        refusals = [pipe.recv() for _ in range(3)]
        assert all("before a fork" in refusal for refusal in refusals)
        assert pipe.recv() == ["child", "parent", "parent again"]
        assert pipe.recv()  # the parent is still served by the same process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who has locked a file")
@rule("O34")
async def test_a_file_that_another_process_has_open_is_warned_of_where_sqlite_may_damage_it(
    sqlite_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(sqlite_dsn)
    assert not opened_elsewhere(path)
    with process(hold_open, sqlite_dsn) as (_, pipe):
        assert pipe.recv() == "ready"
        assert opened_elsewhere(path)
        for _ in range(2):
            units = open_units(parse_dsn(sqlite_dsn))
            with caplog.at_level(logging.WARNING):
                await units.open()
            await units.close()
        pipe.send("close")
        assert pipe.recv() == "done"
    assert not opened_elsewhere(path)
    assert [str(path) in message for message in caplog.messages] == ([True] if wal_reset_risk() else [])
    units = open_units(parse_dsn(sqlite_dsn))
    await units.open()
    assert not opened_elsewhere(path)  # our own threads do not count
    await units.close()
