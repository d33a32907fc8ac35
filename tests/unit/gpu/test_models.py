"""Model folders and weights, without the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu.plugin.seeded_weights import SHARPNESS, checkpoint, mean_and_std, seed
from tests.gpu.shapes import SHAPES, VOCABULARY, write_model


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_folder_names_its_architecture_and_one_word_per_token(
    name: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / name, SHAPES[name])
    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert config["dtype"] == SHAPES[name].dtype
    assert len(config["architectures"]) == 1
    assert sorted(words.values()) == list(range(VOCABULARY)) == list(range(config["vocab_size"]))


def test_mla_shapes_keep_latents_of_released_models() -> None:
    for name in ("mla", "sparse"):
        config = SHAPES[name].config
        assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)


def test_a_matrix_keeps_the_size_of_what_it_is_given() -> None:
    """Variance 1 in, variance 1 out: the standard deviation is that of the inputs' number."""
    assert mean_and_std("model.layers.0.mlp.down_proj.weight", (64, 256)) == (0.0, 1 / 16)
    assert mean_and_std("model.layers.0.mlp.experts.w2_weight", (8, 64, 256)) == (0.0, 1 / 16)


def test_queries_and_keys_are_sharpened_where_the_model_scales_them() -> None:
    """By their norm where there is one, by the matrix where there is none."""
    norm = mean_and_std("model.layers.0.self_attn.q_norm.weight", (128,))
    matrix = mean_and_std("model.layers.0.self_attn.kv_b_proj.weight", (4096, 400))
    assert norm == (SHARPNESS, 0.0)
    assert matrix == (0.0, pytest.approx(SHARPNESS / 20))
    assert mean_and_std("model.layers.0.input_layernorm.weight", (128,)) == (1.0, 0.0)
    assert mean_and_std("model.layers.0.mlp.gate.e_score_correction_bias", (8,)) == (0.0, 0.0)


def test_every_parameter_has_a_seed_of_its_own() -> None:
    """Equal weights in all layers would hide a block that was read into another layer's place."""
    names = [f"model.layers.{k}.self_attn.o_proj.weight" for k in range(100)]
    assert len({seed(name) for name in names}) == 100
    assert all(math.isfinite(seed(name)) for name in names)


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_checkpoint_has_all_that_the_model_has_each_once(tied: bool) -> None:
    config = SimpleNamespace(**{**SHAPES["dense"].config, "tie_word_embeddings": tied})
    found = list(checkpoint(config))
    names = [name for name, _ in found]
    assert len(names) == len(set(names)) == 2 + 8 * 11 + (not tied)
    size = sum(math.prod(shape) for _, shape in found)
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert size == (2 - tied) * VOCABULARY * 4096 + 8 * layer + 4096


def test_matrices_of_a_checkpoint_are_drawn_by_what_they_are_given() -> None:
    """Whole, so that half of their columns on each of two ranks has the same weights."""
    shapes = dict(checkpoint(SimpleNamespace(**SHAPES["tiny"].config)))
    down = "model.layers.0.mlp.down_proj.weight"
    assert mean_and_std(down, shapes[down]) == (0.0, pytest.approx(512**-0.5))
