"""How much arithmetic a prefill is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layer_parameters(config: Mapping[str, Any]) -> int | None:
    """Weights that each prompt token is multiplied with; None for a shape that is not dense.

    Those of all layers' projections: queries, keys, values, output, and the three of the MLP. The
    embedding is looked up, and the output layer sees a prompt's last token only.
    """
    if config.get("kv_lora_rank") or config.get("n_routed_experts") or config.get("num_experts"):
        return None
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = head_size(config)
    attention = hidden * size * (2 * heads + 2 * kv_heads)
    return layers * (attention + 3 * hidden * int(config["intermediate_size"]))


def head_size(config: Mapping[str, Any]) -> int:
    """Values per attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def prefill_flops(config: Mapping[str, Any], tokens: int) -> float | None:
    """Floating-point operations of computing a whole prompt; None for a shape that is not dense.

    2 * parameters * tokens, and of attention 2 * 2 * layers * heads * head size * tokens² / 2:
    scores and weighted values, a multiplication and an addition each, for the half that a causal
    mask leaves. For parameters see layer_parameters.
    """
    parameters = layer_parameters(config)
    if parameters is None:
        return None
    width = int(config["num_attention_heads"]) * head_size(config)
    attention = 2.0 * 2.0 * int(config["num_hidden_layers"]) * width * tokens**2 / 2
    return 2.0 * parameters * tokens + attention
