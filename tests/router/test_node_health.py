"""Nodes that go down and come back, as clients and operators see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.nodes import checks
from vllm.bidir.router.options import Address

from tests.router.conftest import MakeSetup, Setup, until
from tests.router.fake_engine import FakeEngine

UP = "bidir_router_node_up"


def up(setup: Setup, role: str, engine: FakeEngine) -> float | None:
    return setup.router.metrics.registry.get_sample_value(
        UP, {"role": role, "node": str(engine.address)}
    )


async def get(setup: Setup, path: str) -> tuple[int, str]:
    async with setup.client.get(setup.url + path) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("how", ["stopped", "503"])
async def test_a_node_that_is_down_is_not_asked_and_comes_back(
    how: str, make_setup: MakeSetup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    setup = await make_setup(decode=2, health_interval=0.05, slow_start=0.0)
    one, two = setup.decode
    address = one.address
    node = next(node for node in setup.router.decode.nodes if node.address == address)
    await until(lambda: node.health.up is True)
    if how == "stopped":
        await one.stop()
    else:
        one.health = 503
    await until(lambda: node.health.up is False)
    assert f"decode node {address} is down: /health: " in caplog.text
    for _ in range(4):
        assert (await setup.ask())[0] == 200
    assert (len(one.asked), len(two.asked)) == (0, 4)
    assert setup.metric("bidir_router_retries_total", role="decode") == 0
    if how == "stopped":
        await one.start(port=address.port)
    one.health = 200
    await until(lambda: node.health.up is True)
    for _ in range(4):
        assert (await setup.ask())[0] == 200
    assert len(one.asked) == 2


@pytest.fixture
async def silent() -> AsyncIterator[Address]:
    """A node that takes connections and never answers."""
    never = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    never.set()
    server.close()


async def test_a_silent_node_delays_no_others_checks(
    make_setup: MakeSetup, silent: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "TIMEOUT_S", 3600.0)
    setup = await make_setup(prefill=(silent,), health_interval=0.05)
    (engine,), (node,) = setup.decode, setup.router.decode.nodes
    for status, is_up in ((200, True), (503, False), (200, True)):
        engine.health = status
        await until(lambda expected=is_up: node.health.up is expected)
    assert setup.router.prefill.nodes[0].health.up is None


async def test_turns_that_find_no_node_share_one_look_that_a_silent_one_does_not_hold_up(
    make_setup: MakeSetup, silent: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "TIMEOUT_S", 3600.0)
    monkeypatch.setattr(checks, "_RECHECK_S", 0.3)
    monkeypatch.setattr(checks, "_PROBE_S", 3600.0)
    setup = await make_setup(prefill=(silent,), health_interval=3600.0)
    (engine,), (node,) = setup.decode, setup.router.decode.nodes
    await until(lambda: node.health.up is True)
    node.health.up = False
    before = engine.checks
    for _ in range(2):
        answers = await asyncio.gather(*(setup.ask(n=2) for _ in range(5)))
        assert {status for status, _ in answers} == {200}
        node.health.up = False
    assert engine.checks == before + 2


async def test_no_turn_waits_for_a_p_that_is_down(make_setup: MakeSetup) -> None:
    setup = await make_setup(health_interval=0.05)
    setup.prefill[0].health = 500
    await until(lambda: up(setup, "prefill", setup.prefill[0]) == 0.0)
    assert (await setup.ask())[0] == 200
    assert setup.prefill[0].asked == []
    assert "kv_transfer_params" not in setup.decode[0].asked[0]


async def test_failures_in_a_row_eject_a_node(
    make_setup: MakeSetup, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await make_setup(decode=2, eject_after=2, eject_time=0.3, slow_start=0.0)
    bad, good = setup.decode

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500, text="no")

    bad.script = broken
    for _ in range(8):
        assert (await setup.ask(stream=True))[0] == 200
    # Each time with what P handed over, and without: two turns, and no more.
    assert (len(bad.asked), len(good.asked)) == (4, 8)
    assert setup.metric("bidir_router_ejections_total", role="decode") == 1
    assert setup.metric("bidir_router_retries_total", role="decode") == 2
    assert f"decode node {bad.address} is ejected" in caplog.text
    assert (up(setup, "decode", bad), up(setup, "decode", good)) == (0.0, 1.0)
    bad.script = None
    await until(lambda: up(setup, "decode", bad) == 1.0)
    for _ in range(2):
        await setup.ask()
    assert len(bad.asked) == 5


async def test_the_last_d_is_tried_although_it_is_ejected(make_setup: MakeSetup) -> None:
    """A client whose request is at fault must not take the service away from others."""
    setup = await make_setup(eject_after=1, eject_time=60.0)

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        return web.Response(status=500, text="no") if body.get("user") == "poison" else None

    setup.decode[0].script = broken
    assert (await setup.ask(user="poison"))[0] == 500
    assert up(setup, "decode", setup.decode[0]) == 0.0
    assert (await setup.ask())[0] == 200


async def test_a_p_that_was_ejected_is_not_offered_what_d_kept_until_it_verifies_again(
    make_setup: MakeSetup,
) -> None:
    """It may have been replaced by a stock release, which would match by count."""
    setup = await make_setup(eject_after=1, eject_time=0.05)
    await setup.ask(conversation_id="c")

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500, text="no")

    setup.prefill[0].script = broken
    await setup.ask()
    setup.prefill[0].script = None
    await until(lambda: up(setup, "prefill", setup.prefill[0]) == 1.0)
    for _ in range(2):
        await setup.ask(conversation_id="c")
    offered = [one["kv_transfer_params"].get("remote_request_id") for one in setup.prefill[0].asked]
    assert offered[-2] is None and offered[-1] is not None


async def test_what_comes_back_is_given_little_at_first(make_setup: MakeSetup) -> None:
    setup = await make_setup(
        decode=2, health_interval=0.05, slow_start=60.0, decode_in_flight=20, queue_timeout=0.05
    )
    one, two = setup.decode
    one.health = 500
    await until(lambda: up(setup, "decode", one) == 0.0)
    one.health = 200
    await until(lambda: up(setup, "decode", one) == 1.0)
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await may_end.wait()

    one.script = two.script = slow
    asking = [asyncio.create_task(setup.ask()) for _ in range(22)]
    await until(lambda: len(one.asked) + len(two.asked) == 22)
    assert (len(one.asked), len(two.asked)) == (2, 20)
    may_end.set()
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}


async def test_ready_means_that_a_turn_can_be_served(make_setup: MakeSetup) -> None:
    setup = await make_setup(health_interval=0.05)
    await until(lambda: setup.router.decode.nodes[0].health.up is True)
    assert await get(setup, "/ready") == (200, "up: 1 prefill, 1 decode\n")
    setup.prefill[0].health = 500
    await until(lambda: up(setup, "prefill", setup.prefill[0]) == 0.0)
    assert await get(setup, "/ready") == (200, "up: 0 prefill, 1 decode\n")
    setup.decode[0].health = 500
    await until(lambda: up(setup, "decode", setup.decode[0]) == 0.0)
    status, text = await get(setup, "/ready")
    assert status == 503 and "No decode node is up" in text
    assert (await get(setup, "/health"))[0] == 200


async def test_ready_waits_for_the_first_check(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=(Address("127.0.0.1", 9),))
    assert (await get(setup, "/ready"))[0] == 503


async def test_without_checks_turns_alone_tell(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2, health_interval=0.0)
    setup.decode[0].health = 500
    assert await get(setup, "/ready") == (200, "up: 1 prefill, 2 decode\n")
    for _ in range(2):
        assert (await setup.ask())[0] == 200
    assert len(setup.decode[0].asked) == 1


async def test_gauges_show_turns_in_flight_and_go_with_their_node(setup: Setup) -> None:
    engine = setup.decode[0]
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await may_end.wait()

    def in_flight() -> float | None:
        labels = {"role": "decode", "node": str(engine.address)}
        return setup.router.metrics.registry.get_sample_value("bidir_router_node_in_flight", labels)

    engine.script = slow
    asking = asyncio.create_task(setup.ask())
    await until(lambda: in_flight() == 1.0)
    setup.router.decode.set_addresses([])
    assert (in_flight(), up(setup, "decode", engine)) == (1.0, 0.0)
    may_end.set()
    assert (await asking)[0] == 200
    await until(lambda: in_flight() is None and up(setup, "decode", engine) is None)


async def test_a_p_that_was_down_is_not_offered_what_d_kept_until_it_verifies_again(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(health_interval=0.05)
    engine, node = setup.prefill[0], setup.router.prefill.nodes[0]
    await until(lambda: node.health.up is True)
    await setup.ask(conversation_id="c")
    engine.health = 503
    await until(lambda: node.health.up is False)
    engine.health = 200
    await until(lambda: node.health.up is True)
    for _ in range(2):
        await setup.ask(conversation_id="c")
    offered = [one["kv_transfer_params"].get("remote_request_id") for one in engine.asked]
    assert offered[1] is None and offered[2] is not None
