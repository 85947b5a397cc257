"""Every address people write becomes the arguments of one driver, or is refused by name; no password is ever shown."""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from deerflow_runs.errors import InvalidDsn
from deerflow_runs.store import dsn_options
from deerflow_runs.store.database import Database, DatabaseKind, Host, Postgres, Sqlite
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.testing import PostgresCluster, PostgresServer
from tests.rules import rule


def postgres(dsn: str) -> Postgres:
    database = parse_dsn(dsn)
    assert isinstance(database, Postgres)
    return database


def refusal(dsn: str) -> str:
    with pytest.raises(InvalidDsn) as caught:
        parse_dsn(dsn)
    return caught.value.reason


# --- SQLite


@pytest.mark.parametrize(
    ("dsn", "path"),
    [
        ("runs.db", Path("runs.db").absolute()),
        ("./a dir/runs.db\n", Path("a dir/runs.db").absolute()),
        ("/var/lib/runs.db", Path("/var/lib/runs.db")),
        ("sqlite:///runs.db", Path("runs.db").absolute()),
        ("sqlite:////var/lib/runs.db", Path("/var/lib/runs.db")),
        ("sqlite+aiosqlite:////var/lib/runs.db", Path("/var/lib/runs.db")),
        ("sqlite+pysqlite:////var/lib/a%20b%3F.db", Path("/var/lib/a b?.db")),
        ("SQLite:////x@y#z.db", Path("/x@y#z.db")),
        (":memory:", None),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
    ],
)
def test_every_form_of_a_sqlite_address_names_one_absolute_file_or_memory(dsn: str, path: Path | None) -> None:
    assert parse_dsn(dsn) == Sqlite(path)


def test_a_path_object_is_always_a_file() -> None:
    for name in ("host=localhost", "postgres://h/db", "a?b", ":memory:"):
        assert parse_dsn(Path("/data") / name) == Sqlite(Path("/data") / name)


@pytest.mark.parametrize(
    ("dsn", "remedy"),
    [
        ("", "empty"),
        ("sqlite:///", "empty"),
        ("sqlite://runs.db", "three slashes"),
        ("sqlite:runs.db", "neither a path nor an address"),
        ("sqlite::memory:", "neither a path nor an address"),
        ("file:runs.db", "neither a path nor an address"),
        ("postgres:/h/db", "neither a path nor an address"),
        ("host=localhost dbname=runs", "neither a path nor an address"),
        ("user:word@host/db", "neither a path nor an address"),
        ("runs.db?mode=ro", "neither a path nor an address"),
        ("a\0b", "NUL"),
        ("sqlite:///a%00b", "NUL"),
        ("sqlite:///runs.db?mode=ro", "SQLite takes no options"),
        ("sqlite:///runs.db?schema=a", "option schema belongs to Postgres"),
        ("sqlite:///runs.db?pooler=true", "option pooler belongs to Postgres"),
        ("mysql://h/db", "unknown scheme"),
        ("postgresql+psycopg2://h/db", "asyncpg is the one driver"),
    ],
)
def test_what_names_no_database_is_refused_with_the_remedy(dsn: str, remedy: str) -> None:
    assert remedy in refusal(dsn)


def test_a_database_in_memory_is_not_shared_by_several_workers() -> None:
    parse_dsn(":memory:").require_shareable(workers=1)
    parse_dsn("runs.db").require_shareable(workers=8)
    parse_dsn("postgres://h/db").require_shareable(workers=8)
    with pytest.raises(InvalidDsn, match="not to 2 workers"):
        parse_dsn(":memory:").require_shareable(workers=2)


def test_sqlalchemy_opens_the_file_that_the_address_names(tmp_path: Path) -> None:
    file = tmp_path / "a %41 ?#@b.db"
    for database in (parse_dsn(file), parse_dsn(f"sqlite:///{quote(str(file))}")):
        engine = create_engine(database.sqlalchemy_url(), connect_args=database.connect_args())
        with engine.begin() as connection:
            connection.exec_driver_sql("create table if not exists t (x)")
        engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


