"""What a node says in its kv_transfer_params goes on, looked into no further than it has to be."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from aiohttp import web
from vllm.bidir.router.nodes.params import as_offered, decode_params, holds_blocks
from vllm.bidir.router.turns.stream import find_params

from tests.router.conftest import BODY, Setup
from tests.router.fake_engine import long_params

ORDERS = b'"do_remote_prefill":false,"do_remote_decode":true'


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_long_history_leaves_comes_back_to_p_as_d_has_said_it(
    setup: Setup, stream: bool
) -> None:
    setup.decode[0].keeps = long_params
    for _ in range(2):
        assert (await setup.ask(stream=stream, conversation_id="c"))[0] == 200
    offered = setup.prefill[0].asked[1]["kv_transfer_params"]
    assert offered == {**long_params(1), "remote_host": "127.0.0.1"}


@pytest.mark.parametrize("status", [400, 422])
async def test_what_p_cannot_read_of_an_offer_costs_no_answer(setup: Setup, status: int) -> None:
    """Nobody on the way has looked into all of it."""
    setup.decode[0].keeps = long_params

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        offered = "prefix_proof" in body["kv_transfer_params"]
        return web.json_response({"error": {}}, status=status) if offered else None

    setup.prefill[0].script = refuse
    for _ in range(2):
        assert (await setup.ask(conversation_id="c"))[0] == 200
    assert len(setup.prefill[0].asked) == 3
    assert "kv_transfer_params" in setup.decode[0].asked[1]


async def test_a_request_that_is_bad_by_itself_is_refused_as_such(setup: Setup) -> None:
    await setup.ask(conversation_id="c")

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    setup.prefill[0].script = refuse
    asking = setup.client.post(f"{setup.url}/v1/completions", json={**BODY, "conversation_id": "c"})
    async with asking as answer:
        assert (answer.status, await answer.json()) == (400, {"error": {"message": "too long"}})
        assert "transfer_failed" not in answer.headers["x-kv-reuse"]
    assert len(setup.decode[0].asked) == 1


def test_what_is_for_nodes_is_handed_on_byte_by_byte() -> None:
    blocks = b"[[0, 1,\t2], [%b  3]]" % (b"4," * 100)
    said = b'{%b,"remote_block_ids":%b,"remote_port":5700}' % (ORDERS, blocks)
    params = decode_params(said)
    assert params is not None and params["remote_port"] == 5700
    assert as_offered(params) == said


BAD = [b'"\xff"', b'"\\ud800"', b'"\\q"', b"1,", b"NaN", b"01", b"1 2", b"[" * 3000]
BEYOND = [b"1e999", b"-1e999", b"9" * 5000, b"9" * 310 + b".0"]


@pytest.mark.parametrize("bad", BAD + BEYOND)
def test_many_block_ids_have_to_be_such(bad: bytes) -> None:
    many = b"1," * 100
    assert decode_params(b'{"remote_block_ids":[%b2]}' % many) is not None
    assert decode_params(b'{"remote_block_ids":[%b%b]}' % (many, bad)) is None


@pytest.mark.parametrize("bad", BAD)
def test_a_proof_has_to_be_json(bad: bytes) -> None:
    many = b"1," * 100
    assert decode_params(b'{"prefix_proof":[%b2]}' % many) is not None
    assert decode_params(b'{"prefix_proof":[%b%b]}' % (many, bad)) is None


@pytest.mark.parametrize("padding", [b"", b" " * 100], ids=["short", "long"])
@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (b"[[1]]", True),
        (b"[[],[0]]", True),
        (b"[[]]", False),
        (b"[]", False),
        (b"[[],[],[]]", False),
        (b"null", False),
        (b'"1"', False),
        (b'{"1":[1]}', False),
        (b"[null,[1]]", True),
        (b"[[-1]]", True),
    ],
)
def test_whether_there_are_any_blocks(blocks: bytes, expected: bool, padding: bytes) -> None:
    inside = blocks[:1] + padding + blocks[1:] if blocks != b"null" else b"null"
    assert holds_blocks(decode_params(b'{"remote_block_ids":%b}' % inside)) is expected


def test_an_answer_is_not_kept_for_the_params_in_it() -> None:
    answer = b'{"text":"%b","kv_transfer_params":{"remote_block_ids":[[%b1]]}}'
    found = find_params(answer % (b"x" * 1_000_000, b"1," * 100))
    assert found is not None
    tracemalloc.start()
    found = find_params(answer % (b"x" * 1_000_000, b"1," * 100))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None and kept < 100_000


def test_none_are_no_blocks() -> None:
    assert not holds_blocks(None) and not holds_blocks({})


def test_what_else_is_long_is_read() -> None:
    """An engine's id is compared, and may be long."""
    long = {"remote_engine_id": "ä" * 500, "else": [1] * 100}
    assert decode_params(msgspec.json.encode(long)) == long
    assert decode_params(json.dumps(long).encode()) == long
