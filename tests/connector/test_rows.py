"""Blocks whose layers lie side by side are read row by row: real workers and NIXL, real bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.bidir.connector import agents, meeting, peer, posting, questions
from vllm.bidir.connector.decision import Source
from vllm.bidir.connector.messages import HoldAnswer
from vllm.bidir.connector.proof import make_proof
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.rows import Row, in_order, join_blocks, row_of
from vllm.bidir.connector.worker import BidirWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from tests.connector.nodes import BLOCKS, LAYERS, Node, alone, handover
from tests.connector.sim import BLOCK

__all__ = ["alone"]


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
    before = [d.block(number).clone() for number in range(BLOCKS["d"])]
    hands_over(d, THEIRS, [1, 2, *OURS])
    check_moved(before, d, THEIRS, p, OURS)
    assert d.descriptors() == [expected_descriptors(d)]
    assert p.heard() == b"at-p:1", "P frees its blocks when all have come"


def hands_over(d: Node, ours: list[int], theirs: list[int]) -> None:
    """D reads P's blocks into its own, the last into the last."""
    d.worker.start_load_kv(handover(ours, theirs, "localhost", 1))
    d.wait_for("r")


@pytest.mark.parametrize("aside", [False, True])
def test_many_blocks_are_there_when_they_are_said_to_be(
    pair: tuple[Node, Node], aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are posted in another thread: neither too early, nor twice."""
    p, d = pair
    monkeypatch.setattr(posting, "INLINE", 0 if aside else 1000)
    ours, theirs = list(range(49, 0, -1))[:38], list(range(1, 39))
    taken: list[str] = []
    transfer = d.worker.nixl_wrapper.transfer

    def slowly(handle: object) -> object:
        taken.append(threading.current_thread().name)
        time.sleep(0.05)
        return transfer(handle)

    monkeypatch.setattr(d.worker.nixl_wrapper, "transfer", slowly)
    for _ in range(3):
        for layer in d.layers:
            layer[ours] = 0.0
        hands_over(d, ours, theirs)
        for mine, their in zip(ours, theirs, strict=True):
            assert torch.equal(d.block(mine), p.block(their))
        assert d.worker.get_finished() == (set(), set())
    assert all(name.startswith("bidir_post") is aside for name in taken)


def check_moved(
    before: list[torch.Tensor], to: Node, ours: list[int], source: Node, theirs: list[int]
) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(to.block(mine), source.block(their))
    # A probe may have read into the null block.
    for number, block in enumerate(before[1:], 1):
        if number not in ours:
            assert torch.equal(to.block(number), block), "no other block is touched"


def test_a_peer_with_other_layers_is_read_layer_by_layer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = Node(model, "p", "BLHNC"), Node(model, "d", "BLHNC")
    d.metadata.block_lens = [2 * d.metadata.block_lens[0], 0, d.metadata.block_lens[2]]
    monkeypatch.setattr(BidirWorker, "is_alike", lambda *_: True)
    plan = SimpleNamespace(all_source_ranks=(0,), rank_offset_factor=0)
    p.worker.tp_mappings["d"] = plan
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
def test_nodes_of_either_layout_read_from_each_other(
    model: Path, p_layout: str, d_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = Node(model, "p", p_layout), Node(model, "d", d_layout)
    p.meets(d)
    d.meets(p)
    before = [p.block(number).clone() for number in range(BLOCKS["p"])]
    reads_back(p, d, monkeypatch)
    check_moved(before, p, OURS, d, THEIRS)
    assert p.worker._rows.of("d", 0) is None


def test_a_stock_node_is_told_what_it_would_be_itself(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses another name than its own."""
    assert Node(model, "p", "BLHNC").metadata.kv_cache_layout == "LBHNC"
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    chosen = Node(model, "d", "BLHNC")
    assert chosen.metadata.kv_cache_layout == "BLHNC"
    chosen.meets(Node(model, "p", "LBHNC"))


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("given", [4, 3])
def test_smaller_blocks_are_put_where_they_belong(
    model: Path, layout: str, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base takes a part of a block for a part of the distance to the next one, and heads for
    tokens. What P has not computed is zeroed."""
    monkeypatch.setattr(meeting.current_platform, "is_cpu", lambda: False)
    p, d = Node(model, "p", layout, BLOCK // 2), Node(model, "d", layout)
    d.meets(p)
    assert d.worker._rows.of("p", 0) is None
    ours, theirs = [30, 11], [7, 21, 3, 22][:given]
    before = [d.block(number).clone() for number in range(BLOCKS["d"])]
    hands_over(d, ours, theirs)
    parts = [p.block(part) for part in theirs]
    parts += [torch.zeros_like(parts[0])] * (4 - given)
    for number, (first, second) in zip(ours, [parts[:2], parts[2:]], strict=True):
        # [layer, head, token, content]
        assert torch.equal(d.block(number), torch.cat([first, second], dim=2))
    for number, block in enumerate(before[1:], 1):
        if number not in ours:
            assert torch.equal(d.block(number), block), "no other block is touched"


def test_too_few_smaller_blocks_are_a_failed_load(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base would zero the rest, as if the prompt ended there."""
    monkeypatch.setattr(meeting.current_platform, "is_cpu", lambda: False)
    p, d = Node(model, "p", "LBNHC", BLOCK // 2), Node(model, "d", "LBNHC")
    d.meets(p)
    d.worker.start_load_kv(handover([30, 11], [7, 21], "localhost", 1))
    assert d.worker.get_finished()[1] == {"r"}
    assert d.worker.get_block_ids_with_load_errors() == {30, 11}


def test_a_cpus_blocks_are_not_made_of_smaller_ones(model: Path) -> None:
    """Its kernels keep them in an order of their own: a read would answer wrong."""
    with pytest.raises(ValueError, match="the same --block-size"):
        Node(model, "d", "LBHNC").meets(Node(model, "p", "LBHNC", BLOCK // 2))


@pytest.mark.parametrize("outside", ["heads", "tokens"])
def test_blocks_are_joined_in_either_order_of_heads_and_tokens(outside: str) -> None:
    heads, tokens, content = 3, 8, 2
    shape = (4, heads, tokens, content) if outside == "heads" else (4, tokens, heads, content)
    storage = torch.rand(shape)
    cache = storage if outside == "heads" else storage.transpose(1, 2)
    wanted = torch.rand((heads, tokens, content))
    halves = [wanted[:, :4], wanted[:, 4:]]
    # As bytes of a peer with half the block: its own order, one half behind the other.
    raw = [half if outside == "heads" else half.transpose(0, 1) for half in halves]
    storage[2] = torch.cat([one.flatten() for one in raw]).reshape(shape[1:])
    join_blocks(cache, [2], 2, 2)
    assert torch.equal(cache[2], wanted)


@pytest.mark.parametrize(
    ("dcp_size", "sources", "offset"), [(2, (0,), 0), (1, (1,), 0), (1, (0,), 1)]
)
def test_ranks_whose_blocks_do_not_pair_whole_have_no_rows(
    model: Path,
    dcp_size: int,
    sources: tuple[int, ...],
    offset: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, d = Node(model, "p", "BLHNC"), Node(model, "d", "BLHNC")
    p.meets(d)
    p.worker._rows.forget("d")
    monkeypatch.setattr(
        NixlPullConnectorWorker, "add_remote_agent", lambda self, *arguments: "agent"
    )
    plan = p.worker.tp_mappings["d"]
    p.worker.tp_mappings["d"] = replace(plan, all_source_ranks=sources, rank_offset_factor=offset)
    p.worker.add_remote_agent(d.metadata, 0, 1, dcp_size)
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