# --- Postgres: where


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg", "postgres+psycopg", "PostgreSQL"])
def test_every_scheme_means_the_same_driver(scheme: str) -> None:
    database = postgres(f"{scheme}://me:word@db.example:6432/runs")
    assert database == Postgres(hosts=(Host("db.example", 6432),), user="me", password="word", database="runs")
    assert database.kind is DatabaseKind.POSTGRES
    assert database.sqlalchemy_url().drivername == "postgresql+asyncpg"


@pytest.mark.parametrize(
    ("where", "hosts"),
    [
        ("postgres:///db", ()),
        ("postgres://h/db", (Host("h"),)),
        ("postgres://h:/db", (Host("h"),)),
        ("postgres://h:1", (Host("h", 1),)),
        ("postgres://[::1]/db", (Host("::1"),)),
        ("postgres://[fe80::1%25eth0]:5433/db", (Host("fe80::1%eth0", 5433),)),
        ("postgres://a:1,b,[::1]:3/db", (Host("a", 1), Host("b"), Host("::1", 3))),
        ("postgres:///db?host=a,b&port=1,2", (Host("a", 1), Host("b", 2))),
        ("postgres:///db?host=a&host=b&port=1&port=2", (Host("a", 1), Host("b", 2))),
        ("postgres:///db?host=a:1&host=b:2", (Host("a", 1), Host("b", 2))),
        ("postgres:///db?host=a,b&port=7", (Host("a", 7), Host("b", 7))),
        ("postgres:///db?host=::1&port=7", (Host("::1", 7),)),
        ("postgres://h/db?port=7", (Host("h", 7),)),
        ("postgres:///db?host=/run/postgresql", (Host("/run/postgresql"),)),
        ("postgres:///db?host=/run/postgresql&port=5433", (Host("/run/postgresql", 5433),)),
        ("postgres://%2Frun%2Fpostgresql:5433/db", (Host("/run/postgresql", 5433),)),
    ],
)
def test_hosts_ports_and_sockets_are_found_wherever_they_stand(where: str, hosts: tuple[Host, ...]) -> None:
    assert postgres(where).hosts == hosts


def test_of_several_hosts_the_one_that_can_write_is_asked_for() -> None:
    assert "target_session_attrs" not in postgres("postgres://a/db").asyncpg_arguments()
    assert postgres("postgres://a,b/db").asyncpg_arguments()["target_session_attrs"] == "read-write"
    several = postgres("postgres://a:1,b/db?target_session_attrs=any&connect_timeout=3").asyncpg_arguments()
    assert several["target_session_attrs"] == "any"
    assert several["host"] == ["a", "b"]
    assert several["port"] == [1, 5432]
    assert several["timeout"] == 6


@pytest.mark.parametrize(
    ("dsn", "reason"),
    [
        ("postgres://h:port/db", "a port that is no number"),
        ("postgres://h:0/db", "a port that is no number"),
        ("postgres://h:65536/db", "a port that is no number"),
        ("postgres://h:٣/db", "a port that is no number"),
        ("postgres://:5432/db", "a host that is no name"),
        ("postgres://a,,b/db", "a host that is no name"),
        ("postgres://::g/db", "a host that is no name"),
        ("postgres://a b/db", "a host that is no name"),
        ("postgres:///db?host=@abstract", "an @ after the host"),
        ("postgres:///db?host=%40abstract", "a host that is no name"),
        ("postgres://h/db?host=a", "keep one"),
        ("postgres:///db?port=1", "does not fit the hosts"),
        ("postgres://a:1/db?port=1", "does not fit the hosts"),
        ("postgres:///db?host=a,b,c&port=1,2", "does not fit the hosts"),
        ("postgres://h/db/more", "a second /"),
        ("postgres://h/db?dbname=db", "the database is given twice"),
        ("postgres://me@h/db?user=me", "the user is given twice"),
        ("postgres://h/a%00b", "NUL"),
        ("postgres://h/%ff", "not UTF-8"),
        ("postgres://h/%zz", "write it as %25"),
    ],
)
def test_an_address_that_says_two_things_or_nothing_is_refused(dsn: str, reason: str) -> None:
    assert reason in refusal(dsn)


