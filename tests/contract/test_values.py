"""What a caller gives is stored alike on both databases or refused by its path; what a run produced always fits."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from ipaddress import ip_address
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, SecretStr, field_serializer

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import Json
from deerflow_runs.store.jsonable import Strict, Walk
from deerflow_runs.store.values import (
    BODY_BYTES,
    ERROR_BYTES,
    METADATA_BYTES,
    cut_text,
    decode,
    digest,
    encode,
    model_name,
    repaired,
    storable,
    text,
)
from deerflow_runs.testing import PostgresServer
from tests.rules import rule


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Shape(Enum):
    ROUND = ("round", 1)


class Piece(BaseModel):
    name: str
    parts: list[Any] = []
    hidden: str = Field(default="", exclude=True)


class Special(Piece):
    extra: int = 1


@dataclass
class Point:
    x: float
    tags: frozenset[str] = field(default_factory=frozenset)


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (the plain kind is what callers have)

OFFSET = timezone(timedelta(hours=2))
CONVERTED: list[tuple[Any, Json]] = [
    (None, None),
    (True, True),
    (0, 0),
    (-(2**63), -(2**63)),
    (2**63 - 1, 2**63 - 1),
    (-0.0, -0.0),
    (1.7976931348623157e308, 1.7976931348623157e308),
    ("", ""),
    ("🦌 \x01\u2028\uffff", "🦌 \x01\u2028\uffff"),
    ((1, (2,)), [1, [2]]),
    (Pair(1, 2), [1, 2]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a", (1, 2)}), ["a", "b", [1, 2]]),
    ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
    (OrderedDict(b=1), {"b": 1}),
    (MappingProxyType({"a": (1,)}), {"a": [1]}),
    (UserDict({"a": 1}), {"a": 1}),
    ({Colour.RED: Colour.RED}, {"red": "red"}),
    (Level.HIGH, 3),
    (Shape.ROUND, ["round", 1]),
    (datetime(2000, 2, 29, 12, 5, 6, 7, tzinfo=UTC), "2000-02-29T12:05:06.000007+00:00"),
    (datetime(2000, 2, 29, 12, tzinfo=OFFSET), "2000-02-29T12:00:00+02:00"),
    (datetime(2000, 2, 29, 12), "2000-02-29T12:00:00"),  # noqa: DTZ001 (no zone is invented)
    (date(2000, 2, 29), "2000-02-29"),
    (time(12, 5), "12:05:00"),
    (timedelta(minutes=1, milliseconds=5), 60.005),
    (Decimal("1.10"), "1.10"),
    (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (PurePosixPath("/a/b"), "/a/b"),
    (ip_address("::1"), "::1"),
    (AnyUrl("http://a.example/b"), "http://a.example/b"),
    (Point(1.5, frozenset({"b", "a"})), {"x": 1.5, "tags": ["a", "b"]}),
    (
        Piece(name="a", parts=[Special(name="b")], hidden="word"),
        {"name": "a", "parts": [{"name": "b", "parts": [], "extra": 1}]},
    ),
]


@pytest.mark.parametrize("case", range(len(CONVERTED)))
def test_each_convertible_type_becomes_json_in_one_way(case: int) -> None:
    value, expected = CONVERTED[case]
    for wrapped, want in ((value, expected), ({"a": [value]}, {"a": [expected]}), ((value,), [expected])):
        assert repr(storable(wrapped, "kwargs")) == repr(want)
        assert repr(repaired(wrapped, "result")) == repr((want, ()))


def test_keys_keep_their_order() -> None:
    assert encode(storable({"b": 1, "a": {"d": 1, "c": 2}}, "kwargs")) == '{"b":1,"a":{"d":1,"c":2}}'


class Hostile:
    """Fails in whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("zqx")

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise ValueError("zqx")

    def __getattribute__(self, name: str) -> Any:
        raise ValueError("zqx")  # also for __class__, which isinstance() asks for


