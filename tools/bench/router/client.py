"""The load's HTTP client: one request at a time on a kept connection, with the times that count."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

from tools.bench.errors import BenchError

_TIMEOUT_S = 120.0
_END = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Reply:
    """Times are `time.perf_counter`; `first` is when the first byte of the body was there."""

    begun: float
    first: float
    ended: float
    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """A client's side of one connection. Bodies may be chunked or have a length."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(cls, host, port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionError("closed in the middle of an answer"))

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def post(self, path: str, body: bytes) -> Reply:
        """Send, and wait for the whole answer; BenchError if the connection ends before."""
        if self._transport is None:
            raise BenchError("a connection was closed between two requests")
        self._reply = asyncio.get_running_loop().create_future()
        self._head, self._in_body, self._got = b"", False, 0
        self._length: int | None = None
        self._pieces: list[bytes] = []
        self._first = 0.0
        self._begun = time.perf_counter()
        self._transport.write(
            b"POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
        )
        try:
            return await asyncio.wait_for(self._reply, _TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise BenchError(
                "a request was not answered whole", found=repr(error), expected="an answer"
            ) from error

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            return
        if not self._in_body:
            data = self._take_head(data)
            if not self._in_body:
                return
        if data and not self._first:
            self._first = time.perf_counter()
        self._pieces.append(data)
        self._got += len(data)
        if self._is_whole():
            ended = time.perf_counter()
            status = int(self._head[9:12])
            body = b"".join(self._pieces)
            self._reply.set_result(Reply(self._begun, self._first, ended, status, body))

    def _take_head(self, data: bytes) -> bytes:
        """What of the data belongs to the body."""
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        self._in_body = True
        _, sized, length = head.lower().partition(b"\r\ncontent-length:")
        self._length = int(length.split(b"\r\n", 1)[0]) if sized else None
        return rest

    def _is_whole(self) -> bool:
        if self._length is not None:
            return self._got >= self._length
        # No event holds these bytes: they end a chunked body.
        end = self._pieces[-1]
        if len(end) < len(_END):
            end = b"".join(self._pieces[-len(_END) :])
        return end.endswith(_END)


def unchunked(body: bytes) -> bytes:
    """A chunked body without its framing; BenchError if that is broken."""
    pieces: list[bytes] = []
    at = 0
    while True:
        line = body.find(b"\r\n", at)
        try:
            size = int(body[at:line], 16)
        except ValueError as error:
            raise BenchError("an answer's chunks are broken", found=body[at : at + 40]) from error
        if size == 0:
            return b"".join(pieces)
        pieces.append(body[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
