"""A client's connection: one request after the other, to its end or that of the client."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from vllm.bidir.router.clients.body import read_body
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.http import connection as connection_module
from vllm.bidir.router.http.connection import Answered, ClientConnection
from vllm.bidir.router.http.listener import Listener
from vllm.bidir.router.http.reader import Limits
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import Response
from vllm.bidir.router.http.stream import ClientStream

from tests.router.conftest import until

LIMITS = Limits(max_body=1000, max_header=500)
GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


class App:
    """/echo answers with the body, /hang never, /wait once it may go on, /blind without reading
    it, /stream in two pieces. Anything else is told its path."""

    def __init__(self) -> None:
        self.served: list[Request] = []
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.statuses: list[int] = []

    def count(self, request: Request, status: int) -> None:
        self.statuses.append(status)

    async def answer(self, request: Request) -> Answered:
        self.served.append(request)
        if request.path == "/fault":
            raise ValueError
        if request.path == "/hang":
            try:
                await asyncio.sleep(3600)
            finally:
                self.cancelled.set()
        if request.path == "/wait":
            await self.go_on.wait()
        if request.path == "/stream":
            stream = ClientStream.begin(request, {}, b"one")
            stream.put(b"two")
            await stream.end(b"")
            return stream
        if request.path == "/big":
            return Response(body=b"x" * (8 << 20))
        try:
            body = request.path.encode() if request.path != "/echo" else await request.read()
        except ClientError as error:
            return error.response()
        return Response(body=body)


@asynccontextmanager
async def listening(**limits: int) -> AsyncIterator[tuple[App, Listener]]:
    app = App()
    given = Limits(**{"max_body": LIMITS.max_body, "max_header": LIMITS.max_header, **limits})
    listener = Listener(app, given, "127.0.0.1", 0)
    await listener.start()
    try:
        yield app, listener
    finally:
        while Client.opened:
            client = Client.opened.pop()
            client.writer.transport.abort()
        await listener.close()


class Client:
    """A connection to it, whose answers are read by their own length."""

    opened: ClassVar[list[Client]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, listener: Listener) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", listener.port))
        cls.opened.append(client)
        return client

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 5)
        status, *lines = head.decode().strip().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines)
        if "Transfer-Encoding" in fields:
            body = await asyncio.wait_for(self._reader.readuntil(b"0\r\n\r\n"), 5)
        else:
            size = int(fields.get("Content-Length", "0"))
            body = await asyncio.wait_for(self._reader.readexactly(size), 5)
        return int(status.split(" ")[1]), fields, body

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self._reader.read(), 5)


async def test_answers_come_in_the_order_of_their_requests_however_these_come() -> None:
    whole = b"".join(
        [
            GET % b"/a",
            POST + b"Content-Length: 3\r\n\r\nabc",
            GET % b"/stream",
            POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1;x=y\r\nf\r\n0\r\nT: 1\r\n\r\n",
            GET % b"/b",
        ]
    )
    wanted = [b"/a", b"abc", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n", b"def", b"/b"]
    for size in (1, 7, 64, len(whole)):
        async with listening() as (app, listener):
            client = await Client.to(listener)
            for begin in range(0, len(whole), size):
                client.writer.write(whole[begin : begin + size])
                await asyncio.sleep(0)
            assert [(await client.answer())[2] for _ in wanted] == wanted
            assert app.statuses == [200] * 5 and len(listener._open) == 1


@pytest.mark.parametrize(
    ("version", "said", "stays"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: keep-alive\r\n", True),
    ],
)
async def test_a_connection_stays_as_long_as_its_client_wants(
    version: bytes, said: bytes, stays: bool
) -> None:
    async with listening() as (_app, listener):
        client = await Client.to(listener)
        one = b"GET /a HTTP/" + version + b"\r\n" + said + b"\r\n"
        client.writer.write(one)
        fields = (await client.answer())[1]
        if stays:
            assert fields.get("Connection") == ("keep-alive" if version == b"1.0" else None)
            client.writer.write(one)
            await client.answer()
        else:
            assert fields["Connection"] == "close"
            assert await client.rest() == b""


async def test_what_comes_after_the_last_request_is_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n" + GET % b"/b" + b"\0")
        status, fields, body = await client.answer()
        assert (status, fields["Connection"], body) == (200, "close", b"/a")
        assert await client.rest() == b"" and len(app.served) == 1
    assert not caplog.records


async def test_head_is_told_what_get_would_be_and_no_more() -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(b"HEAD /some HTTP/1.1\r\n\r\n" + GET % b"/next")
        head = await asyncio.wait_for(client._reader.readuntil(b"\r\n\r\n"), 5)
        assert b"Content-Length: 5\r\n" in head
        assert (await client.answer())[2] == b"/next"


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a?b=c", "/a"),
        (b"/a%2Fb%20%C3%A9", "/a/b \u00e9"),
        (b"http://host:1/a?b", "/a"),
        (b"http://host", "/"),
        (b"/%ff", "/\ufffd"),
    ],
)
async def test_a_path_is_what_its_target_means(target: bytes, path: str) -> None:
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(GET % target)
        await client.answer()
        assert app.served[0].path == path


@pytest.mark.parametrize(
    "wish",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    ],
)
async def test_who_would_rather_speak_another_protocol_is_served_in_this_one(wish: bytes) -> None:
    """As Java's client asks, each time that it connects."""
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(POST + wish + b"Content-Length: 3\r\n\r\nabc" + GET % b"/next")
        assert (await client.answer())[2] == b"abc"
        assert (await client.answer())[2] == b"/next"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.1\r\nConnection: close, upgrade\r\nUpgrade: x\r\n\r\n",
        b"GET /a HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nConnection: close\r\n\r\n",
    ],
)
async def test_who_wants_another_protocol_and_then_no_more_gets_no_more(head: bytes) -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(head)
        assert (await client.answer())[1]["Connection"] == "close"
        assert await client.rest() == b""


