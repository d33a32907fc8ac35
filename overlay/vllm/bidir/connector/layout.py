# SPDX-License-Identifier: Apache-2.0
"""Which KV cache layout to ask for, and what to call it before peers.

NIXL's cost goes by descriptors. With the blocks outermost (BLHNC) all layers of a block lie side by
side and are one descriptor (see rows.py); the base's connector asks for LBHNC, a descriptor per
block and layer. Within a layer's part of a block both have the same bytes in the same order, and a
peer is told where each part begins and how far the next block is: so that nodes of either layout
read from each other, layer by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.bidir.connector.options import is_on
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

BLOCKS_OUTERMOST = "BLHNC"
LAYERS_OUTERMOST = "LBHNC"
_ALIKE = (BLOCKS_OUTERMOST, LAYERS_OUTERMOST)


def preferred(vllm_config: VllmConfig, required: str | None) -> str | None:
    """BLHNC where a read-back's connector asks for LBHNC and nothing speaks against it.

    Not beside other connectors, which may have asked for the same and mean it; not for a model
    whose layers differ; and not for other kernels than FlashAttention's, which have not been seen
    with it, and may cut a block in several of their own: the base does not start with that.
    """
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    if (
        required != LAYERS_OUTERMOST
        or transfer is None
        or transfer.kv_connector not in ("NixlConnector", "NixlPullConnector")
        or not is_on(transfer)
        or not _is_flash_attention(vllm_config)
        or transfer.kv_buffer_device not in (None, "cuda")
        or vllm_config.speculative_config is not None
        or model is None
        or not _layers_are_alike(model)
    ):
        return required
    return BLOCKS_OUTERMOST


def _is_flash_attention(vllm_config: VllmConfig) -> bool:
    """Whether FlashAttention is chosen, or is what the base chooses (newer GPUs have another)."""
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    attention = vllm_config.attention_config
    if capability is None or capability.major not in (8, 9) or attention.backend_per_kind:
        return False
    if attention.backend is not None:
        return bool(attention.backend.name == "FLASH_ATTN")
    # With other types the base may choose another.
    return vllm_config.cache_config.cache_dtype in ("auto", "bfloat16", "float16")


def _layers_are_alike(model: ModelConfig) -> bool:
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None)
    return (
        not model.use_mla
        and not model.is_hybrid
        and not model.is_encoder_decoder
        and model.get_sliding_window() is None
        and model.attention_chunk_size is None
        and (kinds is None or set(kinds) <= {"attention", "full_attention"})
    )


def announced(layout: str) -> str:
    """What peers are told: what the base would have in this configuration.

    A stock node compares names, and refuses another than its own. One that has been set to BLHNC
    by its user meets nodes that have been set to it as well, as it does in the base.
    """
    chosen_by_user = envs.VLLM_KV_CACHE_LAYOUT is not None
    return LAYERS_OUTERMOST if layout == BLOCKS_OUTERMOST and not chosen_by_user else layout


def as_ours(theirs: NixlAgentMetadata, ours: str) -> NixlAgentMetadata:
    """The same peer, its layout called as ours is, if it can be read from layer by layer."""
    if ours in _ALIKE and theirs.kv_cache_layout in _ALIKE:
        return replace(theirs, kv_cache_layout=ours)
    return theirs
