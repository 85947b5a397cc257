"""Makes histories by hand: rows as they come, change and go, as a recording database would have written them down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from deerflow_runs.model import Micros, Run, RunId, RunKey, RunStatus, Session, SessionState, ThreadId, WorkerId
from deerflow_runs.testing import History
from deerflow_runs.testing.recorded import Change, OutboxChanged, RunChanged, SessionChanged, StepWritten

ME: Final = WorkerId("host:me")
OTHER: Final = WorkerId("host:other")
THREAD: Final = ThreadId("thread")


class Past:
    """What has happened so far, each change in a transaction of its own unless it stands in ``together``."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._runs: dict[str, Run] = {}
        self._scopes: dict[str, str] = {}
        self._sessions: dict[WorkerId, Session] = {}
        self._transaction: int | None = None
        self.opens(ME)
        self.opens(OTHER)

    def history(self) -> History:
        """As it would be read."""
        return History.of(self._changes)

    @contextmanager
    def together(self) -> Iterator[None]:
        """In one transaction."""
        self._transaction = len(self._changes) + 1
        yield
        self._transaction = None

    # Sessions

    def opens(self, worker_id: WorkerId, **given: Any) -> None:
        """A session's row comes, or comes again."""
        session = replace(Session(worker_id, expires_at=Micros(1000)), **given)
        self._changes.append(SessionChanged(before=None, after=session, **self._next()))
        self._sessions[worker_id] = session

    def turns(self, worker_id: WorkerId, *, at: int | None = None, **changes: Any) -> None:
        """A session's row changes."""
        before = self._sessions[worker_id]
        after = self._sessions[worker_id] = replace(before, **changes)
        self._changes.append(SessionChanged(before=before, after=after, **self._next(at)))

    def dies(self, worker_id: WorkerId, *, proven: bool = False) -> None:
        """Somebody's verdict, or its own last word."""
        self.turns(worker_id, state=SessionState.DEAD, proven=proven)

    def forgets(self, worker_id: WorkerId) -> None:
        """A session's row goes."""
        self._changes.append(SessionChanged(before=self._sessions.pop(worker_id), after=None, **self._next()))

    # Runs

    def comes(self, name: str = "run", *, scope: str = "", **given: Any) -> None:
        """An operation is admitted: held by me, unless something else is given."""
        usual: dict[str, Any] = {"owner_worker_id": ME, "epoch": 1, "attempt": 1}
        run = replace(Run(RunId(name), THREAD, seq=len(self._changes), **usual), **given)
        self._runs[name], self._scopes[name] = run, scope
        self._changed(name, None, run)

    def waits(self, name: str, **given: Any) -> None:
        """A run is queued."""
        usual: dict[str, Any] = {"status": RunStatus.QUEUED, "owner_worker_id": None, "epoch": 0, "attempt": 0}
        self.comes(name, **usual | given)

    def becomes(self, name: str = "run", **changes: Any) -> None:
        """A row changes; ``raised`` is by how much its epoch does."""
        before = self._runs[name]
        raised = changes.pop("raised", 0)
        after = self._runs[name] = replace(before, epoch=before.epoch + raised, **changes)
        self._changed(name, before, after)

    def starts(self, name: str = "run", *, turn: int = 1, **changes: Any) -> None:
        """A run starts."""
        self.becomes(name, **{"status": RunStatus.RUNNING, "turn": turn} | changes)

    def claims(self, name: str = "run", by: WorkerId = ME) -> None:
        """Somebody takes a vacant run."""
        self.becomes(name, owner_worker_id=by, raised=1, attempt=max(self._runs[name].attempt, 1))

    def is_resumed(self, name: str = "run", *, attempts: int = 1, **changes: Any) -> None:
        """A run is taken from its owner and waits for another."""
        attempt = self._runs[name].attempt + attempts
        self.becomes(
            name, **{"status": RunStatus.PENDING, "owner_worker_id": None, "attempt": attempt, "raised": 1} | changes
        )

    def ends(self, name: str = "run", status: RunStatus = RunStatus.SUCCESS, **changes: Any) -> None:
        """A run ends, with its receipt, by itself or as a part of what happens together."""
        if self._transaction is None:
            with self.together():
                self.ends(name, status, **changes)
            return
        self.becomes(name, **{"status": status, "settled_by": self._runs[name].owner_worker_id} | changes)
        self.files(name)

    def files(self, name: str = "run") -> None:
        """A receipt is written."""
        self._changes.append(OutboxChanged(run_id=RunId(name), kind="receipt", delivered=True, **self._next()))

    def goes(self, name: str = "run") -> None:
        """A row is removed."""
        self._changed(name, self._runs.pop(name), None)

    def _changed(self, name: str, before: Run | None, after: Run | None) -> None:
        self._changes.append(RunChanged(before=before, after=after, scope=self._scopes[name], **self._next()))

    # Steps

    def writes(self, step: str, name: str = "run", *, epoch: int | None = None, turn: int | None = None) -> None:
        """A step is recorded under a token, the run's own one unless another is given."""
        run = self._runs[name]
        token: dict[str, Any] = {
            "epoch": run.epoch if epoch is None else epoch,
            "turn": run.turn if turn is None else turn,
        }
        self._changes.append(StepWritten(key=RunKey(THREAD, RunId(name)), step=step, **token, **self._next()))

    def _next(self, at: int | None = None) -> dict[str, Any]:
        number = len(self._changes) + 1
        return {"number": number, "at": Micros(at or number), "transaction": self._transaction or number}