@pytest.mark.parametrize("wish", [b"keep-alive", b"keep-alive, upgrade\r\nUpgrade: x"])
async def test_chunks_of_an_old_client_end_its_connection(wish: bytes) -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        head = b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\nConnection: " + wish
        client.writer.write(head + b"\r\n\r\n1\r\na\r\n0\r\n\r\n" + GET % b"/next")
        status, fields, body = await client.answer()
        assert (status, fields["Connection"], body) == (200, "close", b"a")
        assert await client.rest() == b""


@pytest.mark.parametrize("coding", [b"gzip", b"identity"])
async def test_who_wants_another_protocol_may_not_send_what_is_none(
    coding: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        wish = b"Connection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: " + coding
        client.writer.write(POST + wish + b"\r\n\r\n")
        assert (await client.answer())[0] == 400
        assert await client.rest() == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_more_requests_ahead_than_can_be_meant_are_refused() -> None:
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(GET % b"/a" * 1000)
        answers = [await client.answer() for _ in range(258)]
        assert [status for status, _, _ in answers] == [200] * 257 + [400]
        assert await client.rest() == b"" and len(app.served) == 257


async def test_what_is_far_ahead_is_not_read_yet_and_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_AHEAD", 1000)
    async with listening(max_body=1 << 20) as (app, listener):
        client = await Client.to(listener)
        size = 1 << 19
        client.writer.write(GET % b"/wait" + GET % b"/b")
        await until(lambda: bool(app.served))
        client.writer.write(POST + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
        (ours,) = listener._open
        await until(lambda: not ours._reading)
        # It is not the client that is silent.
        ours.end_if_silent(asyncio.get_running_loop().time() + 1000)
        app.go_on.set()
        assert [(await client.answer())[2] for _ in range(2)] == [b"/wait", b"/b"]
        assert (await client.answer())[2] == b"x" * size


async def test_go_on_is_said_once_and_only_to_who_waits_for_it() -> None:
    async with listening() as (_, listener):
        expects = b"Expect: 100-continue\r\nContent-Length: 2\r\n"
        for begun, head in (
            (b"a", POST + expects + b"\r\n"),
            (b"", b"POST /echo HTTP/1.0\r\n" + expects + b"\r\n"),
        ):
            client = await Client.to(listener)
            client.writer.write(head + begun)
            await asyncio.sleep(0.02)
            client.writer.write(b"ab"[len(begun) :])
            assert (await client.answer())[0] == 200
        client = await Client.to(listener)
        client.writer.write(POST + expects + b"\r\n")
        assert (await client.answer())[0] == 100
        client.writer.write(b"ab")
        assert (await client.answer())[2] == b"ab"


@pytest.mark.parametrize("path", [b"/hang", b"/big"])
async def test_a_client_that_goes_ends_what_is_done_for_it(path: bytes) -> None:
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(GET % path + GET % b"/after")
        await until(lambda: bool(app.served))
        await asyncio.sleep(0.05)
        client.writer.transport.abort()
        await until(lambda: not listener._open)
        assert [request.path.encode() for request in app.served] == [path]
        if path == b"/hang":
            await asyncio.wait_for(app.cancelled.wait(), 5)


async def test_a_client_that_does_not_read_gets_no_second_answer_before_it_has() -> None:
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(GET % b"/big" + GET % b"/b")
        await asyncio.sleep(0.2)
        assert [request.path for request in app.served] == ["/big"]
        assert len((await client.answer())[2]) == 8 << 20
        assert (await client.answer())[2] == b"/b"


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_too_large_is_told_so_before_it_has_come(chunked: bool) -> None:
    """And its client can read that, though it is still sending."""
    async with listening() as (_, listener):
        client = await Client.to(listener)
        if chunked:
            client.writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            client.writer.write((b"300\r\n" + b"x" * 0x300 + b"\r\n") * 100)
        else:
            client.writer.write(POST + b"Content-Length: 1001\r\n\r\nabc")
        status, fields, body = await client.answer()
        assert (status, fields["Connection"]) == (413, "close") and b"--max-body" in body
        client.writer.write(b"x" * 500)
        assert await client.rest() == b""


async def test_the_largest_body_is_taken() -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(POST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000)
        assert (await client.answer())[2] == b"x" * 1000


async def test_an_answer_that_does_not_wait_for_the_body_reaches_who_sends_it() -> None:
    async with listening(max_body=1 << 30) as (_, listener):
        client = await Client.to(listener)
        size = 4 << 20
        client.writer.write(b"POST /blind HTTP/1.1\r\nContent-Length: %d\r\n\r\nx" % size)
        client.writer.write(b"x" * (size - 1))
        status, fields, body = await client.answer()
        assert (status, fields["Connection"], body) == (200, "close", b"/blind")


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"a" * 400_000,
        b"GET / HTTP/1.1\r\nA: " + b"a" * 400_000,
        b"GET / HTTP/1.1\r\n" + b"A: aaaaaaaaaaaaaaaa\r\n" * 20_000,
        b"GET / HTTP/1.1\r\n" + b"A" * 400_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: aaaaaaaaaaaaaaaa\r\n" * 20_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 400_000,
    ],
    ids=["url", "value", "fields", "name", "trailer", "extension"],
)
async def test_what_never_ends_is_ended(endless: bytes) -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        for begin in range(0, len(endless), 1000):
            client.writer.write(endless[begin : begin + 1000])
            await asyncio.sleep(0)
        status, fields, _ = await client.answer()
        assert (status, fields["Connection"]) == (400, "close")
        (ours,) = listener._open or (None,)
        assert ours is None or ours._reader._parser is None


