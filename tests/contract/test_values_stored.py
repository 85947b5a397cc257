"""Values from end to end: what a caller gives is stored alike on both databases or refused before anything is held, and
what a run produced is stored whatever it was."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, Final
from uuid import UUID

import pytest
from pydantic import BaseModel

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import (
    EVERYONE,
    Micros,
    OperationKind,
    Run,
    RunId,
    RunStatus,
    Session,
    Strategy,
    ThreadId,
    Usage,
    WorkerId,
)
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import Actor, Applied, Given
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import Admitted, OwnershipStore, Settlement
from deerflow_runs.store.dsn import parse_dsn
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.threads import NewThread, Thread
from deerflow_runs.store.units import open_units
from deerflow_runs.store.values import storable
from deerflow_runs.testing.model_store import ModelStore
from tests.contract.emptying import emptied
from tests.rules import rule

ME = WorkerId("host:me")


@pytest.fixture
async def stores(sqlite_dsn: str, emptied_postgres_dsn: str) -> AsyncIterator[tuple[SqlRunStore, SqlRunStore]]:
    """A store on each database, at once."""
    opened = [open_units(parse_dsn(dsn)) for dsn in (sqlite_dsn, emptied_postgres_dsn)]
    for units in opened:
        await units.open()
        await emptied(units)
    sqlite, postgres = map(SqlRunStore, opened)
    yield sqlite, postgres
    for units in opened:
        await units.close()


def exactly(value: Any) -> str:
    """Equal texts: the same types, the same order of keys, the same digits."""
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)


# --- What is kept as it is ------------------------------------------------------------------------------------------

DEEP: Final = 190


def nested(levels: int) -> Any:
    made: Any = "bottom"
    for level in range(levels):
        made = [made] if level % 2 else {"in": made}
    return made


KEPT: Final[dict[str, Any]] = {
    "empty": {"text": "", "list": [], "object": {}, "": "empty key", "none": None},
    "words": {"yes": True, "no": False, "null": "null", "true": "true"},
    "emoji": {"👩‍👩‍👧": "🏳️‍🌈", "z\u0301": "combining", "ź": "precomposed", "right to left": "שלום \u202e"},
    "controls": {"text": "\t\n\r\x01\x1f\x7f\x85\u2028\u2029\ufeff", "key\x02": 1},
    "escapes": {"text": '\\u0000 \\" \\\\ \\n {"a": 1} %s :name $1 \'; --', "\\u0000": "key"},
    "last characters": {"text": "\ud7ff\ue000\ufffd\uffff\U0010ffff"},
    "integers": [0, -1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63)],
    "floats": [0.1, -0.0, 0.0, 1e22, 1e16, 1e-7, 5e-324, 1.7976931348623157e308, 100.0, 3.0],
    "order of keys": {"b": 1, "a": 2, "10": 3, "9": 4, "aa": 5, "A": 6},
    "keys that look alike": {
        "1": "a",
        "01": "b",
        " 1": "c",
        "1.0": "d",
        "true": "e",
        "True": "f",
        "é": 1,
        "e\u0301": 2,
    },
    "depth": nested(DEEP),
}


@rule("O8", "B018")
@pytest.mark.parametrize("name", KEPT)
async def test_what_json_can_say_comes_back_as_it_was_from_both(name: str, stores: tuple[SqlRunStore, ...]) -> None:
    value = KEPT[name]
    for store in stores:
        newcomer = _newcomer(f"kept-{name}", kwargs={"value": value}, metadata={"value": value})
        newcomer = replace(newcomer, deliveries={"webhook": {"value": value}}, take=False)
        await store.admit(newcomer)
        await store.open_session(Session(ME))
        (claimed,) = await store.claim(Actor(ME), 100)
        read = await store.get(claimed.key, scope=EVERYONE)
        assert read is not None
        for run in (claimed, read):
            assert exactly(run.kwargs) == exactly({"value": value})
            assert exactly(run.metadata) == exactly({"value": value})
        await _settled(store, claimed, Given(values=value, interrupts={"value": value}))
        (delivery,) = await store.outbox.take(["webhook"], 100, Micros(3_600_000_000))
        assert exactly(delivery.payload) == exactly({"value": value})


class Colour(enum.Enum):
    RED = "red"


class Point(BaseModel):
    x: Decimal
    seen: datetime


@dataclass
class Pair:
    left: Any
    right: Any = field(default_factory=set)


NOON: Final = datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=UTC)
CONVERTED: Final[dict[str, Any]] = {
    "decimal": Decimal("1.10"),
    "aware": NOON,
    "naive": NOON.replace(tzinfo=None),
    "duration": timedelta(seconds=1.5),
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
    "set": {3, 1, 2},
    "frozenset": frozenset({"b", "a"}),
    "tuple": (1, (2,)),
    "path": PurePosixPath("/a/b"),
    "enum": Colour.RED,
    "model": Point(x=Decimal("0.10"), seen=NOON),
    "dataclass": Pair(Pair(1, frozenset()), {2}),
}


@rule("B018")
async def test_types_that_json_lacks_are_converted_alike_before_they_are_stored(
    stores: tuple[SqlRunStore, ...],
) -> None:
    wanted = storable(CONVERTED, "wanted")
    for store in _and_the_model(stores):
        answer = await store.admit(_newcomer("converted", kwargs=CONVERTED, metadata=CONVERTED))
        assert isinstance(answer, Admitted)
        read = await store.get(answer.run.key, scope=EVERYONE)
        assert read is not None
        assert exactly(read.kwargs) == exactly(read.metadata) == exactly(wanted)


@rule("B018")
async def test_a_large_input_is_stored_whole(stores: tuple[SqlRunStore, ...]) -> None:
    large = {"text": "ä" * 5_000_000, "list": list(range(10_000))}
    for store in stores:
        answer = await store.admit(_newcomer("large", kwargs=large))
        assert isinstance(answer, Admitted)
        read = await store.get(answer.run.key, scope=EVERYONE)
        assert read is not None
        assert read.kwargs == large


# --- What is refused ------------------------------------------------------------------------------------------------


def cycle() -> Any:
    made: dict[str, Any] = {}
    made["again"] = [made]
    return made


UNFIT: Final[dict[str, Any]] = {
    "nul": {"a": ["b\0"]},
    "surrogate": {"a": ["\ud83d"]},
    "nul key": {"a\0": 1},
    "nan": {"a": [math.nan]},
    "infinity": {"a": [-math.inf]},
    "large integer": {"a": [2**63]},
    "small integer": {"a": [-(2**63) - 1]},
    "decimal": {"a": [Decimal("NaN")]},
    "bytes": {"a": [b"x"]},
    "number as key": {"1": "a", 1: "b"},
    "object": {"a": [object()]},
    "cycle": cycle(),
    "depth": {"a": nested(5000)},
    "no object": [1],
}
"""Neither ``kwargs`` nor ``metadata`` nor a delivery's payload may be like this."""

