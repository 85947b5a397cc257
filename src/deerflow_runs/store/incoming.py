"""What callers and runs hand in, made storable before any statement sees it.

A caller's value that does not fit is refused by name while nothing is stored and nothing holds the thread; what a run
itself produced is repaired, because a finished run must be recordable whatever it produced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, Final

from deerflow_runs.errors import InvalidValue
from deerflow_runs.model import OneUser, RunKey, Scope, Session, Usage
from deerflow_runs.protocol.admission import Newcomer
from deerflow_runs.protocol.decision import NOTHING_GIVEN, Given
from deerflow_runs.store.values import ID_CHARACTERS, METADATA_BYTES, cut_text, model_name, repaired, storable, text

MESSAGE_CHARACTERS: Final = 2000
"""The first human and the last AI message are kept to be shown in lists, not to be read."""

LARGEST: Final = 2**31 - 1
LARGEST_BIG: Final = 2**63 - 1
"""What an integer column holds, and a big one."""

LONGEST: Final = 2**53
"""Microseconds of the longest duration, some 285 years: added to any instant it still fits its column."""


def storable_newcomer(newcomer: Newcomer) -> Newcomer:
    """The same newcomer with every value as both databases keep it, or ``InvalidValue`` naming the path."""
    text(newcomer.run_id, "run_id", nonempty=True)
    text(newcomer.thread_id, "thread_id", nonempty=True)
    text(newcomer.worker_id, "worker_id", nonempty=True)
    for name in ("user_id", "assistant_id", "executor", "idempotency_key"):
        if getattr(newcomer, name) is not None:
            text(getattr(newcomer, name), name, nonempty=name != "user_id")
    _check_counts(newcomer)
    if newcomer.payload_digest is not None:
        text(newcomer.payload_digest, "payload_digest", 64)
    return replace(
        newcomer,
        kwargs=_mapping(newcomer.kwargs, "kwargs"),
        metadata=_mapping(newcomer.metadata, "metadata", METADATA_BYTES),
        deliveries=_deliveries(newcomer.deliveries),
        model_name=model_name(newcomer.model_name),
        required_capabilities=_names(newcomer.required_capabilities, "required_capabilities"),
    )


def _check_counts(newcomer: Newcomer) -> None:
    _whole(newcomer.payload_version, "payload_version", 0, LARGEST)
    _whole(newcomer.max_attempts, "max_attempts", 1, LARGEST)
    _whole(newcomer.delay, "delay", 0, LONGEST)
    if newcomer.run_timeout is not None:
        _whole(newcomer.run_timeout, "run_timeout", 1, LONGEST)
    if newcomer.max_queued is not None:
        _whole(newcomer.max_queued, "max_queued", 0, LARGEST)
    if newcomer.max_active_per_user is not None:
        _whole(newcomer.max_active_per_user, "max_active_per_user", 0, LARGEST)


def _whole(value: object, path: str, lowest: int, highest: int) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidValue(path, f"must be a whole number from {lowest} to {highest}")


def _mapping(value: Mapping[str, Any], path: str, limit: int | None = None) -> dict[str, Any]:
    made = storable(value, path) if limit is None else storable(value, path, limit_bytes=limit)
    if not isinstance(made, dict):
        raise InvalidValue(path, "must be an object")
    return made


def _deliveries(value: Mapping[str, Any]) -> dict[str, Any]:
    made = _mapping(value, "deliveries", METADATA_BYTES)
    for kind, payload in made.items():
        text(kind, "deliveries", 64, nonempty=True)
        if kind == "receipt":
            raise InvalidValue("deliveries.receipt", "every run has a receipt already; choose another kind")
        if not isinstance(payload, dict):
            raise InvalidValue(f"deliveries.{kind}", "must be an object")
    return made


def _names(names: frozenset[str], path: str) -> frozenset[str]:
    return frozenset(text(name, path, nonempty=True) for name in names)


def check_ids(**ids: str | None) -> None:
    """Refuse an id that no row could have and that only one of the databases would even ask for."""
    for name, value in ids.items():
        if value is not None:
            text(value, name, nonempty=True)


def check_key(key: RunKey) -> None:
    """The same for where a run is."""
    check_ids(thread_id=key.thread_id, run_id=key.run_id)


def check_scope(scope: Scope) -> None:
    """The same for whom one reads for; a user may have an empty name."""
    if isinstance(scope, OneUser):
        text(scope.user_id, "user_id")


def check_session(session: Session) -> None:
    """Refuse a session whose row could not be written alike on both databases."""
    text(session.worker_id, "worker_id", nonempty=True)
    text(session.host, "host")
    text(session.boot_id, "boot_id")
    text(session.version, "version", 64)
    _mapping(session.labels, "labels", METADATA_BYTES)
    _names(session.capabilities, "capabilities")
    _whole(session.pid, "pid", 0, LARGEST)
    _whole(session.lease, "lease", 1, LONGEST)
    _whole(session.beat_interval, "beat_interval", 1, LONGEST)


def storable_given(given: Given) -> Given:
    """What a run produced, repaired where it must be: this never fails a run that has finished."""
    if given is NOTHING_GIVEN:
        return given
    return replace(
        given,
        error=None if given.error is None else cut_text(_clean(given.error)),
        stop_reason=None if given.stop_reason is None else _clean(given.stop_reason)[:ID_CHARACTERS],
        usage=_usage(given.usage),
        values=None if given.values is None else repaired(given.values, "values")[0],
        interrupts=None if given.interrupts is None else repaired(given.interrupts, "interrupts")[0],
        base_heads={_clean(namespace): _clean(head) for namespace, head in given.base_heads.items()},
        requirements=frozenset(_clean(name)[:ID_CHARACTERS] for name in given.requirements),
        checkpoint=None if given.checkpoint is None else _clean(given.checkpoint)[:ID_CHARACTERS],
        model_name=None if given.model_name is None else _clean(given.model_name).strip()[:128],
    )


def _usage(usage: Usage) -> Usage:
    return replace(
        usage,
        input_tokens=_count(usage.input_tokens, LARGEST_BIG),
        output_tokens=_count(usage.output_tokens, LARGEST_BIG),
        total_tokens=_count(usage.total_tokens, LARGEST_BIG),
        llm_calls=_count(usage.llm_calls, LARGEST),
        message_count=_count(usage.message_count, LARGEST),
        by_model=_tokens(usage.by_model, "usage.by_model"),
        by_caller=_tokens(usage.by_caller, "usage.by_caller"),
        first_human_message=_message(usage.first_human_message),
        last_ai_message=_message(usage.last_ai_message),
    )


def _count(number: object, largest: int) -> int:
    """What a model's provider reports is not always a number, nor always one that a column holds."""
    if isinstance(number, int) or (isinstance(number, float) and isfinite(number)):
        return min(max(int(number), 0), largest)
    return 0


def _tokens(tokens: Mapping[str, int], path: str) -> dict[str, Any]:
    mended = repaired(dict(tokens), path)[0]
    return mended if isinstance(mended, dict) else {}


def _message(message: str | None) -> str | None:
    return None if message is None else _clean(message)[:MESSAGE_CHARACTERS]


def _clean(value: str) -> str:
    return str(repaired(value, "text")[0])
