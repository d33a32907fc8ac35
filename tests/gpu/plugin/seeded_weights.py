"""A vLLM plugin: `--load-format dummy` makes weights that let a wrong KV block show.

vLLM's own dummy weights are so small that attention is uniform and hardly counts: with them a
model answers the same from any KV. These keep the size of what flows through the model, make
attention pick single tokens, and are a function of the parameter's name alone, so that engines
of one model hold the same.

A dense model's are drawn whole, by the names of a checkpoint, and go through vLLM's own loaders:
so engines of any tensor-parallel size hold the same model. Others are drawn where they lie, which
is right on one rank only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

# Standard deviation of attention scores is its square: enough to pick a handful of tokens among
# a thousand, and too little to be noise only.
SHARPNESS = 1.5
# Of the embeddings, against about 0.5 that each layer adds: most of the output is context.
EMBEDDING = 0.5
# Of the logits: the first twenty then hold most of the probability.
LOGITS = 4.0
# What turns into queries and keys without a norm of its own (MLA, Llama).
_SHARPENED = ("fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "qkv_proj")
_DENSE = "qwen3"


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """How a parameter is drawn. Matrices are (…, out, in)."""
    if len(shape) < 2:
        if name.endswith("bias"):
            return 0.0, 0.0
        return (SHARPNESS if "q_norm" in name or "k_norm" in name else 1.0), 0.0
    if "embed_tokens" in name:
        return 0.0, EMBEDDING
    std = 1 / math.sqrt(shape[-1])
    if "lm_head" in name:
        return 0.0, LOGITS * std
    return 0.0, (SHARPNESS * std if any(part in name for part in _SHARPENED) else std)


def seed(name: str) -> int:
    """Of the generator that draws the parameter."""
    return zlib.crc32(name.encode("utf-8"))


def checkpoint(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a dense model's checkpoint; `config` is the Hugging Face one."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        parts = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in parts.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def register() -> None:
    """Called by vLLM in each of its processes."""
    import torch
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    def draw(name: str, shape: tuple[int, ...], device: Any) -> Any:
        mean, std = mean_and_std(name, shape)
        # One dtype for drawing, whatever the model's: a CPU and a GPU may still differ.
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        if std == 0:
            return drawn.fill_(mean)
        generator = torch.Generator(device=device).manual_seed(seed(name))
        return drawn.normal_(mean, std, generator=generator)

    @torch.no_grad()
    def fill(name: str, tensor: Any) -> None:
        if tensor.device.type != "meta" and torch.is_floating_point(tensor):
            tensor.copy_(draw(name, tuple(tensor.shape), tensor.device))

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        config = model_config.hf_text_config
        if config.model_type == _DENSE:
            # What is quantized as it is loaded lies nowhere yet; the embeddings do.
            device = next(p.device for p in model.parameters() if p.device.type != "meta")
            model.load_weights(
                (name, draw(name, shape, device)) for name, shape in checkpoint(config)
            )
            return
        if get_tensor_model_parallel_world_size() > 1:
            raise ValueError(
                f"seeded weights of {config.model_type} are drawn where they lie, so that each "
                f"rank would hold others; use a {_DENSE} model, or one rank"
            )
        for prefix, layer in model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # Quantized as it is loaded: vLLM draws its tensors one by one, in order.
                count = iter(range(1 << 30))
                dummy_loader.initialize_single_dummy_weight = lambda tensor, p=prefix, c=count: (
                    fill(f"{p}.{next(c)}", tensor)
                )
                self._process_online_quant_layer(layer, info)
                continue
            for name, parameter in layer.named_parameters(recurse=False):
                fill(f"{prefix}.{name}", parameter)

    dummy_loader.DummyModelLoader.load_weights = load_weights