LONG: Final = "x" * 256
ALIKE: Final[list[tuple[str, dict[str, Any]]]] = [
    *((name, {name: text}) for name in ("run_id", "thread_id", "worker_id") for text in ("", LONG, "a\0", "\udc00", 7)),
    *(
        (name, {name: text})
        for name in ("assistant_id", "executor", "idempotency_key")
        for text in ("", LONG, "a\0", "\udc00", 7)
    ),
    *(("user_id", {"user_id": text}) for text in (LONG, "a\0", "\udc00", 7)),
    *(("payload_digest", {"payload_digest": text}) for text in ("d" * 65, "\0", 7)),
    *(("required_capabilities", {"required_capabilities": frozenset({text})}) for text in ("", LONG, "a\0", "\udc00")),
    *(("deliveries", {"deliveries": {kind: {}}}) for kind in ("", "k" * 65, "receipt")),
    ("deliveries.hook", {"deliveries": {"hook": [1]}}),
    ("metadata", {"metadata": {"text": "m" * 10_000_000}}),
    ("kwargs", {"kwargs": {"text": "k" * 34_000_000}}),
    ("deliveries", {"deliveries": {"hook": {"text": "m" * 300_000}}}),
    *(("payload_version", {"payload_version": number}) for number in (-1, 2**31, 1.5)),
    *(("max_attempts", {"max_attempts": number}) for number in (0, 2**31, "3")),
    *(("run_timeout", {"run_timeout": number}) for number in (0, -1, 2**63)),
    *(("delay", {"delay": number, "strategy": Strategy.ENQUEUE}) for number in (-1, 2**62, 0.5)),
    *(("max_queued", {"max_queued": number, "strategy": Strategy.ENQUEUE}) for number in (-1, 2**63)),
]
"""What else a newcomer may not bring: where it is wrong, and how."""


