"""Reads database addresses: every form people write becomes a ``Database``, or is refused with the remedy.

No message of this module ever holds a piece of the address, because any piece may be part of a mistyped password.
Which options exist and what becomes of them stands in ``dsn_options``.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from deerflow_runs.errors import InvalidDsn
from deerflow_runs.store import dsn_options as option
from deerflow_runs.store.database import MEMORY, SYSTEM, Database, Host, Postgres, Sqlite, Tls

SQLITE_SCHEMES: Final = frozenset({"sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"})
POSTGRES_SCHEMES: Final = frozenset(
    scheme + driver for scheme in ("postgres", "postgresql") for driver in ("", "+asyncpg", "+psycopg")
)
SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
CHECKED: Final = ("require", "verify-ca", "verify-full")
"""The modes that look at a root certificate."""
TLS_VERSIONS: Final = ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3")

_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_NO_PATH: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:|\w+\s*=|[^?]*\?|[^@]*:[^@]*@")
"""A scheme without its slashes, libpq's keyword=value, options, credentials: no file is meant."""

_HOST: Final = re.compile(r"(?!@)[^\s:/\[\]]+")
_BRACKETED: Final = re.compile(r"\[([^\[\]]+)\](?::(.*))?", re.DOTALL)
_SCHEMA: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")


def parse_dsn(dsn: str | os.PathLike[str]) -> Database:
    """Read a database address; raise ``InvalidDsn`` for whatever could not be carried out exactly.

    A path, ``:memory:``, ``sqlite:///relative``, ``sqlite:////absolute``, ``postgres://`` and ``postgresql://``; the
    suffixes ``+aiosqlite``, ``+pysqlite``, ``+asyncpg`` and ``+psycopg`` change nothing. In a password only ``/``,
    ``?`` and ``%`` must be percent-encoded. A path object is never taken for anything but a file.
    """
    if isinstance(dsn, os.PathLike):
        return _file(os.fspath(dsn))
    text = dsn.strip()  # a secret mounted as a file ends with a line break
    address = _ADDRESS.fullmatch(text)
    if address is None:
        return _bare_path(text)
    scheme, rest = address[1].lower(), address[2]
    if scheme in SQLITE_SCHEMES:
        return _sqlite(rest)
    if scheme in POSTGRES_SCHEMES:
        return _postgres(rest)
    raise InvalidDsn("unknown scheme; write postgresql:// (asyncpg is the one driver), sqlite:/// or a path")


def _bare_path(text: str) -> Sqlite:
    if text == MEMORY:
        return Sqlite(None)
    if _NO_PATH.match(text):
        raise InvalidDsn(
            "neither a path nor an address; write postgresql://user@host/database or sqlite:///path, "
            "and give a file with such a name as a pathlib.Path"
        )
    return _file(text)


def _file(path: str) -> Sqlite:
    if not path or "\0" in path:
        raise InvalidDsn("a path that is empty or holds a NUL character; write sqlite:///runs.db, or :memory:")
    return Sqlite(Path(path).absolute())  # absolute: a later chdir must not mean another file


def _sqlite(rest: str) -> Sqlite:
    path, _, query = rest.partition("?")
    if query:
        names = {pair.partition("=")[0] for pair in query.split("&")} & option.TAKEN
        which = f"option {min(names)} belongs to Postgres" if names else "the store opens the file with what it needs"
        raise InvalidDsn(f"SQLite takes no options: {which}; drop them")
    if not path:
        return Sqlite(None)
    if not path.startswith("/"):
        raise InvalidDsn("write three slashes for a relative path (sqlite:///runs.db), four for an absolute one")
    name = option.decoded("path", path[1:])
    return Sqlite(None) if name == MEMORY else _file(name)


def _postgres(rest: str) -> Postgres:
    """Cut the address at the one place each mark may stand, so that a piece of a password is never another part."""
    authority = re.split(r"[/?]", rest, maxsplit=1)[0]
    path, _, query = rest.removeprefix(authority).partition("?")
    if "@" in path + query:
        raise InvalidDsn("an @ after the host; write / ? % of a password as %2F %3F %25, and an @ in an option as %40")
    options = option.read_options(query)
    userinfo, _, hosts = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    database = Postgres(
        hosts=_hosts(hosts, options),
        user=_either("user", option.decoded("user", user), options, "user"),
        password=_either("password", option.decoded("password", password), options, "password"),
        passfile=option.one(options, "passfile"),
        database=_either("database", _database(path), options, "dbname", "database"),
        tls=_tls(options),
        options=option.one(options, "options"),
        application_name=option.one(options, "application_name") or option.one(options, "fallback_application_name"),
        target=_target(options),
        connect_timeout=option.seconds(options, "connect_timeout"),
        krbsrvname=option.one(options, "krbsrvname"),
        gsslib=option.one_of(options, "gsslib", ("gssapi", "sspi")),
        pooler=option.flag(options, "pooler"),
        schema=_schema(options),
    )
    return _with_direct(database, option.one(options, "direct_url"))


def _either(what: str, before: str, options: option.Options, *names: str) -> str | None:
    """A part that may stand before the ``?`` or after it; an empty one counts as not given, as in libpq."""
    given = [value for value in (before, *(option.one(options, name) for name in names)) if value]
    if len(given) > 1:
        raise InvalidDsn(f"the {what} is given twice; keep one")
    return given[0] if given else None


