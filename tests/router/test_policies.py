"""Which node a turn is given: by each policy alone, and through a router."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.health import Health, HealthRules
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.policies import DECODE, PREFILL, Ask, Policy, pick
from vllm.bidir.router.options import RouterOptions, parse

from tests.router.conftest import MakeSetup, until


def nodes(count: int = 3, tokens: tuple[int, ...] = (), turns: tuple[int, ...] = ()) -> list[Node]:
    made = [
        Node("any", Address(f"n{number}", 1), Health(HealthRules(), lambda: 0.0))
        for number in range(count)
    ]
    for node, some in zip(made, tokens, strict=False):
        node.tokens = some
    for node, some in zip(made, turns, strict=False):
        node.in_flight = some
    return made


def chosen(policy: Policy, among: list[Node], ask: Ask | None = None) -> str:
    return pick(policy, among, ask or Ask(), 0.0).address.host


def test_round_robin_takes_the_first_whatever_its_load() -> None:
    assert chosen(PREFILL["round-robin"](), nodes(tokens=(9, 0, 0), turns=(9, 0, 0))) == "n0"


def test_least_loaded_goes_by_turns() -> None:
    assert chosen(DECODE["least-loaded"](), nodes(tokens=(0, 9, 9), turns=(2, 1, 3))) == "n1"


def test_least_tokens_goes_by_prompt_tokens() -> None:
    assert chosen(PREFILL["least-tokens"](), nodes(tokens=(9, 5, 0), turns=(0, 0, 7))) == "n2"


@pytest.mark.parametrize("name", ["least-loaded", "sticky"])
def test_a_node_that_has_come_back_counts_as_loaded(name: str) -> None:
    among = nodes(2, turns=(0, 5))
    among[0].health.checked(False)
    among[0].health.checked(True)
    assert chosen(DECODE[name](), among) == "n1"


def test_sticky_goes_where_the_kv_is_and_else_by_load() -> None:
    policy, among = DECODE["sticky"](), nodes(turns=(1, 0, 5))
    assert chosen(policy, among, Ask(kept_on="n2:1")) == "n2"
    assert chosen(policy, among, Ask(kept_on="elsewhere:1")) == "n1"
    assert chosen(policy, among) == "n1"


def test_prefix_affine_goes_to_one_node_for_one_beginning_and_spreads_others() -> None:
    policy, among = PREFILL["prefix-affine"](), nodes()
    begun = [str(number).encode() for number in range(300)]
    homes = {one: chosen(policy, among, Ask(10, None, one)) for one in begun}
    assert all(chosen(policy, among[::-1], Ask(10, None, one)) == homes[one] for one in begun)
    assert min(Counter(homes.values()).values()) > 60
    # Without one node, only what was there moves.
    left = among[:2]
    assert all(
        chosen(policy, left, Ask(10, None, one)) == homes[one]
        for one in begun
        if homes[one] != "n2"
    )


def test_prefix_affine_waits_for_no_longer_than_it_can_save() -> None:
    policy, among = PREFILL["prefix-affine"](), nodes(2)
    home = pick(policy, among, Ask(100, None, b"x"), 0.0)
    home.tokens = 100
    assert pick(policy, among, Ask(100, None, b"x"), 0.0) is home
    home.tokens = 101
    assert pick(policy, among, Ask(100, None, b"x"), 0.0) is not home


def test_policies_are_chosen_by_option_and_the_first_is_the_default() -> None:
    assert parse([]) == RouterOptions()
    assert (parse([]).nodes.prefill_policy, parse([]).nodes.decode_policy) == (
        "least-tokens",
        "sticky",
    )
    given = parse(["--prefill-policy", "prefix-affine", "--decode-policy", "round-robin"]).nodes
    assert (given.prefill_policy, given.decode_policy) == ("prefix-affine", "round-robin")
    with pytest.raises(SystemExit):
        parse(["--prefill-policy", "sticky"])


async def test_a_long_prompt_is_not_joined_by_a_short_one(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=2)
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        if len(body["prompt"]) > 1000:
            await may_end.wait()

    for engine in setup.prefill:
        engine.script = slow
    long = asyncio.create_task(setup.ask(prompt="x" * 5000))
    await until(lambda: sum(len(engine.asked) for engine in setup.prefill) == 1)
    for _ in range(3):
        assert (await setup.ask(prompt="y"))[0] == 200
    assert sorted(len(engine.asked) for engine in setup.prefill) == [1, 3]
    may_end.set()
    assert (await long)[0] == 200
    assert [node.tokens for node in setup.router.prefill.nodes] == [0, 0]


async def test_what_d_keeps_is_not_counted_as_work(make_setup: MakeSetup) -> None:
    """A long conversation that is read back leaves room for others on its P."""
    setup = await make_setup(prefill=1)
    seen: list[int] = []

    async def keeps(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {"remote_block_ids": [[1]], "remote_num_tokens": 1000}
        params |= {"remote_engine_id": "d", "remote_port": 5600}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    async def look(request: web.Request, body: dict[str, Any]) -> None:
        seen.append(setup.router.prefill.nodes[0].tokens)

    setup.prefill[0].script, setup.decode[0].script = look, keeps
    for _ in range(2):
        await setup.ask(conversation_id="c", prompt="x" * 4400)
    assert seen[0] > 1100 and seen[1] == seen[0] - 1000


async def test_without_stickiness_a_conversation_goes_by_load(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2, decode_policy="round-robin")
    for _ in range(4):
        await setup.ask(conversation_id="c")
    assert [len(engine.asked) for engine in setup.decode] == [2, 2]


async def test_turns_of_a_conversation_meet_the_same_p(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=3, prefill_policy="prefix-affine")
    for _ in range(4):
        await setup.ask(conversation_id="c")
    assert sorted(len(engine.asked) for engine in setup.prefill) == [0, 0, 4]


async def test_prompts_that_begin_alike_meet_the_same_p(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=3, prefill_policy="prefix-affine")
    for number in range(6):
        await setup.ask(prompt="the same beginning " * 100 + str(number))
    assert sorted(len(engine.asked) for engine in setup.prefill) == [0, 0, 6]
