"""Real workers with real NIXL, each with a KV cache of random bytes in this process's memory."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import torch
from vllm.bidir.connector.worker import BidirWorker
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from tests.connector.sim import BLOCK, kv_cache_config, vllm_config

# KV heads of the model; each rank has its share of them, or one.
LAYERS, HEADS, SIZE = 3, 4, 4
BLOCKS = {"p": 40, "d": 50}


class Node:
    """A worker with a KV cache of its own, all of whose bytes are random.

    It is `rank` of an engine of `ranks`; `heads` are the model's, 0 for MLA.
    """

    def __init__(
        self,
        model: Path,
        engine_id: str,
        layout: str,
        block_size: int = BLOCK,
        rank: int = 0,
        ranks: int = 1,
        heads: int = HEADS,
    ) -> None:
        # Long enough for a busy machine; tests that wait for it say how long.
        config = vllm_config(model, engine_id, extra={"read_back_timeout": 30.0})
        config.cache_config.kv_cache_layout = layout
        config.cache_config.block_size = block_size
        kind = FullAttentionSpec if heads else MLAAttentionSpec
        own = max(1, heads // ranks)
        size = SIZE if heads else 2 * SIZE
        spec = kind(block_size=block_size, num_kv_heads=own, head_size=size, dtype=torch.float32)
        names = [f"layer.{number}" for number in range(LAYERS)]
        blocks = BLOCKS[engine_id]
        with (
            set_current_vllm_config(config),
            patch.multiple(
                base_worker,
                get_tensor_model_parallel_rank=lambda: rank,
                get_tensor_model_parallel_world_size=lambda: ranks,
            ),
        ):
            self.worker = BidirWorker(
                config, engine_id, kv_cache_config(blocks, KVCacheGroupSpec(names, spec))
            )
        self.worker.use_mla = heads == 0
        page = (own, block_size, 2 * SIZE)
        outer = (blocks, LAYERS) if layout == "BLHNC" else (LAYERS, blocks)
        storage = torch.rand((*outer, *page))
        if layout == "BLHNC":
            self.layers = [storage[:, number] for number in range(LAYERS)]
        else:
            self.layers = [storage[number].clone() for number in range(LAYERS)]
        with patch.object(type(config.model_config), "get_total_num_kv_heads", lambda _: heads):
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

    def heard(self) -> bytes:
        """The one message that comes from the one peer, when it is there."""
        end = time.monotonic() + 10
        while not (found := self.worker.nixl_wrapper.get_new_notifs()):
            assert time.monotonic() < end
            time.sleep(0.001)
        ((message,),) = found.values()
        return bytes(message)

    def descriptors(self) -> list[int]:
        """Of the transfers so far, as NIXL has counted them."""
        return list(self.worker.xfer_stats.data["num_descriptors"])


def handover(ours: list[int], theirs: list[int], host: str, port: int) -> NixlConnectorMetadata:
    """The order to read these blocks of engine `p` as request `r`, which P knows as `at-p`."""
    metadata = NixlConnectorMetadata()
    metadata.reqs_to_recv["r"] = ReqMeta(
        local_block_ids=(ours,),
        local_physical_block_ids=(ours,),
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        remote=RemoteMeta(
            block_ids=(theirs,), host=host, port=port, engine_id="p", request_id="at-p"
        ),
    )
    return metadata


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that no attention kernel looks at."""
    monkeypatch.setattr(base_worker, "select_common_block_size", lambda size, backends: size)
