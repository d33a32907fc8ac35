"""A chunk that has come whole goes on as it is, and whoever takes it loses and doubles nothing."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.bidir.router.node_connection import NodeConnection
from vllm.bidir.router.pass_through import PassThrough
from vllm.bidir.router.reply import AnswerError, Reply
from vllm.bidir.router.responses import ResponsesFilter
from vllm.bidir.router.stream import StreamFilter

from tests.router.test_node_client import Sent

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
EVENT = b"data: a token\n\n"
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


def chunk(content: bytes, form: str = "%x", extension: bytes = b"") -> bytes:
    return (form % len(content)).encode() + extension + b"\r\n" + content + b"\r\n"


def contents(body: bytes) -> bytes:
    """What is in a chunked body that has not ended; AssertionError where it is broken."""
    found, at = [], 0
    while at < len(body):
        size = _CHUNK.match(body, at)
        assert size is not None
        begin = size.end()
        at = begin + int(size[1], 16)
        found.append(body[begin:at])
        assert body[at : at + 2] == b"\r\n"
        at += 2
    return b"".join(found)


class Client:
    """Remembers what it is sent; with `slow` it wants to be waited for after each piece."""

    chunked = True

    def __init__(self, slow: bool = False) -> None:
        self.body = b""
        self.passed: list[bytes] = []
        self.waits = 0
        self._slow = slow

    def put(self, piece: bytes) -> bool:
        self.body += chunk(piece)
        return not self._slow

    def put_chunk(self, data: bytes) -> bool:
        self.passed.append(data)
        self.body += data
        return not self._slow

    async def drain(self) -> None:
        self.waits += 1


async def asked() -> tuple[NodeConnection, Reply]:
    connection = NodeConnection(lambda idle: None, lambda gone: None)
    connection.connection_made(Sent())
    asking = asyncio.ensure_future(connection.ask(b"HEAD\r\n\r\n", b""))
    await asyncio.sleep(0)
    connection.data_received(HEAD)
    return connection, await asking


async def passed_through(
    pieces: list[bytes], client: Client, taken: StreamFilter | None = None
) -> bytes:
    """What is left at the end of a stream that comes in these pieces."""
    connection, reply = await asked()

    async def note() -> None:
        pass

    made: Any = client
    passing = PassThrough(reply, taken or StreamFilter(), made, note)
    running = asyncio.ensure_future(passing.run(b""))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
        for _ in range(3 if client._slow else 0):
            await asyncio.sleep(0)
    return await running


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(at) if a < b]


CONTENT = st.sampled_from(
    [EVENT, b"\n", b"\r\n", b"data: \r\n\r\n", b"0\r\n\r\n\n", b"5\r\nhello\r\n\n", b"half a line"]
    + [b"x" * 300 + b"\n", b'data: {"a":"kv_transfer_params"}\n\n']
)


@given(
    chunks=st.lists(
        st.tuples(
            CONTENT,
            st.sampled_from(["%x", "%X", "0%x"]),
            st.sampled_from([b"", b"", b";x=y"]),
        )
    ),
    cuts=st.lists(st.integers(0, 1 << 16)),
    whole=st.booleans(),
    slow=st.booleans(),
)
def test_whatever_the_pieces(
    chunks: list[tuple[bytes, str, bytes]], cuts: list[int], whole: bool, slow: bool
) -> None:
    """`whole`: they come one by one, and only some of them are cut."""
    framed = [chunk(*one) for one in chunks]
    data = b"".join((*framed, END))
    pieces = [*framed, END] if whole else split(data, cuts)
    client = Client(slow)
    left = asyncio.run(passed_through(pieces, client))
    assert contents(client.body) + left == b"".join(content for content, *_ in chunks)


async def test_whole_chunks_go_on_as_they_are() -> None:
    events = [b"data: %d\n\n" % number for number in range(20)]
    client = Client()
    assert await passed_through([*map(chunk, events), END], client) == b""
    # Where the first begins is not known to be between two.
    assert client.passed == [chunk(event) for event in events[1:]]
    assert contents(client.body) == b"".join(events)


WHOLE = chunk(EVENT)


@pytest.mark.parametrize(
    "others",
    [
        [chunk(EVENT * 2, "%X")],
        [chunk(EVENT, "0%x")],
        [chunk(EVENT, extension=b";x=y")],
        [WHOLE + WHOLE],
        [WHOLE[:-1], WHOLE[-1:]],
        [WHOLE[:-2], WHOLE[-2:]],
        [WHOLE[:5], WHOLE[5:]],
        [WHOLE + b"5", b"\r\nhell\n\r\n"],
        [WHOLE + b"5\r\n", b"hell\n\r\n"],
        [chunk(b"data: half"), chunk(b" of it\n\n")],
        [chunk(b'data: {"kv_transfer_params":null}\n\n')],
    ],
)
async def test_anything_else_is_taken_apart(others: list[bytes]) -> None:
    client = Client()
    await passed_through([WHOLE, *others, WHOLE, END], client)
    assert not set(client.passed) & {*others} - {WHOLE}
    apart = Client()
    apart.chunked = False
    await passed_through([WHOLE, *others, WHOLE, END], apart)
    assert not apart.passed and contents(apart.body) == contents(client.body)


async def test_a_slow_client_is_waited_for_after_a_whole_chunk() -> None:
    client = Client(slow=True)
    events = [chunk(b"data: %d\n\n" % number) for number in range(5)]
    await passed_through([*events, END], client)
    assert client.body == b"".join(events) and client.waits == 5 and client.passed


async def test_the_last_event_of_a_response_is_looked_into() -> None:
    said = b'data: {"type":"response.completed","response":{"id":"r","output":[]}}\n\n'
    taken, client = ResponsesFilter(), Client()
    await passed_through([chunk(EVENT), chunk(EVENT), chunk(said), END], client, taken)
    assert client.passed == [chunk(EVENT)]
    assert taken.said is not None and taken.said.id == "r"


@pytest.mark.parametrize(
    "broken",
    [b"five\r\nhello\n\r\n", b"-1\r\n\n\r\n", b"\r\n\n\r\n", b"1_0\r\n0123456789abcde\n\r\n"],
)
async def test_what_is_no_chunk_after_a_whole_one_is_an_error(broken: bytes) -> None:
    client = Client()
    with pytest.raises(AnswerError):
        await passed_through([WHOLE, WHOLE, broken], client)
    assert client.body == WHOLE + WHOLE
