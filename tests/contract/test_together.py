"""Many starts and settles at once: the same table, one statement on PostgreSQL, one commit on SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deerflow_runs.model import Micros, OnOrphan, Run, RunId, RunKey, RunStatus, Session, ThreadId, Usage, WorkerId
from deerflow_runs.protocol.decision import Actor, Applied, Decision, Given, Refused, decide
from deerflow_runs.protocol.lifecycle import Refusal, RunEvent
from deerflow_runs.store.base import Settlement
from deerflow_runs.store.clauses import Shape
from deerflow_runs.store.coalesce import Coalescer
from deerflow_runs.store.together import TOGETHER
from deerflow_runs.testing.contract import Subject
from deerflow_runs.testing.contract.situations import sessions, situations
from tests.rules import rule


@rule("O7", "O8", "O20")
@pytest.mark.parametrize("event", sorted(TOGETHER))
async def test_what_goes_together_is_decided_as_if_it_went_alone(event: RunEvent, subject: Subject) -> None:
    now = await subject.store.now()
    asked = [situation for status in RunStatus for situation in situations(status, event, now)]
    await subject.place_sessions(sessions(now))
    await subject.place([run for situation in asked for run in (situation.run, *situation.beside)])
    wanted = [decide(one.run, event, one.by, one.facts, one.given) for one in asked]
    answers = await subject.store.settle_many([Settlement(one.run.key, event, one.by, one.given) for one in asked])
    assert [_told(answer) for answer in answers] == [_told(decision) for decision in wanted]
    for situation, decision in zip(asked, wanted, strict=True):
        kept = await subject.row(situation.run.run_id)
        assert kept is not None
        assert _outcome(kept) == _outcome(decision.run or situation.run), situation


def _told(decision: Decision) -> tuple[object, ...]:
    return (decision.repeated,) if isinstance(decision, Applied) else (decision.reason,)


def _outcome(run: Run) -> tuple[object, ...]:
    return (run.status, run.epoch, run.settled_by, run.stop_reason, run.error, run.usage, run.last_checkpoint)


@rule("O8")
async def test_the_same_settlement_given_twice_in_one_batch_happens_once(subject: Subject) -> None:
    me = WorkerId("me:twice")
    await subject.store.open_session(Session(me))
    run = Run(RunId("r"), ThreadId("t"), status=RunStatus.RUNNING, owner_worker_id=me, epoch=1, on_orphan=OnOrphan.FAIL)
    await subject.place([run])
    once = Settlement(run.key, RunEvent.SETTLE_SUCCESS, Actor(me, 1), Given(usage=Usage(total_tokens=7)))
    first, second = await subject.store.settle_many([once, once])
    assert sorted((_told(first), _told(second))) == [(False,), (True,)]


class Recorder:
    """Stands for the two ways of settling and writes down which was taken; ``gate`` holds everything back."""

    def __init__(self, *, lost: Sequence[str] = ()) -> None:
        self.taken: list[tuple[str, ...]] = []
        self.gate = asyncio.Event()
        self._lost = lost

    async def alone(self, asked: Settlement) -> Decision:
        self.taken.append((asked.key.run_id,))
        await self.gate.wait()
        return Refused(Refusal.LOST) if asked.key.run_id in self._lost else Applied(_run(asked))

    async def together(self, event: RunEvent, shape: Shape, asked: Sequence[Settlement]) -> dict[RunId, Run]:
        self.taken.append(tuple(one.key.run_id for one in asked))
        await self.gate.wait()
        if "broken" in self._lost:
            raise ConnectionError("cut")
        return {one.key.run_id: _run(one) for one in asked if one.key.run_id not in self._lost}


def _run(asked: Settlement) -> Run:
    return Run(asked.key.run_id, asked.key.thread_id, updated_at=Micros(1))


def _ask(name: str) -> Settlement:
    key = RunKey(ThreadId(f"thread-{name}"), RunId(name))
    return Settlement(key, RunEvent.SETTLE_SUCCESS, Actor(WorkerId("me"), 1))


async def _turns() -> None:
    """Let everything that is ready happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_arrives_while_two_statements_are_under_way_goes_into_the_next_one() -> None:
    recorder = Recorder()
    coalescer = Coalescer(recorder.alone, recorder.together)
    calls = []
    for name in "abcde":
        calls.append(asyncio.create_task(coalescer.apply(_ask(name))))
        await _turns()
    assert recorder.taken == [("a",), ("b",)]
    recorder.gate.set()
    decisions = await asyncio.gather(*calls)
    assert recorder.taken[2:] == [("c", "d", "e")]
    assert all(isinstance(decision, Applied) for decision in decisions)


@pytest.mark.parametrize("lost", ["b", "broken"])
async def test_a_run_that_did_not_come_back_is_asked_again_alone(lost: str) -> None:
    recorder = Recorder(lost=[lost])
    coalescer = Coalescer(recorder.alone, recorder.together)
    calls = [asyncio.create_task(coalescer.apply(_ask(name))) for name in "abc"]
    recorder.gate.set()
    first, second, third = await asyncio.gather(*calls)
    again = [("b",)] if lost == "b" else [("a",), ("b",), ("c",)]
    assert recorder.taken == [("a", "b", "c"), *again]
    assert isinstance(second, Refused) == (lost == "b")
    assert isinstance(first, Applied)
    assert isinstance(third, Applied)


async def test_a_caller_that_leaves_before_its_turn_takes_its_settlement_along() -> None:
    recorder = Recorder()
    coalescer = Coalescer(recorder.alone, recorder.together)
    first = [asyncio.create_task(coalescer.apply(_ask("a")))]
    await _turns()
    first.append(asyncio.create_task(coalescer.apply(_ask("b"))))
    await _turns()
    leaving, staying = (asyncio.create_task(coalescer.apply(_ask(name))) for name in "cd")
    await _turns()
    leaving.cancel()
    await _turns()
    recorder.gate.set()
    await asyncio.gather(*first, staying)
    assert leaving.cancelled()
    assert recorder.taken == [("a",), ("b",), ("d",)]
