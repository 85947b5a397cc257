"""Random histories: whatever happens in whatever order, a database answers and stands like the model (§13)."""

from __future__ import annotations

from typing import Any

from deerflow_runs.errors import UsageError
from deerflow_runs.model import Run, RunId
from deerflow_runs.protocol.lifecycle import RunEvent
from deerflow_runs.store.base import OwnershipStore
from deerflow_runs.store.sql import SqlRunStore
from deerflow_runs.store.units import Units
from deerflow_runs.testing.contract import SqlSubject
from deerflow_runs.testing.history import HistoryChecker
from deerflow_runs.testing.model_store import ModelStore
from tests.contract.emptying import emptied
from tests.contract.histories import ALL, Author, Move, heard, state
from tests.rules import rule

HISTORIES = 40
MOVES = 60


@rule("I1", "I4", "I5", "I6", "I7", "I14", "I16", "I17", "O8", "O28")
async def test_in_every_history_a_database_answers_and_stands_like_the_model(units: Units) -> None:
    happened: set[RunEvent] = set()
    for seed in range(HISTORIES):
        await emptied(units)
        history = History(seed, SqlSubject(SqlRunStore(units), units))
        try:
            for _ in range(MOVES):
                await history.goes_on()
            await history.ends()
        except AssertionError as error:
            error.add_note(f"history {seed}:\n" + "\n".join(history.told))
            raise
        happened |= history.happened
    assert len(happened) > 20, "histories in which nothing happens prove nothing"


class History:
    """One history of the model and of a database, side by side; ``told`` is what was asked so far."""

    def __init__(self, seed: int, subject: SqlSubject) -> None:
        self.told: list[str] = []
        self.happened: set[RunEvent] = set()
        self._subject = subject
        self._model = ModelStore()
        self._author = Author(seed, self._model)
        self._witness = HistoryChecker()
        self._known: set[RunId] = set()

    async def goes_on(self) -> None:
        """One more move, on both."""
        self._model.world.advance(10)  # the clock of a database moves by itself
        move = self._author.next_move()
        self.told.append(str(move))
        wanted, answer = await answered(move, self._model), await answered(move, self._subject.store)
        assert heard(answer) == heard(wanted)
        rows = await self._rows()
        assert state(rows) == state(list(self._model.world.runs.values()))
        move.told(self._witness, answer)
        self._witness.saw(rows)
        self.happened |= move.events(answer)

    async def ends(self) -> None:
        """A last sweep, after which nobody waits whose turn it is."""
        now = await self._subject.store.now()
        await self._subject.store.promote(ALL)
        self._witness.swept(await self._rows(), now)

    async def _rows(self) -> list[Run]:
        self._known |= self._model.world.runs.keys()
        return list((await self._subject.rows(self._known)).values())


async def answered(move: Move, store: OwnershipStore) -> Any:
    """The answer, or the name of the mistake that the store sees in the question."""
    try:
        return await move.ask(store)
    except UsageError as error:
        return type(error).__name__
