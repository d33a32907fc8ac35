"""Local hub cache entries for the small models that the chosen tests of the base release name.

They only need a configuration and some tokenizer, never weights, so both are made here and
nothing is downloaded. The folder layout (``models--owner--name/{refs,snapshots}``) is the one that
huggingface_hub documents for its cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Class of configuration in transformers, whose defaults are used, and architecture.
MODELS = {
    "facebook/opt-125m": ("OPTConfig", "OPTForCausalLM"),
    "openai-community/gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "meta-llama/Llama-3.2-1B": ("LlamaConfig", "LlamaForCausalLM"),
}

#: The cache names a snapshot after a commit; offline, any 40 hex digits will do.
COMMIT = "0" * 40

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def make_hub(hf_home: Path) -> None:
    """Write an entry for each of MODELS below ``hf_home`` (the value that HF_HOME is to have)."""
    for model, (config_class, architecture) in MODELS.items():
        entry = hf_home / "hub" / f"models--{model.replace('/', '--')}"
        snapshot = entry / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (entry / "refs").mkdir()
        (entry / "refs" / "main").write_text(COMMIT, encoding="utf-8")
        _write_config(snapshot / "config.json", config_class, architecture)
        _write_tokenizer(snapshot)


def _write_config(path: Path, config_class: str, architecture: str) -> None:
    """Without a ``dtype`` vLLM would look for the weights on the hub: 2 s of retries a test."""
    import transformers

    make: Any = getattr(transformers, config_class)
    config: dict[str, Any] = make(architectures=[architecture]).to_dict()
    path.write_text(json.dumps(config | {"dtype": "float16"}, indent=2), encoding="utf-8")


def _write_tokenizer(folder: Path) -> None:
    """One token per byte: whatever the tests encode, decoding gives it back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos, unknown = _SPECIAL
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