class HostileModel(BaseModel):
    name: str = "zqx"

    @field_serializer("name")
    def fail(self, name: str) -> str:
        raise ZeroDivisionError(name)


class HostileMapping(UserDict[str, Any]):
    def items(self) -> Any:
        return [("a", 1), 5]


class HostileMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in {"__name__", "__qualname__", "__str__"}:
            raise ValueError("zqx")
        return super().__getattribute__(name)


class Nameless(metaclass=HostileMeta):
    def __str__(self) -> str:
        raise ValueError("zqx")


def endless() -> Iterator[int]:
    while True:
        yield 1


class Endless(UserDict[str, Any]):
    def items(self) -> Any:
        return ((f"k{number}", "word") for number, _ in enumerate(endless()))


class Turning(BaseModel):
    """Its dump is a model again, without end."""

    def model_dump(self, **_: Any) -> Any:
        return Turning()


def loop() -> list[Any]:
    inner: list[Any] = [1]
    inner.append({"a": (inner,)})
    return inner


def looped_point() -> Point:
    point = Point(1)
    point.x = point  # type: ignore[assignment]
    return point


def deep(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "NUL": (lambda: "zqx\0", "kwargs.a[0]: holds a NUL character"),
    "half a pair": (lambda: "zqx\ud83d", "kwargs.a[0]: holds half of a surrogate pair"),
    "NaN": (lambda: math.nan, "kwargs.a[0]: NaN or an infinity"),
    "infinity": (lambda: -math.inf, "kwargs.a[0]: NaN or an infinity"),
    "decimal NaN": (lambda: Decimal("sNaN"), "kwargs.a[0]: NaN or an infinity"),
    "large int": (lambda: 2**63, "kwargs.a[0]: an integer beyond 64 bits"),
    "small int": (lambda: -(2**63) - 1, "kwargs.a[0]: an integer beyond 64 bits"),
    "huge int": (lambda: 10**5000, "kwargs.a[0]: an integer beyond 64 bits"),
    "bytes": (lambda: b"zqx", "kwargs.a[0]: bytes"),
    "memory": (lambda: memoryview(b"zqx"), "kwargs.a[0]: bytes"),
    "int key": (lambda: {1: 2}, "kwargs.a[0]: a key of type int"),
    "None key": (lambda: {None: 2}, "kwargs.a[0]: a key of type NoneType"),
    "NUL key": (lambda: {"zqx\0": 2}, "kwargs.a[0]: holds a NUL character"),
    "deep key": (lambda: {"b c": {"d": b""}}, "kwargs.a[0]['b c'].d: bytes"),
    "cycle": (loop, "kwargs.a[0][1].a[0]: contains itself"),
    "dataclass cycle": (looped_point, "kwargs.a[0].x: contains itself"),
    "secret": (lambda: SecretStr("zqx"), "kwargs.a[0]: a value of type SecretStr"),
    "object": (object, "kwargs.a[0]: a value of type object"),
    "class": (lambda: Piece, "kwargs.a[0]: a value of type ModelMetaclass"),
    "dataclass class": (lambda: Point, "kwargs.a[0]: a value of type type"),
    "exception": (lambda: ValueError("zqx"), "kwargs.a[0]: a value of type ValueError"),
    "generator": (endless, "kwargs.a[0]: a value of type generator"),
    "deque": (lambda: deque(["zqx"]), "kwargs.a[0]: a value of type deque"),
    "hostile": (Hostile, "kwargs.a[0]: a value of type Hostile"),
    "hostile key": (lambda: {Hostile(): 1}, "kwargs.a[0]: a value of type Hostile"),
    "hostile model": (HostileModel, "kwargs.a[0]: a value of type HostileModel that fails to be read"),
    "hostile mapping": (HostileMapping, "kwargs.a[0]: "),
    "nameless": (Nameless, "kwargs.a[0]: a value of type object"),
    "turning": (Turning, "kwargs.a[0]: more than 200 levels deep"),
    "deep lists": (lambda: deep(5000, lambda v: [v]), "more than 200 levels deep"),
    "deep dicts": (lambda: deep(5000, lambda v: {"a": v}), "more than 200 levels deep"),
    "deep tuples": (lambda: deep(5000, lambda v: (v,)), "more than 200 levels deep"),
    "deep models": (lambda: deep(5000, lambda v: Piece.model_construct(name="a", parts=[v])), "kwargs.a[0]"),
    "deep in a model": (lambda: Piece(name="a", parts=[deep(5000, lambda v: {"a": v})]), "kwargs.a[0]"),
    "deep dataclasses": (lambda: deep(5000, Point), "more than 200 levels deep"),
    "endless": (Endless, f"kwargs: is larger than {METADATA_BYTES} bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_alike_is_refused_by_its_path_and_never_shown(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(InvalidValue) as caught:
        storable({"a": [make()]}, "kwargs", limit_bytes=METADATA_BYTES)
    assert reason in str(caught.value)
    assert "zqx" not in str(caught.value)
    assert caught.value.path.startswith("kwargs")
    assert len(caught.value.path) < 320


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_from_a_run_is_repaired_and_noted(name: str) -> None:
    value, notes = repaired({"a": [REFUSED[name][0]()], "b": 1}, "result", limit_bytes=METADATA_BYTES)
    assert notes
    assert all(note.startswith("result") for note in notes)
    assert repr(storable(value, "result")) == repr(value)


def test_a_repair_says_what_stood_there() -> None:
    value = {"a\0": "x\0y\ud83d\ude00\udc00", 1: math.inf, "1": b"\xff\xfe", "n": 2**70, "e": KeyError("k"), "s": {1.5}}
    mended, notes = repaired(value, "result")
    assert mended == {
        "a\ufffd": "x\ufffdy😀\ufffd",
        "1": "inf",
        "1 (3)": "//4=",
        "n": "1180591620717411303424",
        "e": "'k'",
        "s": [1.5],
    }
    assert "result['a\ufffd']: holds a NUL character, which Postgres cannot store" in notes
    assert "result: two keys that are the same text" in notes


def test_many_repairs_are_noted_briefly() -> None:
    _, notes = repaired([math.nan] * 1000, "result")
    assert len(notes) == 21
    assert notes[-1] == "and 980 more"


# --- Sizes


@pytest.mark.parametrize("limit", [METADATA_BYTES, BODY_BYTES])
def test_the_limit_counts_bytes_of_encoded_json(limit: int) -> None:
    empty = len(encode({"a": ["", 1.5, None]}).encode())
    for character in ("x", "é", "🦌", "\n"):
        room = (limit - empty) // len(json.dumps(character, ensure_ascii=False)[1:-1].encode())
        fits = {"a": [character * room, 1.5, None]}
        assert storable(fits, "metadata", limit_bytes=limit) == fits
        with pytest.raises(InvalidValue, match=f"metadata: is larger than {limit} bytes"):
            storable({"a": [character * (room + 1), 1.5, None]}, "metadata", limit_bytes=limit)


def test_ten_megabytes_of_metadata_are_refused() -> None:
    for value in ({"a": "x" * 10_000_000}, {"a": [0] * 5_000_000}, {"x" * 10_000_000: 1}):
        with pytest.raises(InvalidValue, match="metadata: is larger than 262144 bytes of JSON"):
            storable(value, "metadata", limit_bytes=METADATA_BYTES)


def test_shared_parts_count_as_often_as_they_occur() -> None:
    value = deep(60, lambda v: [v, v])
    with pytest.raises(InvalidValue, match="is larger than"):
        storable(value, "kwargs", limit_bytes=METADATA_BYTES)
    cut, notes = repaired(value, "result", limit_bytes=METADATA_BYTES)
    assert len(encode(cut)) <= METADATA_BYTES
    assert "cut off here" in notes[0]


@pytest.mark.parametrize("limit", [10, 100, 1000])
def test_a_cut_result_keeps_its_beginning_and_fits(limit: int) -> None:
    value = {"first": 1, "text": "é\n🦌" * 1000, "last": [1, 2, 3]}
    cut, notes = repaired(value, "result", limit_bytes=limit)
    assert isinstance(cut, dict)
    assert limit - 16 < len(encode(cut).encode()) + 16 * (limit == 10) <= limit + 16
    assert len(encode(cut).encode()) <= limit
    assert list(cut) == ["first", "text"][: len(cut)]
    assert len(notes) == 1


def test_a_text_is_cut_between_characters_and_says_so() -> None:
    assert cut_text("🦌" * 3, 12) == "🦌" * 3
    for limit in range(8, 120):
        cut = cut_text("é🦌" * 1000, limit)
        assert len(cut.encode()) <= limit
        assert "\ufffd" not in cut
        assert limit < 40 or cut.endswith("… [cut, 2000 characters in all]")
    assert len(cut_text("x" * 1_000_000).encode()) == ERROR_BYTES
    assert cut_text("a\0b\ud83dc") == "a\ufffdb\ufffdc"


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: (v,)], ids=["list", "dict", "tuple"])
def test_two_hundred_levels_are_stored_and_one_more_is_refused(wrap: Callable[[Any], Any]) -> None:
    deepest = deep(200, wrap)
    stored = storable(deepest, "kwargs")
    assert encode(stored).count("[") + encode(stored).count("{") == 200
    assert repaired(deepest, "result") == (stored, ())
    with pytest.raises(InvalidValue, match="more than 200 levels deep"):
        storable(wrap(deepest), "kwargs")
    assert "<more than 200 levels deep>" in encode(repaired(wrap(deepest), "result")[0])


