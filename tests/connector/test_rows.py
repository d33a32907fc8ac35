"""Blocks whose layers lie side by side are read row by row: real workers and NIXL, real bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from vllm.bidir.connector import agents, peer, questions
from vllm.bidir.connector.decision import Source
from vllm.bidir.connector.messages import HoldAnswer
from vllm.bidir.connector.proof import make_proof
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.rows import Row, in_order, row_of
from vllm.bidir.connector.worker import BidirWorker
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from tests.connector.sim import BLOCK, kv_cache_config, vllm_config

LAYERS, HEADS, SIZE = 3, 2, 4
BLOCKS = {"p": 40, "d": 50}


class Node:
    """A worker with a KV cache of its own, all of whose bytes are random."""

    def __init__(self, model: Path, engine_id: str, layout: str) -> None:
        config = vllm_config(model, engine_id)
        config.cache_config.kv_cache_layout = layout
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32
        )
        names = [f"layer.{number}" for number in range(LAYERS)]
        blocks = BLOCKS[engine_id]
        with set_current_vllm_config(config):
            self.worker = BidirWorker(
                config, engine_id, kv_cache_config(blocks, KVCacheGroupSpec(names, spec))
            )
        page = (HEADS, BLOCK, 2 * SIZE)
        outer = (blocks, LAYERS) if layout == "BLHNC" else (LAYERS, blocks)
        storage = torch.rand((*outer, *page))
        if layout == "BLHNC":
            self.layers = [storage[:, number] for number in range(LAYERS)]
        else:
            self.layers = [storage[number].clone() for number in range(LAYERS)]
        self.worker.register_kv_caches(dict(zip(names, self.layers, strict=True)))
        payload = self.worker.xfer_handshake_metadata
        decoder = msgspec.msgpack.Decoder(NixlAgentMetadata)
        self.metadata = decoder.decode(payload.agent_metadata_bytes)

    def meets(self, other: Node) -> None:
        worker, engine_id = self.worker, other.worker.engine_id
        name = worker.add_remote_agent(other.metadata, 0, 1, 1)
        worker._remote_agents[engine_id][0, 0] = name
        worker._addresses[engine_id] = ("localhost", 1)
        worker._engine_clock_offset[engine_id] = 0.0

    def block(self, number: int) -> torch.Tensor:
        """[layer, head, token, content]"""
        return torch.stack([layer[number] for layer in self.layers])

    def wait_for(self, request_id: str) -> None:
        end = time.monotonic() + 10
        while True:
            self.worker._advance()
            if request_id in self.worker.get_finished()[1]:
                break
            assert time.monotonic() < end
            time.sleep(0.001)
        assert self.worker.get_block_ids_with_load_errors() == set()

    def descriptors(self) -> list[int]:
        """Of the transfers so far, as NIXL has counted them."""
        return list(self.worker.xfer_stats.data["num_descriptors"])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without process groups, and blocks that no attention kernel looks at."""
    monkeypatch.setattr(base_worker, "select_common_block_size", lambda size, backends: size)
    monkeypatch.setattr(base_worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(base_worker, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.fixture(params=["BLHNC", "LBHNC"])
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Node, Node]]:
    """P and D that have met, with this layout."""
    p, d = Node(model, "p", request.param), Node(model, "d", request.param)
    p.meets(d)
    d.meets(p)
    yield p, d
    for node in (p, d):
        node.worker.shutdown()


# D's blocks by position, P's for them: falling runs, as a pool gives them out, and a straggler.
THEIRS = [31, 30, 29, 28, 11, 12, 7]
OURS = [20, 19, 18, 17, 4, 5, 33]
RUNS = 3


def expected_descriptors(node: Node) -> int:
    """Neighbouring rows are one; in layers neighbours are side by side layer by layer."""
    rows = node.layers[0].stride(0) > node.layers[0][0].numel()
    return RUNS if rows else LAYERS * RUNS


def reads_back(p: Node, d: Node, monkeypatch: pytest.MonkeyPatch, request_id: str = "r") -> None:
    """P reads a turn that D holds: THEIRS into OURS."""
    tokens = len(OURS) * BLOCK
    proof = make_proof("f", BLOCK, [b"h" * 32] * len(OURS), list(range(tokens)), tokens, tokens)
    assert proof is not None
    held = HoldAnswer(
        epoch=1,
        engine_id="d",
        agents=[agents.digest(d.metadata.agent_metadata)],
        tp_size=1,
        block_ids=THEIRS,
        valid_tokens=tokens,
        digest=proof.digest(),
    )
    monkeypatch.setattr(questions.peer, "hold", lambda *args: peer.Asked(hold=held))
    monkeypatch.setattr(questions.peer, "confirm", lambda *args: peer.Asked(stood=True))
    order = ReadBack(
        source=Source("d0-1", "d", "localhost", 1, proof),
        digest=proof.digest(),
        first_block=0,
        local_block_ids=tuple(OURS),
        prompt=tokens + 1,
        local=0,
        verified=tokens,
        total=tokens,
    )
    metadata = NixlConnectorMetadata()
    metadata.read_backs = {request_id: order}
    p.worker.start_load_kv(metadata)
    p.wait_for(request_id)


