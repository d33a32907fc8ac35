# SPDX-License-Identifier: Apache-2.0
"""What a client is sent of a stream: straight to its connection, without a task or a queue.

To await, for every event of a hundred bytes, what is hardly ever to be waited for costs more than
the event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm.bidir.router.http.request import Client, Request
from vllm.bidir.router.http.response import head

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx hands tokens on in lumps
}
_CHUNKED = {"Transfer-Encoding": "chunked"}
_LAST_CHUNK = b"0\r\n\r\n"


class ClientGoneError(ConnectionResetError):
    """Nobody is there to be sent anything."""


class ClientStream:
    """An answer of 200 that has begun. `chunked`: what it is sent in; False for HTTP/1.0."""

    status = 200

    def __init__(self, client: Client, chunked: bool) -> None:
        if client.transport is None:
            raise ClientGoneError
        self.chunked = chunked
        # Its end has been written, though the client may not have read it yet.
        self.ended = False
        self._client = client
        self._write = client.transport.write
        self._is_closing = client.transport.is_closing
        self._sent = b""
        self._sent_as_chunk = False

    @classmethod
    def begin(cls, request: Request, headers: Mapping[str, str], first: bytes) -> ClientStream:
        """Send the head, and the first bytes, if there are any, in the same packet.

        ClientGoneError.
        """
        stream = cls(request.client, request.http_11)
        fields = {**headers, **_HEADERS}
        if stream.chunked:
            fields |= _CHUNKED
        # Of HTTP/1.0 nothing else says where it ends.
        request.keeps_alive &= request.whole and stream.chunked
        said = head(cls.status, fields, not request.keeps_alive, request.http_11)
        request.client.count(request, cls.status)
        request.stream = stream
        stream._sent = first
        stream._write(said + stream._framed(first) if first else said)
        return stream

    @property
    def sent(self) -> bytes:
        """What was sent last, to its end; before that may stand what it was framed in."""
        return self._sent[:-2] if self._sent_as_chunk else self._sent

    def put(self, piece: bytes) -> bool:
        """Send it; False where the client reads more slowly than this writes: `drain` first.

        Not nothing: that would be the end of the stream.
        """
        if self._is_closing():
            return False
        self._sent, self._sent_as_chunk = piece, False
        self._write(self._framed(piece))
        return not self._client.full

    def chunk_taker(
        self, held: Sequence[bytes], words: Sequence[bytes]
    ) -> Callable[[bytes], bool | None] | None:
        """What sends a whole chunk as it is framed already, as `put` does a piece.

        It leaves one alone, and says None, that has one of `words`, and all of them while something
        is `held`. None where the client is not sent chunks.

        Nearly all of a stream goes this way: one call, which has all that it needs at hand.
        """
        if not self.chunked:
            return None
        client, write, is_closing = self._client, self._write, self._is_closing

        def take(chunk: bytes) -> bool | None:
            if held:
                return None
            for word in words:
                # The quickest search: `in` first tries whether the word is a number.
                if chunk.partition(word)[1]:
                    return None
            if is_closing():
                return False
            self._sent, self._sent_as_chunk = chunk, True
            write(chunk)
            return not client.full

        return take

    async def drain(self) -> None:
        """Wait until the client has read; ClientGoneError."""
        if not self._is_closing():
            await self._client.drained()
        if self._is_closing():
            raise ClientGoneError

    async def end(self, last: bytes) -> None:
        """Send what is left, and in the same packet that this is all; ClientGoneError."""
        if self._is_closing():
            raise ClientGoneError
        self.ended = True
        framed = self._framed(last) if last else b""
        if self.chunked:
            framed += _LAST_CHUNK
        if framed:
            self._write(framed)
            await self._client.drained()

    def _framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece
