"""What a worker tells, who may hear it, and that no listener can disturb a run or see what it must not."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, fields
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from sqlalchemy.exc import OperationalError

from deerflow_runs import Counters, Event, LogObserver, Observer, StoreUnavailable, observe
from deerflow_runs.model import CancelAction, RunId, RunStatus, Strategy, ThreadId, WorkerId
from deerflow_runs.observe import (
    BeatFailed,
    CancelHeard,
    CancelRequested,
    Durations,
    EventOfRun,
    Observers,
    RunAdmitted,
    RunRestored,
    RunSeized,
    RunSettled,
    RunStarted,
    RunWaitsFor,
    SessionDeclaredDead,
    TrustEnded,
    error_code,
)
from deerflow_runs.protocol.judge import How

ME = WorkerId("host:1")
RUN: dict[str, Any] = {"worker_id": ME, "run_id": RunId("run-1"), "thread_id": ThreadId("thread-1")}

EVENTS = [
    value
    for value in (getattr(observe, name) for name in observe.__all__)
    if isinstance(value, type) and issubclass(value, Event) and value not in (Event, EventOfRun)
]
each_event = pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)


def example(event: type[Event]) -> Event:
    """One of them, with some value in every field."""
    hints = get_type_hints(event)
    values: dict[str, Any] = {field.name: some(hints[field.name]) for field in fields(event)}
    return event(**values)


def some(kind: Any) -> object:
    """A value of this type."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is tuple:
        return (some(get_args(kind)[0]),)
    if get_origin(kind) in (Union, UnionType):
        return some(get_args(kind)[0])
    plain = getattr(kind, "__supertype__", kind)
    return {int: 3, float: 1.5, str: "word"}[plain]


def settled(status: RunStatus = RunStatus.SUCCESS, seconds: float = 1.0) -> RunSettled:
    return RunSettled(**RUN, epoch=1, status=status, stop_reason=None, seconds=seconds)


class Kept:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observed(self, event: Event) -> None:
        self.events.append(event)


