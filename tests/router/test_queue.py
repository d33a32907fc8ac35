"""Turns that wait for room: in order, not for ever, and not too many."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.health import HealthRules
from vllm.bidir.router.nodes.policies import Ask, Policy
from vllm.bidir.router.nodes.pool import Limits, Pool
from vllm.bidir.router.telemetry.metrics import Metrics

from tests.router.conftest import BODY, MakeSetup, Setup, until
from tests.router.fake_engine import FakeEngine


class Gate:
    """Holds turns on an engine until they are let go, one by one, in the order of their coming."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.held: list[asyncio.Event] = []
        engine.script = self.hold

    async def hold(self, request: web.Request, body: dict[str, Any]) -> None:
        self.held.append(asyncio.Event())
        await self.held[-1].wait()

    def users(self) -> list[Any]:
        return [body.get("user") for body in self.engine.asked]


def waiting(setup: Setup, role: str = "decode") -> float:
    return setup.metric("bidir_router_queue_length", role=role)


async def filled(setup: Setup, gate: Gate, users: str) -> list[asyncio.Task[tuple[int, bytes]]]:
    """The first user's turn is on the node, the others' wait, in this order."""
    tasks = []
    for number, user in enumerate(users):
        tasks.append(asyncio.create_task(setup.ask(user=user)))
        await until(lambda number=number: len(gate.held) + waiting(setup) == number + 1)
    return tasks


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_has_no_more_turns_than_its_limit_and_those_who_wait_come_in_order(
    role: str, make_setup: MakeSetup
) -> None:
    setup = await make_setup(**{f"{role}_in_flight": 1})
    gate = Gate(getattr(setup, role)[0])
    tasks = []
    for number, user in enumerate("abcd"):
        tasks.append(asyncio.create_task(setup.ask(user=user)))
        await until(lambda number=number: len(gate.held) + waiting(setup, role) == number + 1)
    for number, user in enumerate("abcd"):
        await until(lambda number=number: len(gate.held) == number + 1)
        assert waiting(setup, role) == 3 - number
        assert gate.users()[-1] == user
        gate.held[number].set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4
    assert waiting(setup, role) == 0
    assert setup.metric("bidir_router_queue_seconds_count", role=role) == 3


