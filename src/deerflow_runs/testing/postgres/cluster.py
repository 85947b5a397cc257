"""A server of our own, a child of this process: started on a free port, killed and restarted at will.

It listens on the loopback address only, behind a random password, in a temporary directory that goes away with it,
also when the process that started it is killed. Nothing here looks into a database.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeAlias
from urllib.parse import quote

from deerflow_runs.testing.postgres.binaries import (
    NoPostgres,
    find_binaries,
    runnable_binaries,
    scratch_parent,
    unprivileged_account,
)
from deerflow_runs.testing.postgres.server import PostgresServer

Setting: TypeAlias = str | int | bool
Settings: TypeAlias = Mapping[str, Setting]

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.01
# Below the range that systems hand out to outgoing connections: none of those can take the port of a killed server,
# and none can connect to itself while the server is away.
_PORTS = range(15_000, 32_000)


class PostgresCluster(PostgresServer):
    """A server of our own, started by ``start()`` or by entering the block.

    ``settings`` are lines of ``postgresql.conf``. Without ``durable`` the server does not sync to disk: it survives
    ``kill()``, not a power cut. ``binaries`` chooses other programs than ``find_binaries()`` would.
    """

    def __init__(
        self, *, durable: bool = False, settings: Settings | None = None, binaries: Path | None = None
    ) -> None:
        self.binaries = binaries or find_binaries()
        self.user = "postgres"
        self.password = secrets.token_urlsafe(12)
        self._move_to(_free_port())
        self._served = False
        self._settings = _defaults(durable=durable) | dict(settings or {})
        self._account = unprivileged_account()
        self._root: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the postmaster, ``None`` while the server does not run."""
        return None if self._process is None else self._process.pid

    @property
    def data_directory(self) -> Path:
        """Where the server keeps its files, once it was started."""
        if self._root is None:
            raise RuntimeError("the server was never started, or stop() has removed it")
        return self._root / "data"

    def log(self) -> str:
        """What the server has written to its log so far."""
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    @property
    def _log_file(self) -> Path:
        return self.data_directory.parent / "log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, on the data it had if it was killed. Returns when it accepts connections."""
        if self._process is not None:
            raise RuntimeError("the server runs already")
        try:
            if self._root is None:
                self._create()
            self._launch(time.monotonic() + _START_SECONDS)
        except BaseException:
            if not self._served:  # nothing is kept yet that would be missed
                self.stop()
            raise

    def stop(self) -> None:
        """End the server at once and remove everything it kept. Harmless when it is gone already."""
        self._end(signal.SIGTERM if os.name == "nt" else signal.SIGQUIT)
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def kill(self) -> None:
        """Crash the server: every connection breaks, nothing is written out. The data stays for ``start()``."""
        self._end(signal.SIGTERM if os.name == "nt" else signal.SIGKILL)

    def restart(self) -> None:
        """Shut down in order, breaking off connections, and start again on the same port and data."""
        self._end(signal.SIGINT)
        self.start()

    def _create(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="deerflow-runs-postgres-", dir=scratch_parent(self._account)))
        self.binaries = runnable_binaries(self.binaries, self._account, self._root / "pg")
        password_file = self._root / "password"
        self.data_directory.mkdir(mode=0o700)
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        if self._account is not None:
            self._root.chmod(0o755)
            for owned in (self.data_directory, password_file):
                os.chown(owned, self._account.uid, self._account.gid)
        self._initdb(password_file)
        password_file.unlink()
        lines = [f"{key} = {_quoted(value)}\n" for key, value in self._settings.items()]
        with (self.data_directory / "postgresql.conf").open("a") as configuration:
            configuration.writelines(lines)

    def _initdb(self, password_file: Path) -> None:
        command: list[str | Path] = [
            *(self.binaries / "initdb", "-D", self.data_directory, "-U", self.user),
            *("-A", "scram-sha-256", f"--pwfile={password_file}", "-E", "UTF8", "--no-locale", "--no-sync"),
        ]
        done = self._spawn(command, output=subprocess.PIPE)
        output, _ = done.communicate()
        if done.returncode != 0:
            raise NoPostgres(f"initdb failed:\n{output.decode(errors='replace')}")

    def _move_to(self, port: int) -> None:
        self.port = port
        super().__init__(f"postgresql://{self.user}:{quote(self.password, safe='')}@127.0.0.1:{port}/postgres")

    def _launch(self, deadline: float) -> None:
        while True:
            written = len(self.log())
            self._spawn_server()
            if self._became_ready(deadline):
                self._served = True
                return
            self.kill()
            reason = self.log()[written:]
            port_taken = "could not bind" in reason and not self._served
            # A killed server's children need a moment to notice; meanwhile their memory keeps a new server out.
            if not (port_taken or "still in use" in reason) or time.monotonic() > deadline:
                raise NoPostgres(f"the server in {self.binaries} did not start:\n{reason}")
            if port_taken:
                self._move_to(_free_port())
            time.sleep(_LOOK_SECONDS)

    def _spawn_server(self) -> None:
        command: list[str | Path] = [self.binaries / "postgres", "-D", self.data_directory, "-p", str(self.port)]
        with self._log_file.open("ab") as log:
            self._process = self._spawn(command, output=log)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(self._process.pid), str(self._root)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _became_ready(self, deadline: float) -> bool:
        process = self._process
        while process is not None and process.poll() is None and time.monotonic() < deadline:
            if self._ready(process.pid):
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _ready(self, pid: int) -> bool:
        """A killed server leaves a file that says "ready": the process id in it must be that of the new one."""
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[-1].strip() == "ready"

    def _end(self, how: signal.Signals) -> None:
        if self._watchdog is not None:  # first: afterwards the process id may belong to somebody else
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_STOP_SECONDS)
            self._process = None

    def _spawn(self, command: list[str | Path], *, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        account = self._account
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self.data_directory.parent,
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"},
            start_new_session=True,  # a Ctrl-C in the terminal is for the tests, not for the server
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
        )


# Reads until the process that started the server is gone, however it ended; then nobody needs the server.
_WATCHDOG = """
import os, shutil, signal, sys, time
pid, root = int(sys.argv[1]), sys.argv[2]
sys.stdin.read()
try:
    os.kill(pid, getattr(signal, "SIGQUIT", signal.SIGTERM))
    for _ in range(1000):
        time.sleep(0.01)
        os.kill(pid, 0)
except OSError:
    pass
shutil.rmtree(root, ignore_errors=True)
"""


def _defaults(*, durable: bool) -> dict[str, Setting]:
    return {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "max_connections": 200,
        "shared_buffers": "64MB",
        "fsync": durable,
        "full_page_writes": durable,
    }


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise NoPostgres(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _quoted(value: Setting) -> str:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return "'" + text.replace("'", "''") + "'"
