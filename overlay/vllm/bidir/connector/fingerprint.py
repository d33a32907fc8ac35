# SPDX-License-Identifier: Apache-2.0
"""What must be equal on both sides before equal block hashes mean equal KV."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_none_hash_seed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Collisions in these would pass another prompt's KV for this one's.
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def is_cryptographic(vllm_config: VllmConfig) -> bool:
    """Whether the prefix-caching hash can vouch for content."""
    return vllm_config.cache_config.prefix_caching_hash_algo in _CRYPTOGRAPHIC


def fingerprint(vllm_config: VllmConfig, weight_version: str) -> str:
    """`<hash>:<16 hex digits>` over hash seed, model, revision, weight version, dtypes and
    quantization. `weight_version` is what the engine was last told; it starts as "default"."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "seed": get_none_hash_seed(),
        "model": model.model,
        "revision": model.revision,
        "weight_version": weight_version,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_dtype": str(cache.cache_dtype),
        "overrides": repr(model.hf_overrides),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{cache.prefix_caching_hash_algo}:{digest[:16]}"
