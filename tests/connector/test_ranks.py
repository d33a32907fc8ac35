"""Several workers of one engine, each reading its own rank of D by position.

Real BidirWorkers with the base's own mapping, descriptors and bookkeeping; NIXL records what it is
asked for, the test answers HOLD and CONFIRM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.bidir.connector import peer, questions
from vllm.bidir.connector.outcome import Outcome, WorkerReport
from vllm.bidir.connector.posting import Poster
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.utils import (
    EngineTransferInfo,
    KVOutputAggregator,
    TransferTopology,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.connector.sim import kv_cache_config
from tests.connector.test_worker import ORDER, Bare, FakeNixl, answer

REGIONS = 2
LOCAL_BLOCKS, REMOTE_BLOCKS = 100, 200


class Nixl(FakeNixl):
    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        raise AssertionError("a read-back notifies nobody")


class Rank(Bare):
    """One worker of an engine with `size` ranks, which has met a D with `remote_size`."""

    _logical_to_kernel_block_ids = NixlBaseConnectorWorker._logical_to_kernel_block_ids
    _compute_desc_ids = NixlBaseConnectorWorker._compute_desc_ids

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        remote_size: int = 1,
        mla: bool = False,
        per_block: int = 1,
    ) -> None:
        super().__init__()
        self.tp_rank, self.world_size = rank, size
        spec = MLAAttentionSpec if mla else FullAttentionSpec
        shape = spec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.kv_cache_config = kv_cache_config(10, KVCacheGroupSpec(["layer"], shape))
        self._physical_blocks_per_logical_kv_block = per_block
        block_size = 16 // per_block
        self.transfer_topo = TransferTopology(
            rank, size, block_size, "p", mla, False, 1 if mla else 4, []
        )
        info = EngineTransferInfo(
            remote_tp_size=remote_size,
            remote_block_len=1000,
            remote_block_size=block_size,
            remote_physical_blocks_per_logical=per_block,
        )
        self.transfer_topo.register_remote_engine("d", info)
        mapping = compute_tp_mapping(self.transfer_topo, remote_size, (spec,))
        self.tp_mappings = {"d": mapping}
        self.nixl_wrapper = Nixl()
        self._poster = Poster(self.nixl_wrapper, lambda: None, shared=False)
        self._recving_transfers = defaultdict(list)
        # The handle of D's rank k is 100 + k, so that posted reads show whose memory they read.
        self.dst_xfer_side_handles = {"d": {k: 100 + k for k in range(remote_size)}}
        self.src_xfer_handles_by_block_size = {block_size: 1}
        self.dst_num_blocks = {"d": REMOTE_BLOCKS * per_block, "p": LOCAL_BLOCKS * per_block}
        self.num_regions, self._has_mamba, self.use_mla = REGIONS, False, mla
        self.dcp_size, self.pcp_rank = 1, 0
        self._bidirectional_kv_xfer_enabled = True
        self._engine_last_active: dict[str, float] = {}
        self._ready_requests = self._failed_recv_reqs.__class__()
        self._reqs_to_process: set[str] = set()
        self._reqs_to_send: dict[str, float] = {}
        self.use_host_buffer = self.enable_permute_local_kv = False
        self.enable_heterogeneous_attn_post_process = False

    def _get_new_notifs(self) -> set[str]:
        return set()

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        pass

    def step(self, **orders: Any) -> ModelRunnerOutput:
        """One engine step with these orders, after all that was asked has been answered."""
        metadata = NixlConnectorMetadata()
        metadata.read_backs = orders
        self.start_load_kv(metadata)
        _, received = self.get_finished()
        return ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving=received or None,
                invalid_block_ids=self.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=self.take_report(),
            ),
        )


class AtOnce:
    """Asks in the caller's thread, so that a step finds the answer."""

    def submit(self, call: Any, *arguments: Any) -> None:
        call(*arguments)

    def shutdown(self, **how: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions.peer, "hold", lambda *args: peer.Asked(hold=answer(tp_size=2)))
    monkeypatch.setattr(questions.peer, "confirm", lambda *args: peer.Asked(stood=True))


def made(**options: Any) -> Rank:
    rank = Rank(**options)
    rank._questions.close()
    rank._questions._holders = rank._questions._confirmers = AtOnce()  # type: ignore[assignment]
    return rank


def posted(rank: Rank) -> list[tuple[list[int], int, list[int]]]:
    return [
        ([*map(int, local)], side, [*map(int, remote)])
        for _, _, local, side, remote in rank.nixl_wrapper.posted
    ]


