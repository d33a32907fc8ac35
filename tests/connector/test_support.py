"""What cannot take part in verified read-back is refused with a reason, and works otherwise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.bidir.connector import support
from vllm.bidir.connector.connector import BidirConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tests.connector.sim import BLOCK, Engine, kv_cache_config, vllm_config
from tests.connector.test_simulated import finished_turn, numbers


def request(**content: Any) -> Request:
    fields = {"prompt_token_ids": [1, 2, 3], **content}
    return Request(
        request_id="r", sampling_params=SamplingParams(max_tokens=1), pooling_params=None, **fields
    )


def test_a_full_attention_model_has_no_obstacle(model: Path) -> None:
    assert support.engine_obstacle(vllm_config(model, "p"), kv_cache_config(10), False) is None


def window() -> KVCacheGroupSpec:
    spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=64
    )
    return KVCacheGroupSpec(["other"], spec)


@pytest.mark.parametrize("alone", [True, False])
def test_sliding_window_and_hybrid_models_are_refused(model: Path, alone: bool) -> None:
    plain = kv_cache_config(10)
    groups = [window()] if alone else [*plain.kv_cache_groups, window()]
    config = replace(plain, kv_cache_groups=groups)
    assert support.engine_obstacle(vllm_config(model, "p"), config, False) is not None


def test_a_hash_that_can_collide_is_refused(model: Path) -> None:
    config = vllm_config(model, "p", hash_algo="xxhash")
    found = support.engine_obstacle(config, kv_cache_config(10), False)
    assert found is not None and "use sha256" in found


def test_a_host_buffer_is_refused(model: Path) -> None:
    assert support.engine_obstacle(vllm_config(model, "p"), kv_cache_config(10), True) is not None


def test_lora_and_embeddings_are_refused_per_request() -> None:
    lora = LoRARequest("adapter", 1, "/nowhere")
    assert support.request_obstacle(request()) is None
    assert support.request_obstacle(request(lora_request=lora)) == "lora"
    embeds = torch.zeros(3, 4)
    found = request(prompt_token_ids=None, prompt_embeds=embeds)
    assert support.request_obstacle(found) == "prompt_embeds"


def test_prompt_logprobs_need_every_token_computed() -> None:
    asked = Request(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=1),
        pooling_params=None,
    )
    assert support.request_obstacle(asked) == "whole_prompt"


def test_a_lora_turn_keeps_nothing_and_reads_nothing(model: Path) -> None:
    """Two adapters of one name may differ in their files, which no hash sees."""
    rng = random.Random(1)
    p, d = Engine(model, "p"), Engine(model, "d")
    lora = LoRARequest("adapter", 1, "/nowhere")
    h, out = numbers(rng, 200), numbers(rng, 20)
    params, _ = finished_turn(d, h, out)
    asked = p.add(h + out, params, lora_request=lora)
    metadata = p.scheduler.schedule().kv_connector_metadata
    assert metadata.read_backs == {}
    row = p.bidir.stats.data["read_backs"][-1]
    assert row[:2] == ["recompute", "unsupported"]
    assert asked.num_computed_tokens > 0


def test_images_bound_what_ids_identify() -> None:
    assert support.text_until(request()) is None
    features = [SimpleNamespace(mm_position=SimpleNamespace(offset=k)) for k in (90, 30)]
    asked = request()
    asked.mm_features = features
    assert support.text_until(asked) == 30


def test_mla_on_the_cpu_is_refused_at_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the ordinary handover answers wrong there."""
    config = vllm_config(model, "p")
    monkeypatch.setattr(type(config.model_config), "use_mla", property(lambda self: True))
    with pytest.raises(ValueError, match="MLA model on the CPU answers wrong"):
        BidirConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(10))


def test_an_unusable_kv_peers_is_refused_at_start(model: Path) -> None:
    config = vllm_config(model, "p", kv_peers=["10.0.0.0/99"])
    with pytest.raises(ValueError, match="is no network"):
        BidirConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(10))


def test_a_hybrid_engine_serves_without_read_back(model: Path) -> None:
    """One warning at start; turns keep no blocks that nobody could read."""
    d = Engine(model, "d", hash_algo="xxhash")
    assert d.bidir._obstacle is not None
    free = d.free_blocks
    params, _ = d.run(list(range(100)), {"do_remote_prefill": False, "x": 1}, max_tokens=3)
    assert params is None
    assert d.free_blocks == free
