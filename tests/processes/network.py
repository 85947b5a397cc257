"""The network between one worker and its server, for tests that break it at a chosen moment."""

from __future__ import annotations

from typing import Any

from tests.support.proxy import RoundTripProxy


class Wire(RoundTripProxy):
    """A proxy of one worker's own. ``hold`` swallows everything, ``cut`` breaks off, ``sever`` also keeps it away."""

    def __init__(self) -> None:
        super().__init__()
        self._severed = False
        self._word = b""
        self._mentions_until_loss = 0
        self._deaf: set[Any] = set()
        self.lost = 0

    def lose_reply_about(self, word: str, number: int) -> None:
        """Break off a connection instead of passing on what the server answers to the ``number``-th flight that
        mentions ``word``, from now on. What was asked for has then happened, and the asker does not know."""
        self._word, self._mentions_until_loss = word.encode(), number

    def sever(self) -> None:
        """Break off every connection and let nobody connect."""
        self._severed = True
        self.cut()

    def mend(self) -> None:
        """Let everybody connect again. What was swallowed is lost with its connections."""
        self._severed = False
        self.cut()
        self.release()

    # --- For the ends of connections --------------------------------------------------------------------------------

    def accepted(self, client: Any) -> None:
        if self._severed:
            client.abort()
        else:
            super().accepted(client)

    def closed(self, end: Any) -> None:
        self._deaf.discard(end)
        super().closed(end)

    def pass_on(self, end: Any, data: bytes, *, reply: bool) -> None:
        if end in self._deaf:
            self.lost += 1
            end.abort()
            return
        if not end.is_client and self._mentions_until_loss and self._word in data:
            self._mentions_until_loss -= 1
            if not self._mentions_until_loss:
                self._deaf.add(end.other)
        super().pass_on(end, data, reply=reply)
