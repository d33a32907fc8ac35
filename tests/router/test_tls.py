"""Streams over TLS, to clients and from engines, and clients that come over IPv6.

What a router does on plain sockets must not hang on their being plain: TLS has buffers of its own,
and a connection that is aborted says so otherwise.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.router import Router

from tests.router.conftest import BODY, MakeSetup, RouterServer, Setup
from tests.router.fake_engine import FakeEngine, begin_stream, event
from tests.router.test_clients_go import GONE_WITHIN_S, read_slowly
from tests.router.tls import make_certificate

# The last bytes of one read and the first of the next belong to one letter.
TEXT = "é漢🙂" * 40


@pytest.fixture
async def encrypted(make_setup: MakeSetup, tmp_path: Path) -> AsyncIterator[Setup]:
    """Both legs and the client speak TLS."""
    cert, key = make_certificate(tmp_path)
    security = Security(tls=(cert, key), engine_ca=cert)
    engines = [
        await FakeEngine(role).start(tls=security.server_context())
        for role in ("prefill", "decode")
    ]
    p, d = engines
    setup = await make_setup(prefill=(p.address,), decode=(d.address,), security=security)
    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=cert))
    async with aiohttp.ClientSession(connector=trusting) as client:
        yield replace(setup, prefill=[p], decode=[d], client=client)
    for engine in engines:
        await engine.stop()


async def test_a_stream_is_the_same_to_its_last_byte_in_pieces_of_any_size(
    encrypted: Setup,
) -> None:
    whole = b"".join(event({"choices": [{"index": 0, "text": TEXT}]}) for _ in range(50))
    sizes = (1, 7, 100, 16_384, 20_000)

    async def in_pieces(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        at, number = 0, 0
        while at < len(whole):
            size = sizes[number % len(sizes)]
            await response.write(whole[at : at + size])
            await asyncio.sleep(0)
            at, number = at + size, number + 1
        await response.write(event("[DONE]"))
        return response

    encrypted.decode[0].script = in_pieces
    assert encrypted.url.startswith("https:")
    status, answer = await encrypted.ask(stream=True, conversation_id="c")
    assert (status, answer) == (200, whole + event("[DONE]"))


async def test_a_conversation_is_read_back_over_tls(encrypted: Setup) -> None:
    for _ in range(2):
        status, answer = await encrypted.ask(stream=True, conversation_id="c")
        assert status == 200 and b"remote_block_ids" not in answer
    _, again = encrypted.prefill[0].asked
    assert again["kv_transfer_params"]["remote_request_id"] == "turn-1"


async def test_the_engine_sees_within_100_ms_that_the_client_has_gone(encrypted: Setup) -> None:
    engine = encrypted.decode[0]

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(event("1"))
        await asyncio.sleep(60)
        return response

    engine.script = slow
    url = encrypted.url + "/v1/completions"
    response = await encrypted.client.post(url, json={**BODY, "stream": True})
    assert await response.content.readline() == b"data: 1\n"
    response.close()
    begun = time.monotonic()
    await asyncio.wait_for(engine.gone.wait(), 5)
    assert time.monotonic() - begun < GONE_WITHIN_S


async def test_a_client_that_reads_slowly_slows_its_d_down_and_loses_nothing(
    encrypted: Setup,
) -> None:
    await read_slowly(encrypted)


async def test_a_client_may_come_over_ipv6(setup: Setup) -> None:
    server = RouterServer(Router(setup.router.options), host="::1")
    await server.start_server()
    try:
        over = replace(setup, url=server.url)
        assert over.url.startswith("http://[::1]:")
        assert (await over.ask(stream=True, conversation_id="c"))[0] == 200
        async with setup.client.get(over.url + "/v1/models") as response:
            assert json.loads(await response.read())["data"] == [{"id": "m"}]
    finally:
        await server.close()