async def test_a_turn_is_given_to_another_node_where_its_own_is_full(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(decode=2, decode_in_flight=1)
    await setup.ask(conversation_id="c")
    own, other = sorted(setup.decode, key=lambda engine: -len(engine.asked))
    gate = Gate(own)
    first = asyncio.create_task(setup.ask(conversation_id="c"))
    await until(lambda: len(gate.held) == 1)
    assert (await setup.ask(conversation_id="c"))[0] == 200
    assert len(other.asked) == 1
    gate.held[0].set()
    await first


async def test_beyond_the_queue_a_client_is_told_to_come_later(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode_in_flight=1, queue_limit=1)
    gate = Gate(setup.decode[0])
    tasks = await filled(setup, gate, "ab")
    async with setup.client.post(setup.url + "/v1/completions", json=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        error = (await response.json())["error"]
    assert error["type"] == "rate_limit_error" and "queue" in error["message"]
    refused = "bidir_router_refused_total"
    assert setup.metric(refused, role="decode", reason="queue_full") == 1
    assert len(setup.prefill[0].asked) == 1
    gate.held[0].set()
    await until(lambda: len(gate.held) == 2)
    gate.held[1].set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_turn_that_has_waited_long_enough_is_told_so(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode_in_flight=1, queue_timeout=0.1)
    gate = Gate(setup.decode[0])
    (first,) = await filled(setup, gate, "a")
    async with setup.client.post(setup.url + "/v1/completions", json=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert "within 0.1 s" in (await response.json())["error"]["message"]
    refused = "bidir_router_refused_total"
    assert setup.metric(refused, role="decode", reason="queue_timeout") == 1
    gate.held[0].set()
    assert (await first)[0] == 200
    assert (await asyncio.wait_for(_next(setup, gate), 5))[0] == 200


async def _next(setup: Setup, gate: Gate) -> tuple[int, bytes]:
    asking = asyncio.create_task(setup.ask())
    await until(lambda: len(gate.held) == 2)
    gate.held[1].set()
    return await asking


async def test_a_client_that_goes_away_leaves_the_queue(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode_in_flight=1)
    gate = Gate(setup.decode[0])
    first, gone, last = await filled(setup, gate, "abc")
    gone.cancel()
    await until(lambda: waiting(setup) == 1)
    gate.held[0].set()
    await until(lambda: gate.users() == ["a", "c"])
    gate.held[1].set()
    assert [(await one)[0] for one in (first, last)] == [200, 200]
    assert setup.router.decode.nodes[0].in_flight == 0


async def test_room_that_comes_with_a_node_is_used(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2, decode_in_flight=1)
    pool = setup.router.decode
    one, two = setup.decode
    pool.set_addresses([one.address])
    gate = Gate(one)
    first, second = await filled(setup, gate, "ab")
    pool.set_addresses([one.address, two.address])
    assert (await asyncio.wait_for(second, 5))[0] == 200
    assert len(two.asked) == 1
    gate.held[0].set()
    await first


async def test_who_waits_for_a_p_is_served_alone_where_the_last_one_goes(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(prefill_in_flight=1)
    gate = Gate(setup.prefill[0])
    first = asyncio.create_task(setup.ask(user="a"))
    await until(lambda: len(gate.held) == 1)
    second = asyncio.create_task(setup.ask(user="b"))
    await until(lambda: waiting(setup, "prefill") == 1)
    setup.router.prefill.set_addresses([])
    status, body = await asyncio.wait_for(second, 5)
    assert status == 200 and json.loads(body)["choices"]
    assert "kv_transfer_params" not in setup.decode[0].asked[0]
    gate.held[0].set()
    assert (await first)[0] == 200


async def test_a_turn_whose_node_has_failed_goes_before_those_who_have_not_begun(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(decode=2, decode_in_flight=1)
    bad, good = setup.decode
    gate = Gate(good)
    may_fail = asyncio.Event()

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        await may_fail.wait()
        return web.Response(status=500, text="no")

    bad.script = broken
    setup.router.decode.set_addresses([good.address])
    tasks = [asyncio.create_task(setup.ask(user="first"))]
    await until(lambda: len(gate.held) == 1)
    setup.router.decode.set_addresses([good.address, bad.address])
    await until(lambda: len(setup.router.decode.usable()) == 2)
    for user in ("failing", "waits"):
        tasks.append(asyncio.create_task(setup.ask(user=user)))
        await until(lambda: len(bad.asked) == 1)
    await until(lambda: waiting(setup) == 1)
    setup.router.decode.set_addresses([good.address])
    may_fail.set()
    await until(lambda: waiting(setup) == 2)
    for number in range(3):
        await until(lambda number=number: len(gate.held) == number + 1)
        gate.held[number].set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3
    assert gate.users() == ["first", "failing", "waits"]


async def test_a_client_that_goes_just_when_there_is_room_leaves_it_to_the_next() -> None:
    pool = Pool("decode", Policy(), Limits(in_flight=1), HealthRules(), Metrics())
    pool.set_addresses([Address("n", 1)])
    ask = Ask(tokens=5)
    node = await pool.take(ask, set())
    assert node is not None
    gone, following = (asyncio.create_task(pool.take(ask, set())) for _ in range(2))
    await asyncio.sleep(0)
    assert pool.waiting == 2
    pool.give_back(node, ask)
    gone.cancel()
    assert await asyncio.wait_for(following, 5) is node
    assert gone.cancelled() and (node.in_flight, node.tokens) == (1, 5)