class Raises:
    """Keeps what it is told, and raises it all the same."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.told = 0

    def observed(self, event: Event) -> None:
        self.told += 1
        raise self.error


# ---- events --------------------------------------------------------------------------------------------------------


@each_event
def test_an_event_is_a_frozen_value_that_names_its_worker_first(event: type[Event]) -> None:
    one = example(event)
    assert one == example(event)
    assert hash(one) == hash(example(event))
    assert fields(one)[0].name == "worker_id"
    with pytest.raises(FrozenInstanceError):
        one.worker_id = WorkerId("another")  # type: ignore[misc]


@each_event
def test_an_event_about_a_run_names_the_run_and_its_thread_next(event: type[Event]) -> None:
    names = [field.name for field in fields(event)]
    assert (names[1:3] == ["run_id", "thread_id"]) == issubclass(event, EventOfRun)
    assert issubclass(event, EventOfRun) == ("run_id" in names)


@each_event
def test_an_event_reads_as_json_with_all_its_fields(event: type[Event]) -> None:
    told = example(event).as_json()
    assert list(told) == [field.name for field in fields(event)]
    assert all(isinstance(value, str | int | float | list) and not isinstance(value, Enum) for value in told.values())


@each_event
def test_an_event_is_counted_by_a_field_with_few_values(event: type[Event]) -> None:
    if event.counted_by is not None:
        own = {field.name for field in fields(event)} - {field.name for field in fields(EventOfRun)}
        assert event.counted_by in own - {"error", "reason", "message"}


def test_no_value_enters_an_event_that_json_has_no_type_for() -> None:
    with pytest.raises(TypeError, match="cannot hold a object"):
        TrustEnded(worker_id=object()).as_json()  # type: ignore[arg-type]


# ---- errors in events ----------------------------------------------------------------------------------------------


def test_an_error_is_told_by_its_type_and_never_by_its_message() -> None:
    assert error_code(ValueError("the user's secret")) == "ValueError"


def test_an_error_of_a_database_is_told_with_the_code_of_its_driver() -> None:
    with pytest.raises(sqlite3.OperationalError) as caught:
        sqlite3.connect(":memory:").execute("SELECT secret FROM nowhere")
    driver = caught.value
    wrapped = OperationalError("SELECT secret FROM nowhere", {}, driver)
    assert error_code(driver) == "OperationalError SQLITE_ERROR"
    assert error_code(wrapped) == "OperationalError SQLITE_ERROR"
    assert error_code(unavailable_from(wrapped)) == "StoreUnavailable SQLITE_ERROR"


def unavailable_from(cause: BaseException) -> StoreUnavailable:
    error = StoreUnavailable("no answer")
    error.__cause__ = cause
    return error


# ---- several observers ---------------------------------------------------------------------------------------------


def test_an_observer_that_raises_hides_nothing_from_the_others() -> None:
    first, last = Kept(), Kept()
    Observers([first, Raises(ValueError("broken")), last]).observed(settled())
    assert first.events == last.events == [settled()]


def test_observers_are_told_in_their_order() -> None:
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def observed(self, event: Event) -> None:
            order.append(f"{self.name} {type(event).__name__}")

    Observers([Named("a"), Named("b")]).observed(TrustEnded(worker_id=ME))
    assert order == ["a TrustEnded", "b TrustEnded"]


def test_an_observer_cannot_make_a_run_look_cancelled() -> None:
    told = Raises(asyncio.CancelledError())
    Observers([told]).observed(settled())
    assert told.told == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_the_wish_to_end_the_process_passes_through_an_observer(stop: type[BaseException]) -> None:
    with pytest.raises(stop):
        Observers([Raises(stop())]).observed(settled())


def test_an_observers_error_is_logged_once_for_each_kind_and_each_observer(caplog: pytest.LogCaptureFixture) -> None:
    broken, also = Raises(ValueError("broken")), Raises(ValueError("too"))
    observers = Observers([broken, also])
    for _ in range(3):
        observers.observed(settled())
    broken.error = KeyError("new")
    observers.observed(settled())
    assert [(record.name, record.levelname) for record in caplog.records] == [("deerflow_runs.observe", "ERROR")] * 3
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        ValueError,
        ValueError,
        KeyError,
    ]
    assert broken.told == 4


def test_a_host_whose_logging_is_broken_does_not_stop_a_run() -> None:
    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError(record.name)

    host = logging.getLogger("deerflow_runs.observe")
    broken, after = Broken(), Kept()
    host.addFilter(broken)
    try:
        Observers([Raises(ValueError("broken")), after]).observed(settled())
    finally:
        host.removeFilter(broken)
    assert after.events == [settled()]


# ---- the log -------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="deerflow_runs.events")
    return caplog


@each_event
def test_every_event_becomes_one_line_at_the_level_of_its_class(
    event: type[Event], log: pytest.LogCaptureFixture
) -> None:
    LogObserver().observed(example(event))
    (record,) = log.records
    assert (record.name, record.levelno) == ("deerflow_runs.events", event.level)
    assert record.getMessage().split()[:2] == [event.__name__, "worker_id=word"]
    if issubclass(event, EventOfRun):
        assert record.getMessage().split()[2:4] == ["run_id=word", "thread_id=word"]


@each_event
def test_a_record_carries_every_field_for_handlers_that_write_json(
    event: type[Event], log: pytest.LogCaptureFixture
) -> None:
    LogObserver().observed(example(event))
    (record,) = log.records
    told = {name.removesuffix("_"): value for name, value in vars(record).items()}
    assert vars(record)["event"] == event.__name__
    assert {name: told[name] for name in example(event).as_json() if name != "message"}.items() <= told.items()
    assert record.getMessage() != vars(record).get("message_")


def test_a_field_that_a_record_has_itself_ends_in_an_underscore(log: pytest.LogCaptureFixture) -> None:
    LogObserver().observed(RunWaitsFor(**RUN, missing=("executor:agent",), message="no live worker has it"))
    assert vars(log.records[0])["message_"] == "no live worker has it"


def test_a_line_reads_as_one_would_search_for_it(log: pytest.LogCaptureFixture) -> None:
    LogObserver().observed(settled(seconds=2.5))
    assert log.messages == [
        "RunSettled worker_id=host:1 run_id=run-1 thread_id=thread-1 epoch=1 status=success stop_reason=- seconds=2.500"
    ]


def test_tools_can_group_the_lines_of_one_kind_of_event(log: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        LogObserver().observed(RunStarted(**RUN, epoch=number, attempt=number))
    assert len({record.msg for record in log.records}) == 1
    assert len(set(log.messages)) == 2


@pytest.mark.parametrize("name", ["a\nERROR forged", "a status=success", "", "a\x1b[2Jb", "a\u2028b"])
def test_no_id_can_forge_a_line_or_a_field(name: str, log: pytest.LogCaptureFixture) -> None:
    LogObserver().observed(RunRestored(worker_id=ME, run_id=RunId("run-1"), thread_id=ThreadId(name)))
    assert log.messages == [f"RunRestored worker_id=host:1 run_id=run-1 thread_id={name!a}"]


def test_ids_in_any_script_stay_readable(log: pytest.LogCaptureFixture) -> None:
    LogObserver().observed(RunRestored(worker_id=ME, run_id=RunId("run-1"), thread_id=ThreadId("対話-1")))
    assert log.messages[0].endswith("thread_id=対話-1")


def test_lines_go_to_the_logger_that_one_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="mine")
    LogObserver(logging.getLogger("mine")).observed(TrustEnded(worker_id=ME))
    assert [record.name for record in caplog.records] == ["mine"]


def test_a_level_that_is_off_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="deerflow_runs.events")
    LogObserver().observed(settled())
    assert caplog.records == []


ADMITTED = RunAdmitted(**RUN, status=RunStatus.PENDING, strategy=Strategy.REJECT)
STARTED = RunStarted(**RUN, epoch=1, attempt=1)
REQUESTED = CancelRequested(**RUN, action=CancelAction.ROLLBACK, outcome="requested")
HEARD = CancelHeard(**RUN, action=CancelAction.ROLLBACK)
SEIZED = RunSeized(**RUN, epoch=2, attempt=1)
LIVES = {
    "that ends well": [ADMITTED, STARTED, settled()],
    "that a user cancels": [ADMITTED, STARTED, REQUESTED, HEARD, settled(RunStatus.INTERRUPTED)],
    "that is rolled back": [
        *(ADMITTED, STARTED, REQUESTED, HEARD, SEIZED, RunRestored(**RUN)),
        settled(RunStatus.INTERRUPTED),
    ],
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_a_run_without_a_fault_leaves_one_line_and_no_warning(
    life: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="deerflow_runs.events")
    for event in life:
        LogObserver().observed(event)
    assert [record.levelname for record in caplog.records] == ["INFO"]


# ---- counters ------------------------------------------------------------------------------------------------------


def test_events_are_counted_by_kind_and_by_outcome() -> None:
    counters = Counters()
    for status in (RunStatus.SUCCESS, RunStatus.SUCCESS, RunStatus.ERROR):
        counters.observed(settled(status))
    counters.observed(TrustEnded(worker_id=ME))
    counters.observed(SessionDeclaredDead(worker_id=ME, judged=WorkerId("host:2"), how=How.PROOF))
    assert counters.snapshot().events == {
        "RunSettled": {"success": 2, "error": 1},
        "TrustEnded": {"": 1},
        "SessionDeclaredDead": {"proof": 1},
    }


def test_a_snapshot_answers_for_a_class_and_for_a_value() -> None:
    counters = Counters()
    counters.observed(settled(RunStatus.SUCCESS))
    counters.observed(settled(RunStatus.TIMEOUT))
    now = counters.snapshot()
    assert (now.of(RunSettled), now.of(RunSettled, "timeout"), now.of(RunSettled, "error")) == (2, 1, 0)
    assert now.of(TrustEnded) == now.of(TrustEnded, "") == 0


@each_event
def test_every_event_can_be_counted(event: type[Event]) -> None:
    counters = Counters()
    counters.observed(example(event))
    assert counters.snapshot().of(event) == 1


def test_durations_of_settled_runs_are_summed() -> None:
    counters = Counters()
    for seconds in (1.5, 4.0, 0.25):
        counters.observed(settled(seconds=seconds))
    assert counters.snapshot().settled == Durations(count=3, total=5.75, longest=4.0)


def test_a_snapshot_does_not_change_any_more() -> None:
    counters = Counters()
    counters.observed(settled())
    before = counters.snapshot()
    counters.observed(settled())
    counters.observed(TrustEnded(worker_id=ME))
    assert before.events == {"RunSettled": {"success": 1}}
    assert before.settled.count == 1
    with pytest.raises(TypeError):
        before.events["RunSettled"]["success"] = 9  # type: ignore[index]


def test_nothing_is_counted_that_an_executor_can_name_as_it_likes() -> None:
    counters = Counters()
    for number in range(50):
        counters.observed(BeatFailed(worker_id=ME, error=f"Error {number}", failures=number))
    assert counters.snapshot().events == {"BeatFailed": {"": 50}}


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_threads_that_count_together_lose_nothing() -> None:
    counters, threads, each = Counters(), 4, 4000
    begin = threading.Barrier(threads)

    def count() -> None:
        begin.wait()
        for _ in range(each):
            counters.observed(settled())

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(count) for _ in range(threads)]:
            done.result()
    assert counters.snapshot().of(RunSettled) == counters.snapshot().settled.count == threads * each


def test_what_is_shipped_are_observers() -> None:
    listeners: list[Observer] = [LogObserver(), Counters(), Observers()]
    Observers(listeners).observed(settled())
