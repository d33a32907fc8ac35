"""Twins of the base release's tests that demand a read without any proof.

Each shows the behaviour that is wanted instead: the same situation, with what D really proves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.connector.sim import BLOCK, FIRST_TURN, Engine
from tests.connector.test_simulated import finished_turn

HISTORY = list(range(100))
ANSWER = [500 + k for k in range(21)]
TURN = HISTORY + ANSWER
# The last generated token has never been fed to the model.
KEPT = len(TURN) - 1


@pytest.fixture
def p(model: Path) -> Engine:
    return Engine(model, "p", prefix_caching=False)


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d")


@pytest.fixture
def params(d: Engine) -> Any:
    found, _ = finished_turn(d, HISTORY, ANSWER)
    return found


def test_two_turns_read_what_was_kept_and_give_every_block_back(p: Engine, d: Engine) -> None:
    free = p.free_blocks, d.free_blocks
    p.run(HISTORY, FIRST_TURN)
    params, request_id = finished_turn(d, HISTORY, ANSWER)
    p.run(TURN + [9] * 30, params, source=d)
    (order,) = p.orders
    assert (order.local, order.total, order.prompt) == (0, KEPT, len(TURN) + 30)
    d.expire(request_id)
    assert (p.free_blocks, d.free_blocks) == free


def test_a_turn_longer_than_the_prompt_is_read_short_of_its_last_token(
    p: Engine, d: Engine, params: Any
) -> None:
    """The base reports all of the prompt; P always computes its last token."""
    p.run(HISTORY[:97], params, source=d)
    assert [order.total for order in p.orders] == [96]


def test_the_partly_filled_last_block_is_read_too(p: Engine, d: Engine, params: Any) -> None:
    p.run(TURN + [9], params, source=d)
    (order,) = p.orders
    assert order.total == KEPT and KEPT % BLOCK != 0
    assert len(order.local_block_ids) == -(-KEPT // BLOCK)


def test_an_order_names_the_peer_and_one_local_block_per_position(
    p: Engine, d: Engine, params: Any
) -> None:
    request = p.add(TURN + [9], params)
    meta = p.scheduler.schedule().kv_connector_metadata
    order = meta.read_backs[request.request_id]
    assert order.source.engine_id == "d" == params["remote_engine_id"]
    assert (order.source.host, order.source.port) == (params["remote_host"], params["remote_port"])
    assert order.source.lease_id == params["lease_id"]
    assert order.remote_positions == slice(0, -(-KEPT // BLOCK))
    (blocks,) = p.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert list(order.local_block_ids) == blocks
    assert meta.reqs_to_recv == {}, "nothing is left to pair by count"


def test_two_requests_of_one_step_have_an_order_each(p: Engine, d: Engine, params: Any) -> None:
    first, second = p.add(TURN + [9], params), p.add(TURN + [8, 8], params)
    orders = p.scheduler.schedule().kv_connector_metadata.read_backs
    assert set(orders) == {first.request_id, second.request_id}
    blocks = [set(order.local_block_ids) for order in orders.values()]
    assert not blocks[0] & blocks[1]


def test_a_request_that_waits_for_its_read_is_not_ordered_again(
    p: Engine, d: Engine, params: Any
) -> None:
    request = p.add(TURN + [9], params)
    assert list(p.scheduler.schedule().kv_connector_metadata.read_backs) == [request.request_id]
    assert p.scheduler.schedule().kv_connector_metadata.read_backs == {}


def test_a_turn_shorter_than_the_prompt_is_read_and_the_rest_computed(
    p: Engine, d: Engine, params: Any
) -> None:
    p.run(TURN + [9] * 200, params, source=d)
    assert [(order.total, order.prompt) for order in p.orders] == [(KEPT, len(TURN) + 200)]


def test_an_attempt_is_spent_also_when_it_was_lost(p: Engine, d: Engine, params: Any) -> None:
    """A second scheduling of the request asks for nothing, and it finishes."""

    def gone(engine: Engine, order: Any) -> None:
        engine.bidir.kept.end_all()

    p.run(TURN + [9], params, source=d, fault=gone)
    assert len(p.orders) == 1