def _refused() -> dict[str, tuple[str, dict[str, Any]]]:
    places: dict[str, Callable[[Any], Any]] = {
        "kwargs": lambda value: {"kwargs": value},
        "metadata": lambda value: {"metadata": value},
        "deliveries": lambda value: {"deliveries": {"webhook": value}},
    }
    nested_ones = {
        f"{place}: {name}": (place, put(value)) for place, put in places.items() for name, value in UNFIT.items()
    }
    return nested_ones | {f"{path} {number}": (path, given) for number, (path, given) in enumerate(ALIKE)}


REFUSED: Final = _refused()


@rule("B005", "B060", "O1", "P017", "P049")
async def test_what_cannot_be_stored_alike_is_refused_by_its_path_and_the_thread_stays_free(
    stores: tuple[SqlRunStore, ...],
) -> None:
    for store in _and_the_model(stores):
        for number, (name, (path, given)) in enumerate(REFUSED.items()):
            thread_id = f"refused-{number}"
            usual: dict[str, Any] = {"thread_id": ThreadId(thread_id)}
            refused = await _refusal(store.admit(replace(_newcomer("refused"), **usual | given)))
            assert refused is not None, f"{name} was let in"
            assert refused.path.startswith(path), f"{name}: {refused}"
            assert len(str(refused)) < 1000, "a message that shows the value"
            assert await store.active(ThreadId(thread_id)) is None, name
        answer = await store.admit(_newcomer("refused"))
        assert isinstance(answer, Admitted), "a good one right after"


async def _refusal(asking: Awaitable[object]) -> InvalidValue | None:
    try:
        await asking
    except InvalidValue as refused:
        return refused
    return None


@rule("O9")
@pytest.mark.parametrize(
    ("path", "given"),
    [
        *(("worker_id", {"worker_id": text}) for text in ("", LONG, "a\0")),
        *((name, {name: text}) for name in ("host", "boot_id") for text in (LONG, "a\0", "\ud800")),
        ("version", {"version": "v" * 65}),
        ("labels", {"labels": {"a": math.nan}}),
        ("labels", {"labels": {"a": "x" * 300_000}}),
        ("capabilities", {"capabilities": frozenset({"a\0"})}),
        ("pid", {"pid": 2**31}),
        *((name, {name: number}) for name in ("lease", "beat_interval") for number in (0, -1, 2**62)),
    ],
    ids=str,
)
async def test_a_session_that_could_not_be_written_alike_is_refused_by_its_path(
    path: str, given: dict[str, Any], stores: tuple[SqlRunStore, ...]
) -> None:
    for store in _and_the_model(stores):
        refused = await _refusal(store.open_session(replace(Session(ME), **given)))
        assert refused is not None
        assert refused.path.startswith(path)


