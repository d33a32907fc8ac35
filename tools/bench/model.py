"""Models without weights: configurations of released shapes, and where a model's own lies.

An engine started with `--load-format dummy` makes up the weights; timing needs no others. What is
here has one word per token id for a tokenizer, since the benchmark sends token ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.errors import BenchError
from tools.cluster.model import ModelShape, make_model
from tools.cluster.tokenizer import GENERATED_IDS

DUMMY_WEIGHTS = ("--load-format", "dummy")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
# An FP8 index key and the float32 scale of its 128 values.
_INDEX_SCALE_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """What `config.json` says, the engine's dtype, and arguments that the model needs."""

    config: Mapping[str, Any]
    dtype: str = "bfloat16"
    args: tuple[str, ...] = ()


def decoder(**more: Any) -> dict[str, Any]:
    """The part of a configuration that all shapes here share."""
    return {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **more,
    }


def qwen3(layers: int, hidden: int, intermediate: int, heads: int, **more: Any) -> dict[str, Any]:
    """A dense Qwen3 with 8 KV heads of 128 values, unless `more` says otherwise."""
    return decoder(
        **{
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            **more,
        }
    )


def glm5(**more: Any) -> dict[str, Any]:
    """GLM-5: latent attention whose indexer, with a cache of its own, picks 2,048 tokens."""
    return decoder(
        **{
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "vocab_size": 154880,
            "max_position_embeddings": 202752,
            "num_hidden_layers": 78,
            "first_k_dense_replace": 3,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            **more,
        }
    )


SHAPES: Mapping[str, Shape] = {
    "qwen3-1.7b": Shape(qwen3(28, 2048, 6144, 16, tie_word_embeddings=True)),
    "qwen3-8b": Shape(qwen3(36, 4096, 12288, 32)),
    "qwen3-32b": Shape(qwen3(64, 5120, 25600, 64)),
    "glm-5": Shape(glm5(), args=("--quantization", "fp8")),
    # The layers of GLM-5, few enough for one GPU; read-back moves 8 of 78 layers' KV.
    "glm-5-8-layers": Shape(
        glm5(num_hidden_layers=8, n_routed_experts=32), args=("--quantization", "fp8")
    ),
}
# The small CPU model: random weights of its own, so that greedy answers are worth comparing.
TINY = "tiny"


@dataclass(frozen=True)
class Model:
    """A model that engines can serve. `path` is a folder with a `config.json`.

    `token_ids`: what prompts are made of. `args`: what `vllm serve` needs beside the path.
    """

    name: str
    path: Path
    dtype: str
    args: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def config(self) -> dict[str, Any]:
        return read_config(self.path)


def find_model(name: str, scratch: Path, env: Mapping[str, str] | None = None) -> Model:
    """The model called `name`; shapes are written below `scratch`.

    `name` is "tiny", a shape of SHAPES, a folder, or a repository's name whose snapshot lies in
    the Hugging Face cache (HF_HOME). BenchError if it is none of these.
    """
    if name == TINY:
        path = make_model(scratch / TINY, ModelShape())
        return Model(name, path, "float32", token_ids=GENERATED_IDS)
    if name in SHAPES:
        shape = SHAPES[name]
        path = write_model(scratch / name, shape)
        return Model(name, path, shape.dtype, (*DUMMY_WEIGHTS, *shape.args), _ids(shape.config))
    folder = Path(name) if (Path(name) / "config.json").is_file() else _snapshot(name, env)
    config = read_config(folder)
    return Model(name, folder.absolute(), "auto", (), _ids(config))


def write_model(folder: Path, shape: Shape) -> Path:
    """Write `config.json` and a tokenizer with one word per token id; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"t{token}": token for token in range(shape.config["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "unk_token": "t0"}
    for name, content in (
        ("config.json", {**shape.config, "dtype": shape.dtype}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", about),
    ):
        (folder / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's `config.json`; of a multi-modal model, its text part."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(
            "a model's configuration cannot be read",
            file=path,
            expected="a JSON object",
            found=error,
        ) from error
    return {**config, **config.get("text_config", {})}


def kv_bytes_per_token(
    config: Mapping[str, Any], dtype: str = "auto", tensor_parallel: int = 1
) -> int:
    """Bytes of KV that one token takes in all layers and on all ranks of one engine together.

    `dtype` is the KV cache's. Latent attention keeps one latent and one rotary key per token and
    layer, on every rank; other attention splits its KV heads over the ranks, and repeats them where
    there are more ranks than heads. BenchError for a dtype that is not known.
    """
    name = config.get("dtype") or config.get("torch_dtype") if dtype == "auto" else dtype
    if name not in _DTYPE_BYTES:
        raise BenchError(
            "bytes per token are not known",
            expected=f"a KV cache of {', '.join(_DTYPE_BYTES)}",
            found=name,
            next_step="give them: --kv-bytes-per-token",
        )
    size, layers = _DTYPE_BYTES[name], int(config["num_hidden_layers"])
    if latent := config.get("kv_lora_rank"):
        per_layer = (int(latent) + int(config["qk_rope_head_dim"])) * size
        if index := config.get("index_head_dim"):
            per_layer += int(index) + _INDEX_SCALE_BYTES
        return layers * per_layer * tensor_parallel
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return layers * 2 * max(kv_heads, tensor_parallel) * head_size * size


def default_shape(gib_per_engine: float) -> str:
    """The largest dense shape whose bfloat16 weights take at most half of an engine's memory."""
    for name, needed in (("qwen3-32b", 132.0), ("qwen3-8b", 33.0)):
        if gib_per_engine >= needed:
            return name
    return "qwen3-1.7b"


def _ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    # The first and the last ids are often bytes and special tokens.
    size = int(config["vocab_size"])
    return tuple(range(min(1000, size // 4), size - size // 10))


def _snapshot(name: str, env: Mapping[str, str] | None) -> Path:
    home = Path((os.environ if env is None else env).get("HF_HOME") or "~/.cache/huggingface")
    folder = home.expanduser() / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BenchError(
            f"there is no model {name!r}",
            expected=f"{TINY}, {', '.join(SHAPES)}, a folder with a config.json, or a snapshot "
            f"below {folder}",
            found="none of these",
            next_step="choose a shape (no weights are needed), or download the model first",
        )
    return found[-1].parent
