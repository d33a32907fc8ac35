# SPDX-License-Identifier: Apache-2.0
"""D's stream on its way to one client: as fast as both can, and no faster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from vllm.bidir.router.client_stream import ClientStream
from vllm.bidir.router.reply import Reply
from vllm.bidir.router.stream import StreamFilter


class PassThrough:
    """Hands on what a filter leaves. `note` is awaited when the filter has found something, before
    the client sees what follows; `sent` is what the client was sent last.
    """

    def __init__(
        self,
        upstream: Reply,
        taken: StreamFilter,
        client: ClientStream,
        note: Callable[[], Awaitable[None]],
    ) -> None:
        self.sent = b""
        self._upstream = upstream
        self._filter = taken
        self._client = client
        self._note = note
        # What the client gets once what was found in it has been noted.
        self._after_note: bytes | None = None

    async def run(self, first: bytes) -> None:
        """All that comes after its first bytes, and those.

        Raises AnswerError if D's stream breaks off, ValueError if it cannot be one, and
        ClientGoneError.
        """
        if not self._take(first):
            await self._go_on()
        while not await self._upstream.relay(self._take):
            await self._go_on()

    async def _go_on(self) -> None:
        """After a piece that could not be handed on at once, or not at all yet."""
        piece, self._after_note = self._after_note, None
        if piece is not None:
            await self._note()
            if piece:
                self.sent = piece
                self._client.put(piece)
        await self._client.drain()

    def _take(self, piece: bytes) -> bool:
        """Hand on a piece; False where something has to be waited for first."""
        if not self._filter.passes(piece):
            piece = self._filter.feed(piece)
            if self._filter.has_found():
                self._after_note = piece
                return False
            if not piece:
                return True
        self.sent = piece
        return self._client.put(piece)

    async def finish(self) -> None:
        """What is left when D's stream has ended."""
        left = self._filter.finish()
        await self._note()
        if left:
            self.sent = left
            self._client.put(left)
