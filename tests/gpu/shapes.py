"""Model folders of given shapes: a configuration and a tokenizer, no weights and no network.

Shapes are those of released models, of reduced depth and vocabulary; `tiny` is for a CPU.
"""

from __future__ import annotations

from typing import Any

from tools.bench.model import Shape, decoder, glm5, qwen3, write_model

__all__ = ["SHAPES", "VOCABULARY", "Shape", "write_model"]

VOCABULARY = 32768
_REDUCED: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}

# Attention of DeepSeek-V3: latents of 512 and 64 values per token, whatever the heads. All layers
# are dense, since a router that tips over makes noise that has nothing to do with KV.
_MLA = decoder(
    **_REDUCED,
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=6,
    first_k_dense_replace=6,
    num_attention_heads=16,
    num_key_value_heads=16,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=512,
    n_group=1,
    topk_group=1,
    num_nextn_predict_layers=0,
)

# The indexer picks 2,048 tokens, more than any prompt here has. Where it has to leave tokens out,
# two equal requests to one engine differ.
_SPARSE = glm5(
    **_REDUCED,
    num_hidden_layers=4,
    mlp_layer_types=["dense"] * 3 + ["sparse"],
    n_routed_experts=16,
)


def _windowed(layers: int, window: int, **more: Any) -> dict[str, Any]:
    """A Llama, every other layer of which attends to so many tokens only: two cache groups."""
    kinds = [("sliding_attention", "full_attention")[number % 2] for number in range(layers)]
    return decoder(
        **_REDUCED,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        num_hidden_layers=layers,
        layer_types=kinds,
        sliding_window=window,
        **more,
    )


SHAPES = {
    "mla": Shape(_MLA),
    "dense": Shape(qwen3(8, 4096, 12288, 32, **_REDUCED)),
    # Several engines of it start quickly, and fit on one GPU beside each other.
    "small": Shape(qwen3(8, 2048, 6144, 16, **_REDUCED)),
    "sparse": Shape(_SPARSE, args=("--quantization", "fp8")),
    "tiny": Shape(
        qwen3(3, 256, 512, 8, **_REDUCED, num_key_value_heads=4, head_dim=64), dtype="float32"
    ),
}

# By device. Tokens of a window, then the shape.
HYBRID = {
    "cuda": (
        512,
        Shape(
            _windowed(
                8,
                512,
                hidden_size=4096,
                intermediate_size=12288,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
            )
        ),
    ),
    "cpu": (
        256,
        Shape(
            _windowed(
                4,
                256,
                hidden_size=256,
                intermediate_size=512,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=64,
            ),
            dtype="float32",
        ),
    ),
}
