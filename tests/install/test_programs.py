"""A missing helper program is a skip with a name on a developer's machine, and a failure where ``CI`` is set."""

from __future__ import annotations

import pytest

from tests.programs import require_program, skipped_for_programs


def test_a_program_that_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert require_program("sh").endswith("/sh")


def test_a_missing_program_skips_and_is_counted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception) as skipped:
        require_program("no-such-program")
    assert skipped_for_programs([str(skipped.value), "another reason"]) == {"no-such-program": 1}


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_with_ci_a_missing_program_fails(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.fail.Exception, match="needs the program no-such-program"):
        require_program("no-such-program")