# --- Postgres: who


@pytest.mark.parametrize(
    ("userinfo", "user", "password"),
    [
        ("me", "me", None),
        ("me:", "me", None),
        (":word", None, "word"),
        ("me:a@b", "me", "a@b"),
        ("me:a#b:c+d&e=f", "me", "a#b:c+d&e=f"),
        ("me:a%2Fb%3Fc%25d%40", "me", "a/b?c%d@"),
        ("m%C3%A9%40corp:g%C3%A4%F0%9F%A6%8C", "mé@corp", "gä🦌"),
        ("mé:gä🦌", "mé", "gä🦌"),
    ],
)
def test_user_and_password_may_hold_any_character(userinfo: str, user: str | None, password: str | None) -> None:
    database = postgres(f"postgres://{userinfo}@h/db")
    assert (database.user, database.password, database.hosts) == (user, password, (Host("h"),))


@pytest.mark.parametrize("password", ["a/b", "a?b", "a?b=c", "a/b?c", "a@b/c", "a?user=b", "12?user=b", "a%b", "50%"])
def test_a_password_that_cannot_be_told_from_the_rest_is_refused(password: str) -> None:
    assert "%" in refusal(f"postgres://me:{password}@h/db")


SPECIAL = st.lists(st.sampled_from([*"/?#@%:&=+, []\\'\"é🦌", "%40", "%zz"]), min_size=1, max_size=6)
BUILDERS = [
    "postgres://me:{}@h/db",
    "postgres://me:{}@h:1,[::1]/db?sslmode=require",
    "postgres://me:{}@",
    "postgresql://me:{}@h:port/db",
    "postgres:///{}@h/db",
    "me:{}@h/db",
    "host=h password={}",
    "postgres:/me:{}@h/db",
    "mysql://me:{}@h/db",
    "postgres://me@h/db?password={}",
    "postgres://me@h/db?password={}&sslmod=require",
    "postgres://me@h/db?sslpassword={}&keepalives_idle=1",
    "postgres://me@h/db?direct_url=postgres://me:{}@h/db",
    "postgres://h/db?pooler=true&direct_url=postgres%3A%2F%2Fme%3A{}%40h%2Fdb",
    "sqlite:///runs.db?password={}",
]


@given(special=SPECIAL, encode=st.booleans(), builder=st.sampled_from(BUILDERS))
def test_no_piece_of_a_password_is_ever_shown(special: list[str], encode: bool, builder: str) -> None:
    password = "zqx".join(["", *special, ""])
    dsn = builder.format(quote(password, safe="") if encode else password)
    assert "zqx" not in everything_shown(dsn)


def everything_shown(dsn: str) -> str:
    try:
        database = parse_dsn(dsn)
    except InvalidDsn as error:
        return "".join(traceback.format_exception_only(error)) + repr(error.__cause__) + repr(error.reason)
    shown = [repr(database), str(database), f"{database}", database.display(), repr(database.sqlalchemy_url())]
    if isinstance(database, Postgres):
        shown += [repr(database.tls), repr(database.direct), repr(database.session())]
    return "".join(shown)


# --- Postgres: options


REAL: dict[str, list[str]] = {
    "connect_timeout": ["10"],
    "gsslib": ["gssapi", "sspi"],
    "host": ["a"],
    "pooler": ["true", "false", "1", "off"],
    "schema": ["runs_2"],
    "sslmode": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"],
    "sslnegotiation": ["postgres"],
    "ssl_max_protocol_version": ["TLSv1.3"],
    "ssl_min_protocol_version": ["TLSv1.2"],
    "target_session_attrs": ["any", "primary", "read-write"],
    "direct_url": ["postgres%3A%2F%2Fa%2Fb"],
}
"""Values of options that do not take any text."""

FILES = ("passfile", "sslcert", "sslcrl", "sslkey", "sslrootcert")
ELSEWHERE = ("port", "dbname", "database")
"""Options that depend on the rest of the address, tested above."""


