"""What a client is sent arrives whole and in order, however slowly it reads, or not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from vllm.bidir.router.http.connection import Answered, ClientConnection
from vllm.bidir.router.http.reader import Limits
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.stream import ClientGoneError, ClientStream
from vllm.bidir.router.process.runtime import new_event_loop

# More than a socket's buffers and the connection's own hold.
MANY = 4000
PIECE = b"data: " + b"x" * 1000 + b"\n\n"


Handler = Callable[[Request], Awaitable[Answered]]


class App:
    """Serves everything with one handler."""

    def __init__(self, handler: Handler) -> None:
        self.answer = handler

    def count(self, request: Request, status: int) -> None:
        assert status == 200


async def never(request: Request) -> Answered:
    raise AssertionError


@asynccontextmanager
async def connection(
    handler: Handler = never,
) -> AsyncIterator[tuple[ClientConnection, socket.socket]]:
    """The router's side of a connection, and the client's socket."""
    ours, client = socket.socketpair()
    _, made = await asyncio.get_running_loop().create_connection(
        lambda: ClientConnection(App(handler), Limits(1000, 1000), set()), sock=ours
    )
    try:
        yield made, client
    finally:
        made.abort()
        client.close()


async def read(client: socket.socket, size: int) -> bytes:
    client.setblocking(False)
    found = b""
    while len(found) < size:
        piece = await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        assert piece, "the connection has ended"
        found += piece
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
        async with connection() as (ours, client):
            await course(ClientStream(ours, chunked=False), client)

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


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("first", [b"one", b""])
@pytest.mark.parametrize("last", [b"three", b""])
async def test_the_head_goes_with_the_first_piece_and_the_end_with_the_last(
    version: bytes, first: bytes, last: bytes
) -> None:
    """Each packet costs more than what is in it."""
    made: list[Written] = []

    async def handler(request: Request) -> Answered:
        assert request.client.transport is not None
        made.append(Written(request.client.transport))
        request.client.transport = cast(Any, made[0])
        stream = ClientStream.begin(request, {"X-Kind": "test"}, first)
        assert stream.sent == first
        assert stream.put(b"two") and stream.sent == b"two"
        await stream.end(last)
        return stream

    chunked = version == b"1.1"
    end = (b"5\r\nthree\r\n0\r\n\r\n" if last else b"0\r\n\r\n") if chunked else last
    async with connection(handler) as (_, client):
        client.sendall(b"GET / HTTP/%b\r\n\r\n" % version)
        while not made or b"".join(made[0].calls).count(b"two") == 0:
            await asyncio.sleep(0.001)
        whole = b"".join(made[0].calls)
        assert await read(client, len(whole)) == whole
    head, blank, body = made[0].calls[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nX-Kind: test\r\n") and blank
    assert b"\r\nContent-Type: text/event-stream; charset=utf-8\r\n" in head
    assert (b"\r\nConnection: close" in head) is not chunked
    assert body == (b"3\r\none\r\n" if chunked and first else first)
    assert made[0].calls[1] == (b"3\r\ntwo\r\n" if chunked else b"two")
    assert made[0].calls[2:] == [end] * bool(end)


async def test_a_chunk_may_pass_as_it_is() -> None:
    async def handler(request: Request) -> Answered:
        stream = ClientStream.begin(request, {}, b"")
        take = stream.chunk_taker([], [b"secret"])
        assert take is not None and take(b"7\r\nsecret\n\r\n") is None
        assert take(b"4\r\none\n\r\n") and stream.sent.endswith(b"\none\n")
        await stream.end(b"")
        return stream

    async with connection(handler) as (_, client):
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            found += await read(client, 1)
    assert found.endswith(b"\r\n\r\n4\r\none\n\r\n0\r\n\r\n")