def _database(path: str) -> str:
    if "/" in path[1:]:
        raise InvalidDsn("a second / after the host; write / of a password or of a database's name as %2F")
    return option.decoded("database", path[1:])


def _hosts(authority: str, options: option.Options) -> tuple[Host, ...]:
    """Hosts from before the ``?`` or from ``host=``, once or several times, alone or in a list; ports likewise."""
    listed = _pieces(options, "host")
    if authority and listed:
        raise InvalidDsn("hosts stand before the ? and in host=; keep one")
    hosts = [_host(piece, encoded=True) for piece in authority.split(",")] if authority else []
    hosts = hosts or [_host(piece, encoded=False) for piece in listed]
    ports = [_port(piece) for piece in _pieces(options, "port")]
    if not ports:
        return tuple(hosts)
    if len(ports) not in {1, len(hosts)} or not hosts or any(host.port for host in hosts):
        raise InvalidDsn("port= does not fit the hosts: give one for all, or one for each, and none beside a host")
    return tuple(replace(host, port=port) for host, port in zip(hosts, ports * len(hosts), strict=False))


def _pieces(options: option.Options, name: str) -> list[str]:
    return [piece for value in options.get(name, []) for piece in value.split(",")]


def _host(text: str, *, encoded: bool) -> Host:
    """``name``, ``name:port``, ``[IPv6]:port``, a bare IPv6 address, or the folder of a Unix socket."""
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed:
        name, port = bracketed[1], bracketed[2] or ""
    elif text.startswith("/") or text.count(":") > 1:
        name, port = text, ""
    else:
        name, _, port = text.partition(":")
    name = option.decoded("host", name) if encoded else name
    if not _HOST.fullmatch(name) and not name.startswith("/") and not _is_ipv6(name):
        raise InvalidDsn("a host that is no name, address or absolute folder; IPv6 goes into brackets: [::1]:5432")
    return Host(name, _port(port) if port else None)


def _is_ipv6(name: str) -> bool:
    try:
        return ip_address(name).version == 6
    except ValueError:
        return False


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise InvalidDsn("a port that is no number from 1 to 65535; or the @ between password and host is missing")
    return int(text)


def _tls(options: option.Options) -> Tls:
    tls = Tls(
        mode=option.one_of(options, "sslmode", SSL_MODES),
        root_cert=_readable(options, "sslrootcert"),
        cert=_readable(options, "sslcert"),
        key=_readable(options, "sslkey"),
        crl=_readable(options, "sslcrl"),
        minimum=option.one_of(options, "ssl_min_protocol_version", TLS_VERSIONS),
        maximum=option.one_of(options, "ssl_max_protocol_version", TLS_VERSIONS),
        direct=option.one_of(options, "sslnegotiation", ("postgres", "direct")) == "direct",
        password=option.one(options, "sslpassword"),
    )
    if tls.root_cert == SYSTEM:
        return _system(tls)
    if tls.root_cert and tls.mode not in CHECKED:
        raise InvalidDsn("sslrootcert is given, but this sslmode does not look at it; add sslmode=verify-full")
    if tls.direct and tls.mode not in CHECKED:
        raise InvalidDsn("sslnegotiation=direct needs sslmode=require, verify-ca or verify-full")
    return tls


def _system(tls: Tls) -> Tls:
    """As in libpq, the system's certificates are for verify-full only; asyncpg takes nothing else beside them."""
    if tls.mode not in {None, "verify-full"}:
        raise InvalidDsn("sslrootcert=system goes with sslmode=verify-full only")
    full = replace(tls, mode="verify-full")
    if full != Tls(mode="verify-full", root_cert=SYSTEM, direct=tls.direct):
        raise InvalidDsn("sslrootcert=system goes with no other TLS option; name the certificates' file instead")
    return full


def _readable(options: option.Options, name: str) -> str | None:
    path = option.one(options, name)
    if path is None or (name == "sslrootcert" and path == SYSTEM):
        return path
    if not (Path(path).is_file() and os.access(path, os.R_OK)):
        raise InvalidDsn(f"option {name} names no file that can be read here")
    return path


def _target(options: option.Options) -> str | None:
    value = option.one(options, "target_session_attrs")
    if value in {"read-only", "standby", "prefer-standby"}:
        raise InvalidDsn("option target_session_attrs asks for a standby, where nothing can be stored; use read-write")
    return option.one_of(options, "target_session_attrs", ("any", "primary", "read-write"))


def _schema(options: option.Options) -> str | None:
    schema = option.one(options, "schema")
    if schema is not None and not _SCHEMA.fullmatch(schema):
        raise InvalidDsn("option schema must be a-z, 0-9 and _ only, at most 63, not starting with pg_ or a digit")
    return schema


def _with_direct(database: Postgres, direct_url: str | None) -> Postgres:
    if direct_url is None:
        return database
    try:
        direct = parse_dsn(direct_url)
    except InvalidDsn as error:
        raise InvalidDsn(f"direct_url: {error.reason}") from None
    if not isinstance(direct, Postgres) or direct.pooler or direct.direct:
        raise InvalidDsn("direct_url must lead to a Postgres database without pooler= and direct_url= of its own")
    if direct.schema not in {None, database.schema}:
        raise InvalidDsn("direct_url names another schema than the address itself; leave it out there")
    return replace(database, direct=replace(direct, schema=database.schema))