def test_a_read_back_brings_each_block_to_its_place(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    before = [p.block(number).clone() for number in range(BLOCKS["p"])]
    reads_back(p, d, monkeypatch)
    check_moved(before, p, OURS, d, THEIRS)
    assert p.descriptors() == [expected_descriptors(p)]


def test_a_handover_brings_each_block_to_its_place(pair: tuple[Node, Node]) -> None:
    """Of a prompt of which D has a part: the last blocks are those that it still needs."""
    p, d = pair
    first = [1, 2]
    meta = ReqMeta(
        local_block_ids=(THEIRS,),
        local_physical_block_ids=(THEIRS,),
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        remote=RemoteMeta(
            block_ids=(first + OURS,), host="localhost", port=1, engine_id="p", request_id="at-p"
        ),
    )
    before = [d.block(number).clone() for number in range(BLOCKS["d"])]
    metadata = NixlConnectorMetadata()
    metadata.reqs_to_recv["r"] = meta
    d.worker.start_load_kv(metadata)
    d.wait_for("r")
    check_moved(before, d, THEIRS, p, OURS)
    assert d.descriptors() == [expected_descriptors(d)]
    notified = wait_for_notification(p)
    assert notified == b"at-p:1", "P frees its blocks when all have come"


def wait_for_notification(node: Node) -> bytes:
    end = time.monotonic() + 10
    while not (found := node.worker.nixl_wrapper.get_new_notifs()):
        assert time.monotonic() < end
        time.sleep(0.001)
    ((message,),) = found.values()
    return bytes(message)


def check_moved(
    before: list[torch.Tensor], to: Node, ours: list[int], source: Node, theirs: list[int]
) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(to.block(mine), source.block(their))
    for number, block in enumerate(before):
        if number not in ours:
            assert torch.equal(to.block(number), block), "no other block is touched"


def test_a_peer_with_other_layers_is_read_layer_by_layer(model: Path) -> None:
    p, d = Node(model, "p", "BLHNC"), Node(model, "d", "BLHNC")
    d.metadata.block_lens = [2 * d.metadata.block_lens[0], 0, d.metadata.block_lens[2]]
    p.worker._meet_rows(d.metadata, 0, "agent")
    assert p.worker._rows.of("d", 0) is None


def test_an_engine_that_is_forgotten_takes_its_rows_with_it(model: Path) -> None:
    p, d = Node(model, "p", "BLHNC"), Node(model, "d", "BLHNC")
    p.meets(d)
    assert p.worker._rows.of("d", 0) is not None
    assert p.worker.forget("d")
    assert p.worker._rows.of("d", 0) is None
    p.meets(d)
    assert p.worker._rows.of("d", 0) is not None


@pytest.mark.parametrize(("p_layout", "d_layout"), [("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")])
def test_other_layouts_do_not_meet(model: Path, p_layout: str, d_layout: str) -> None:
    with pytest.raises(RuntimeError, match="kv_cache_layout"):
        Node(model, "p", p_layout).meets(Node(model, "d", d_layout))


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_smaller_blocks_are_not_put_where_they_do_not_belong(model: Path, layout: str) -> None:
    """The base takes a part of a block for a part of the distance to the next one."""
    p, d = Node(model, "p", layout), Node(model, "d", layout)
    p.metadata.block_size = BLOCK // 2
    p.metadata.block_lens = [length // 2 for length in p.metadata.block_lens]
    if layout == "BLHNC":
        with pytest.raises(ValueError, match="--block-size"):
            d.meets(p)
    else:
        d.meets(p)
        assert d.worker._rows.of("p", 0) is None


@pytest.mark.parametrize(("tp_size", "dcp_size"), [(2, 1), (1, 2)])
def test_ranks_that_do_not_pair_have_no_rows(
    model: Path, tp_size: int, dcp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = Node(model, "p", "BLHNC"), Node(model, "d", "BLHNC")
    monkeypatch.setattr(
        NixlPullConnectorWorker, "add_remote_agent", lambda self, *arguments: "agent"
    )
    p.worker.add_remote_agent(d.metadata, 0, tp_size, dcp_size)
    assert p.worker._rows.of("d", 0) is None


def test_nothing_is_left_when_it_shuts_down(model: Path) -> None:
    p, d = Node(model, "p", "BLHNC"), Node(model, "d", "BLHNC")
    p.meets(d)
    released: list[object] = []
    release = p.worker.nixl_wrapper.release_dlist_handle
    p.worker.nixl_wrapper.release_dlist_handle = lambda one: (released.append(one), release(one))
    own, theirs = p.worker._rows.of("d", 0) or (None, None)
    p.worker.shutdown()
    assert own in released and theirs in released


@pytest.mark.parametrize(
    ("bases", "lengths", "strides", "row"),
    [
        ([100, 110, 130], [10, 20, 5], [35] * 3, Row(100, 35, 35)),
        ([100, 110, 130], [10, 20, 5], [64] * 3, Row(100, 35, 64)),
        ([100], [10], [10], Row(100, 10, 10)),
        ([], [], [], None),
        ([100, 110, 131], [10, 20, 5], [40] * 3, None),
        ([110, 100], [10, 10], [20, 20], None),
        ([100, 500], [10, 10], [10, 10], None),
        ([100, 110], [10, 10], [20, 30], None),
        ([100, 110], [10, 10], [19, 19], None),
        ([100, 110], [10], [20, 20], None),
    ],
)
def test_a_row_is_one_run_of_bytes(
    bases: list[int], lengths: list[int], strides: list[int], row: Row | None
) -> None:
    assert row_of(bases, lengths, strides) == row


def test_pairs_stay_pairs() -> None:
    ours, theirs = in_order([[9, 8, 3], [5]], [[1, 2, 7], [4]])
    assert [ids.tolist() for ids in ours] == [[3, 8, 9], [5]]
    assert [ids.tolist() for ids in theirs] == [[7, 2, 1], [4]]
    assert ours[0].dtype == np.int32, "NIXL takes these as they are"
    with pytest.raises(ValueError, match="3 blocks"):
        in_order([[1, 2, 3]], [[1, 2]])
