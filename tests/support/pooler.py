"""A real PgBouncer in transaction mode, for one test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from deerflow_runs.testing.postgres.binaries import scratch_parent, unprivileged_account
from tests.programs import require_program

_SETTINGS = """[databases]
* = host={server.hostname} port={server.port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {users}
pool_mode = transaction
default_pool_size = {connections}
max_client_conn = 200
"""


@contextlib.contextmanager
def pgbouncer(dsn: str, *, connections: int) -> Iterator[str]:
    """The address that leads through a pooler of so many server connections. Without the program: a skipped test."""
    program = require_program("pgbouncer")
    account = unprivileged_account()  # it refuses to run as root
    with tempfile.TemporaryDirectory(dir=scratch_parent(account), ignore_cleanup_errors=True) as name:
        port = _free_port()
        settings = _write(Path(name), urlsplit(dsn), port, connections)
        if account is not None:
            for path in (settings.parent, *settings.parent.iterdir()):
                os.chown(path, account.uid, account.gid)
        process = subprocess.Popen(
            [program, settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
        )
        try:
            _wait_for(port, process)
            yield urlunsplit(_through(urlsplit(dsn), port))
        finally:
            process.kill()
            process.wait()


def _write(folder: Path, server: SplitResult, port: int, connections: int) -> Path:
    users, settings = folder / "users.txt", folder / "pgbouncer.ini"
    users.write_text(f'"{unquote(server.username or "")}" "{unquote(server.password or "")}"\n')
    settings.write_text(_SETTINGS.format(server=server, port=port, users=users, connections=connections))
    return settings


def _through(server: SplitResult, port: int) -> SplitResult:
    login, _, _ = server.netloc.rpartition("@")
    return server._replace(netloc=f"{login}@127.0.0.1:{port}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.01)
    raise AssertionError(f"pgbouncer did not start: {process.returncode}")
