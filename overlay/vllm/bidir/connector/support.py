# SPDX-License-Identifier: Apache-2.0
"""Which engines and which requests can take part in verified read-back.

Whatever is not listed as possible computes its prompts, with the reason counted; nothing else of
the engine changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.bidir.connector.fingerprint import is_cryptographic
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


# Not their subclasses, which add windows and holes.
_PLAIN = (FullAttentionSpec, MLAAttentionSpec)


def engine_obstacle(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, use_host_buffer: bool
) -> str | None:
    """Why this engine can neither keep turns for read-back nor read them, or None."""
    groups = kv_cache_config.transfer_groups
    if len(kv_cache_config.kv_cache_groups) != 1 or len(groups) != 1:
        return "the model has several KV cache groups (hybrid, Mamba or sliding window)"
    obstacle = layer_obstacle(kv_cache_config)
    if obstacle is not None:
        return obstacle
    if not is_cryptographic(vllm_config):
        return (
            f"prefix_caching_hash_algo={vllm_config.cache_config.prefix_caching_hash_algo} "
            "is not cryptographic; use sha256"
        )
    if use_host_buffer:
        return "KV goes through a host buffer (kv_buffer_device=cpu on an accelerator)"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is on"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is on"
    return None


def layer_obstacle(kv_cache_config: KVCacheConfig) -> str | None:
    """A layer whose KV at one position is more than a function of the tokens up to it, or None.

    The scheduler's configuration shows one layer of each group; the workers' shows all.
    """
    for group in kv_cache_config.transfer_groups:
        spec = group.kv_cache_spec
        several = isinstance(spec, UniformTypeKVCacheSpecs)
        layers = spec.kv_cache_specs.values() if several else (spec,)
        for layer in layers:
            if type(layer) not in _PLAIN or getattr(layer, "non_causal", False):
                return f"its KV cache is not plain causal attention ({type(layer).__name__})"
            if getattr(layer, "sliding_window", None) or getattr(
                layer, "attention_chunk_size", None
            ):
                return "it attends to a window"
    return None


def refuse_wrong_answers(vllm_config: VllmConfig) -> None:
    """ValueError for a pair that would answer wrong, whatever is read."""
    if vllm_config.model_config.use_mla and current_platform.is_cpu():
        raise ValueError(
            "NixlConnector with an MLA model on the CPU answers wrong: the CPU's MLA attention "
            "cannot continue from KV that was loaded. Run this model without a KV connector "
            "here, or on a GPU."
        )


def request_obstacle(request: Request) -> str | None:
    """Why this request's content is not identified by its block hashes alone, or None."""
    if request.lora_request is not None:
        return "lora"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.pooling_params is not None:
        return "pooling"
    if request.skip_reading_prefix_cache:
        # prompt_logprobs, for one, need each prompt token to be computed.
        return "whole_prompt"
    return None


def text_until(request: Request) -> int | None:
    """Position from which token ids alone no longer identify content (an image begins), or None.

    Only looked at behind the last hashed block; images before it are in the hash chain.
    """
    starts = [feature.mm_position.offset for feature in request.mm_features]
    return min(starts) if starts else None
