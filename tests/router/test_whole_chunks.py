"""Chunks that pass as a node has framed them leave nothing out and let nothing through."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
from vllm.bidir.router.http.stream import ClientStream
from vllm.bidir.router.nodes.connection import NodeConnection
from vllm.bidir.router.nodes.reply import AnswerError
from vllm.bidir.router.turns.pass_through import PassThrough
from vllm.bidir.router.turns.stream import StreamFilter

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
EVENT = b'data: {"text":"x"}\n\n'
PARAMS = b'data: {"text":"y","kv_transfer_params":{"secret":1}}\n\n'


def chunk(piece: bytes, size: bytes | None = None) -> bytes:
    return (b"%x" % len(piece) if size is None else size) + b"\r\n" + piece + b"\r\n"


class Transport:
    """Takes what is written, as much as there is `room` for."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.written: list[bytes] = []
        self.room = room

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def writelines(self, lines: list[bytes]) -> None:
        """A request."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    resume_reading = abort = pause_reading


class Client:
    """A connection that is drained as soon as that is asked for."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.drains = 0

    @property
    def full(self) -> bool:
        return len(self.transport.written) >= self.transport.room

    async def drained(self) -> None:
        self.drains += 1
        self.transport.room += 3


class Relay:
    """A node's connection, and the stream of a client that gets what comes over it."""

    def __init__(self, room: int = 1 << 30, chunked: bool = True) -> None:
        self.node = NodeConnection(lambda _: None, lambda _: None)
        self.node.connection_made(cast(Any, Transport()))
        self.client = Client(Transport(room))
        self.stream = ClientStream(cast(Any, self.client), chunked)
        self.filter = StreamFilter()
        self.params: list[dict[str, Any]] = []

    @property
    def written(self) -> bytes:
        return b"".join(self.client.transport.written)

    async def run(self, sends: list[bytes]) -> bytes:
        """What is left for the client at the end."""

        async def note() -> None:
            assert self.filter.params is not None
            self.params.append(self.filter.params)
            self.filter.params = None

        asking = asyncio.ensure_future(self.node.ask(b"x", b""))
        await asyncio.sleep(0)
        self.node.data_received(HEAD)
        reply = await asking
        run = asyncio.ensure_future(PassThrough(reply, self.filter, self.stream, note).run(b""))
        for send in sends:
            for _ in range(4):
                await asyncio.sleep(0)
            self.node.data_received(send)
        left = await asyncio.wait_for(run, 5)
        if self.filter.params is not None:
            await note()
        return left

    async def whole(self, sends: list[bytes]) -> bytes:
        """What the client has read, which its own parser takes apart."""
        left = await self.run(sends)
        sent = self.written + (chunk(left) if left else b"") + END
        return body(sent) if self.stream.chunked else self.written + left


def body(chunks: bytes) -> bytes:
    """Taken out of its chunks, whose framing must be right."""
    pieces = []
    while True:
        size, _, chunks = chunks.partition(b"\r\n")
        number = int(size, 16)
        assert size == b"%x" % number and chunks[number : number + 2] == b"\r\n"
        if not number:
            return b"".join(pieces)
        pieces.append(chunks[:number])
        chunks = chunks[number + 2 :]


async def test_an_event_passes_in_its_own_frame() -> None:
    relay = Relay()
    assert await relay.run([chunk(EVENT), chunk(EVENT), chunk(EVENT), END]) == b""
    # The first of them shows that the parser stands behind a chunk.
    assert relay.client.transport.written == [chunk(EVENT)] * 3
    assert relay.stream.sent.endswith(EVENT) and relay.stream._sent_as_chunk


async def test_nothing_passes_to_a_client_that_takes_no_chunks() -> None:
    relay = Relay(chunked=False)
    assert await relay.whole([chunk(EVENT), chunk(EVENT), END]) == EVENT * 2


async def test_a_slow_client_holds_the_stream_up_and_loses_nothing() -> None:
    relay = Relay(room=2)
    assert await relay.whole([*[chunk(EVENT)] * 20, END]) == EVENT * 20
    assert relay.client.drains > 3


