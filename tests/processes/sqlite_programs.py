"""What other processes do with a database in these tests. Each talks through a pipe."""

from __future__ import annotations

import asyncio
import gc
import os
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import Connection, text

from deerflow_runs.errors import UsageError
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.units import Units, open_units
from tests.support.units import look, put


def add_one(connection: Connection) -> None:
    """Read, then write what follows from it: lost if anybody writes in between."""
    before = look(connection)["sum"]
    connection.execute(text("UPDATE dr_fence SET turn = :turn WHERE thread_id = 'sum'"), {"turn": before + 1})


def add_often(pipe: Pipe, dsn: str, callers: str, times: str) -> None:
    """So many callers in one process add one so many times each."""

    async def call(units: Units) -> None:
        for _ in range(int(times)):
            await units.transaction(add_one)

    async def main() -> None:
        units = open_units(parse_dsn(dsn))
        await units.open()
        pipe.send("ready")
        pipe.recv()
        await asyncio.gather(*(call(units) for _ in range(int(callers))))
        await units.close()
        pipe.send("done")

    asyncio.run(main())


def wait_inside(pipe: Pipe, dsn: str) -> None:
    """Say who we are in the middle of a transaction; when told to, commit it and say so."""

    def wait(connection: Connection) -> None:
        put("stopped")(connection)
        pipe.send(os.getpid())
        pipe.recv()

    async def main() -> None:
        units = open_units(parse_dsn(dsn))
        await units.open()
        await units.once(wait)
        await units.close()
        pipe.send("done")

    asyncio.run(main())


def hold_open(pipe: Pipe, dsn: str) -> None:
    """Have the store open until told otherwise."""

    async def main() -> None:
        units = open_units(parse_dsn(dsn))
        await units.open()
        pipe.send("ready")
        pipe.recv()
        await units.close()
        pipe.send("done")

    asyncio.run(main())


def fork(pipe: Pipe, dsn: str) -> None:
    """Fork with an open store. The child tries that one, closes it, and uses one of its own; the parent goes on."""
    units = open_units(parse_dsn(dsn))
    with asyncio.Runner() as runner:
        runner.run(units.open())
        runner.run(units.once(put("parent")))
        before = runner.run(units.once(_server_process))
        child = os.fork()
        if not child:
            asyncio.run(_in_the_child(pipe, units, dsn))
            del units
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        runner.run(units.once(put("parent again")))
        pipe.send(sorted(runner.run(units.read(look))))
        pipe.send(runner.run(units.once(_server_process)) == before)
        runner.run(units.close())


def _server_process(connection: Connection) -> int:
    """Who serves this connection, where somebody does."""
    is_postgres = connection.dialect.name == "postgresql"
    return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()) if is_postgres else 0


async def _in_the_child(pipe: Pipe, inherited: Units, dsn: str) -> None:
    for verb in (inherited.once, inherited.transaction, inherited.read):
        try:
            await verb(look)
        except UsageError as error:
            pipe.send(str(error))
    await inherited.close()
    own = open_units(parse_dsn(dsn))
    await own.open()
    await own.once(put("child"))
    await own.close()
