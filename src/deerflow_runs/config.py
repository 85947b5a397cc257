"""Every setting with its default, its bounds and its rule, and every relation that settings must keep.

One frozen model and nothing else: no environment variables, no files. Whoever reads those hands the result to
``RunsConfig.from_mapping``. ``docs/configuration.md`` is generated from this module, so what it says is true.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deerflow_runs.errors import InvalidConfig
from deerflow_runs.model import OnDisconnect, OnOrphan, Strategy
from deerflow_runs.protocol.judge import Limits
from deerflow_runs.protocol.trust import BEATS_PER_TRUST, Terms

KIB, MIB = 1024, 1024 * 1024

# ---- durations -----------------------------------------------------------------------------------------------------

UNITS: Final[Mapping[str, timedelta]] = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "min": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_TEXT = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})?\s*", re.ASCII)


def _duration(value: object) -> timedelta:
    """A timedelta, a number of seconds, or a number with a unit."""
    try:
        if isinstance(value, timedelta):
            return value
        if isinstance(value, str) and (match := _TEXT.fullmatch(value)):
            return float(match[1]) * UNITS[match[2] or "s"]
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return timedelta(seconds=value)
    except OverflowError:
        pass
    raise ValueError("give a timedelta, a number of seconds, or text such as '15 s', '500 ms' or '24 h'")


Duration = Annotated[timedelta, BeforeValidator(_duration)]


def seconds(number: float) -> timedelta:
    """A duration of so many seconds."""
    return timedelta(seconds=number)


def shown(value: object, unit: str = "") -> str:
    """A setting's value as messages and the documentation write it; ``unit`` says whether a number counts bytes."""
    match value:
        case timedelta():
            return _shown_duration(value)
        case int() if unit == "bytes" and value >= KIB and value % KIB == 0:
            return f"{value // MIB:,} MiB" if value % MIB == 0 else f"{value // KIB} KiB"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def _shown_duration(value: timedelta) -> str:
    """In the largest unit that divides it, but hours for a single day."""
    whole = (unit for unit, one in UNITS.items() if value and value % one == timedelta() and unit != "ms")
    unit = "h" if value == UNITS["d"] else next(whole, "s")
    return f"{value / UNITS[unit]:g} {unit}"


# ---- the settings --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class About:
    """What is checked of a setting and said of it on the page: ``least`` and ``most`` are allowed themselves.

    ``derived``: how the default follows from another setting. ``absent``: what None means, where it is allowed.
    """

    rule: str
    unit: str
    least: Any = None
    most: Any = None
    derived: str = ""
    absent: str = ""


def span(rule: str, least: timedelta, most: timedelta, *, derived: str = "", absent: str = "") -> About:
    """About a duration."""
    return About(rule, "seconds", least, most, derived, absent)


def count(rule: str, unit: str, least: float, most: float, *, absent: str = "") -> About:
    """About a number of things."""
    return About(rule, unit, least, most, absent=absent)


def choice(rule: str) -> About:
    """About a setting whose type says what it may be."""
    return About(rule, "")


MINUTE, HOUR, DAY, YEAR = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1), timedelta(days=365)


