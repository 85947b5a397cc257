"""Which descriptors a forked child closes, and whether one may have been missed."""

from __future__ import annotations

import os

from deerflow_runs.store.forks import Descriptors
from tests.rules import rule


@rule("O27")
def test_a_descriptor_is_not_safe_if_a_child_was_forked_before_it_was_kept() -> None:
    descriptors, (reading, writing) = Descriptors(), os.pipe()
    since = descriptors.now()
    assert descriptors.keep(writing, None, since=since)
    descriptors.forking()
    assert not descriptors.keep(writing, None, since=since)
    assert not descriptors.keep(writing, None, since=descriptors.now())  # the child may be made at this moment
    descriptors.forked()
    assert not descriptors.keep(writing, None, since=since)
    assert descriptors.keep(writing, None, since=descriptors.now())
    for descriptor in (reading, writing):
        os.close(descriptor)


@rule("O27")
def test_a_child_closes_what_is_kept_and_lets_the_number_stand_for_nothing() -> None:
    descriptors = Descriptors()
    reading, writing = os.pipe()
    descriptors.keep(writing, None, since=descriptors.now())
    descriptors.in_child()
    assert os.read(reading, 1) == b""  # nobody can write any more
    assert os.write(writing, b"lost") == 4
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_what_was_forgotten_is_left_alone() -> None:
    descriptors = Descriptors()
    reading, writing = os.pipe()
    descriptors.keep(writing, None, since=descriptors.now())
    descriptors.forget(writing)
    descriptors.forget(writing)
    descriptors.in_child()
    os.write(writing, b"x")
    assert os.read(reading, 1) == b"x"
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_number_that_stands_for_something_else_by_now_is_left_alone() -> None:
    """A driver closes a socket that the other side has closed, and says so later."""
    descriptors = Descriptors()
    reading, writing = os.pipe()
    descriptors.keep(writing, None, since=descriptors.now())
    os.close(writing)
    os.close(reading)
    others = os.pipe()
    assert writing in others, "the system gives the lowest numbers that are free"
    descriptors.in_child()
    os.write(others[1], b"x")
    assert os.read(others[0], 1) == b"x"
    for descriptor in others:
        os.close(descriptor)
