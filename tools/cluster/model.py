"""A small random model for tests: seeded, made in a second, needs no network.

Its greedy output is varied, depends on the whole context, and never leaves the tokens that
survive text -> ids -> text (see ``tokenizer.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cluster.tokenizer import END_OF_TEXT_ID, GENERATED_IDS, VOCAB_SIZE, write_tokenizer

# The residual stream's first feature holds this value at every layer and position, since nothing
# writes to it. The output layer uses it as the bias that these models have not got.
_BIAS_FEATURE = 0
_BIAS_VALUE = 1.0
_NEVER = -1e5


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. Heads divide by 4, so that it runs with tensor parallelism 1, 2 and 4.

    A Qwen3. With ``window`` a Llama, every other layer of which attends to so many tokens only:
    its KV cache has two kinds of groups.

    ``initializer_range`` is the standard deviation of all weights but the embeddings, where it
    is 1. ``query_scale`` multiplies the normalised queries: at 1 attention is nearly uniform and
    the output falls into repeating one token; at 2 it picks single tokens, near and far.
    """

    layers: int = 4
    hidden: int = 256
    intermediate: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 64
    max_positions: int = 131072
    initializer_range: float = 0.2
    query_scale: float = 2.0
    seed: int = 0
    window: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one token takes in all layers together."""
        return self.layers * 2 * self.kv_heads * self.head_size * 4


def make_model(folder: Path, shape: ModelShape | None = None) -> Path:
    """Write config, float32 weights and tokenizer into ``folder`` (made if missing); return it.

    The same shape gives the same bytes. Files of an earlier call are overwritten.
    """
    from safetensors.numpy import save_file

    shape = shape or ModelShape()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape.max_positions)
    save_file(dict(_weights(shape)), str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name, content in (
        ("config.json", _config(shape)),
        ("generation_config.json", {"eos_token_id": END_OF_TEXT_ID}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def _config(shape: ModelShape) -> dict[str, Any]:
    kind: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.window:
        layers = [("sliding", "full")[number % 2] for number in range(shape.layers)]
        kind = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "layer_types": [f"{layer}_attention" for layer in layers],
            "sliding_window": shape.window,
        }
    return {
        **kind,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": shape.max_positions,
        "initializer_range": shape.initializer_range,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "dtype": "float32",
    }


def _weights(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    import numpy as np

    random = np.random.default_rng(shape.seed)

    def normal(rows: int, columns: int) -> Any:
        return random.standard_normal((rows, columns), dtype=np.float32)

    def matrix(rows: int, columns: int) -> Any:
        return normal(rows, columns) * np.float32(shape.initializer_range)

    def ones(size: int) -> Any:
        return np.ones(size, dtype=np.float32)

    def residual(columns: int) -> Any:
        values = matrix(shape.hidden, columns)
        values[_BIAS_FEATURE, :] = 0.0
        return values

    embedding = normal(VOCAB_SIZE, shape.hidden)
    embedding[:, _BIAS_FEATURE] = _BIAS_VALUE
    yield "model.embed_tokens.weight", embedding
    query, key_value = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", ones(shape.hidden)
        yield prefix + "self_attn.q_proj.weight", matrix(query, shape.hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(key_value, shape.hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(key_value, shape.hidden)
        if not shape.window:  # Llama normalises neither
            scale = np.float32(shape.query_scale)
            yield prefix + "self_attn.q_norm.weight", ones(shape.head_size) * scale
            yield prefix + "self_attn.k_norm.weight", ones(shape.head_size)
        yield prefix + "self_attn.o_proj.weight", residual(query)
        yield prefix + "post_attention_layernorm.weight", ones(shape.hidden)
        yield prefix + "mlp.gate_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield prefix + "mlp.up_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield prefix + "mlp.down_proj.weight", residual(shape.intermediate)
    yield "model.norm.weight", ones(shape.hidden)
    head = matrix(VOCAB_SIZE, shape.hidden)
    head[:, _BIAS_FEATURE] = _NEVER
    head[list(GENERATED_IDS), _BIAS_FEATURE] = 0.0
    yield "lm_head.weight", head