class RunsConfig(BaseModel):
    """All settings of one worker. Raises ``InvalidConfig``, naming the setting and what to change.

    Durations are timedeltas; a number of seconds and text such as ``"15 s"`` are accepted too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Ownership
    lease: Annotated[Duration, span("O9, O24", seconds(0.5), HOUR)] = seconds(15)
    """How long a worker's promise stands after its last beat. Longer: outages are survived longer. Shorter: the runs
    of a lost worker are found sooner."""
    lease_floor: Annotated[Duration, span("O9", seconds(0.5), HOUR)] = seconds(5)
    """The shortest lease that is accepted. Only tests have a reason to lower it."""
    beat: Annotated[Duration, span("O10, O19", seconds(0.01), 10 * MINUTE, derived="lease / 6, at most 2.5 s")] = Field(
        default_factory=lambda given: min(given["lease"] / 6, seconds(2.5))
    )
    """Pause between two renewals of the session, give or take a tenth. A cancel from another worker is heard after
    one beat at the latest."""
    margin: Annotated[Duration, span("O9", seconds(0.01), HOUR, derived="lease / 10")] = Field(
        default_factory=lambda given: given["lease"] / 10
    )
    """How long before the lease ends at the store a worker stops trusting it: room for clocks that run at different
    speeds. What is left of the lease must outlast the longest call that blocks the whole interpreter."""
    grace: Annotated[Duration, span("O24", seconds(0), HOUR)] = seconds(5)
    """How long after its expiry a session is left alone. With the lease it is also how long a judge must have been
    well itself."""
    sweep: Annotated[Duration, span("O26, O32", seconds(0.02), 10 * MINUTE)] = seconds(2)
    """Pause between two looks for dead workers, orphans, due runs and work to claim, give or take a fifth. A delayed
    run that is known to come due brings the next one forward."""
    max_stall: Annotated[Duration, span("O11", seconds(0.1), DAY)] = seconds(120)
    """How long the main event loop may stay silent before the worker logs all stacks and stops renewing its
    session."""
    max_suspend: Annotated[Duration, span("O12", seconds(0), DAY)] = seconds(300)
    """How long runs are held in memory while the store cannot be reached, before they are aborted and given back. 0 s:
    they are aborted when trust ends."""
    attach_deadline: Annotated[Duration, span("O12", seconds(0.04), HOUR)] = seconds(30)
    """A run that the store says this worker owns, and that it has not held for so long, is given back."""
    cancel_grace: Annotated[Duration, span("O4", seconds(0.02), HOUR)] = seconds(10)
    """How long an owner may take over a cancel before others seize or force the run."""
    drain: Annotated[Duration, span("O35", seconds(0), HOUR)] = seconds(20)
    """All the time that a shutdown may take; for the first half of it runs may stop between steps. Keep it below what
    the process manager grants before it kills."""

    # Recovery
    on_orphan: Annotated[OnOrphan, choice("O29")] = OnOrphan.RESUME
    """What becomes of a run of a named executor when its worker dies. Runs of local callables always fail: nobody
    else has their code."""
    max_attempts: Annotated[int, count("O30", "attempts", 1, 100)] = 3
    """How often a run is tried without writing a checkpoint before it ends as poison."""
    backoff_min: Annotated[Duration, span("O30", seconds(0.01), HOUR)] = seconds(1)
    """The shortest pause before a run is tried again."""
    backoff_max: Annotated[Duration, span("O30", seconds(0.01), DAY)] = seconds(60)
    """The longest pause before a run is tried again. Each pause is random below a ceiling that doubles with every
    attempt."""
    resumes_per_second: Annotated[float, count("O32", "runs per second", 0.1, 1000)] = 5.0
    """How fast a worker takes runs up again after it has reconnected."""

    # Runs
    strategy: Annotated[Strategy, choice("O1, O2, O3")] = Strategy.REJECT
    """What a newcomer to a busy thread asks for when it does not say."""
    gateway_strategy: Annotated[Strategy, choice("O1, O2, O3")] = Strategy.ENQUEUE
    """The same for requests that come through the gateway."""
    on_disconnect: Annotated[OnDisconnect, choice("O6")] = OnDisconnect.CONTINUE
    """What the disconnect of its creator does to a run that does not say."""
    max_concurrent_runs: Annotated[int, count("I19", "runs", 0, 100_000)] = 100
    """How many runs this worker carries out at once. 0: it admits runs and leaves them to others."""
    max_queued_per_thread: Annotated[int, count("I19", "runs", 0, 100_000)] = 100
    """How many runs may wait on one thread; one more is refused."""
    max_active_per_user: Annotated[int | None, count("I19", "runs", 1, 1_000_000, absent="no limit")] = None
    """How many runs of one user may be active at once."""
    run_timeout: Annotated[Duration, span("I8", seconds(1), 30 * DAY)] = DAY
    """How long a run may take in all, unless it says otherwise."""
    step_timeout: Annotated[Duration, span("I8", seconds(1), DAY)] = HOUR
    """How long one step of a graph may take, unless its node says otherwise."""
    hook_timeout: Annotated[Duration, span("O28", seconds(0.1), HOUR)] = seconds(60)
    """How long a hook for ended runs may take. One that its worker did not live to finish is called again, by any
    worker that has it, after one and a half times as long."""

    # What is kept
    events_kept: Annotated[Duration, span("", seconds(0), YEAR)] = DAY
    """How long the events of a run can be read after its end."""
    max_events_per_run: Annotated[int, count("", "events", 1, 10_000_000)] = 20_000
    """How many events of one run are kept; the oldest go first."""
    max_event_bytes_per_run: Annotated[int, count("", "bytes", KIB, 1024 * MIB)] = 32 * MIB
    """How large the events of one run may be together."""
    runs_kept: Annotated[Duration | None, span("O5", MINUTE, 10 * YEAR, absent="for ever")] = None
    """How long an ended run, its receipt and its idempotency key are kept."""
    threads_kept: Annotated[Duration | None, span("", MINUTE, 10 * YEAR, absent="for ever")] = None
    """How long a thread without runs is kept after its last change."""
    sessions_kept: Annotated[Duration, span("O26", HOUR, YEAR)] = 7 * DAY
    """How long the row of a dead worker session is kept."""

    # Sizes
    max_body: Annotated[int, count("", "bytes", KIB, 1024 * MIB)] = 32 * MIB
    """The largest request body."""
    max_metadata: Annotated[int, count("", "bytes", 2, 32 * MIB)] = 256 * KIB
    """The largest metadata of a run or a thread, as JSON."""
    max_id_length: Annotated[int, count("", "characters", 36, 255)] = 255
    """The longest id; the columns hold no more than 255."""
    max_error_text: Annotated[int, count("", "bytes", 256, MIB)] = 8 * KIB
    """How much of an error's text is stored; the rest is cut."""

    # Connections
    pool_size: Annotated[int, count("O10", "connections", 1, 1000)] = 5
    """Connections of this worker for runs and threads. One more, for the session alone, is always open."""
    saver_pool_size: Annotated[int, count("", "connections", 1, 1000)] = 5
    """Connections of this worker for checkpoints."""

    if not TYPE_CHECKING:  # a type checker is shown the settings themselves

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise InvalidConfig("; ".join(_complaints(error))) from None

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """The configuration that a file or another source has as a mapping from names to values."""
        for name in settings:
            if not isinstance(name, str):
                raise InvalidConfig(f"{name!r} is not the name of a setting: names are text")
        return cls(**settings)

    @classmethod
    def for_tests(cls, **settings: Any) -> Self:
        """About fifteen times as fast, with a lease of one second. For tests only: a busy machine loses leases."""
        return cls(**{**_FOR_TESTS, **settings})

    @classmethod
    def for_small_setups(cls, **settings: Any) -> Self:
        """One process, one file, few users: fewer connections, shorter queues, less memory. Safety is the same."""
        return cls(**{**_FOR_SMALL_SETUPS, **settings})

    def changed(self, **settings: Any) -> Self:
        """A copy with other values, checked again; what was derived from another setting is derived anew."""
        return type(self)(**({name: getattr(self, name) for name in self.model_fields_set} | settings))

    def terms(self) -> Terms:
        """What a session promises and lives by."""
        return Terms(
            lease=self.lease.total_seconds(),
            margin=self.margin.total_seconds(),
            beat=self.beat.total_seconds(),
            max_suspend=self.max_suspend.total_seconds(),
            max_stall=self.max_stall.total_seconds(),
        )

    def limits(self) -> Limits:
        """How sure this worker must be as a judge."""
        return Limits(grace=self.grace.total_seconds())

    @model_validator(mode="after")
    def _checked(self) -> Self:
        problems = list(_out_of_bounds(self)) or list(_out_of_relation(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self


SECTIONS: Final[Mapping[str, str]] = {
    "lease": "Ownership",
    "on_orphan": "Recovery",
    "strategy": "Runs",
    "events_kept": "What is kept",
    "max_body": "Sizes",
    "pool_size": "Connections",
}
"""The first setting of each section of the page."""

_FOR_TESTS: Final[Mapping[str, Any]] = {
    "lease_floor": seconds(0.5),
    "lease": seconds(1),
    "grace": seconds(0.3),
    "sweep": seconds(0.1),
    "max_stall": seconds(5),
    "max_suspend": seconds(10),
    "attach_deadline": seconds(1),
    "cancel_grace": seconds(0.5),
    "drain": seconds(3),
    "backoff_min": seconds(0.02),
    "backoff_max": seconds(0.5),
    "resumes_per_second": 100.0,
    "hook_timeout": seconds(2),
}

_FOR_SMALL_SETUPS: Final[Mapping[str, Any]] = {
    "max_concurrent_runs": 10,
    "max_queued_per_thread": 20,
    "max_events_per_run": 5_000,
    "max_event_bytes_per_run": 8 * MIB,
    "pool_size": 2,
    "saver_pool_size": 2,
}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {"for_tests": _FOR_TESTS, "for_small_setups": _FOR_SMALL_SETUPS}


def about(name: str) -> About:
    """What is known of the setting ``name``."""
    return next(entry for entry in RunsConfig.model_fields[name].metadata if isinstance(entry, About))


# ---- relations -----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Relation:
    """Something that several settings must keep. ``mend`` says, for settings that break it, what to change."""

    says: str
    why: str
    rule: str
    holds: Callable[[RunsConfig], bool]
    mend: Callable[[RunsConfig], str]


ROUNDING: Final = timedelta(microseconds=10)
"""A tenth of a lease, times ten, is the lease but for this."""


def _trust_needed(config: RunsConfig) -> timedelta:
    return BEATS_PER_TRUST * config.beat


def _mend_beats(config: RunsConfig) -> str:
    need = _trust_needed(config)
    beat, lease = (config.lease - config.margin) / BEATS_PER_TRUST, max(need + config.margin, need / 0.9)
    return f"lower beat to at most {_down(beat)} or raise lease to at least {_up(lease)}"


def _down(value: timedelta) -> str:
    return f"{math.floor(value.total_seconds() * 1000) / 1000:g} s"


def _up(value: timedelta) -> str:
    return f"{math.ceil(value.total_seconds() * 1000) / 1000:g} s"


RELATIONS: Final = (
    Relation(
        "lease ≥ lease_floor",
        "A shorter lease is lost to a pause of the garbage collector or a busy machine.",
        "O9",
        lambda c: c.lease >= c.lease_floor,
        lambda c: f"raise lease to at least {shown(c.lease_floor)} (tests: RunsConfig.for_tests())",
    ),
    Relation(
        "margin ≥ lease / 10",
        "The clocks of worker and store may differ in speed by a tenth.",
        "O9",
        lambda c: c.margin * 10 + ROUNDING >= c.lease,
        lambda c: f"raise margin to at least {_up(c.lease / 10)}, or leave it out",
    ),
    Relation(
        f"lease - margin ≥ {BEATS_PER_TRUST:g} × beat",
        "Trust must outlast two beats, each a tenth late, and one answer that takes two beats: a single lost beat "
        "suspends nobody, and no outage too short to be noticed makes a live worker look dead.",
        "O9, O10, O24",
        lambda c: c.lease - c.margin + ROUNDING >= _trust_needed(c),
        _mend_beats,
    ),
    Relation(
        "max_stall ≥ 2 × beat",
        "The loop is asked once a beat, and a reading that is a beat late does not count.",
        "O11",
        lambda c: c.max_stall >= 2 * c.beat,
        lambda c: f"raise max_stall to at least {_up(2 * c.beat)}",
    ),
    Relation(
        "cancel_grace ≥ 2 × beat",
        "An owner may hear of a cancel only with its next beat; forcing it before that wastes its work.",
        "O4, O19",
        lambda c: c.cancel_grace >= 2 * c.beat,
        lambda c: f"raise cancel_grace to at least {_up(2 * c.beat)}",
    ),
    Relation(
        "attach_deadline ≥ 2 × sweep",
        "Two sweeps in a row must miss a run before it is given back; one may come between grant and hand-over.",
        "O12",
        lambda c: c.attach_deadline >= 2 * c.sweep,
        lambda c: f"raise attach_deadline to at least {_up(2 * c.sweep)}",
    ),
    Relation(
        "backoff_min ≤ backoff_max",
        "They are the ends of one range.",
        "O30",
        lambda c: c.backoff_min <= c.backoff_max,
        lambda c: f"lower backoff_min to at most {shown(c.backoff_max)}",
    ),
)


# ---- complaints ----------------------------------------------------------------------------------------------------


def _out_of_bounds(config: RunsConfig) -> Iterator[str]:
    for name in RunsConfig.model_fields:
        value, known = getattr(config, name), about(name)
        if value is None:
            continue
        if known.least is not None and not value >= known.least:
            yield f"{name} is {shown(value, known.unit)}: raise it to at least {shown(known.least, known.unit)}"
        elif known.most is not None and not value <= known.most:
            yield f"{name} is {shown(value, known.unit)}: lower it to at most {shown(known.most, known.unit)}"


def _out_of_relation(config: RunsConfig) -> Iterator[str]:
    for relation in RELATIONS:
        if not relation.holds(config):
            yield f"{relation.says} does not hold: {relation.mend(config)}"


def _complaints(error: ValidationError) -> Iterator[str]:
    """Pydantic's findings in our words; what merely follows from another finding is left out."""
    for found in error.errors(include_url=False, include_input=False):
        name = str(found["loc"][0]) if found["loc"] else ""
        cause = found.get("ctx", {}).get("error")
        match found["type"]:
            case "default_factory_not_called":
                continue
            case "extra_forbidden":
                yield _unknown(name)
            case "value_error":
                yield f"{name}: {cause}" if name else str(cause)
            case _:
                yield f"{name}: {found['msg'].replace('Input should be', 'give')}"


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, RunsConfig.model_fields, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for those there are"
    return f"there is no setting {name!r}: {hint}"