def addresses(name: str) -> list[str]:
    return [f"postgres:///db?{name}={value}" for value in REAL.get(name, ["word"])]


@pytest.mark.parametrize("name", sorted(dsn_options.TAKEN - {*FILES, *ELSEWHERE}))
def test_every_translated_option_makes_arguments_that_asyncpg_knows(name: str) -> None:
    for dsn in addresses(name):
        arguments = postgres(dsn).asyncpg_arguments()
        inspect.signature(asyncpg.connect).bind(**arguments)
        assert name in {"direct_url", "pooler", "schema", "sslnegotiation"} or len(arguments) > 1


@pytest.mark.parametrize("name", sorted(dsn_options.ALREADY_SO))
def test_an_option_that_asks_for_what_asyncpg_does_anyway_is_taken_and_any_other_value_refused(name: str) -> None:
    for value in dsn_options.ALREADY_SO[name][0]:
        assert postgres(f"postgres://h/db?{name}={value}") == postgres("postgres://h/db")
    assert refusal(f"postgres://h/db?{name}=zqx") == (
        f"option {name} cannot be used with this value: {dsn_options.ALREADY_SO[name][1]}"
    )


@pytest.mark.parametrize("name", sorted(dsn_options.REFUSED))
def test_an_option_that_cannot_be_carried_out_is_refused_by_name_with_the_remedy(name: str) -> None:
    reason = refusal(f"postgres://h/db?{name}=zqx")
    assert reason == f"option {name} cannot be used: {dsn_options.REFUSED[name]}"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("sslmod=require", "option sslmod is not known here; did you mean sslmode?"),
        ("SSLMODE=require", "option SSLMODE is not known here; did you mean sslmode?"),
        ("zzz=1", "option zzz is not known here"),
        ("password=a&sslmod=b", "an option is not known here; did you mean sslmode?"),
        ("s%20s=1", "an option is not known here"),
        ("sslmode", "an option without a value"),
        ("sslmode=on", "option sslmode must be one of disable, allow, prefer, require, verify-ca, verify-full"),
        ("sslmode=require&sslmode=require", "option sslmode is given twice"),
        ("pooler=maybe", "option pooler must be one of"),
        ("connect_timeout=0", "nothing here may wait for ever"),
        ("connect_timeout=1.5", "whole seconds"),
        ("target_session_attrs=standby", "nothing can be stored"),
        ("target_session_attrs=read-only", "nothing can be stored"),
        ("target_session_attrs=first", "must be one of any, primary, read-write"),
        ("options=-c+search_path=x", "write a space as %20"),
        ("schema=Runs", "option schema must be"),
        ("schema=pg_runs", "option schema must be"),
        ("schema=a%22%3Bdrop", "option schema must be"),
        ("schema=1a", "option schema must be"),
        ("sslrootcert=/no/such/file&sslmode=verify-full", "option sslrootcert names no file"),
        ("sslcert=/", "option sslcert names no file"),
        ("sslrootcert=system&sslmode=require", "goes with sslmode=verify-full only"),
        ("sslrootcert=system&ssl_min_protocol_version=TLSv1.3", "goes with no other TLS option"),
        ("sslnegotiation=direct", "needs sslmode=require"),
        ("direct_url=sqlite%3A%2F%2F", "direct_url must lead to a Postgres database"),
        ("direct_url=postgres%3A%2F%2Fh%3Fpooler%3D1", "without pooler="),
        ("direct_url=postgres%3A%2F%2Fh%3Fsslmod%3D1", "direct_url: option sslmod is not known here"),
        ("direct_url=postgres%3A%2F%2Fh%3Fschema%3Da&schema=b", "another schema"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(query: str, reason: str) -> None:
    assert reason in refusal(f"postgres:///db?{query}")


def test_a_certificate_that_the_mode_would_not_look_at_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "root.crt"
    file.touch()
    for mode in ("", "&sslmode=prefer", "&sslmode=allow", "&sslmode=disable"):
        assert "does not look at it" in refusal(f"postgres://h/db?sslrootcert={file}{mode}")
    for mode in ("require", "verify-ca", "verify-full"):
        arguments = postgres(f"postgres://h/db?sslrootcert={file}&sslmode={mode}").asyncpg_arguments()
        assert arguments["dsn"] == f"postgresql://?sslmode={mode}&sslrootcert={quote(str(file), safe='')}"


def test_the_system_s_certificates_mean_a_full_check() -> None:
    arguments = postgres("postgres://h/db?sslrootcert=system&sslnegotiation=direct").asyncpg_arguments()
    assert arguments == {"host": ["h"], "database": "db", "ssl": True, "direct_tls": True}


@rule("P087")
def test_behind_a_pooler_no_statement_has_a_name_or_is_kept() -> None:
    arguments = postgres("postgres://h/db?pooler=true").connect_args()
    assert arguments["statement_cache_size"] == arguments["prepared_statement_cache_size"] == 0
    assert arguments["prepared_statement_name_func"]() == ""
    assert "prepared_statement_name_func" not in postgres("postgres://h/db?pooler=false").connect_args()


@rule("P087")
def test_a_session_needs_a_way_around_the_pooler() -> None:
    plain = postgres("postgres://h/db")
    assert plain.session() == plain
    assert postgres("postgres://h/db?pooler=true").session() is None
    both = postgres("postgres://h/db?pooler=true&schema=a&direct_url=postgresql+asyncpg%3A%2F%2Fme%3Aword%40h2%2Fdb")
    assert both.session() == Postgres(hosts=(Host("h2"),), user="me", password="word", database="db", schema="a")


@given(
    hosts=st.lists(st.sampled_from(["h", "::1", "/tmp/a b", "10.0.0.1"]), max_size=3),
    port=st.none() | st.integers(1, 65535),
    user=st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    name=st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    pooler=st.booleans(),
)
def test_what_is_displayed_names_the_same_database(
    hosts: list[str], port: int | None, user: str | None, name: str | None, pooler: bool
) -> None:
    where = tuple(Host(host, port) for host in hosts)
    database: Database = Postgres(hosts=where, user=user, database=name, pooler=pooler)
    assert parse_dsn(database.display()) == database


# --- What the driver makes of it


@asynccontextmanager
async def listener() -> AsyncIterator[tuple[int, list[dict[str, str]]]]:
    """A server without TLS that notes what each client asks for at its start, and hangs up. Yields port and notes."""
    notes: list[dict[str, str]] = []
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            packet = await packet_of(reader)
            if packet == TLS_REQUEST:
                writer.write(b"N")
                packet = await packet_of(reader)
            words = packet[4:].rstrip(b"\0").split(b"\0")
            notes.append({words[i].decode(): words[i + 1].decode() for i in range(0, len(words) - 1, 2)})
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], notes
    await asyncio.gather(*served)