async def test_a_fault_behind_a_request_does_not_take_its_answer() -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(GET % b"/a" + GET % b"/b" + b"NONSENSE\r\n\r\n")
        assert [(await client.answer())[2] for _ in range(2)] == [b"/a", b"/b"]
        assert (await client.answer())[0] == 400
        assert await client.rest() == b""


async def test_the_last_answer_says_that_it_is_the_last() -> None:
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(GET % b"/wait")
        await until(lambda: bool(app.served))
        ending = asyncio.create_task(listener.close())
        await asyncio.sleep(0.01)
        app.go_on.set()
        assert (await client.answer())[1]["Connection"] == "close"
        await asyncio.wait_for(ending, 5)


async def test_who_does_not_read_what_it_was_told_last_is_let_go() -> None:
    async with listening() as (app, listener):
        client = await Client.to(listener)
        client.writer.write(GET % b"/wait")
        await until(lambda: bool(app.served))
        (ours,) = listener._open
        assert ours.transport is not None
        ours.transport.write(b"x" * (16 << 20))
        ours.transport.close()
        ours.end_if_silent(0)
        await asyncio.sleep(0.01)
        assert listener._open, "it has had no time to read"
        ours.end_if_silent(asyncio.get_running_loop().time())
        await until(lambda: not listener._open)


@pytest.mark.parametrize(
    "codings",
    [
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: gzip, chunked\r\nConnection: upgrade\r\nUpgrade: x",
    ],
)
async def test_only_chunks_are_taken_apart(codings: bytes) -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(POST + codings + b"\r\n\r\n1\r\na\r\n0\r\n\r\n" + GET % b"/next")
        assert (await client.answer())[0] == 400
        assert await client.rest() == b""


async def test_a_fault_of_ours_cuts_the_connection_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as (_, listener):
        client = await Client.to(listener)
        client.writer.write(GET % b"/fault")
        assert await client.rest() == b""
    assert "ValueError" in caplog.text