# --- Ids, names, digests


@pytest.mark.parametrize("value", ["a", "", "null", "../../x", "🦌" * 255, "e\u0301", " a ", Colour.RED])
def test_an_id_is_any_text_of_255_characters(value: str) -> None:
    assert text(value, "thread_id") == value
    assert type(text(value, "thread_id")) is str


@rule("P098", "P099")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("🦌" * 256, "run_id: has 256 characters, and 255 are allowed"),
        ("", "run_id: must not be empty"),
        ("zqx\0", "run_id: holds a NUL character"),
        ("zqx\udfff", "run_id: holds half of a surrogate pair"),
        (b"zqx", "run_id: must be text, not a value of type bytes"),
        (None, "run_id: must be text, not a value of type NoneType"),
    ],
)
def test_an_id_that_no_database_may_hold_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        text(value, "run_id", nonempty=True)
    assert str(caught.value).startswith(reason)
    assert "zqx" not in str(caught.value)


@rule("B019")
def test_a_model_name_is_trimmed_made_text_and_cut_to_128_characters() -> None:
    assert model_name(None) is None
    assert model_name("  gpt \n") == "gpt"
    assert model_name("  ") is None
    assert model_name("🦌" * 200) == "🦌" * 128
    assert model_name("a" * 127 + "   b") == "a" * 127
    assert model_name(Colour.RED) == "red"
    assert model_name(5) == "5"
    assert model_name("a\0") == "a\ufffd"
    assert model_name(Nameless()) == "<object>"


