"""What becomes of every option that may follow the ``?`` of a Postgres address: taken, already so, or refused by name.

The driver is asyncpg, the addresses people have are libpq's. An option that would silently mean less than it says is
refused with the remedy. No message of this module ever holds a value: it may be a piece of a password.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from deerflow_runs.errors import InvalidDsn

Options = dict[str, list[str]]
"""Values by name, percent-decoded; a list since host and port may be repeated."""

SECRET: Final = frozenset({"password", "sslpassword", "direct_url"})
"""Options that hold a password: beside one of them an unknown name may be a piece of it."""

REPEATABLE: Final = frozenset({"host", "port"})

TRANSLATED: Final = {
    "application_name",
    "connect_timeout",
    "database",
    "dbname",
    "fallback_application_name",
    "gsslib",
    "krbsrvname",
    "options",
    "passfile",
    "pooler",
    "schema",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslmode",
    "sslnegotiation",
    "sslrootcert",
    "target_session_attrs",
    "user",
}

TAKEN: Final = SECRET | REPEATABLE | TRANSLATED
"""Options that ``dsn`` translates."""

ALREADY_SO: Final[dict[str, tuple[frozenset[str], str]]] = {
    "channel_binding": (
        frozenset({"disable", "prefer"}),
        "asyncpg cannot bind the channel; drop it and let sslmode=verify-full check the server",
    ),
    "client_encoding": (frozenset({"UTF8", "UTF-8", "utf8", "utf-8", "auto"}), "everything here is UTF-8; drop it"),
    "gssdelegation": (frozenset({"0"}), "asyncpg does not delegate credentials; drop it"),
    "gssencmode": (frozenset({"disable", "prefer"}), "asyncpg does not encrypt with GSSAPI; use sslmode=verify-full"),
    "keepalives": (
        frozenset({"0"}),
        "asyncpg sets none; drop it and let the server probe with options=-c%20tcp_keepalives_idle=30",
    ),
    "load_balance_hosts": (frozenset({"disable"}), "asyncpg tries the hosts in the order given; drop it"),
    "max_protocol_version": (frozenset({"3.0"}), "asyncpg speaks protocol 3.0; drop it"),
    "min_protocol_version": (frozenset({"3.0"}), "asyncpg speaks protocol 3.0; drop it"),
    "replication": (frozenset({"false", "off", "no", "0"}), "a replication connection runs no statements; drop it"),
    "requiressl": (frozenset({"0"}), "write sslmode=require"),
    "sslcertmode": (frozenset({"allow"}), "give sslcert and sslkey, or neither, instead"),
    "sslcompression": (frozenset({"0"}), "TLS compression is not available; drop it"),
    "sslsni": (frozenset({"1"}), "asyncpg always sends the server's name; drop it"),
}
"""Options whose given values describe what asyncpg does anyway; any other value is refused with the remedy."""

_SYSTEM_KEEPALIVE: Final = ALREADY_SO["keepalives"][1]
_CERTIFICATE_ONLY: Final = "asyncpg cannot check it; let sslmode=verify-full and pg_hba.conf decide who may log in"

REFUSED: Final[dict[str, str]] = {
    # libpq knows these, asyncpg has no equivalent.
    "hostaddr": "write the address as the host",
    "keepalives_count": _SYSTEM_KEEPALIVE,
    "keepalives_idle": _SYSTEM_KEEPALIVE,
    "keepalives_interval": _SYSTEM_KEEPALIVE,
    "oauth_client_id": "asyncpg does not speak OAuth; use a password or a client certificate",
    "oauth_client_secret": "asyncpg does not speak OAuth; use a password or a client certificate",
    "oauth_issuer": "asyncpg does not speak OAuth; use a password or a client certificate",
    "oauth_scope": "asyncpg does not speak OAuth; use a password or a client certificate",
    "require_auth": _CERTIFICATE_ONLY,
    "requirepeer": "asyncpg cannot check it; protect the socket's folder with its permissions",
    "scram_client_key": "give the password instead",
    "scram_server_key": "give the password instead",
    "service": "write the service's settings into the address",
    "servicefile": "write the service's settings into the address",
    "sslcrldir": "asyncpg reads one file; use sslcrl",
    "sslkeylogfile": "set the environment variable SSLKEYLOGFILE instead",
    "tcp_user_timeout": "set the server's with options=-c%20tcp_user_timeout=30000",
    # Words of other drivers for something that has a name here.
    "command_timeout": "use options=-c%20statement_timeout=30000 (milliseconds)",
    "currentSchema": "use schema=",
    "direct_tls": "use sslnegotiation=direct",
    "max_cached_statement_lifetime": "use pooler=true, which switches the statement caches off",
    "pgbouncer": "use pooler=true",
    "prepare_threshold": "use pooler=true, which switches the statement caches off",
    "prepared_statement_cache_size": "use pooler=true, which switches the statement caches off",
    "prepared_statement_name_func": "use pooler=true, which gives no statement a name",
    "search_path": "use schema= for our tables, or options=-c%20search_path=...",
    "server_settings": "use options=-c%20name=value",
    "ssl": "use sslmode= with one of disable, allow, prefer, require, verify-ca, verify-full",
    "statement_cache_size": "use pooler=true, which switches the statement caches off",
    "timeout": "use connect_timeout= (seconds)",
}
"""Options refused by name, each with what to do instead."""

KNOWN: Final = TAKEN | ALREADY_SO.keys() | REFUSED.keys()

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,40}\Z")
_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def decoded(part: str, text: str) -> str:
    """Percent-decode one ``part`` of an address (its name is for the message). A ``+`` stays a plus, as in libpq."""
    if _PERCENT.search(text):
        raise InvalidDsn(f"{part}: a % that starts no percent-encoding; write it as %25")
    try:
        plain = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidDsn(f"{part}: percent-encoded bytes that are not UTF-8") from None
    if "\0" in plain:
        raise InvalidDsn(f"{part}: a NUL character has no place in an address")
    return plain


def read_options(query: str) -> Options:
    """Read ``name=value&…`` into a dictionary of the options ``dsn`` translates; everything else is checked here."""
    pairs = [piece.partition("=") for piece in query.split("&") if piece]
    if not all(equals for _, equals, _ in pairs):
        raise InvalidDsn("an option without a value; write name=value and percent-encode & (%26) inside values")
    secret = any(name in SECRET for name, _, _ in pairs)
    options: Options = {}
    for raw_name, _, raw_value in pairs:
        name = checked_name(decoded("the name of an option", raw_name), KNOWN, hide=secret)
        if name == "options" and "+" in raw_value:
            raise InvalidDsn("options: write a space as %20 and a plus as %2B")
        options.setdefault(name, []).append(decoded(name, raw_value))
    refuse_what_differs(options)
    return {name: values for name, values in options.items() if name in TAKEN}


def checked_name(name: str, known: Iterable[str], *, hide: bool) -> str:
    """Return a known ``name``, else refuse it with the closest known one; ``hide`` keeps it out of the message."""
    known = sorted(known)
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), known, n=1)
    shown = "an option" if hide or not _NAME.match(name) else f"option {name}"
    raise InvalidDsn(f"{shown} is not known here" + (f"; did you mean {close[0]}?" if close else ""))


def refuse_what_differs(options: Options) -> None:
    """Refuse by name what asyncpg cannot do, and what is given twice."""
    for name, values in options.items():
        if name in REFUSED:
            raise InvalidDsn(f"option {name} cannot be used: {REFUSED[name]}")
        if name in ALREADY_SO and not set(values) <= ALREADY_SO[name][0]:
            raise InvalidDsn(f"option {name} cannot be used with this value: {ALREADY_SO[name][1]}")
        if len(values) > 1 and name not in REPEATABLE:
            raise InvalidDsn(f"option {name} is given twice; keep one")


def one(options: Options, name: str) -> str | None:
    """The value of an option that may be given once; an empty one counts as not given, as in libpq."""
    return options.get(name, [""])[0] or None


def one_of(options: Options, name: str, words: tuple[str, ...]) -> str | None:
    """The value of an option that is one of a few words."""
    value = one(options, name)
    if value is not None and value not in words:
        raise InvalidDsn(f"option {name} must be one of {', '.join(words)}")
    return value


def flag(options: Options, name: str) -> bool:
    """The value of an option that is true or false; false when it is not given."""
    value = one_of(options, name, ("true", "false", "yes", "no", "on", "off", "1", "0"))
    return value in {"true", "yes", "on", "1"}


def seconds(options: Options, name: str) -> int | None:
    """The value of an option in whole seconds, at least one; None when it is not given."""
    value = one(options, name)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) == 0:
        raise InvalidDsn(f"option {name} must be whole seconds from 1 on; nothing here may wait for ever")
    return int(value)
