"""Requests to nodes: what they may answer, in which pieces, and over which connection."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.client import NodeClient
from vllm.bidir.router.nodes.connection import NodeConnection
from vllm.bidir.router.nodes.names import Names
from vllm.bidir.router.nodes.reply import AnswerError

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"content-length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nt: u\r\n\r\n"
UNTIL_CLOSED = OK + b"\r\nhello"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Node:
    """Answers every request with the same bytes, one by one if asked to, and then may close."""

    def __init__(self, answer: bytes, in_pieces: bool = False, closes: bool = False) -> None:
        self.answer = answer
        self.in_pieces = in_pieces
        self.closes = closes
        self.connections = 0
        self.asked: list[bytes] = []
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append(head)
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                await reader.readexactly(size)
                pieces = [self.answer]
                if self.in_pieces:
                    pieces = [self.answer[at : at + 1] for at in range(len(self.answer))]
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def started(node: Node) -> AsyncIterator[Address]:
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def ask(client: NodeClient, address: Address) -> bytes:
    reply = await client.request(address, "POST", "/", {}, b"{}")
    with closing(reply):
        return await reply.read()


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("answer", [SIZED, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED])
async def test_an_answer_is_read_whole_and_its_connection_used_again(
    answer: bytes, in_pieces: bool
) -> None:
    node = Node(answer, in_pieces)
    async with started(node) as address:
        with closing(NodeClient(5)) as client:
            assert [await ask(client, address) for _ in range(3)] == [b"hello"] * 3
    assert node.connections == 1


class Sent(asyncio.Transport):
    """Remembers what it is given to send in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.closing = False

    def write(self, data: Any) -> None:
        self.calls.append(bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.calls.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.parametrize(("status", "connections"), [(404, 1), (500, 3), (503, 3)])
async def test_a_node_that_cannot_serve_is_left(status: int, connections: int) -> None:
    """It may be ending, and wait for its connections to end: checks would keep one for ever."""
    answer = b"HTTP/1.1 %d Said\r\nContent-Length: 2\r\n\r\nno" % status
    node = Node(answer)
    async with started(node) as address:
        with closing(NodeClient(5)) as client:
            assert [await ask(client, address) for _ in range(3)] == [b"no"] * 3
    assert node.connections == connections


async def test_nothing_is_sent_on_a_connection_that_is_closing() -> None:
    """It has been made, and its node has closed it a moment later."""
    sent = Sent()
    connection = NodeConnection(lambda one: None, lambda one: None)
    connection.connection_made(sent)
    sent.closing = True
    with pytest.raises(OSError, match="closed"):
        await connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"")
    assert sent.calls == []


@pytest.mark.parametrize("body", [b"", b"{}"])
async def test_a_request_is_sent_at_once(body: bytes) -> None:
    """A node that is sent its head first wakes twice, and so does the system here."""
    sent, idle = Sent(), list[NodeConnection]()
    connection = NodeConnection(idle.append, lambda gone: None)
    connection.connection_made(sent)
    asking = asyncio.ensure_future(connection.ask(b"HEAD\r\n\r\n", body))
    await asyncio.sleep(0)
    connection.data_received(SIZED)
    assert await (await asking).read() == b"hello"
    assert sent.calls == [b"HEAD\r\n\r\n" + body] and idle == [connection]


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_an_answer_without_a_length_ends_with_its_connection(in_pieces: bool) -> None:
    node = Node(UNTIL_CLOSED, in_pieces, closes=True)
    async with started(node) as address:
        with closing(NodeClient(5)) as client:
            assert [await ask(client, address) for _ in range(2)] == [b"hello"] * 2
    assert node.connections == 2


