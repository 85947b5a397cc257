"""A proxy in front of a PostgreSQL server: counts round trips, holds everything up, breaks connections off.

It runs in the test's own event loop and understands nothing of what it passes on, but for notifications it is to keep.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit, urlunsplit


class RoundTripProxy:
    """``async with RoundTripProxy() as proxy: connect(proxy.dsn(dsn))``, then look at ``proxy.turns``.

    A turn is one flight from client to server, in however many packets; it ends when the server says something.
    """

    def __init__(self) -> None:
        self.turns = 0
        self._target: tuple[str, int] | None = None
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._held: list[tuple[_End, bytes]] | None = None
        self._replies_until_loss = 0
        self._muted = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self), "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.gather(*self._connecting)
        self.cut()
        await self._server.wait_closed()

    def dsn(self, dsn: str) -> str:
        """The address that leads through the proxy to ``dsn``. All that are asked for must name one server."""
        assert self._server is not None
        parts = urlsplit(dsn)
        target = (parts.hostname or "127.0.0.1", parts.port or 5432)
        assert self._target in {None, target}
        self._target = target
        login, _, _ = parts.netloc.rpartition("@")
        port = self._server.sockets[0].getsockname()[1]
        return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}"))

    def hold(self) -> None:
        """Pass nothing on, in either direction. Connections stay open and new ones are accepted."""
        self._held = self._held or []

    def release(self) -> None:
        """Pass on what was held, and what follows."""
        held, self._held = self._held or [], None
        for end, data in held:
            end.say(data)

    def mute(self) -> None:
        """From now on no notification arrives, and everything else does."""
        self._muted = True

    def lose_reply(self, number: int) -> None:
        """Break off the connection instead of passing on the first, second… reply from now on."""
        self._replies_until_loss = number

    def cut(self) -> None:
        """Break off every connection. New ones work."""
        for end in list(self._ends):
            end.abort()

    # --- For the ends of connections --------------------------------------------------------------------------------

    def accepted(self, client: _End) -> None:
        """A client has come: find it the server."""
        task = asyncio.get_running_loop().create_task(self._connect(client), name="round-trip-proxy")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def opened(self, end: _End) -> None:
        """Remember it for ``cut()``."""
        self._ends.add(end)

    def closed(self, end: _End) -> None:
        """What happens to one end happens to the other."""
        self._ends.discard(end)
        if end.other is not None:
            end.other.abort()

    def pass_on(self, end: _End, data: bytes, *, reply: bool) -> None:
        """Say ``data`` at ``end``, now or when it is released. Whether it begins the ``reply`` to a turn."""
        if reply and self._replies_until_loss:
            self._replies_until_loss -= 1
            if not self._replies_until_loss:
                end.abort()
                return
        if self._muted and end.is_client:
            data = _without_notifications(data)
        if self._held is None:
            end.say(data)
        else:
            self._held.append((end, data))

    async def _connect(self, client: _End) -> None:
        assert self._target is not None
        server = _End(self, client)
        try:
            await asyncio.get_running_loop().create_connection(lambda: server, *self._target)
        except OSError:
            client.abort()  # a server that is gone looks as it would without us
        else:
            client.meet(server)


class _End(asyncio.Protocol):
    """One end of a connection through the proxy: towards a client, or (with ``client``) towards the server."""

    def __init__(self, proxy: RoundTripProxy, client: _End | None = None) -> None:
        self.other = client
        self._is_server = client is not None
        self._proxy = proxy
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self._in_flight = False

    @property
    def is_client(self) -> bool:
        """Whether a client is told what is said here."""
        return not self._is_server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._proxy.opened(self)
        if not self._is_server:
            self._proxy.accepted(self)

    def meet(self, server: _End) -> None:
        """The server is there: tell it what the client has said meanwhile."""
        self.other = server
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
            return
        client = self.other if self._is_server else self
        turned = client.turn(client_speaks=not self._is_server)
        self._proxy.turns += turned and not self._is_server
        self._proxy.pass_on(self.other, data, reply=turned and self._is_server)

    def turn(self, *, client_speaks: bool) -> bool:
        """Whether another side speaks than before."""
        turned = self._in_flight is not client_speaks
        self._in_flight = client_speaks
        return turned

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.closed(self)

    def say(self, data: bytes) -> None:
        """Send it this way, if there is still somebody."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Break off this end."""
        if self._transport is not None:
            self._transport.abort()


def _without_notifications(data: bytes) -> bytes:
    """What a server has said, in whole messages: a letter, and a length that counts itself."""
    kept, at = b"", 0
    while at < len(data):
        end = at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
        kept += b"" if data[at : at + 1] == b"A" else data[at:end]
        at = end
    return kept
