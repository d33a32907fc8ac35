# SPDX-License-Identifier: Apache-2.0
"""What a client is sent of a stream: head and end by aiohttp, the rest straight to its connection.

aiohttp's own way to write awaits, for every event of a hundred bytes, what is hardly ever to be
waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx hands tokens on in lumps
}
# A connection's own limit, above which its buffer is to be drained.
_MAX_BUFFERED = 64 << 10


class ClientGoneError(ConnectionResetError):
    """Nobody is there to be sent anything."""


class _Streamed(web.StreamResponse):
    """One whose head goes with its first bytes, as that of a whole answer does."""

    _send_headers_immediately = False


class ClientStream:
    """A response that has begun."""

    def __init__(
        self,
        response: web.StreamResponse,
        writer: AbstractStreamWriter,
        transport: asyncio.Transport,
    ) -> None:
        self.response = response
        self._writer = writer
        self._transport = transport
        self._chunked = response.chunked
        # The piece that was sent last.
        self.sent = b""

    @classmethod
    async def begin(
        cls, http: web.Request, headers: Mapping[str, str], first: bytes
    ) -> ClientStream:
        """Send the head, and the first bytes, if there are any, in the same packet.

        ClientGoneError.
        """
        response = _Streamed(headers={**headers, **_HEADERS})
        if http.version == HttpVersion11:
            response.enable_chunked_encoding()
        else:
            response.force_close()  # nothing else says where it ends
        writer = await response.prepare(http)
        if writer is None or http.transport is None:
            raise ClientGoneError
        await writer.write(first)
        begun = cls(response, writer, http.transport)
        begun.sent = first
        return begun

    def put(self, piece: bytes) -> bool:
        """Send it; False where the client reads more slowly than this writes: `drain` first.

        Not nothing: that would be the end of the stream.
        """
        transport = self._transport
        if transport.is_closing():
            return False
        self.sent = piece
        transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
        return transport.get_write_buffer_size() <= _MAX_BUFFERED

    async def drain(self) -> None:
        """Wait until the client has read; ClientGoneError."""
        if self._transport.is_closing():
            raise ClientGoneError
        await self._writer.drain()

    async def end(self, last: bytes) -> None:
        """Send what is left, and in the same packet that this is all; ConnectionResetError."""
        await self.response.write_eof(last)