@pytest.mark.parametrize(
    "answer",
    [SIZED + SIZED, SIZED + b"x", SIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")],
)
async def test_what_comes_after_an_answer_is_nobodys(answer: bytes) -> None:
    """Else one client would be given what was meant for another."""
    node = Node(answer)
    async with started(node) as address:
        with closing(NodeClient(5)) as client:
            assert [await ask(client, address) for _ in range(2)] == [b"hello"] * 2
    assert node.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        OK + b"content-length: 6\r\n\r\nhello",
        CHUNKED[:-5],
        b"HELLO\r\n\r\n",
        OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        OK + b"transfer-encoding: chunked\r\n\r\nfive\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nhello",
    ],
)
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_broken_answer_is_an_error(answer: bytes, in_pieces: bool) -> None:
    async with started(Node(answer, in_pieces, closes=True)) as address:
        with closing(NodeClient(5)) as client, pytest.raises(AnswerError):
            await ask(client, address)


@pytest.mark.parametrize("where", ["head", "trailer"])
async def test_header_fields_without_end_are_refused(where: str) -> None:
    begin = OK if where == "head" else CHUNKED[:-4]
    node = Node(begin + b"x: " + b"y" * 2_000_000)
    async with started(node) as address:
        with closing(NodeClient(5)) as client, pytest.raises(AnswerError, match="65536 bytes"):
            await ask(client, address)


async def test_a_node_that_is_not_there_is_an_error() -> None:
    async with started(Node(SIZED)) as address:
        pass
    with closing(NodeClient(5)) as client, pytest.raises(ConnectionError):
        await ask(client, address)


async def test_a_redirect_is_an_answer_like_any_other() -> None:
    """The nodes' key is for the nodes."""
    node = Node(b"HTTP/1.1 307 Gone\r\nLocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n")
    async with started(node) as address:
        with closing(NodeClient(5)) as client:
            reply = await client.request(address, "POST", "/", {})
    assert reply.status == 307


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb", "a\0b"])
async def test_a_header_cannot_bring_another_with_it(value: str) -> None:
    with closing(NodeClient(5)) as client, pytest.raises(ValueError, match="line end"):
        await client.request(Address("127.0.0.1", 9), "GET", "/", {"X-Request-Id": value})


@pytest.fixture
async def relaying() -> AsyncIterator[NodeClient]:
    with closing(NodeClient(5)) as client:
        yield client


async def relayed(client: NodeClient, address: Address, often: int = 1) -> bytes:
    """All of an answer, taken so often before it is asked for again."""
    with closing(await client.request(address, "POST", "/", {})) as reply:
        taken: list[bytes] = []

        def take(piece: bytes) -> bool:
            taken.append(piece)
            return len(taken) % often != 0

        while (last := await reply.relay(take)) is None:
            await asyncio.sleep(0)
    return b"".join((*taken, last))


LONG = b"x" * 3_000_000


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (SIZED, b"hello"),
        (CHUNKED, b"hello"),
        (OK + b"Content-Length: %d\r\n\r\n" % len(LONG) + LONG, LONG),
    ],
)
@pytest.mark.parametrize("often", [1, 3, sys.maxsize])
async def test_who_stops_taking_is_given_the_rest_later(
    answer: bytes, body: bytes, often: int, relaying: NodeClient
) -> None:
    node = Node(answer, in_pieces=len(answer) < 1000)
    async with started(node) as address:
        for _ in range(3):
            assert await relayed(relaying, address, often) == body
    assert node.connections == 1


async def test_many_streams_at_once_over_connections_of_their_own(relaying: NodeClient) -> None:
    node = Node(CHUNKED, in_pieces=True)
    async with started(node) as address:
        for _ in range(2):
            whole = await asyncio.gather(*(relayed(relaying, address) for _ in range(40)))
            assert whole == [b"hello"] * 40
    assert node.connections == 40


async def test_a_relayed_answer_without_a_length_ends_with_its_connection(
    relaying: NodeClient,
) -> None:
    async with started(Node(UNTIL_CLOSED, in_pieces=True, closes=True)) as address:
        assert await relayed(relaying, address) == b"hello"