async def packet_of(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("!i", await reader.readexactly(4))
    return await reader.readexactly(length - 4)


TLS_REQUEST = struct.pack("!i", 80877103)


async def notes_of(query: str) -> list[dict[str, str]]:
    async with listener() as (port, notes):
        database = postgres(f"postgres://me:word@127.0.0.1:{port}/runs?{query}")
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await asyncpg.connect(**database.asyncpg_arguments())
    return notes


async def test_settings_reach_the_server_as_they_were_written() -> None:
    (note, *_) = await notes_of("sslmode=disable&application_name=a%20b&options=-c%20search_path=x,y%20-c%20a.b=1")
    expected = {"user": "me", "database": "runs", "application_name": "a b", "options": "-c search_path=x,y -c a.b=1"}
    assert note.items() >= expected.items()


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer"])
async def test_these_modes_go_on_without_tls(mode: str) -> None:
    assert await notes_of(f"sslmode={mode}")


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
async def test_these_modes_say_nothing_to_a_server_without_tls(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "root.crt"
    file.write_text(ROOT)
    assert await notes_of(f"sslmode={mode}&sslrootcert={file}") == []


async def test_the_system_s_certificates_say_nothing_to_a_server_without_tls() -> None:
    assert await notes_of("sslrootcert=system") == []


def with_options(dsn: str, query: str) -> dict[str, Any]:
    return postgres(f"{dsn}{'&' if '?' in dsn else '?'}{query}").connect_args()


async def test_a_real_server_obeys_the_options(postgres_cluster: PostgresServer) -> None:
    database = postgres(postgres_cluster.dsn())
    arguments = with_options(postgres_cluster.dsn(), "application_name=a%20b&options=-c%20statement_timeout=4321")
    engine = create_async_engine(database.sqlalchemy_url(), connect_args=arguments)
    async with engine.connect() as connection:
        shown = [await connection.scalar(text(f"show {name}")) for name in ("application_name", "statement_timeout")]
    await engine.dispose()
    assert shown == ["a b", "4321ms"]
    assert database.password is None or database.password not in repr(engine)


async def test_a_pooler_s_connection_keeps_no_prepared_statement(postgres_cluster: PostgresServer) -> None:
    arguments = with_options(postgres_cluster.dsn(), "pooler=true")
    engine = create_async_engine(postgres(postgres_cluster.dsn()).sqlalchemy_url(), connect_args=arguments)
    async with engine.connect() as connection:
        for number in range(3):
            assert await connection.scalar(text("select cast(:n as int)"), {"n": number}) == number
        kept = await connection.scalar(text("select count(*) from pg_prepared_statements"))
    await engine.dispose()
    assert kept == 0


async def test_a_dead_first_host_is_passed_over(postgres_cluster: PostgresServer) -> None:
    live = postgres(postgres_cluster.dsn())
    with socket.socket() as nobody:  # bound, never listening: connections are refused at once
        nobody.bind(("127.0.0.1", 0))
        hosts = (Host("127.0.0.1", nobody.getsockname()[1]), *live.hosts)
        connection = await asyncpg.connect(**replace(live, hosts=hosts).asyncpg_arguments())
    assert await connection.fetchval("select not pg_is_in_recovery()")
    await connection.close()


async def test_a_unix_socket_leads_to_the_server() -> None:
    with PostgresCluster(settings={"unix_socket_directories": "."}) as cluster:  # "." is the folder of its data
        folder = quote(str(cluster.data_directory), safe="")
        who = f"{cluster.user}:{quote(cluster.password, safe='')}"
        for where in (
            f"{who}@{folder}:{cluster.port}/postgres",
            f"{who}@/postgres?host={folder}&port={cluster.port}&sslmode=require",
        ):
            connection = await asyncpg.connect(**postgres(f"postgres://{where}").asyncpg_arguments())
            assert await connection.fetchval("select inet_server_addr() is null")
            await connection.close()


ROOT = """\
-----BEGIN CERTIFICATE-----
MIIBkjCCATegAwIBAgIUGsynkdIvEEeNGyZstAx0h8igstgwCgYIKoZIzj0EAwIw
HTEbMBkGA1UEAwwSTm9ib2R5J3MgdGVzdCByb290MCAXDTI2MTEzMDE4MzQxOFoY
DzIxMjYxMTA2MTgzNDE4WjAdMRswGQYDVQQDDBJOb2JvZHkncyB0ZXN0IHJvb3Qw
WTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASVTNSR/RK/uCcSNOyvBBIm4sbkoB3C
YpfYnlMG+BLbWit87MdoZmR+if4lCJsQR6Q+LEafDqxb+3ZL6i0wYckCo1MwUTAd
BgNVHQ4EFgQUUB/15h/k2oNTL3Ka/hv3dmFJO2MwHwYDVR0jBBgwFoAUUB/15h/k
2oNTL3Ka/hv3dmFJO2MwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBG
AiEAicFsYF/UFEiN3i1RNF1bqisJSbuFCpQZi7VVzkSa4PcCIQCDugQYsMFrokBF
rcccULBi0D0ducoZTKP7ieVbcj1aSw==
-----END CERTIFICATE-----
"""