@rule("O1", "P098", "P099")
async def test_ids_of_any_text_up_to_their_limit_are_found_again(stores: tuple[SqlRunStore, ...]) -> None:
    odd = ("🦌" * 255, "a'b\"c\\d%_", " leading and trailing ", "../../etc", "\u202e\x01", "é", "e\u0301", "null")
    for store in stores:
        for text in odd:
            worker_id = WorkerId(text)
            await store.open_session(Session(worker_id, host=text, boot_id=text, capabilities=frozenset({text})))
            names: dict[str, Any] = {"assistant_id": text, "executor": text, "user_id": text, "idempotency_key": text}
            newcomer = Newcomer(
                run_id=RunId(text), thread_id=ThreadId(text), worker_id=worker_id, take=False, pinned=True, **names
            )
            newcomer = replace(newcomer, required_capabilities=frozenset({text}), model_name=text)
            await store.admit(newcomer)
            (claimed,) = await store.claim(Actor(worker_id, capabilities=frozenset({text})), 10)
            assert (claimed.run_id, claimed.thread_id, claimed.user_id, claimed.executor) == (text,) * 4
            again = await store.admit(replace(newcomer, run_id=RunId("another")))
            assert again.run.run_id == text  # type: ignore[union-attr]
            assert [run.run_id for run in await store.owned(worker_id)] == [text]
            await _settled(store, claimed, Given())


# --- What a run produced --------------------------------------------------------------------------------------------

ODD: Final = {
    "nul": "\0",
    "half": "\ud83d",
    "nan": math.nan,
    "big": 2**2000,
    "bytes": b"\xff",
    1: "key",
    "self": object,
}
PRODUCED: Final[dict[str, Given]] = {
    "texts": Given(error="a\0b\ud800", stop_reason="r\0" * 200, checkpoint="c\0" * 200, model_name="  m\0  "),
    "a long error": Given(error="ä" * 100_000),
    "state": Given(values=ODD | {"cycle": cycle(), "depth": nested(5000)}, interrupts={"a": [math.inf, b"x"]}),
    "a state that is no object": Given(values=[1, math.nan], interrupts=["a\0"]),
    "numbers": Given(usage=Usage(2**2000, -1, 2**63, 2**31, 2**40, {"m": 2**70}, {"c\0": 1})),
    "numbers that are none": Given(usage=Usage(1.5, math.nan, "7", None, True)),  # type: ignore[arg-type]
    "messages": Given(usage=Usage(1, first_human_message="h\0" * 5000, last_ai_message="\ud800" * 5000)),
    "messages that are no text": Given(usage=Usage(1, first_human_message=[1], last_ai_message=7)),  # type: ignore[arg-type]
    "an error that is no text": Given(error=ValueError("x\0"), stop_reason=Colour.RED),  # type: ignore[arg-type]
    "heads": Given(base_heads={"ns\0": "c\0", "b\ud800": "x" * 300}),
}


@rule("B088", "O28", "P017", "P049")
@pytest.mark.parametrize("name", PRODUCED)
async def test_nothing_that_a_run_produced_keeps_it_from_its_end(name: str, stores: tuple[SqlRunStore, ...]) -> None:
    given = PRODUCED[name]
    kept = []
    for store in stores:
        ended = [
            await _alone(store, f"{name}-alone", given),
            await _behind(store, f"{name}-behind", given),
            *await _together(store, f"{name}-together", given),
        ]
        assert {run.status for run in ended} == {RunStatus.SUCCESS}
        seen = [(_produced(run), _state(await _thread(store, run))) for run in ended]
        assert all(exactly(one) == exactly(seen[0]) for one in seen), "whichever way it was settled"
        kept.append(seen[0])
    assert exactly(kept[0]) == exactly(kept[1]), "on whichever database"


async def _alone(store: SqlRunStore, name: str, given: Given) -> Run:
    return await _settled(store, await _started(store, name, given), given)


