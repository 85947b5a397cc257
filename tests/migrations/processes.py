"""Real processes that upgrade a database and can be killed at the very statement.

They are forked from a server that has loaded everything once, where the system can do that: a process costs
milliseconds instead of the seconds of its imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import alembic.command  # noqa: F401 - for the server of forks
from sqlalchemy import Engine, event

from deerflow_runs.store.migrate import current, upgrade

if sys.platform == "win32":
    _PROCESSES = multiprocessing.get_context("spawn")
else:
    _PROCESSES = multiprocessing.get_context("forkserver")
    _PROCESSES.set_forkserver_preload([__name__])


@contextlib.contextmanager
def process(program: Callable[..., None], *arguments: str) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs ``program(pipe, *arguments)``, and our end of the pipe; killed with -9 at the end."""
    ours, theirs = _PROCESSES.Pipe()
    started = _PROCESSES.Process(target=program, args=(theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        yield started, ours
    finally:
        kill(started)
        ours.close()


def kill(started: BaseProcess) -> None:
    """kill -9; returns when the process is gone."""
    started.kill()
    started.join()


def upgrade_when_told(pipe: Connection, dsn: str) -> None:
    """Say that we stand ready, wait for the word, upgrade, and say where the database stands."""
    pipe.send("ready")
    pipe.recv()
    upgrade(dsn)
    pipe.send(current(dsn))


def upgrade_up_to(pipe: Connection, dsn: str, words: str) -> None:
    """Upgrade, but stop for good just before the first statement that contains ``words``; say so when we are there."""

    @event.listens_for(Engine, "before_cursor_execute")
    def stop(_connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        if words in statement:
            pipe.send("there")
            pipe.recv()

    upgrade(dsn)
    pipe.send("finished")
