"""Settings: their bounds, the relations they keep, what a mistake is told, and the generated page."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deerflow_runs import docs
from deerflow_runs.config import PRESETS, RELATIONS, RunsConfig, about, seconds, shown
from deerflow_runs.errors import InvalidConfig
from deerflow_runs.model import OnDisconnect, OnOrphan, Strategy
from deerflow_runs.protocol.judge import Limits
from deerflow_runs.protocol.trust import BEATS_PER_TRUST, Terms
from tests.rules import rule


def complaint(**settings: Any) -> str:
    with pytest.raises(InvalidConfig) as caught:
        RunsConfig(**settings)
    return str(caught.value)


# ---- defaults ------------------------------------------------------------------------------------------------------


@rule("O9", "O10", "O24", "O4", "O12", "O11", "O30", "O35")
def test_the_defaults_are_those_of_the_protocol() -> None:
    expected = {
        "lease": seconds(15),
        "lease_floor": seconds(5),
        "beat": seconds(2.5),
        "sweep": seconds(2),
        "grace": seconds(5),
        "margin": seconds(1.5),
        "cancel_grace": seconds(10),
        "attach_deadline": seconds(30),
        "max_suspend": seconds(300),
        "max_stall": seconds(120),
        "max_attempts": 3,
        "backoff_min": seconds(1),
        "backoff_max": seconds(60),
        "drain": seconds(20),
        "max_concurrent_runs": 100,
        "run_timeout": timedelta(hours=24),
        "step_timeout": timedelta(hours=1),
        "hook_timeout": timedelta(seconds=60),
        "max_queued_per_thread": 100,
        "max_active_per_user": None,
        "events_kept": timedelta(hours=24),
        "max_events_per_run": 20_000,
        "max_event_bytes_per_run": 32 * 1024 * 1024,
        "runs_kept": None,
        "threads_kept": None,
        "sessions_kept": timedelta(days=7),
        "max_body": 32 * 1024 * 1024,
        "max_metadata": 256 * 1024,
        "max_id_length": 255,
        "max_error_text": 8 * 1024,
        "pool_size": 5,
        "saver_pool_size": 5,
        "strategy": Strategy.REJECT,
        "gateway_strategy": Strategy.ENQUEUE,
        "on_disconnect": OnDisconnect.CONTINUE,
        "on_orphan": OnOrphan.RESUME,
        "resumes_per_second": 5.0,
    }
    assert RunsConfig().model_dump() == expected


@rule("O9", "O24")
def test_what_the_protocol_is_told_is_in_seconds() -> None:
    assert RunsConfig().terms() == Terms(lease=15.0, margin=1.5, beat=2.5, max_suspend=300.0, max_stall=120.0)
    assert RunsConfig().limits() == Limits(grace=5.0)


@rule("O9", "O10")
def test_beat_and_margin_follow_the_lease() -> None:
    short, long = RunsConfig(lease=6), RunsConfig(lease=60)
    assert (short.beat, short.margin) == (seconds(1), seconds(0.6))
    assert (long.beat, long.margin) == (seconds(2.5), seconds(6))


def test_a_changed_copy_derives_anew_and_is_checked_anew() -> None:
    given = RunsConfig(grace=1)
    assert given.changed(lease=6) == RunsConfig(grace=1, lease=6)
    with pytest.raises(InvalidConfig):
        given.changed(lease=1)


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunsConfig().lease = seconds(1)  # type: ignore[misc]


# ---- what may be given ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (20, seconds(20)),
        (7.5, seconds(7.5)),
        ("20", seconds(20)),
        ("20 s", seconds(20)),
        ("20000ms", seconds(20)),
        ("1.5 min", seconds(90)),
        ("0.5h", seconds(1800)),
        (seconds(20), seconds(20)),
    ],
)
def test_durations_are_given_in_several_ways(given: object, meant: timedelta) -> None:
    assert RunsConfig.from_mapping({"max_suspend": given}).max_suspend == meant


@pytest.mark.parametrize(
    "given", ["soon", "", "-3 s", "5 weeks", True, None, float("nan"), float("inf"), 1e300, [1], "9" * 400]
)
def test_what_is_no_duration_is_refused_and_told_what_would_be(given: object) -> None:
    assert "max_suspend: give a timedelta, a number of seconds, or text" in complaint(max_suspend=given)


def test_text_stands_for_the_choices_it_names() -> None:
    assert RunsConfig.from_mapping({"on_orphan": "fail"}).on_orphan is OnOrphan.FAIL
    assert "strategy: give 'reject', 'enqueue', 'interrupt' or 'rollback'" in complaint(strategy="wait")


@pytest.mark.parametrize(("wrong", "right"), [("leese", "lease"), ("max_attempt", "max_attempts"), ("beats", "beat")])
def test_an_unknown_setting_is_refused_with_the_closest_known_one(wrong: str, right: str) -> None:
    assert complaint(**{wrong: 1}) == f"there is no setting '{wrong}': did you mean {right}?"


def test_a_name_like_no_other_is_sent_to_the_page() -> None:
    assert "see docs/configuration.md" in complaint(xyzzy=1)


def test_a_mapping_with_other_keys_than_names_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="7 is not the name of a setting"):
        RunsConfig.from_mapping({7: 1})  # type: ignore[dict-item]


def test_all_mistakes_are_told_at_once() -> None:
    told = complaint(lease="x", grace="y", leese=1)
    assert [part.split(":")[0] for part in told.split("; ")] == ["lease", "grace", "there is no setting 'leese'"]


# ---- bounds --------------------------------------------------------------------------------------------------------

BOUNDED = [name for name in RunsConfig.model_fields if about(name).least is not None]
RELATED = {name for relation in RELATIONS for name in re.findall(r"[a-z_]{2,}", relation.says)}
"""What is left of their bounds depends on other settings."""


@pytest.mark.parametrize("name", BOUNDED)
def test_a_value_out_of_bounds_is_refused_by_name_with_the_bound(name: str) -> None:
    known = about(name)
    tiny = timedelta(milliseconds=1) if known.unit == "seconds" else 1
    assert complaint(**{name: known.least - tiny}).endswith(f"raise it to at least {shown(known.least, known.unit)}")
    assert complaint(**{name: known.most + tiny}).endswith(f"lower it to at most {shown(known.most, known.unit)}")


@pytest.mark.parametrize("name", sorted(set(BOUNDED) - RELATED))
def test_the_bounds_themselves_are_allowed(name: str) -> None:
    for bound in (about(name).least, about(name).most):
        relaxed: dict[str, Any] = {"attach_deadline": 3600, name: bound}
        assert getattr(RunsConfig(**relaxed), name) == bound


# ---- relations -----------------------------------------------------------------------------------------------------

BROKEN: dict[str, dict[str, float]] = {
    "lease ≥ lease_floor": {"lease": 4.9},
    "margin ≥ lease / 10": {"margin": 1.4},
    "lease - margin ≥ 4.2 × beat": {"beat": 3.3},
    "max_stall ≥ 2 × beat": {"max_stall": 4.9},
    "cancel_grace ≥ 2 × beat": {"cancel_grace": 4.9},
    "attach_deadline ≥ 2 × sweep": {"sweep": 15.1},
    "backoff_min ≤ backoff_max": {"backoff_min": 61},
}


@rule("O9", "O10", "O11", "O12", "O24", "O30", "O4")
@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.says)
def test_settings_that_break_a_relation_are_refused(relation: Any) -> None:
    assert complaint(**BROKEN[relation.says]).startswith(f"{relation.says} does not hold: ")


REMEDY = re.compile(r"(?P<verb>raise|lower) (?P<name>\w+) to at (?:least|most) (?P<value>[\d.]+ \w+)")
DURATIONS = st.floats(0.5, 100).map(lambda number: round(number, 3))


@rule("O9", "O10", "O24")
@given(lease=DURATIONS, beat=DURATIONS, margin=DURATIONS, grace=DURATIONS)
def test_whatever_is_accepted_lets_trust_outlast_two_beats_and_an_answer(
    lease: float, beat: float, margin: float, grace: float
) -> None:
    try:
        terms = RunsConfig(lease=lease, beat=beat, margin=margin, grace=grace).terms()
    except InvalidConfig:
        return
    assert terms.lease >= 5
    assert terms.margin >= terms.lease / 10 - 1e-5
    assert terms.lease - terms.margin >= BEATS_PER_TRUST * terms.beat - 1e-4


@given(lease=DURATIONS, beat=DURATIONS, sweep=DURATIONS, backoff_min=DURATIONS)
def test_every_remedy_mends_what_it_is_offered_for(lease: float, beat: float, sweep: float, backoff_min: float) -> None:
    settings: dict[str, Any] = {"lease": lease, "beat": beat, "sweep": sweep, "backoff_min": backoff_min}
    for _ in range(2 * len(RELATIONS)):
        try:
            RunsConfig(**settings)
        except InvalidConfig as error:
            remedy = REMEDY.search(str(error))
            assert remedy is not None
            settings[remedy["name"]] = remedy["value"]
        else:
            return
    pytest.fail(f"never mended: {settings}")


# ---- presets -------------------------------------------------------------------------------------------------------


def test_presets_are_valid_and_yield_to_what_is_given() -> None:
    assert RunsConfig.for_tests().lease == seconds(1)
    assert RunsConfig.for_tests(lease=0.5).lease == seconds(0.5)
    assert RunsConfig.for_small_setups().pool_size < RunsConfig().pool_size
    assert RunsConfig.for_small_setups(pool_size=7).pool_size == 7


@rule("O9")
def test_only_the_preset_for_tests_takes_a_lease_below_the_floor() -> None:
    assert "RunsConfig.for_tests()" in complaint(lease=1)
    with pytest.raises(InvalidConfig):
        RunsConfig.for_small_setups(lease=1)
    with pytest.raises(InvalidConfig):
        RunsConfig.for_tests(lease=0.4)


def test_presets_say_only_what_differs() -> None:
    defaults = RunsConfig()
    for settings in PRESETS.values():
        assert [name for name, value in settings.items() if getattr(defaults, name) == value] == []


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_page_explains_every_setting_and_relation() -> None:
    page = docs.configuration.page()
    for name in RunsConfig.model_fields:
        row = re.search(rf"^\| `{name}` \| (.+) \| (.*) \| (.+) \| (.{{20,}}) \| (.*) \|$", page, re.MULTILINE)
        assert row is not None, name
    for relation in RELATIONS:
        assert f"| `{relation.says}` |" in page


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    return tmp_path / "docs"


def test_a_written_page_is_not_stale(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main([], docs=checkout) == 0
    assert "wrote" in capsys.readouterr().out
    assert docs.main(["--check"], docs=checkout) == 0
    assert capsys.readouterr().out == ""


def test_a_stale_page_fails_the_check_says_how_to_write_it_and_stays(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs.main([], docs=checkout)
    stale = (checkout / "configuration.md").read_text().replace("| 15 s |", "| 16 s |")
    (checkout / "configuration.md").write_text(stale)
    capsys.readouterr()
    assert docs.main(["--check"], docs=checkout) == 1
    told = capsys.readouterr().out
    assert "configuration.md is stale; write it anew with: python3 dev.py docs" in told
    assert "| 16 s |" in told
    assert (checkout / "configuration.md").read_text() == stale


def test_a_missing_page_fails_the_check(checkout: Path) -> None:
    assert docs.main(["--check"], docs=checkout) == 1


def test_outside_a_checkout_nothing_is_written(tmp_path: Path) -> None:
    assert docs.main([], docs=tmp_path / "docs") == 2
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (timedelta(0), "0 s"),
        (seconds(2.5), "2.5 s"),
        (seconds(0.166667), "0.166667 s"),
        (seconds(60), "1 min"),
        (timedelta(hours=24), "24 h"),
        (timedelta(days=7), "7 d"),
        (20_000, "20,000"),
        (2048, "2,048"),
    ],
)
def test_values_are_shown_as_people_write_them(value: object, text: str) -> None:
    assert shown(value) == text
