"""Shapes of reference models, and what their KV takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.errors import BenchError
from tools.bench.model import (
    SHAPES,
    Shape,
    default_shape,
    find_model,
    kv_bytes_per_token,
    qwen3,
    write_model,
)
from tools.cluster.model import ModelShape


def test_bytes_per_token_are_those_of_the_released_models() -> None:
    """Qwen3-32B: 64 layers, keys and values, 8 heads of 128, 2 bytes. GLM-5: one latent of 576
    values of 2 bytes, and an index key of 128 bytes with its scale."""
    assert kv_bytes_per_token(SHAPES["qwen3-32b"].config, "bfloat16") == 64 * 2 * 8 * 128 * 2
    assert kv_bytes_per_token(SHAPES["qwen3-8b"].config, "bfloat16") == 147_456
    assert kv_bytes_per_token(SHAPES["glm-5"].config, "bfloat16") == 78 * (576 * 2 + 132)


def test_heads_are_split_over_ranks_and_repeated_beyond_their_number() -> None:
    config = SHAPES["qwen3-8b"].config
    whole = kv_bytes_per_token(config, "bfloat16")
    assert [kv_bytes_per_token(config, "bfloat16", tp) for tp in (2, 8, 16)] == [
        whole,
        whole,
        2 * whole,
    ]
    latent = SHAPES["glm-5"].config
    assert kv_bytes_per_token(latent, "bfloat16", 8) == 8 * kv_bytes_per_token(latent, "bfloat16")


def test_the_configurations_own_dtype_is_taken_when_none_is_given() -> None:
    config = qwen3(2, 256, 512, 8, dtype="float32")
    assert kv_bytes_per_token(config) == kv_bytes_per_token(config, "float32")
    with pytest.raises(BenchError, match="--kv-bytes-per-token"):
        kv_bytes_per_token(config, "int3")


def test_a_small_model_on_the_cpu_agrees_with_the_clusters_own_count(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    assert kv_bytes_per_token(config, "float32") == ModelShape().kv_bytes_per_token


def test_a_shape_is_found_written_and_needs_no_weights(tmp_path: Path) -> None:
    model = find_model("qwen3-8b", tmp_path)
    assert model.args == ("--load-format", "dummy") and model.dtype == "bfloat16"
    assert model.config["num_hidden_layers"] == 36
    assert len(set(model.token_ids)) > 100_000 and max(model.token_ids) < 151936


def test_real_weights_are_found_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(qwen3(28, 1024, 3072, 16)))
    model = find_model("Qwen/Qwen3-0.6B", tmp_path / "s", {"HF_HOME": str(tmp_path)})
    assert (model.path, model.args) == (snapshot, ())


def test_a_model_that_is_nowhere_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as error:
        find_model("Qwen/Nothing", tmp_path, {"HF_HOME": str(tmp_path)})
    assert "qwen3-32b" in str(error.value) and str(tmp_path / "hub") in str(error.value)


def test_the_largest_shape_that_leaves_room_is_the_default() -> None:
    assert [default_shape(gib) for gib in (20, 40, 70, 140)] == [
        "qwen3-1.7b",
        "qwen3-8b",
        "qwen3-8b",
        "qwen3-32b",
    ]


def test_a_written_model_has_a_word_for_each_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path, Shape(qwen3(1, 64, 64, 1, vocab_size=50)))
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(50))
