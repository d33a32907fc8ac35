"""A turn waits for a node no longer than it is up, and no longer than its client is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.bidir.router.nodes import while_up
from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.client import NodeClient
from vllm.bidir.router.nodes.connection import NodeConnection
from vllm.bidir.router.nodes.health import Health, HealthRules
from vllm.bidir.router.nodes.names import Names
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.nodes.while_up import NodeDownError, give_up

from tests.router.conftest import until

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b"5\r\nhello\r\n"


@dataclass
class Engine:
    """A node that says what it is told to, and never ends an answer."""

    node: Node
    client: NodeClient
    says: bytes = b""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    left: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionResetError):
            await reader.readuntil(b"\r\n\r\n")
            self.writers.append(writer)
            writer.write(self.says)
            await reader.readuntil(b"never said")
        self.left += 1

    def goes_down(self) -> None:
        self.node.health.up = False
        give_up(self.node)

    async def ask(self) -> Reply:
        return await self.client.request(self.node.address, "POST", "/", {}, b"{}", node=self.node)

    async def whole(self) -> bytes:
        """An answer, of which this says more than its head; it is left alone once it fails."""
        with closing(await self.ask()) as reply:
            return await reply.read()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    with closing(NodeClient(5)) as client:
        address = Address("127.0.0.1", 1)
        health = Health(HealthRules(), time.monotonic)
        made = Engine(Node("decode", address, health), client)
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        made.node.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        yield made
        server.close()


async def waits(engine: Engine) -> str:
    """What comes of a turn whose node never ends its answer."""
    try:
        await engine.whole()
    except NodeDownError:
        await asyncio.sleep(0)
        return "goes on"
    return "never"


@pytest.mark.parametrize("said", [b"", HEAD[:-2], HEAD, HEAD + PIECE])
async def test_when_a_node_goes_down_all_that_wait_for_it_go_on(
    said: bytes, engine: Engine
) -> None:
    engine.says = said
    waiting = [asyncio.create_task(waits(engine)) for _ in range(3)]
    await until(lambda: len(engine.writers) == 3)
    engine.goes_down()
    assert await asyncio.gather(*waiting) == ["goes on"] * 3
    assert not engine.node.awaited and not engine.client._idle
    await until(lambda: engine.left == 3)


async def test_who_connects_to_a_node_that_goes_down_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def find(self: Names, host: str, port: int) -> list[Any]:
        await never.wait()
        return []

    monkeypatch.setattr(Names, "find", find)
    waiting = asyncio.create_task(waits(engine))
    await asyncio.sleep(0.01)
    engine.goes_down()
    assert await waiting == "goes on"
    assert not engine.node.awaited


async def test_a_node_that_went_down_while_it_was_connected_to_is_not_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = NodeConnection.connection_made

    def goes_down(self: NodeConnection, transport: asyncio.BaseTransport) -> None:
        made(self, transport)
        engine.node.health.up = False

    monkeypatch.setattr(NodeConnection, "connection_made", goes_down)
    assert await waits(engine) == "goes on"
    await until(lambda: engine.left == 1 and not engine.client._open)
    assert not engine.writers


@pytest.mark.parametrize("node_first", [False, True])
@pytest.mark.parametrize("said", [b"", HEAD + PIECE])
async def test_where_both_go_at_once_nothing_goes_on(
    said: bytes, node_first: bool, engine: Engine
) -> None:
    engine.says = said
    waiting = asyncio.create_task(waits(engine))
    await until(lambda: len(engine.writers) == 1)
    both: list[Callable[[], object]] = [engine.goes_down, waiting.cancel]
    for one in both if node_first else both[::-1]:
        one()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not engine.node.awaited
    await until(lambda: engine.left == 1)


@pytest.mark.parametrize("nth", [1, 2])
async def test_who_goes_in_the_moment_of_an_answer_ends_it(
    nth: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its head, or of what follows."""
    engine.says = HEAD
    wake, woken = Reply.wake, []

    def goes(self: Reply) -> None:
        wake(self)
        woken.append(self.status)
        if len(woken) == nth:
            waiting.cancel()
        elif nth > 1:
            engine.writers[0].write(PIECE)

    monkeypatch.setattr(Reply, "wake", goes)
    waiting = asyncio.create_task(engine.whole())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not engine.node.awaited
    await until(lambda: engine.left == 1 and not engine.client._open)


async def test_who_goes_in_the_moment_of_a_connection_closes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = NodeConnection.connection_made
    connections: list[NodeConnection] = []

    def goes(self: NodeConnection, transport: asyncio.BaseTransport) -> None:
        made(self, transport)
        connections.append(self)
        asyncio.get_running_loop().call_soon(waiting.cancel)

    monkeypatch.setattr(NodeConnection, "connection_made", goes)
    waiting = asyncio.create_task(engine.whole())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: engine.left == 1 and not connections[0].usable)
    assert not engine.node.awaited and not engine.writers


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(while_up, "SILENT_S", 0.05)


async def begun(engine: Engine) -> Reply:
    """A stream whose first bytes have been read."""
    engine.says = HEAD + PIECE
    reply = await engine.ask()
    assert await reply.read_some() == b"hello"
    reply.be_patient()
    return reply


async def test_a_stream_of_a_node_that_is_down_ends_once_it_is_silent(
    engine: Engine, soon: None
) -> None:
    reply, taken = await begun(engine), []

    def take(piece: bytes) -> bool:
        taken.append(piece)
        return True

    relaying = asyncio.create_task(reply.relay(take))
    engine.goes_down()
    for _ in range(10):
        await asyncio.sleep(0.02)
        engine.writers[0].write(PIECE)
    await until(lambda: len(taken) == 10)
    with pytest.raises(NodeDownError):
        await relaying
    await until(lambda: engine.left == 1)
    assert not engine.node.awaited


async def test_a_stream_of_a_node_that_is_up_again_may_be_silent(
    engine: Engine, soon: None
) -> None:
    reply = await begun(engine)
    relaying = asyncio.create_task(reply.relay(lambda piece: True))
    engine.goes_down()
    engine.node.health.up = True
    await asyncio.sleep(0.12)
    assert not relaying.done()
    engine.goes_down()
    with pytest.raises(NodeDownError):
        await relaying


async def test_a_client_that_reads_slowly_is_no_node_that_is_silent(
    engine: Engine, soon: None
) -> None:
    reply = await begun(engine)
    engine.goes_down()
    await asyncio.sleep(0.12)
    engine.writers[0].write(PIECE + b"0\r\n\r\n")
    assert await reply.relay(lambda piece: True) is not None