@rule("O5")
def test_a_digest_depends_on_the_payload_and_on_nothing_else() -> None:
    payload = storable({"b": 2, "a": [1.5, {"d": None, "c": "é"}, {3, 1}]}, "kwargs")
    assert digest(payload) == digest({"a": [1.5, {"c": "é", "d": None}, [1, 3]], "b": 2})
    assert digest(payload) == "9a64189b44bc75faa76c9791fbe8308804382d8361ae43ede3434b299f5fc360", (
        "digests are stored: they must be the same in every release"
    )
    different: list[Json] = [None, False, 0, 0.0, "", "0", [], {}, [[]], {"a": None}, {"": None}, [1, 2], [2, 1]]
    assert len({digest(value) for value in different}) == len(different)


# --- Whatever the value


NOT_IN_TEXT = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(NOT_IN_TEXT)
)
PLAIN = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(NOT_IN_TEXT), inner), max_leaves=20
)
ODD_LEAVES = st.one_of(
    LEAVES,
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.binary(),
    st.decimals(),
    st.datetimes(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([Colour.RED, Level.HIGH, Shape.ROUND, object(), Point]),
    st.sampled_from(["nameless", "hostile model", "hostile mapping"]).map(lambda name: REFUSED[name][0]()),
)
KEYS = st.text(st.characters()) | st.sampled_from([1, None, 1.5, True, Colour.RED, "1", b"1", (1,)])
ODD = st.recursive(
    ODD_LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(st.integers() | st.text(st.characters())),
        inner.map(lambda value: Piece.model_construct(name="a", parts=[value])),
        inner.map(Point),
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_json_within_the_limits_is_stored_as_it_is(value: Json) -> None:
    assert repr(storable(value, "kwargs")) == repr(value)
    assert repr(decode(encode(value))) == repr(value)
    assert repr(repaired(value, "result")) == repr((value, ()))


@given(ODD)
def test_what_is_storable_is_encoded_and_stays_as_it_is(value: Any) -> None:
    try:
        stored = storable(value, "kwargs")
    except InvalidValue:
        _, notes = repaired(value, "result")
        assert notes
        return
    assert repaired(value, "result")[1] == ()
    assert repr(decode(encode(stored))) == repr(stored) == repr(storable(stored, "kwargs"))
    encode(stored).encode()


@given(ODD, st.integers(10, 300))
def test_whatever_a_run_produced_becomes_json_that_fits(value: Any, limit: int) -> None:
    mended, _ = repaired(value, "result", limit_bytes=limit)
    assert len(encode(mended).encode()) <= limit
    assert repr(storable(mended, "result", limit_bytes=limit)) == repr(mended)
    assert repaired(mended, "result", limit_bytes=limit)[1] == ()


@given(PLAIN, st.integers(1, 100))
def test_the_quick_and_the_careful_way_agree(value: Json, limit: int) -> None:
    assert answer(lambda: storable(value, "a", limit_bytes=limit)) == answer(
        lambda: Walk(Strict("a"), limit).run(value)
    )


def answer(ask: Callable[[], Json]) -> str:
    try:
        return repr(ask())
    except InvalidValue as error:
        return str(error)


@given(st.text(st.characters()), st.integers(0, 60))
def test_cut_text_never_exceeds_its_limit(value: str, limit: int) -> None:
    cut = cut_text(value, limit)
    assert len(cut.encode()) <= limit
    assert "\0" not in cut


# --- The databases


def examples() -> list[Json]:
    """A few hundred storable values of every shape."""
    found: list[Json] = [expected for _, expected in CONVERTED]

    @given(PLAIN)
    def collect(value: Json) -> None:
        found.append(storable(value, "kwargs"))

    collect()
    found.append(storable(deep(200, lambda v: [v]), "kwargs"))
    found.append(storable({"x" * 100_000: "🦌" * 100_000}, "kwargs"))
    return found


async def test_both_databases_return_what_was_storable(postgres_cluster: PostgresServer) -> None:
    values = examples()
    sent = [encode(value) for value in values]
    assert repr([decode(stored) for stored in through_sqlite(sent)]) == repr(values)
    assert repr([decode(stored) for stored in await through_postgres(postgres_cluster, sent)]) == repr(values)


def through_sqlite(sent: list[str]) -> list[str]:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (n integer primary key, v text)")
    connection.executemany("insert into t (v) values (?)", [(each,) for each in sent])
    rows = connection.execute("select v from t order by n").fetchall()
    connection.close()
    return [row[0] for row in rows]


async def through_postgres(server: PostgresServer, sent: list[str]) -> list[str]:
    connection = await asyncpg.connect(server.dsn())
    await connection.execute("create temp table t (n int, v text)")
    await connection.executemany("insert into t values ($1, $2)", list(enumerate(sent)))
    rows = await connection.fetch("select v from t order by n")
    await connection.close()
    return [row["v"] for row in rows]
