"""Which database: frozen values that say where it is and what its driver is told; ``dsn`` makes them from text.

A password is reachable only through the arguments for the driver: it is in no ``repr``, ``str`` or ``display()``.
Nothing here connects, and nothing here decides what a store does with its connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final, final
from urllib.parse import quote, urlencode

from sqlalchemy import URL

from deerflow_runs.errors import InvalidDsn

MEMORY: Final = ":memory:"
SYSTEM: Final = "system"
"""The root certificate that means those of the operating system."""
DEFAULT_PORT: Final = 5432


class DatabaseKind(StrEnum):
    """The two families of databases."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Sqlite:
    """A SQLite file, or a private database in memory when ``path`` is None."""

    kind: ClassVar[DatabaseKind] = DatabaseKind.SQLITE
    path: Path | None

    def sqlalchemy_url(self) -> URL:
        """The URL for ``create_engine``: always the synchronous driver, a unit of work is one thread hop."""
        return URL.create("sqlite", database=str(self.path) if self.path else MEMORY)

    def connect_args(self) -> dict[str, Any]:
        """What ``sqlite3.connect`` is given: no busy handler, since it starves some processes (O34)."""
        return {"timeout": 0.0}

    def require_shareable(self, workers: int) -> None:
        """Refuse a database in memory for more than one worker: each would have one of its own."""
        if self.path is None and workers > 1:
            raise InvalidDsn(f"{MEMORY} belongs to one process, not to {workers} workers; use a file or Postgres")

    def display(self) -> str:
        """The address as text for people."""
        return "sqlite:///" + (quote(str(self.path), safe="/:\\") if self.path else MEMORY)

    def __str__(self) -> str:
        return self.display()

    def __repr__(self) -> str:
        return f"<Sqlite {self.display()}>"


@final
@dataclass(frozen=True, slots=True)
class Host:
    """One place where a server listens: a name, an address, or the folder of a Unix socket. No port: the default."""

    name: str
    port: int | None = None

    def display(self) -> str:
        """As it stands in an address."""
        name = f"[{quote(self.name, safe=':')}]" if ":" in self.name else quote(self.name, safe="")
        return name if self.port is None else f"{name}:{self.port}"


@final
@dataclass(frozen=True, slots=True)
class Tls:
    """libpq's TLS options as given; ``root_cert`` may be the word ``system``. What they mean is asyncpg's:

    ``disable`` none · ``allow`` only if the server insists · ``prefer`` (the default) if the server can, unchecked ·
    ``require`` always, checked only against a root certificate that is given or stands in ``~/.postgresql`` ·
    ``verify-ca`` always, checked · ``verify-full`` always, checked, and the host name too. Unix sockets have no TLS.
    """

    mode: str | None = None
    root_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    crl: str | None = None
    minimum: str | None = None
    maximum: str | None = None
    direct: bool = False
    password: str | None = field(default=None, repr=False)

    def arguments(self) -> dict[str, Any]:
        """asyncpg takes certificates only inside a DSN, so it gets one that holds nothing else."""
        words = {
            "sslmode": self.mode,
            "sslrootcert": self.root_cert,
            "sslcert": self.cert,
            "sslkey": self.key,
            "sslpassword": self.password,
            "sslcrl": self.crl,
            "ssl_min_protocol_version": self.minimum,
            "ssl_max_protocol_version": self.maximum,
        }
        given = {word: value for word, value in words.items() if value is not None}
        arguments: dict[str, Any] = {"direct_tls": True} if self.direct else {}
        if self.root_cert == SYSTEM:  # asyncpg's True: the system's certificates, host name checked
            return {"ssl": True, **arguments}
        return {"dsn": f"postgresql://?{urlencode(given, quote_via=quote)}", **arguments} if given else arguments


@final
@dataclass(frozen=True, slots=True, repr=False)
class Postgres:
    """A PostgreSQL database. What is None or empty is left to asyncpg: the PG… environment variables, then defaults.

    ``pooler`` says that a transaction pooler stands in between; ``direct`` is the way around it. ``target`` is the
    ``target_session_attrs``; of several hosts it is read-write unless said otherwise, as a standby can admit nothing.
    ``connect_timeout`` is in seconds and per host.
    """

    kind: ClassVar[DatabaseKind] = DatabaseKind.POSTGRES
    hosts: tuple[Host, ...] = ()
    user: str | None = None
    password: str | None = None
    passfile: str | None = None
    database: str | None = None
    tls: Tls = field(default_factory=Tls)
    options: str | None = None
    application_name: str | None = None
    target: str | None = None
    connect_timeout: int | None = None
    krbsrvname: str | None = None
    gsslib: str | None = None
    pooler: bool = False
    direct: Postgres | None = None
    schema: str | None = None

    def sqlalchemy_url(self) -> URL:
        """The URL for ``create_async_engine``: names for people; all that counts is in ``connect_args()``."""
        return URL.create("postgresql+asyncpg", username=self.user, database=self.database)

    def connect_args(self) -> dict[str, Any]:
        """For ``create_async_engine``. Behind a pooler no statement is kept, and none has a name."""
        arguments = self.asyncpg_arguments()
        if self.pooler:
            arguments |= {"prepared_statement_cache_size": 0, "prepared_statement_name_func": _no_name}
        return arguments

    def asyncpg_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``asyncpg.connect``. They hold the password: never log them."""
        settings = {"options": self.options, "application_name": self.application_name}
        given = {
            "host": [host.name for host in self.hosts] or None,
            "port": [host.port or DEFAULT_PORT for host in self.hosts] if any(h.port for h in self.hosts) else None,
            "user": self.user,
            "password": self.password,
            "passfile": self.passfile,
            "database": self.database,
            "server_settings": {name: value for name, value in settings.items() if value is not None} or None,
            "target_session_attrs": self.target or ("read-write" if len(self.hosts) > 1 else None),
            # asyncpg counts over all hosts together, libpq for each.
            "timeout": self.connect_timeout and self.connect_timeout * max(1, len(self.hosts)),
            "krbsrvname": self.krbsrvname,
            "gsslib": self.gsslib,
            "statement_cache_size": 0 if self.pooler else None,
        }
        return {name: value for name, value in given.items() if value is not None} | self.tls.arguments()

    def session(self) -> Postgres | None:
        """Where LISTEN, advisory locks and migrations work; None when only the way through a pooler is known."""
        return self.direct if self.direct or self.pooler else self

    def require_shareable(self, workers: int) -> None:
        """Always satisfied; the counterpart of a SQLite database in memory."""

    def display(self) -> str:
        """The address as text for people, without the password and without what may hold secrets."""
        who = f"{quote(self.user, safe='')}@" if self.user is not None else ""
        where = ",".join(host.display() for host in self.hosts)
        flags = {"pooler": "true" if self.pooler else None, "schema": self.schema}
        query = urlencode({name: value for name, value in flags.items() if value})
        return f"postgresql://{who}{where}/{quote(self.database or '', safe='')}{'?' if query else ''}{query}"

    def __str__(self) -> str:
        return self.display()

    def __repr__(self) -> str:
        return f"<Postgres {self.display()}>"


Database = Sqlite | Postgres


def _no_name() -> str:
    """The name of the statement that the next one replaces.

    asyncpg closes a named one in a message of its own, between preparing and executing the next: there a pooler
    changes the server. A closing that reaches another server leaves the statement behind for ever.
    """
    return ""
