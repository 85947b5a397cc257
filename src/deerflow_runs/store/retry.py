"""The only retry loop. A question is asked again while that may bring an answer; then ``StoreUnavailable`` says so.

What an error means stands in ``failures``. Every write may be repeated after a lost reply (O8), so a loop needs to
know nothing about what it repeats.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar, final

from deerflow_runs.errors import InvalidConfig, StoreUnavailable
from deerflow_runs.store.failures import ErrorKind, classify, driver_error, error_code

__all__ = ["ErrorKind", "RetryPolicy", "classify", "retrying", "retrying_in_thread"]

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to ask and how long to wait in between, in seconds; the waits grow by ``factor`` up to ``maximum``."""

    max_attempts: int = 5
    initial: float = 0.05
    maximum: float = 1.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or not 0 <= self.initial <= self.maximum or not 1 <= self.factor <= 10:
            raise InvalidConfig("a retry policy needs max_attempts >= 1, 0 <= initial <= maximum, 1 <= factor <= 10")

    def wait(self, attempts: int, chance: float) -> float:
        """Seconds to wait after so many attempts; ``chance`` from 0 to 1 spreads those who failed together."""
        growth = self.factor ** min(attempts - 1, 64)  # a higher power would only overflow
        return chance * min(self.maximum, self.initial * growth)


async def retrying(
    policy: RetryPolicy,
    attempt: Callable[[], Awaitable[T]],
    kind_of: Callable[[BaseException], ErrorKind] = classify,
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    chance: Callable[[], float] = random.random,
) -> T:
    """Await ``attempt()`` until it answers; an error that is an answer, or a mistake, passes unchanged.

    A cancellation passes at once and says nothing about what was stored (shield whole units of work outside).
    """
    tries = _Tries(policy, kind_of)
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not tries.failed(error):
                raise
            failure = error
        await sleep(tries.wait(failure, chance()))


def retrying_in_thread(
    policy: RetryPolicy,
    attempt: Callable[[], T],
    kind_of: Callable[[BaseException], ErrorKind] = classify,
    *,
    sleep: Callable[[float], object] = time.sleep,
    chance: Callable[[], float] = random.random,
) -> T:
    """The same for a thread of its own, such as SQLite's writer (O34); never to be called on an event loop."""
    tries = _Tries(policy, kind_of)
    while True:
        try:
            return attempt()
        except Exception as error:
            if not tries.failed(error):
                raise
            failure = error
        sleep(tries.wait(failure, chance()))


class _Tries:
    """What one loop has seen so far."""

    def __init__(self, policy: RetryPolicy, kind_of: Callable[[BaseException], ErrorKind]) -> None:
        self._policy = policy
        self._kind_of = kind_of
        self._count = 0
        self._doubtful = False

    def failed(self, error: Exception) -> bool:
        """Note a failed attempt; False if asking again would not help."""
        kind = self._kind_of(error)
        self._count += 1
        self._doubtful |= kind is ErrorKind.UNKNOWN_OUTCOME
        return kind.repeatable

    def wait(self, last: Exception, chance: float) -> float:
        """Seconds until the next attempt; raises when there is none left.

        To be called outside of the ``except`` block: what is raised then carries the driver's error and not that of
        SQLAlchemy, whose text shows the statement's parameters.
        """
        if self._count < self._policy.max_attempts:
            return self._policy.wait(self._count, chance)
        known = "it may have been stored; repeat it with the same ids" if self._doubtful else "nothing was stored"
        message = (
            f"no answer from the store after {self._count} attempts, the last error was {error_code(last)}: {known}"
        )
        raise StoreUnavailable(message) from driver_error(last)
