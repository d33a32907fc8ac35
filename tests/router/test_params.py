"""What a node says in its kv_transfer_params goes on, looked into no further than it has to be."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from vllm.bidir.router.clients.parts import decode_params
from vllm.bidir.router.conversations.kept_params import as_offered
from vllm.bidir.router.turns.legs import holds_blocks

from tests.router import fake_engine
from tests.router.conftest import Setup

BLOCKS = [list(range(400)), [], list(range(7, 90))]
PROOF = {"v": 1, "hash": "sha256", "checkpoints": [[n, f"{n:022}"] for n in range(40)]}
ORDERS = b'"do_remote_prefill":false,"do_remote_decode":true'


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_long_history_leaves_comes_back_to_p_as_d_has_said_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    before = fake_engine.d_params

    def grown(turn: int) -> dict[str, Any]:
        return before(turn) | {"remote_block_ids": BLOCKS, "prefix_proof": PROOF}

    monkeypatch.setattr(fake_engine, "d_params", grown)
    for _ in range(2):
        assert (await setup.ask(stream=stream, conversation_id="c"))[0] == 200
    offered = setup.prefill[0].asked[1]["kv_transfer_params"]
    assert offered == {**grown(1), "remote_host": "127.0.0.1"}


def test_what_is_for_nodes_is_handed_on_byte_by_byte() -> None:
    blocks = b"[[0, 1,\t2], [%b  3]]" % (b"4," * 100)
    said = b'{%b,"remote_block_ids":%b,"remote_port":5700}' % (ORDERS, blocks)
    params = decode_params(said)
    assert params is not None and params["remote_port"] == 5700
    assert as_offered(params) == said


@pytest.mark.parametrize(
    "bad", [b'"\xff"', b'"\\ud800"', b'"\\q"', b"1,", b"NaN", b"01", b"1 2", b"[" * 3000]
)
def test_even_what_is_not_looked_into_has_to_be_json(bad: bytes) -> None:
    many = b"1," * 100
    for name in (b"remote_block_ids", b"prefix_proof"):
        assert decode_params(b'{"%b":[%b2]}' % (name, many)) is not None
        assert decode_params(b'{"%b":[%b%b]}' % (name, many, bad)) is None


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
    ],
)
def test_whether_there_are_any_blocks(blocks: bytes, expected: bool, padding: bytes) -> None:
    inside = blocks[:1] + padding + blocks[1:] if blocks != b"null" else b"null"
    assert holds_blocks(decode_params(b'{"remote_block_ids":%b}' % inside)) is expected


def test_none_are_no_blocks() -> None:
    assert not holds_blocks(None) and not holds_blocks({})


def test_what_else_is_long_is_read() -> None:
    """An engine's id is compared, and may be long."""
    long = {"remote_engine_id": "ä" * 500, "else": [1] * 100}
    assert decode_params(msgspec.json.encode(long)) == long
    assert decode_params(json.dumps(long).encode()) == long
