"""A turn waits for a node no longer than it is up, and no longer than its client is there."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest
from vllm.bidir.router.address import Address
from vllm.bidir.router.health import Health, HealthRules
from vllm.bidir.router.nodes import Node
from vllm.bidir.router.while_up import NodeDownError, give_up, while_up


@pytest.fixture
def node() -> Node:
    return Node("decode", Address("d", 1), Health(HealthRules(), time.monotonic))


async def waits(node: Node) -> str:
    """What comes of a turn that waits for ever."""
    try:
        await while_up(node, asyncio.Event().wait())
    except NodeDownError:
        await asyncio.sleep(0)
        return "goes on"
    return "never"


async def test_when_a_node_goes_down_all_that_wait_for_it_go_on(node: Node) -> None:
    waiting = [asyncio.create_task(waits(node)) for _ in range(3)]
    await asyncio.sleep(0)
    give_up(node)
    assert await asyncio.gather(*waiting) == ["goes on"] * 3
    assert not node.awaited


async def test_a_client_that_goes_is_no_node_that_is_down(node: Node) -> None:
    waiting = asyncio.create_task(waits(node))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not node.awaited


@pytest.mark.skipif(sys.version_info < (3, 11), reason="who cancels is not counted before 3.11")
@pytest.mark.parametrize("node_first", [False, True])
async def test_where_both_go_at_once_nothing_goes_on(node: Node, node_first: bool) -> None:
    waiting = asyncio.create_task(waits(node))
    await asyncio.sleep(0)
    both = [lambda: give_up(node), waiting.cancel]
    for one in both if node_first else both[::-1]:
        one()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_has_been_answered_is_not_taken_back(node: Node) -> None:
    async def answered() -> str:
        return "answer"

    assert await while_up(node, answered()) == "answer"
    give_up(node)
    await asyncio.sleep(0)
