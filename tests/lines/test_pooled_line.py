"""Session lines where a real PgBouncer in transaction mode stands in between: no connection is anybody's own."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from deerflow_runs import store_at
from deerflow_runs.model import Session
from deerflow_runs.protocol.judge import Sign
from deerflow_runs.store.base import CancelRequest
from deerflow_runs.store.signals import Signal, SignalMode
from tests.contract.lives import admitted
from tests.lines.support import ME, OTHER, beat, beating, ending, holds, mode, sign_of
from tests.rules import rule
from tests.support.pooler import pgbouncer


@pytest.fixture
def pooled(postgres_dsn: str) -> Iterator[str]:
    """The address through a pooler that has two connections to the server."""
    with pgbouncer(postgres_dsn, connections=2) as dsn:
        yield dsn + "?pooler=true"


@rule("O10", "O27", "O33")
async def test_behind_a_pooler_a_line_beats_and_polls_and_claims_no_hint(pooled: str) -> None:
    async with store_at(pooled) as store, beating(store) as line:
        for number in (1, 2, 3):
            assert (await beat(line)).beat == number
        assert not await line.probe()
        assert mode(line) is SignalMode.POLLING
        assert not holds(line)
        await store.send(Signal.WORK)
        assert await line.wait(0.01) == frozenset()
        (session,) = await store.sessions()
        assert not session.hinted


@rule("O10")
async def test_behind_a_pooler_many_lines_share_few_connections(pooled: str) -> None:
    async with store_at(pooled) as store, beating(store) as line, beating(store, OTHER) as other:
        await admitted(store, "r", "t")
        for number in range(1, 20):
            assert ((await beat(line)).beat, (await beat(other, OTHER)).beat) == (number, number)
        requests: tuple[CancelRequest, ...] = await line.requests(ME)
        assert requests == ()
        assert await line.close_session(ME)


@rule("O27")
async def test_behind_a_pooler_a_free_lock_means_nothing(pooled: str) -> None:
    async with store_at(pooled) as store:
        await store.open_session(Session(ME, hinted=True))
        assert await sign_of(store) is Sign.NONE


@rule("O27", "O33")
async def test_a_way_around_the_pooler_is_taken_by_the_line(pooled: str, postgres_dsn: str) -> None:
    around = f"{pooled}&direct_url={quote(postgres_dsn, safe='')}"
    async with store_at(around) as store, beating(store) as line:
        assert mode(line) is SignalMode.NOTIFY
        assert holds(line)
        await store.send(Signal.WORK)  # through the pooler
        assert await ending(line.wait(60)) == {Signal.WORK}
        assert await sign_of(store) is Sign.NONE