async def test_params_never_pass() -> None:
    relay = Relay()
    sends = [chunk(EVENT), chunk(PARAMS), chunk(EVENT), END]
    assert await relay.whole(sends) == EVENT + b'data: {"text":"y"}\n\n' + EVENT
    assert relay.params == [{"secret": 1}]


async def test_params_in_two_chunks_do_not_pass_either() -> None:
    relay = Relay()
    sends = [chunk(EVENT), chunk(PARAMS[:30]), chunk(PARAMS[30:]), chunk(EVENT), END]
    assert await relay.whole(sends) == EVENT + b'data: {"text":"y"}\n\n' + EVENT
    assert relay.params == [{"secret": 1}]


@pytest.mark.parametrize(
    ("sends", "wanted"),
    [
        # Of the next chunk's size half has come: what looks like a chunk is the rest of it.
        (
            [b"2\r\na\n\r\n1", b"5\r\nabcd\n\r\n", b"x" * 13 + b"\n\r\n", END],
            b"a\nabcd\n\r\n" + b"x" * 13 + b"\n",
        ),
        # All of its size has come: what looks like a chunk is its data.
        ([b"2\r\na\n\r\na\r\n", b"5\r\nabcd\n\r\n", b"\r\n", END], b"a\n5\r\nabcd\n\r\n"),
    ],
)
async def test_what_only_looks_like_a_chunk_is_none(sends: list[bytes], wanted: bytes) -> None:
    assert await Relay().whole(sends) == wanted


@pytest.mark.parametrize(
    "odd",
    [
        chunk(EVENT, b"%x;e=1" % len(EVENT)),
        chunk(EVENT, b"0%x" % len(EVENT)),
        chunk(EVENT, b"%X;" % len(EVENT) + b"e" * 20),
        chunk(EVENT) + chunk(EVENT),
        chunk(EVENT)[:-1],
        chunk(b"x" * 10) + chunk(b"\n"),
    ],
)
async def test_a_frame_that_is_not_the_usual_one_ends_here(odd: bytes) -> None:
    rest = b"\n" if odd.endswith(b"\r") else b""
    wanted = EVENT + odd.count(EVENT) * EVENT + (b"x" * 10 + b"\n") * odd.count(b"x" * 10)
    relay = Relay()
    assert await relay.whole([chunk(EVENT), odd, *([rest] if rest else []), END]) == wanted
    assert odd not in relay.client.transport.written


async def test_a_size_that_is_none_is_an_error() -> None:
    relay = Relay()
    with pytest.raises(AnswerError):
        await relay.run([chunk(EVENT), b"-5\r\nabcd\n\r\n", END])


@pytest.mark.parametrize("seed", range(200))
async def test_however_it_comes_it_is_what_was_sent(seed: int) -> None:
    """Any sizes of chunks, any framing of them, any pieces of that, and a client of any speed."""
    rng = random.Random(seed)
    events = [rng.choice((EVENT, EVENT, PARAMS, b": alive\n\n", b"\r\n")) for _ in range(12)]
    said = b"".join(events)
    chunks = []
    while said:
        size = rng.choice((len(said), 1, rng.randint(1, 40), len(EVENT)))
        piece, said = said[:size], said[size:]
        chunks.append(chunk(piece, rng.choice((None, None, b"%X;a" % len(piece)))))
    whole = b"".join(chunks) + END
    sends = [*chunks, END] if rng.random() < 0.5 else []
    while not sends or b"".join(sends) != whole:
        at = len(b"".join(sends))
        sends.append(whole[at : at + rng.randint(1, 60)])
    relay = Relay(room=rng.choice((1, 5, 1 << 30)))
    wanted = b"".join(events).replace(PARAMS, b'data: {"text":"y"}\n\n')
    assert await relay.whole(sends) == wanted
    assert all("secret" in one for one in relay.params)
    assert bool(relay.params) is (PARAMS in events)
