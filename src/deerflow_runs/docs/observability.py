"""The page ``docs/observability.md``: how to listen, and every event with its fields, from ``observe``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from inspect import cleandoc
from types import MappingProxyType, ModuleType
from typing import Final, get_type_hints

from deerflow_runs.model import RunId, RunStatus, StopReason, ThreadId, WorkerId
from deerflow_runs.observe import About, Event, EventOfRun, RunSettled, base, drain, recovery, runs, sessions
from deerflow_runs.observe.log import line

NOTHING: Final = "–"

GROUPS: Final[Mapping[str, ModuleType]] = MappingProxyType(
    {"Sessions": sessions, "Runs": runs, "Recovery": recovery, "Drain": drain}
)
"""The modules that hold events, in the order of the page."""

SHARED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "epoch": base.Epoch,
        "attempt": base.Attempt,
        "error": base.ErrorCode,
        "failures": base.Failures,
        "suspended_for": base.SuspendedFor,
    }
)
"""Fields of one meaning, told once for all events."""


def page() -> str:
    """The text of the page."""
    opening = _OPENING.replace("LINE", _line())
    groups = (part for title, module in GROUPS.items() for part in _group(title, module))
    return "\n".join([opening, *_common(), _LEVELS, *groups, ""])


_OPENING: Final = """\
<!-- Generated from src/deerflow_runs/observe/ by `python3 dev.py docs`; change those files, not this one. -->

# Observability

A worker tells what it does as events: frozen dataclasses, one for each kind of thing that can happen. An event says
what was carried out, by which worker session, to which run; it never holds an input, a result or the message of an
error. Rules (O1 …) are those that the code and its tests cite; the words are explained in [concepts](concepts.md).

## Listening

An observer is any object with the method `observed(event)`. A manager is given a list of them:
`RunManager(store, observers=[LogObserver(), counters, Alarm()])`.

```python
from deerflow_runs import Counters, Event, LogObserver
from deerflow_runs.observe import LoopStalled, RunSettled, RunWaitsFor

counters = Counters()


class Alarm:
    def __init__(self) -> None:
        self.rung: list[str] = []

    def observed(self, event: Event) -> None:
        match event:
            case RunWaitsFor(run_id=run, message=why):
                self.rung.append(f"run {run} waits: {why}")
            case LoopStalled(seconds=seconds):
                self.rung.append(f"the loop stands still for {seconds:.0f} s")
```

- It is called where the thing happens: on the manager's loop, and in the heartbeat's thread too, perhaps at the same
  time. It must be safe in threads and return at once; what takes long belongs into a queue of its own.
- What it raises is logged by `deerflow_runs.observe`, once for each observer and type of error, and disturbs neither a
  run nor another observer.
- Events are hints for people and machines that watch. A worker that is killed tells nothing more. What must be acted
  upon once a run has ended belongs into the hook `on_settled`, which is delivered at least once.

An observer is tested by telling it events:

```python
alarm = Alarm()
alarm.observed(LoopStalled(worker_id="host:1", seconds=12.5))
assert alarm.rung == ["the loop stands still for 12 s"]
```

## The log

`LogObserver()` writes every event as one line to the logger `deerflow_runs.events` of the standard library. It
configures nothing: where lines go, and from which level on, is yours to say.

```text
LINE
```

Values that could break a line are quoted, absent ones read `-`. A record also carries `event` (the name) and each field
as attributes of their own, for handlers that write JSON; where a log record has an attribute of the same name, the
field's ends in an underscore (`message_`).

An executor, a function, a restore or a hook that raises in the background is logged as well, by
`deerflow_runs.manager` at ERROR and without any observer: the type of the error and the stack. What a run's error says
is in its row (`run.error`).

## Counters

`Counters()` counts events, and adds up how long settled runs were held. `snapshot()` gives plain numbers, from any
thread; whatever collects metrics can read them when it is asked. No metrics library is imported.

```python
counters.observed(
    RunSettled(worker_id="host:1", run_id="r", thread_id="t", epoch=1, status="success", stop_reason=None, seconds=2.5)
)
now = counters.snapshot()
assert now.of(RunSettled) == now.of(RunSettled, "success") == 1
assert now.events == {"RunSettled": {"success": 1}}
assert now.settled.count == 1 and now.settled.total == now.settled.longest == 2.5
```

An event is counted by the values of one of its fields where the tables say so (**bold**); such a field has few values.

## Fields of many events

| field | of | what it is |
| --- | --- | --- |"""

_LEVELS: Final = """
## Levels

| level | meaning |
| --- | --- |
| debug | one step in the life of a run, or of the worker's own work |
| info | the life of a worker, and one line for each run that was started: its end |
| warning | something is not as it should be, and the worker deals with it |
| error | somebody should look |

A cancel that a user asked for is no fault: it adds nothing above debug to the one line of the run's end."""


def _line() -> str:
    """A line as the log observer writes it."""
    return line(
        RunSettled(
            worker_id=WorkerId("host:5f0c"),
            run_id=RunId("run-1"),
            thread_id=ThreadId("thread-1"),
            epoch=2,
            status=RunStatus.INTERRUPTED,
            stop_reason=StopReason.SHUTDOWN,
            seconds=2.5,
        )
    )


def _common() -> Iterator[str]:
    for name, about in _fields(EventOfRun).items():
        yield _row((f"`{name}`", "every event" if name in _fields(Event) else "events of runs (▸)", about.text))
    for name, annotation in SHARED.items():
        yield _row((f"`{name}`", "where the tables name it", _with_unit(_about(annotation))))


def _group(title: str, module: ModuleType) -> Iterator[str]:
    yield f"\n## {title}\n\n{_opening_of(module)}\n"
    yield "| event | level | when | its own fields |\n| --- | --- | --- | --- |"
    for event in events_of(module):
        mark = "▸ " if issubclass(event, EventOfRun) else ""
        level = logging.getLevelName(event.level).lower()
        yield _row((f"{mark}`{event.__name__}`", level, _one_line(event), _cell(event)))


def events_of(module: ModuleType) -> Iterator[type[Event]]:
    """The events that ``module`` defines, in its order."""
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Event) and value.__module__ == module.__name__:
            yield value


def _opening_of(module: ModuleType) -> str:
    return cleandoc(module.__doc__ or "").split("\n\n")[0]


def _one_line(event: type[Event]) -> str:
    return " ".join((event.__doc__ or "").split())


def _cell(event: type[Event]) -> str:
    own = {name: about for name, about in _fields(event).items() if name not in _fields(EventOfRun)}
    return " · ".join(_described(event, name, about) for name, about in own.items()) or NOTHING


def _described(event: type[Event], name: str, about: About) -> str:
    shown = f"**`{name}`**" if name == event.counted_by else f"`{name}`"
    told = _about(SHARED[name]) is about if name in SHARED else False
    return shown if told else f"{shown}: {_with_unit(about)}"


def _with_unit(about: About) -> str:
    return f"{about.text} ({about.unit})" if about.unit else about.text


def _fields(event: type[Event]) -> dict[str, About]:
    hints = get_type_hints(event, include_extras=True)
    return {field.name: _about(hints[field.name]) for field in fields(event)}


def _about(annotation: object) -> About:
    return next(part for part in getattr(annotation, "__metadata__", ()) if isinstance(part, About))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
