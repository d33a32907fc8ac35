# SPDX-License-Identifier: Apache-2.0
"""D's stream on its way to one client: as fast as both can, and no faster."""

from __future__ import annotations

from collections.abc import Callable

from vllm.bidir.router.client_stream import ClientStream
from vllm.bidir.router.node_connection import Reply
from vllm.bidir.router.stream import StreamFilter


class PassThrough:
    """Hands on what a filter leaves. `note` is called when the filter has found something, before
    the client sees what follows; `sent` is what the client was sent last.
    """

    def __init__(
        self, upstream: Reply, taken: StreamFilter, client: ClientStream, note: Callable[[], None]
    ) -> None:
        self.sent = b""
        self._upstream = upstream
        self._filter = taken
        self._client = client
        self._note = note

    async def run(self, first: bytes) -> None:
        """All that comes after its first bytes, and those.

        Raises AnswerError if D's stream breaks off, ValueError if it cannot be one, and
        ClientGoneError.
        """
        if not self._take(first):
            await self._client.drain()
        while not await self._upstream.relay(self._take):
            await self._client.drain()

    def _take(self, piece: bytes) -> bool:
        """Hand on a piece; False where the client has to read first."""
        if not self._filter.passes(piece):
            piece = self._filter.feed(piece)
            if self._filter.has_found():
                self._note()
            if not piece:
                return True
        self.sent = piece
        return self._client.put(piece)

    def finish(self) -> None:
        """What is left when D's stream has ended."""
        if left := self._filter.finish():
            self.sent = left
            self._client.put(left)
