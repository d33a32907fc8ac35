# SPDX-License-Identifier: Apache-2.0
"""D's stream on its way to one client: as fast as both can, and no faster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from vllm.bidir.router.http.stream import ClientStream
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.turns.stream import StreamFilter


class PassThrough:
    """Hands on what a filter leaves. `note` is awaited when the filter has found something, before
    the client sees what follows.
    """

    def __init__(
        self,
        upstream: Reply,
        taken: StreamFilter,
        client: ClientStream,
        note: Callable[[], Awaitable[None]],
    ) -> None:
        self._upstream = upstream
        self._filter = taken
        self._client = client
        self._note = note
        # What the client gets once what was found in it has been noted.
        self._after_note: bytes | None = None

    async def run(self, first: bytes) -> bytes:
        """All that comes after its first bytes, and those; what is left for the client at the end.

        In that the filter may have found something. Raises AnswerError if D's stream breaks off,
        ValueError if it cannot be one, and ClientGoneError.
        """
        if first and not self._take(first):
            await self._go_on()
        take_chunk = self._client.chunk_taker(self._filter.held, self._filter.words)
        while (last := await self._upstream.relay(self._take, take_chunk)) is None:
            await self._go_on()
        return self._filter.feed(last) + self._filter.finish()

    async def _go_on(self) -> None:
        """After a piece that could not be handed on at once, or not at all yet."""
        piece, self._after_note = self._after_note, None
        if piece is not None:
            await self._note()
            if piece:
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
        return self._client.put(piece)