def descriptors(blocks: list[int], of: int) -> list[int]:
    """NIXL's numbers of these blocks in each region of `of` blocks."""
    return [region * of + block for region in range(REGIONS) for block in blocks]


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_its_own_rank_of_d_by_position(rank: int, mla: bool) -> None:
    """With MLA every rank holds all of the cache, and reads it from its twin too."""
    one = made(rank=rank, size=2, remote_size=2, mla=mla)
    done = one.step(r=ORDER).kv_connector_output
    assert posted(one) == [
        (descriptors([7, 8, 9], LOCAL_BLOCKS), 100 + rank, descriptors([41, 42, 43], REMOTE_BLOCKS))
    ]
    assert done is not None and done.finished_recving == {"r"}
    assert done.invalid_block_ids == set()


@pytest.mark.parametrize("per_block", [2, 4])
def test_a_block_of_several_kernel_blocks_is_read_whole_and_in_order(
    per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions.peer, "hold", lambda *args: peer.Asked(hold=answer()))
    one = made(per_block=per_block)
    one.step(r=ORDER)

    def parts(blocks: list[int]) -> list[int]:
        return [block * per_block + k for block in blocks for k in range(per_block)]

    assert posted(one) == [
        (
            descriptors(parts([7, 8, 9]), LOCAL_BLOCKS * per_block),
            100,
            descriptors(parts([41, 42, 43]), REMOTE_BLOCKS * per_block),
        )
    ]


@pytest.mark.parametrize(("size", "theirs"), [(2, 3), (4, 6), (1, 8), (2, 0), (1, 4096)])
def test_sizes_that_do_not_pair_compute_instead(
    size: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four heads can be cut neither in three nor in eight; and D may say anything of itself."""
    held = peer.Asked(hold=answer(tp_size=theirs))
    monkeypatch.setattr(questions.peer, "hold", lambda *args: held)
    for rank in range(size):
        one = made(rank=rank, size=size, remote_size=size)
        lost = one.step(r=ORDER).kv_connector_output
        assert lost is not None and lost.invalid_block_ids == {7, 8, 9}
        assert lost.finished_recving == {"r"}
        assert posted(one) == []
        assert outcome(lost).lost is Reason.UNSUPPORTED


def aggregated(ranks: list[Rank]) -> Iterator[KVConnectorOutput]:
    """What the scheduler hears of each step of all ranks, the first of them with the order."""
    aggregator = KVOutputAggregator(len(ranks))
    orders: dict[str, Any] = {"r": ORDER}
    for _ in range(4):
        output = aggregator.aggregate([rank.step(**orders) for rank in ranks])
        orders = {}
        assert output is not None and output.kv_connector_output is not None
        yield output.kv_connector_output


def outcome(heard: KVConnectorOutput) -> Outcome:
    report = heard.kv_connector_worker_meta
    assert isinstance(report, WorkerReport)
    return report.outcomes["r"]


def reported(heard: list[KVConnectorOutput]) -> Outcome:
    """What the reports of all steps add up to."""
    found = [outcome(one) for one in heard if one.kv_connector_worker_meta]
    return found[0] if len(found) == 1 else found[0].with_rank(found[1])


def test_a_read_back_is_done_when_all_ranks_have_read() -> None:
    ranks = [made(rank=k, size=2, remote_size=2) for k in range(2)]
    ranks[1].nixl_wrapper.states = ["PROC", "PROC"]
    heard = list(aggregated(ranks))
    assert [one.finished_recving for one in heard] == [None, None, {"r"}, None]
    assert reported(heard).lost is None


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("states", [["ERR"], ["PROC", "PROC", "ERR"]])
def test_a_read_back_that_one_rank_loses_is_lost_for_all(loser: int, states: list[str]) -> None:
    """Bad blocks are told before, or with, the end of the transfer."""
    ranks = [made(rank=k, size=2, remote_size=2) for k in range(2)]
    ranks[loser].nixl_wrapper.states = list(states)
    heard = list(aggregated(ranks))
    (end,) = [k for k, one in enumerate(heard) if one.finished_recving]
    told = [k for k, one in enumerate(heard) if one.invalid_block_ids]
    assert heard[end].finished_recving == {"r"}
    assert told and max(told) <= end
    assert set().union(*(one.invalid_block_ids for one in heard)) == {7, 8, 9}
    assert reported(heard).lost is Reason.TRANSFER_FAILED