async def _behind(store: SqlRunStore, name: str, given: Given) -> Run:
    run = await _started(store, name, given)
    behind = replace(_newcomer(f"{name}-next"), thread_id=run.thread_id, strategy=Strategy.ENQUEUE)
    await store.admit(behind)
    return await _settled(store, run, given)


async def _together(store: SqlRunStore, name: str, given: Given) -> list[Run]:
    runs = [await _started(store, f"{name}-{number}", given) for number in range(3)]
    asked = [Settlement(run.key, RunEvent.SETTLE_SUCCESS, Actor(ME, run.epoch), given) for run in runs]
    decisions = await store.settle_many(asked)
    return [decision.run for decision in decisions if isinstance(decision, Applied)]


def _produced(run: Run) -> list[Any]:
    usage = run.usage
    counted = [usage.input_tokens, usage.output_tokens, usage.total_tokens, usage.llm_calls, usage.message_count]
    told = [usage.first_human_message, usage.last_ai_message, dict(usage.by_model), dict(usage.by_caller)]
    return [run.error, run.stop_reason, run.last_checkpoint, run.model_name, dict(run.base_heads), *counted, *told]


def _state(thread: Thread) -> list[Any]:
    return [thread.values, thread.interrupts, thread.error, thread.outcome.value]


async def _thread(store: SqlRunStore, run: Run) -> Thread:
    thread = await store.threads.get(run.thread_id, scope=EVERYONE)
    assert thread is not None
    return thread


@rule("O28")
async def test_a_state_that_is_too_large_is_cut_and_the_run_ends(stores: tuple[SqlRunStore, ...]) -> None:
    parts = ["v" * 100_000] * 340
    for store in stores:
        ended = await _settled(store, await _started(store, "large", Given()), Given(values={"parts": parts}))
        kept = (await _thread(store, ended)).values["parts"]
        assert len(parts) - 10 < len(kept) < len(parts)
        assert kept[:300] == parts[:300]


@rule("O31")
async def test_a_requirement_that_could_not_be_stored_does_not_keep_a_run_from_being_deferred(
    stores: tuple[SqlRunStore, ...],
) -> None:
    for store in stores:
        run = await _started(store, "deferred", Given())
        needs = Given(requirements=frozenset({"gpu\0", "x" * 300}))
        decision = await store.apply(run.key, RunEvent.DEFER, Actor(ME, run.epoch), needs)
        assert isinstance(decision, Applied)
        assert decision.run.required_capabilities == {"gpu\N{REPLACEMENT CHARACTER}", "x" * 255}


# --- Steps ----------------------------------------------------------------------------------------------------------


def _and_the_model(stores: Sequence[SqlRunStore]) -> Sequence[OwnershipStore]:
    return (*stores, ModelStore())


def _newcomer(name: str, **given: Any) -> Newcomer:
    return Newcomer(run_id=RunId(name), thread_id=ThreadId(f"thread of {name}"), worker_id=ME, **given)


async def _started(store: SqlRunStore, name: str, given: Given) -> Run:
    newcomer = _newcomer(name)
    await store.threads.create(NewThread(thread_id=newcomer.thread_id))
    answer = await store.admit(newcomer)
    assert isinstance(answer, Admitted)
    await store.apply(answer.run.key, RunEvent.START, Actor(ME, 1), given)
    decision = await store.apply(answer.run.key, RunEvent.PROGRESS, Actor(ME, 1), given)
    assert isinstance(decision, Applied)
    return decision.run


async def _settled(store: SqlRunStore, run: Run, given: Given) -> Run:
    by = Actor(run.owner_worker_id or ME, run.epoch)
    if run.status is RunStatus.PENDING:
        await store.apply(run.key, RunEvent.START, by)
    decision = await store.apply(run.key, RunEvent.SETTLE_SUCCESS, by, given)
    assert isinstance(decision, Applied)
    assert run.kind is OperationKind.RUN
    return decision.run
