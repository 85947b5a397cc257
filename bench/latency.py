"""A slower network: a proxy before PostgreSQL that holds every reply back, in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tests.support.proxy import RoundTripProxy


class LatencyProxy(RoundTripProxy):
    """Replies arrive ``seconds`` later, in their order. The way there is as quick as ever."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._late: dict[Any, deque[bytes]] = {}

    def pass_on(self, end: Any, data: bytes, *, reply: bool) -> None:
        if not end.is_client:
            super().pass_on(end, data, reply=reply)
            return
        self._late.setdefault(end, deque()).append(data)
        asyncio.get_running_loop().call_later(self._seconds, self._say, end)

    def closed(self, end: Any) -> None:
        self._late.pop(end, None)
        super().closed(end)

    def _say(self, end: Any) -> None:
        """One callback for each piece, whichever comes first: pieces keep their order, callbacks need not."""
        if late := self._late.get(end):
            end.say(late.popleft())


@contextmanager
def slower(dsn: str, seconds: float) -> Iterator[str]:
    """The address that leads to ``dsn`` through the proxy; nothing slower: ``dsn`` itself."""
    if not seconds:
        yield dsn
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, dsn, seconds), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Pipe, dsn: str, seconds: float) -> None:
    async def serve() -> None:
        async with LatencyProxy(seconds) as proxy:
            pipe.send(proxy.dsn(dsn))
            await asyncio.Event().wait()

    asyncio.run(serve())
