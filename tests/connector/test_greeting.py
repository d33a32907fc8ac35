"""An engine says in its handshake that it binds claims, and other releases do not notice."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from vllm.bidir.connector import greeting, peer
from vllm.bidir.connector.agents import digest
from vllm.bidir.connector.greeting import Greeting, read_greeting
from vllm.bidir.connector.messages import MalformedMessageError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
)

from tests.connector.sim import Engine

HOST = "127.0.0.1"
METADATA = NixlAgentMetadata(
    engine_id="p",
    agent_metadata=b"agent",
    kv_caches_base_addr=[0],
    device_id=0,
    num_blocks=1,
    block_lens=[1],
    block_strides=[1],
    kv_cache_layout="LBHNC",
    block_size=16,
    ssm_sizes=(0, 0),
    attn_backend_name="CPU_ATTN",
    physical_blocks_per_logical_kv_block=1,
)
PAYLOAD = NixlHandshakePayload("hash", msgspec.msgpack.encode(METADATA))


def test_an_engine_says_it_where_the_engine_core_has_it_serve_handshakes(model: Path) -> None:
    p = Engine(model, "p").bidir
    with socket.socket() as free:
        free.bind((HOST, 0))
        p.side_channel_host, p.side_channel_port = free.getsockname()
    p.set_xfer_handshake_metadata({(0, 0): PAYLOAD})
    try:
        ask = msgspec.msgpack.encode((GET_META_MSG, 0, 0))
        said = peer.greeting(HOST, p.side_channel_port, ask, 5.0)
    finally:
        p.shutdown()
    assert said == Greeting(digest(b"agent"), True)


def test_the_bases_decoder_passes_over_it() -> None:
    frame = greeting.payloads({(0, 0): PAYLOAD})[0, 0]
    assert msgspec.msgpack.Decoder(NixlHandshakePayload).decode(frame) == PAYLOAD


def test_a_stock_engine_says_that_it_does_not_bind() -> None:
    assert read_greeting(msgspec.msgpack.encode(PAYLOAD)) == Greeting(digest(b"agent"), False)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc0",
        b"\xc1",
        msgspec.msgpack.encode({"agent_metadata_bytes": b""}),
        msgspec.msgpack.encode({"agent_metadata_bytes": PAYLOAD.agent_metadata_bytes[:9]}),
        msgspec.msgpack.encode(
            {"agent_metadata_bytes": PAYLOAD.agent_metadata_bytes, "bidir_claim": "2"}
        ),
    ],
)
def test_what_is_no_handshake_is_not_understood(frame: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read_greeting(frame)
