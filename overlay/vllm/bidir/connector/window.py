# SPDX-License-Identifier: Apache-2.0
"""Prompts of which D would load all but what their last token attends to.

The base takes a handed-over prompt for computed, as a whole, when it gives D blocks for it: of a
layer with a window only those that the token *behind* the prompt attends to. Then it has D compute
the prompt's last token, whose window begins one position earlier. Where a block ends between the
two that position is in none of D's blocks, and D would answer from a block of nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def misses_last_tokens(kv_cache_config: KVCacheConfig, tokens: int) -> bool:
    """Whether the window of the last of so many prompt tokens begins in a block that is not loaded
    with them."""
    return any(
        _skipped(spec, tokens) // spec.block_size > _skipped(spec, tokens - 1) // spec.block_size
        for spec in _specs(kv_cache_config)
    )


def _specs(kv_cache_config: KVCacheConfig) -> Iterator[KVCacheSpec]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            yield from spec.kv_cache_specs.values()
        else:
            yield spec


def _skipped(spec: KVCacheSpec, computed: int) -> int:
    """Tokens that the one behind `computed` does not attend to, as the managers of the base's KV
    cache reckon them."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, computed - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return computed // spec.attention_chunk_size * spec.attention_chunk_size
    return 0
