"""What a client is sent arrives whole and in order, however slowly it reads, or not at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.bidir.router.client_stream import ClientGoneError, ClientStream
from vllm.bidir.router.runtime import new_event_loop

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
