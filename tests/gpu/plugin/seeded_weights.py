"""A vLLM plugin: `--load-format dummy` makes weights that let a wrong KV block show.

vLLM's own dummy weights are so small that attention is uniform and hardly counts: with them a
model answers the same from any KV. These keep the size of what flows through the model, make
attention pick single tokens, and are a function of the parameter's name alone, so that engines
of one model hold the same.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

# Standard deviation of attention scores is its square: enough to pick a handful of tokens among
# a thousand, and too little to be noise only.
SHARPNESS = 1.5
# Of the embeddings, against about 0.5 that each layer adds: most of the output is context.
EMBEDDING = 0.5
# Of the logits: the first twenty then hold most of the probability.
LOGITS = 4.0
# What turns into queries and keys without a norm of its own (MLA).
_SHARPENED = ("fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj")


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


def register() -> None:
    """Called by vLLM in each of its processes."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    @torch.no_grad()
    def fill(name: str, tensor: Any) -> None:
        if tensor.device.type == "meta" or not torch.is_floating_point(tensor):
            return
        mean, std = mean_and_std(name, tuple(tensor.shape))
        if std == 0:
            tensor.fill_(mean)
            return
        generator = torch.Generator(device=tensor.device).manual_seed(seed(name))
        # One dtype for drawing, whatever the model's: a CPU and a GPU may still differ.
        drawn = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        tensor.copy_(drawn.normal_(mean, std, generator=generator))

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
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
