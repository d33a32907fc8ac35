"""What a client is sent arrives whole and in order, however slowly it reads, or not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import HttpVersion, HttpVersion10, HttpVersion11, web
from aiohttp.test_utils import TestClient, TestServer
from vllm.bidir.router.clients.stream import ClientGoneError, ClientStream
from vllm.bidir.router.process.runtime import new_event_loop

# More than a socket's buffers and the connection's own hold.
MANY = 4000
PIECE = b"data: " + b"x" * 1000 + b"\n\n"


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[ClientStream, socket.socket]]:
    """The router's side of a connection, and the client's socket."""
    ours, client = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    response: Any = SimpleNamespace(chunked=False)
    try:
        yield ClientStream(response, cast(Any, None), transport), client
    finally:
        transport.abort()
        client.close()


async def read(client: socket.socket, size: int) -> bytes:
    client.setblocking(False)
    found = b""
    while len(found) < size:
        found += await asyncio.get_running_loop().sock_recv(client, 1 << 20)
    return found


async def a_client_that_does_not_read_is_sent_everything_later(
    stream: ClientStream, client: socket.socket
) -> None:
    pieces = [b"%d " % number + PIECE for number in range(MANY)]
    sent = 0
    while stream.put(pieces[sent]):
        sent += 1
    assert sent > 10, "nothing was sent before it was full"
    for piece in pieces[sent + 1 :]:
        stream.put(piece)
    whole = b"".join(pieces)
    assert await read(client, len(whole)) == whole


async def what_is_sent_at_once_does_not_overtake_what_waits(
    stream: ClientStream, client: socket.socket
) -> None:
    sent = []
    while not sent or stream.put(sent[-1]):
        sent.append(b"%d " % len(sent) + PIECE)
    client.setblocking(False)
    # There is room again, and the loop has not come round to it yet.
    found = client.recv(1 << 20)
    sent.append(b"the last")
    stream.put(sent[-1])
    whole = b"".join(sent)
    assert found + await read(client, len(whole) - len(found)) == whole


async def a_client_that_is_gone_is_found_out(stream: ClientStream, client: socket.socket) -> None:
    client.close()
    while stream.put(PIECE):
        await asyncio.sleep(0)
    with pytest.raises(ClientGoneError):
        await stream.drain()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, new_event_loop])
@pytest.mark.parametrize(
    "course",
    [
        a_client_that_does_not_read_is_sent_everything_later,
        what_is_sent_at_once_does_not_overtake_what_waits,
        a_client_that_is_gone_is_found_out,
    ],
)
def test_whatever_the_loop(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    course: Callable[[ClientStream, socket.socket], Awaitable[None]],
) -> None:
    async def run() -> None:
        async with connection() as (stream, client):
            await course(stream, client)

    loop = make_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


class Written:
    """A client's connection that remembers what it is given to send in each call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.calls: list[bytes] = []
        self._transport = transport

    def write(self, data: bytes) -> None:
        self.calls.append(data)
        self._transport.write(data)

    def writelines(self, lines: Iterable[bytes]) -> None:
        self.write(b"".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
@pytest.mark.parametrize("first", [b"one", b""])
@pytest.mark.parametrize("last", [b"three", b""])
async def test_the_head_goes_with_the_first_piece_and_the_end_with_the_last(
    version: HttpVersion, first: bytes, last: bytes
) -> None:
    """Each packet costs more than what is in it."""
    made: list[Written] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        made.append(Written(http.transport))
        http.protocol.transport = cast(Any, made[0])
        stream = await ClientStream.begin(http, {"X-Kind": "test"}, first)
        assert stream.sent == first
        assert stream.put(b"two") and stream.sent == b"two"
        await stream.end(last)
        return stream.response

    app = web.Application()
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app), version=version) as client:
        response = await client.get("/")
        assert await response.read() == first + b"two" + last
        assert response.headers["X-Kind"] == "test"
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    chunked = version == HttpVersion11
    begin, second, *end = made[0].calls
    assert begin.startswith(b"HTTP/1.") and begin.endswith(
        b"\r\n\r\n3\r\none\r\n" if chunked and first else b"\r\n\r\n" + first
    )
    assert second == (b"3\r\ntwo\r\n" if chunked else b"two")
    if chunked:
        assert end == [b"5\r\nthree\r\n0\r\n\r\n" if last else b"0\r\n\r\n"]
    else:
        assert end == [last] * bool(last)
