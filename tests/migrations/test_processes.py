"""Several processes upgrade at once, and processes die in the middle: kill -9, at the very statement."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import asyncpg
import pytest

from deerflow_runs.store.migrate import check, current, head, upgrade
from tests.migrations.databases import add_run, ask, invalid_indexes, is_sqlite, statuses
from tests.migrations.processes import kill, process, upgrade_up_to, upgrade_when_told
from tests.rules import rule


def test_processes_that_upgrade_at_once_all_succeed_and_apply_the_history_once(empty: str) -> None:
    with ExitStack() as stack:
        many = range(4 if is_sqlite(empty) else 6)
        pipes = [stack.enter_context(process(upgrade_when_told, empty))[1] for _ in many]
        assert [pipe.recv() for pipe in pipes] == ["ready" for _ in many]
        for pipe in pipes:
            pipe.send("go")
        assert [pipe.recv() for pipe in pipes] == [head() for _ in many]
    assert ask(empty, "SELECT version_num FROM dr_alembic_version") == [(head(),)]
    check(empty)


# From the first statement to the last: inside 0001, between the two, inside the repair, among the indexes, at the end.
PLACES = {
    "CREATE TABLE dr_alembic_version": None,
    "CREATE TABLE dr_threads": None,
    "VALUES ('0001')": None,
    "UPDATE dr_runs SET": "0001",
    "INSERT INTO dr_outbox": "0001",
    "uq_dr_runs_active_thread": "0001",
    "ix_dr_runs_queue": "0001",
    "SET version_num='0002'": "0001",
    "ix_dr_runs_user": "0002",
    "SET version_num='0003'": "0002",
}


@pytest.mark.parametrize("place", PLACES)
def test_an_upgrade_killed_anywhere_stands_at_a_revision_and_is_finished_by_the_next(empty: str, place: str) -> None:
    with process(upgrade_up_to, empty, place) as (killed, pipe):
        assert pipe.recv() == "there"
        kill(killed)
    assert current(empty) == PLACES[place]
    upgrade(empty)
    check(empty)


def test_an_upgrade_killed_after_its_repair_has_ended_each_surplus_run_once(empty: str) -> None:
    upgrade(empty, revision="0001")
    add_run(empty, "other", epoch=4)
    add_run(empty, "kept", created_at=2)
    with process(upgrade_up_to, empty, "ix_dr_runs_queue") as (killed, pipe):
        assert pipe.recv() == "there"
        kill(killed)
    upgrade(empty)
    assert statuses(empty) == {"other": "error", "kept": "running"}
    assert ask(empty, "SELECT epoch FROM dr_runs WHERE run_id = 'other'") == [(5,)]
    assert ask(empty, "SELECT run_id, kind FROM dr_outbox") == [("other", "receipt")]


async def until_it_waits(dsn: str, statement: str) -> int:
    """The server process that has been given ``statement`` and waits for a transaction of somebody else."""
    waiting = (
        f"SELECT pid FROM pg_stat_activity WHERE query LIKE '%{statement}%' AND wait_event_type = 'Lock' "
        "AND datname = current_database()"
    )
    async with asyncio.timeout(60):
        while not (found := await asyncio.to_thread(ask, dsn, waiting)):
            pass
    return int(found[0][0])


@rule("I5")
async def test_a_run_that_ends_by_itself_while_the_repair_waits_for_it_keeps_its_end(empty_postgres: str) -> None:
    upgrade(empty_postgres, revision="0001")
    add_run(empty_postgres, "surplus")
    add_run(empty_postgres, "kept", created_at=2)
    owner = await asyncpg.connect(empty_postgres)
    async with owner.transaction():
        await owner.execute("UPDATE dr_runs SET status = 'success' WHERE run_id = 'surplus'")
        upgrading = asyncio.create_task(asyncio.to_thread(upgrade, empty_postgres))
        await until_it_waits(empty_postgres, "UPDATE dr_runs SET")
    await upgrading
    await owner.close()
    assert statuses(empty_postgres) == {"surplus": "success", "kept": "running"}


@rule("F62")
async def test_workers_write_while_an_index_is_built(empty_postgres: str) -> None:
    upgrade(empty_postgres, revision="0001")
    writer, reader = await asyncpg.connect(empty_postgres), await asyncpg.connect(empty_postgres)
    async with writer.transaction():
        await writer.execute("DELETE FROM dr_runs")
        building = asyncio.create_task(asyncio.to_thread(upgrade, empty_postgres))
        await until_it_waits(empty_postgres, "CREATE UNIQUE INDEX")
        await reader.execute("SET lock_timeout = '5s'")
        await reader.execute("UPDATE dr_runs SET epoch = epoch")
    await building
    await writer.close()
    await reader.close()
    check(empty_postgres)


@rule("F62")
@pytest.mark.parametrize("index", ["uq_dr_runs_active_thread", "ix_dr_runs_user"])
async def test_an_index_whose_building_was_broken_off_is_built_again(index: str, empty_postgres: str) -> None:
    before = {"uq_dr_runs_active_thread": "0001", "ix_dr_runs_user": "0002"}[index]
    upgrade(empty_postgres, revision=before)
    writer = await asyncpg.connect(empty_postgres)
    with process(upgrade_up_to, empty_postgres, "nowhere") as (killed, _):
        async with writer.transaction():
            await writer.execute("DELETE FROM dr_runs")
            pid = await until_it_waits(empty_postgres, f"INDEX CONCURRENTLY IF NOT EXISTS {index}")
            kill(killed)
            # The server goes on building for a client that is gone; a server that is stopped does not.
            await writer.execute("SELECT pg_terminate_backend($1, 10000)", pid)
        await writer.close()
    assert invalid_indexes(empty_postgres) == [index]
    assert current(empty_postgres) == before
    upgrade(empty_postgres)
    assert invalid_indexes(empty_postgres) == []
    check(empty_postgres)
