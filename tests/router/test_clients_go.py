"""Clients that go, or read slowly: what a node sees of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.stream import ClientStream
from vllm.bidir.router.nodes.reply import Reply

from tests.router.conftest import BODY, Setup, until
from tests.router.fake_engine import (
    FakeEngine,
    begin_stream,
    event,
)

GONE_WITHIN_S = 0.1


@pytest.mark.parametrize(
    "when", ["prefill", "before the first byte", "between two tokens", "in a whole answer"]
)
async def test_the_engine_sees_within_100_ms_that_the_client_has_gone(
    when: str, setup: Setup
) -> None:
    engine = setup.prefill[0] if when == "prefill" else setup.decode[0]
    started = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        response = None
        if when == "between two tokens":
            response = await begin_stream(request)
            await response.write(event("1"))
        started.set()
        await asyncio.sleep(60)
        return response

    engine.script = slow
    stream = when != "in a whole answer"
    asking = asyncio.create_task(setup.ask(stream=stream, conversation_id="c"))
    await asyncio.wait_for(started.wait(), 5)
    if when == "between two tokens":
        await asyncio.sleep(0.05)
    asking.cancel()
    begun = time.monotonic()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert time.monotonic() - begun < GONE_WITHIN_S
    nodes = (*setup.router.prefill.nodes, *setup.router.decode.nodes)
    await until(lambda: all(node.in_flight == node.tokens == 0 for node in nodes))
    await until(lambda: all(not node.awaited for node in nodes))


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_client_that_goes_in_the_moment_of_the_answer_ends_it(
    nth: int, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its head, or of its first bytes."""
    engine = setup.decode[0]

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        woken.clear()
        response = await begin_stream(request)
        await asyncio.sleep(0.01)
        await response.write(event("1"))
        await asyncio.sleep(60)

    woken, wake = [], Reply.wake

    def goes(self: Reply) -> None:
        wake(self)
        woken.append(self)
        if engine.asked and len(woken) == nth:
            (turn,) = setup.router.draining._under_way
            turn.cancel()

    monkeypatch.setattr(Reply, "wake", goes)
    engine.script = slow
    with pytest.raises(aiohttp.ClientError):
        await setup.ask(stream=True)
    await asyncio.wait_for(engine.gone.wait(), 1)


async def test_a_client_that_goes_while_it_does_not_read_ends_the_work_too(setup: Setup) -> None:
    """The router waits to write then, not to read."""
    engine = setup.decode[0]
    written = Written(engine, pieces=2000)
    response = await setup.client.post(setup.url + "/v1/completions", json={**BODY, "stream": True})
    await written.until_it_stands_still()
    response.close()
    begun = time.monotonic()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert time.monotonic() - begun < GONE_WITHIN_S


async def test_a_client_that_goes_just_before_its_first_byte_is_no_fault(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begins = ClientStream.begin

    def gone(request: Request, headers: Mapping[str, str], first: bytes) -> ClientStream:
        (ours,) = setup.server.listener._open
        ours.abort()
        ours.transport = None  # as when it is told so
        return begins(request, headers, first)

    monkeypatch.setattr(ClientStream, "begin", gone)
    with pytest.raises(aiohttp.ClientError):
        await setup.ask(stream=True)
    await until(lambda: not setup.server.listener._open)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Written:
    """A D that writes as fast as it is let, and how much that was."""

    PIECE = event("x" * 65_000)

    def __init__(self, engine: FakeEngine, pieces: int) -> None:
        self.count = 0
        self._pieces = pieces
        engine.script = self._write

    async def _write(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for _ in range(self._pieces):
            await response.write(self.PIECE)
            self.count += 1
        return response

    async def until_it_stands_still(self) -> None:
        before = -1
        while before != self.count or not self.count:
            before = self.count
            await asyncio.sleep(0.1)


async def read_slowly(setup: Setup) -> None:
    """D is slowed down by a client that reads slowly, and the client loses nothing."""
    pieces = 1000
    written = Written(setup.decode[0], pieces)
    url = setup.url + "/v1/completions"
    async with setup.client.post(url, json={**BODY, "stream": True}) as response:
        await written.until_it_stands_still()
        assert written.count < pieces / 2
        whole = await response.read()
    assert whole == Written.PIECE * pieces


async def test_a_client_that_reads_slowly_slows_its_d_down_and_loses_nothing(
    setup: Setup,
) -> None:
    """What it has not read stays where it is made: in between are sockets' buffers only."""
    await read_slowly(setup)
