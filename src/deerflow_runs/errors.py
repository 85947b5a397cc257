"""Every exception of the package, drawn as one tree; nothing here knows about databases, tasks or HTTP.

Losing a race is never an exception (it is a value, see ``protocol``). What is raised is a caller's mistake or a
question that got no answer::

    DeerflowRunsError
    ├── UsageError (also a ValueError)    the caller can mend it; nothing was stored
    │   ├── InvalidValue                  a value no database may hold; says the path
    │   ├── InvalidDsn                    a database address we cannot use; never shows the password
    │   ├── InvalidConfig                 a setting, or two that do not fit together
    │   └── IdempotencyMismatch           the key is known, the request is another (O5)
    ├── Refusal errors                    the answer is no, and says who holds what and when to retry
    │   ├── ThreadBusy                    another operation holds the thread
    │   ├── QueueFull                     the thread's queue is at its limit
    │   └── UserBusy                      the user has as many active runs as one may have
    ├── Ends of a wait                    the run is not carried out by this caller
    │   ├── StillWaiting                  its turn has not come within the time given; it keeps its place
    │   ├── RunCancelled                  it was stopped, before or while the caller carried it out
    │   └── ReservationLost               the reservation is somebody else's; the body was stopped
    ├── SchemaMismatch                    the tables are not those this version reads; says the command
    └── StoreUnavailable                  no answer: the write may or may not have happened (repeat it, O8)
"""

from __future__ import annotations


class DeerflowRunsError(Exception):
    """Root of everything this package raises on purpose."""


class UsageError(DeerflowRunsError, ValueError):
    """The caller's request cannot be carried out as given; nothing was stored and nothing holds a thread."""


class InvalidValue(UsageError):
    """A value that cannot be stored alike on every database.

    ``path`` names the place inside the request (``metadata.tags[3]``), ``reason`` what is wrong and what to do.
    The value itself is never part of the message: it may be a secret.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class InvalidDsn(UsageError):
    """A database address that cannot be used; ``reason`` names the part and the remedy, never a password."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"database address: {reason}")
        self.reason = reason


class InvalidConfig(UsageError):
    """A setting outside its bounds, or settings that contradict each other; the message says what to change."""


class IdempotencyMismatch(UsageError):
    """The idempotency key belongs to a run that was asked for with another payload (O5)."""

    def __init__(self, run_id: str, key: str) -> None:
        super().__init__(
            f"idempotency key {key!r} already belongs to run {run_id} with a different payload; "
            "send the same payload to get that run, or choose a new key"
        )
        self.run_id = run_id
        self.key = key


class ThreadBusy(DeerflowRunsError):
    """Another operation holds the thread (O1).

    ``retry_after`` is in seconds, at least one; ``holder`` and ``owner`` name the operation and the worker session
    that stand in the way (``owner`` is None while the holder waits for a worker).
    """

    def __init__(self, *, thread_id: str, holder: str | None, owner: str | None, retry_after: int) -> None:
        who = f"operation {holder}" if holder else "another operation"
        where = f" on worker {owner}" if owner else ""
        super().__init__(f"thread {thread_id} is busy: {who}{where} holds it; retry in {retry_after} s")
        self.thread_id = thread_id
        self.holder = holder
        self.owner = owner
        self.retry_after = retry_after


class QueueFull(DeerflowRunsError):
    """The thread already has as many waiting runs as it may; ``limit`` says how many, ``retry_after`` is in seconds."""

    def __init__(self, *, thread_id: str, limit: int, retry_after: int) -> None:
        super().__init__(f"thread {thread_id} already has {limit} runs waiting; retry in {retry_after} s")
        self.thread_id = thread_id
        self.limit = limit
        self.retry_after = retry_after


class UserBusy(DeerflowRunsError):
    """The user already has as many active runs, on whatever threads, as one user may have (I19); ``limit`` says how
    many, ``retry_after`` is in seconds."""

    def __init__(self, *, user_id: str, limit: int, retry_after: int) -> None:
        super().__init__(f"user {user_id} already has {limit} active runs; retry in {retry_after} s")
        self.user_id = user_id
        self.limit = limit
        self.retry_after = retry_after


class StillWaiting(DeerflowRunsError):
    """The run's turn has not come within the time given. It keeps its place: wait for it again, or cancel it."""

    def __init__(self, *, run_id: str, thread_id: str) -> None:
        super().__init__(f"run {run_id} still waits for its turn on thread {thread_id}; it keeps its place")
        self.run_id = run_id
        self.thread_id = thread_id


class RunCancelled(DeerflowRunsError):
    """The run was stopped by a cancel, its time limit or a shutdown; ``stop_reason`` says which, as it was stored.

    None: how it ended could not be learnt or is not decided yet, or it had ended by itself before it was entered, which
    the message tells.
    """

    def __init__(self, *, run_id: str, thread_id: str, stop_reason: str | None, ended_as: str | None = None) -> None:
        known = f"has ended as {ended_as}" if ended_as else "was stopped: its end is not known yet"
        what = f"was stopped: {stop_reason}" if stop_reason else known
        super().__init__(f"run {run_id} on thread {thread_id} {what}")
        self.run_id = run_id
        self.thread_id = thread_id
        self.stop_reason = stop_reason


class ReservationLost(DeerflowRunsError):
    """The thread's reservation was lost while its body ran, because this worker was taken for dead: the body was
    stopped half way, and somebody else may use the thread. Look at what is there before trying again."""

    def __init__(self, *, thread_id: str, kind: str) -> None:
        super().__init__(f"the reservation ({kind}) of thread {thread_id} was lost while it was in use")
        self.thread_id = thread_id
        self.kind = kind


class SchemaMismatch(DeerflowRunsError):
    """The database's tables are older or newer than this version can use; the message holds the command to run."""


class StoreUnavailable(DeerflowRunsError):
    """The store gave no answer within the retries allowed.

    A write may or may not have been committed: repeat it with the same ids, every write is safe to repeat (O8).
    The driver's error is the ``__cause__``.
    """