@pytest.mark.parametrize("end", ["closes", "resets"])
async def test_a_relayed_answer_that_breaks_off_is_an_error(end: str, relaying: NodeClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        # Without a length its connection's end is its own, but for a reset.
        writer.write(UNTIL_CLOSED if end == "resets" else SIZED[:-1])
        await asyncio.sleep(0.02)
        if end == "resets":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(AnswerError):
        await relayed(relaying, address)
    server.close()


@pytest.mark.parametrize(
    ("pieces", "taken", "last"),
    [
        ([CHUNKED], [], b"hello"),
        ([CHUNKED[:-16], CHUNKED[-16:]], [b"hel"], b"lo"),
        ([CHUNKED[:-11], CHUNKED[-11:]], [b"hello"], b""),
    ],
)
async def test_what_comes_with_the_end_of_a_relayed_answer_is_returned(
    pieces: list[bytes], taken: list[bytes], last: bytes
) -> None:
    """So that it can go on in the same packet as the end."""
    connection = NodeConnection(lambda idle: None, lambda gone: None)
    connection.connection_made(Sent())
    asking = asyncio.ensure_future(connection.ask(b"HEAD\r\n\r\n", b""))
    await asyncio.sleep(0)
    head = CHUNKED.index(b"3;x=y")
    connection.data_received(CHUNKED[:head])
    reply, found = await asking, list[bytes]()
    relaying = asyncio.ensure_future(reply.relay(lambda piece: not found.append(piece)))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece.removeprefix(CHUNKED[:head]))
        await asyncio.sleep(0)
    assert (found, await relaying) == (taken, last)


async def test_who_gives_a_relayed_answer_up_ends_it(relaying: NodeClient) -> None:
    node = Node(CHUNKED[:-5])
    async with started(node) as address:
        asking = [asyncio.create_task(relayed(relaying, address)) for _ in range(3)]
        await asyncio.sleep(0.02)
        for one in asking:
            one.cancel()
        await asyncio.wait_for(node.left.wait(), 5)


async def test_what_goes_wrong_in_taking_comes_out_where_it_was_asked_for(
    relaying: NodeClient,
) -> None:
    node = Node(CHUNKED, in_pieces=True)
    async with started(node) as address:
        reply = await relaying.request(address, "POST", "/", {})

        def take(piece: bytes) -> bool:
            raise ValueError("too long")

        with pytest.raises(ValueError, match="too long"):
            await reply.relay(take)
        reply.close()
        await asyncio.wait_for(node.left.wait(), 5)


async def test_a_connection_that_comes_too_late_is_not_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = asyncio.Event()

    async def find(self: Names, host: str, port: int) -> list[object]:
        await never.wait()
        return []

    monkeypatch.setattr(Names, "find", find)
    with closing(NodeClient(0.05)) as client, pytest.raises(asyncio.TimeoutError):
        await ask(client, Address("127.0.0.1", 9))


async def test_a_name_that_python_cannot_encode_is_a_node_that_is_not_there() -> None:
    for host in ("10.0.0.1..2", "x" * 64):
        with closing(NodeClient(5)) as client, pytest.raises(OSError, match="no host name"):
            await ask(client, Address(host, 9))


async def test_names_are_looked_up_once_for_many_and_anew_after_a_failure() -> None:
    names = Names()
    loop = asyncio.get_running_loop()
    asked: list[str] = []
    known = False

    async def getaddrinfo(host: str, port: int, **more: object) -> list[tuple[object, ...]]:
        asked.append(host)
        await asyncio.sleep(0)
        if not known:
            raise OSError("no such name")
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign, assignment]
    found = await asyncio.gather(*(names.find("d", 1) for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [OSError] * 5 and asked == ["d"]
    known = True
    assert len(await asyncio.gather(*(names.find("d", 1) for _ in range(5)))) == 5
    assert await names.find("d", 1) and asked == ["d", "d"]