async def test_who_says_nothing_for_long_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those: not who waits for an answer."""
    async with listening() as (app, listener):
        silent, begun, half, waits = [await Client.to(listener) for _ in range(4)]
        begun.writer.write(b"GET / HT")
        half.writer.write(POST + b"Content-Length: 10\r\n\r\nabc")
        waits.writer.write(GET % b"/hang")
        await until(lambda: len(app.served) == 2 and len(listener._open) == 4)
        await asyncio.sleep(0.01)
        later = asyncio.get_running_loop().time() + 1000
        for one in tuple(listener._open):
            one.end_if_silent(0)  # has been heard since
        assert len(listener._open) == 4 and not any(one._lingers for one in listener._open)
        for one in tuple(listener._open):
            one.end_if_silent(later)
        assert await silent.rest() == await begun.rest() == b""
        assert (await half.answer())[0] == 408
        # The one that was told has a moment to read it.
        await until(lambda: len(listener._open) <= 2)
        assert not app.cancelled.is_set()


async def test_at_the_end_what_is_served_has_a_moment_and_what_is_not_has_none() -> None:
    async with listening() as (app, listener):
        idle, waits = [await Client.to(listener) for _ in range(2)]
        waits.writer.write(GET % b"/hang")
        await until(lambda: bool(app.served))
        ending = asyncio.create_task(listener.close())
        assert await idle.rest() == b""
        assert not app.cancelled.is_set()
        await asyncio.wait_for(ending, 5)
        assert app.cancelled.is_set() and await waits.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await Client.to(listener)


async def test_a_slow_end_is_cut_all_the_same() -> None:
    async with listening() as (app, listener):
        reads = await Client.to(listener)
        reads.writer.write(GET % b"/big")
        await until(lambda: bool(app.statuses))
        await asyncio.wait_for(listener.close(), 5)
        assert not listener._open


@pytest.mark.parametrize("value", ["a\r\nb", "a\nb", "a\0b"])
def test_no_field_ends_its_line(value: str) -> None:
    with pytest.raises(ValueError):
        Response(headers={"A": value}).head(False, True)


@pytest.mark.parametrize("status", [204, 304])
def test_what_has_no_body_says_no_length(status: int) -> None:
    response = Response(status, b"abc")
    assert response.body == b"" and b"Content-Length" not in response.head(False, True)


def test_a_status_without_a_name_is_sent_as_it_is() -> None:
    assert Response(599).head(False, True).startswith(b"HTTP/1.1 599 \r\n")


def gz(text: bytes, level: int = 9) -> bytes:
    return gzip.compress(text, level, mtime=0)


def compressed(text: bytes, wbits: int) -> bytes:
    made = zlib.compressobj(wbits=wbits)
    return made.compress(text) + made.flush()


class Sent:
    """A request whose body has come."""

    def __init__(self, body: bytes, coding: str, most: int = 3000) -> None:
        self.request = Request(None, "POST", b"/", True, most)  # type: ignore[arg-type]
        self.request.headers.add("Content-Type", "application/json")
        self.request.headers.add("Content-Encoding", coding)
        self.request.receive(body)
        self.request.complete()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("identity", b'{"a":1}'),
        ("gzip", gz(b'{"a":1}')),
        ("gzip", gz(b'{"a"') + gz(b":1}")),
        ("gzip", gz(b"") * 99 + gz(b'{"a":1}')),
        ("gzip", gz(b'{"a":1}', level=0)),
        ("GZip", gz(b'{"a":1}')),
        ("deflate", compressed(b'{"a":1}', 15)),
        ("deflate", compressed(b'{"a":1}', -15)),
    ],
)
async def test_a_body_is_taken_in_each_coding(coding: str, body: bytes) -> None:
    assert await read_body(Sent(body, coding).request) == b'{"a":1}'


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", b"", 400),
        ("gzip", b"no gzip", 400),
        ("gzip", gz(b"{}")[:-4], 400),
        ("gzip", gz(b"{}") + b"more", 400),
        ("deflate", b"\xff\xff\xff", 400),
        ("gzip", gz(b"x" * 3001), 413),
        ("gzip", gz(b"x" * 1600) * 2, 413),
        ("deflate", compressed(b"x" * 100_000, 15), 413),
        ("gzip", gz(b"") * 101, 400),
        ("br", b"", 415),
    ],
)
async def test_what_is_no_such_body_is_refused(coding: str, body: bytes, status: int) -> None:
    with pytest.raises(ClientError) as refused:
        await read_body(Sent(body, coding).request)
    assert refused.value.status == status


async def test_a_socket_that_is_closed_while_it_lingers_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "_LINGER_S", 0.05)
    ours, client = socket.socketpair()
    open_: set[ClientConnection] = set()
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: ClientConnection(App(), LIMITS, open_), sock=ours)
    client.sendall(b"\0\r\n\r\n")
    await until(lambda: not open_)
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    client.close()


async def test_many_small_parts_are_not_looked_at_one_by_one() -> None:
    """Each would be copied with all that comes after it, in a thread that nobody can end."""
    body = gz(b"") * 100_000
    with pytest.raises(ClientError):
        await asyncio.wait_for(read_body(Sent(body, "gzip", 64 << 20).request), 1)
