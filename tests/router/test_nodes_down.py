"""Nodes that are down, hang or vanish: what they keep, what they serve still, and who waits."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.nodes import while_up
from vllm.bidir.router.nodes.sockets import node_socket

from tests.router.conftest import BODY, MakeSetup, Setup, until
from tests.router.fake_engine import (
    begin_stream,
    event,
)


async def hangs(request: web.Request, body: dict[str, Any]) -> None:
    await asyncio.sleep(60)


async def test_what_a_d_keeps_that_is_down_is_not_asked_for_until_it_is_back(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(2, 2, health_interval=0.05)
    one, two = setup.decode
    reuse = []

    async def turn(conversation: str) -> None:
        body = {**BODY, "conversation_id": conversation}
        async with setup.client.post(setup.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            reuse.append(response.headers["x-kv-reuse"])

    for conversation in "abcd":
        await turn(conversation)
    assert (len(one.asked), len(two.asked)) == (2, 2)
    node = setup.router.decode.nodes[0]
    one.health = 503
    await until(lambda: node.health.up is False)
    for conversation in "ab":
        await turn(conversation)
    assert reuse[4:] == ["miss; reason=peer_gone", "hit"]
    offered = [asked["kv_transfer_params"] for engine in setup.prefill for asked in engine.asked]
    assert sum(params["remote_host"] is None for params in offered) == 5
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="peer_gone") == 1
    one.health = 200
    await until(lambda: node.health.up is True)
    await turn("c")
    assert reuse[6:] == ["hit"] and len(one.asked) == 3


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_node_that_hangs_is_replaced_once_it_is_down(
    leg: str, make_setup: MakeSetup
) -> None:
    setup = await make_setup(2, 2, health_interval=0.05)
    await until(lambda: all(node.health.up for node in setup.router.decode.nodes))
    one, two = getattr(setup, leg)
    one.script = hangs
    # One of the two is given the one that hangs.
    asking = [asyncio.create_task(setup.ask(stream=True)) for _ in range(2)]
    await until(lambda: len(one.asked) == 1 and len(two.asked) == 1)
    one.health = 503
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    assert len(two.asked) == 2
    await asyncio.wait_for(one.gone.wait(), 1)


async def test_a_node_that_goes_down_keeps_the_streams_that_it_still_serves(
    make_setup: MakeSetup,
) -> None:
    """An engine that is about to end, or too busy for its /health, may well finish them."""
    setup = await make_setup(health_interval=0.05)
    engine, node = setup.decode[0], setup.router.decode.nodes[0]
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(event("1"))
        await may_end.wait()
        await response.write(event("2"))
        return response

    engine.script = slow
    await until(lambda: node.health.up is True)
    asking = asyncio.create_task(setup.ask(stream=True))
    await until(lambda: len(engine.asked) == 1)
    engine.health = 503
    await until(lambda: node.health.up is False)
    may_end.set()
    assert await asking == (200, event("1") + event("2"))


async def test_a_stream_of_a_node_that_has_stopped_ends_with_an_error(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel answers for it: nothing else would ever tell."""
    monkeypatch.setattr(while_up, "SILENT_S", 0.05)
    setup = await make_setup(health_interval=0.05)
    engine, node = setup.decode[0], setup.router.decode.nodes[0]

    async def stops(request: web.Request, body: dict[str, Any]) -> None:
        response = await begin_stream(request)
        await response.write(event("1"))
        engine.health = 503
        await asyncio.sleep(60)

    engine.script = stops
    await until(lambda: node.health.up is True)
    status, body = await setup.ask(stream=True)
    assert status == 200 and body.startswith(event("1"))
    error = json.loads(body.removeprefix(event("1")).removeprefix(b"data: "))
    assert error["error"]["code"] == 502
    await asyncio.wait_for(engine.gone.wait(), 1)
    labels = {"leg": "decode", "kind": "NodeDownError"}
    assert setup.metric("bidir_router_leg_failures_total", **labels) == 1


def test_a_host_that_has_vanished_is_noticed() -> None:
    with node_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        seconds = [
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert seconds[0] + seconds[1] * seconds[2] <= 30
        assert 0 < made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


async def test_nodes_are_reached_over_such_sockets(setup: Setup) -> None:
    seen: list[int] = []

    async def look(request: web.Request, body: dict[str, Any]) -> None:
        for one in setup.router.calls._client._open:  # type: ignore[union-attr]
            raw = one._transport.get_extra_info("socket")
            seen.append(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    setup.decode[0].script = look
    await setup.ask()
    assert seen and all(seen)
