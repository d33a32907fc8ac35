"""Models whose KV cannot be read back are served without it; others are read back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.bidir.connector import scheduler
from vllm.bidir.connector.support import layer_obstacle
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.connector.histories import D_TURN, Engines, run
from tests.connector.sim import BLOCK, FIRST_TURN, Engine, kv_cache_config
from tests.connector.test_simulated import COUNT, finished_turn, numbers

H, OUT = numbers(random.Random(1), 200), numbers(random.Random(2), 20)
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
# A window in a full group, as when the hybrid memory manager is off.
INNER = FullAttentionSpec(**SHAPE, sliding_window=64)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,))
MLA = MLAAttentionSpec(**SHAPE)


def groups(*specs: KVCacheSpec) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec([f"layer{k}"], spec) for k, spec in enumerate(specs)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"groups": groups(WINDOW)}, "plain causal attention"),
    "inner": ({"groups": groups(INNER)}, "attends to a window"),
    "local": ({"groups": groups(LOCAL)}, "plain causal attention"),
    "full+window": ({"groups": groups(FULL, WINDOW)}, "several KV cache groups"),
    "full+window+window": ({"groups": groups(FULL, WINDOW, WINDOW)}, "several KV cache groups"),
    "full+local": ({"groups": groups(FULL, LOCAL)}, "several KV cache groups"),
    "full+mamba": (
        {"groups": groups(FULL, MAMBA), "prefix_caching": False},
        "several KV cache groups",
    ),
    "mamba": ({"groups": groups(MAMBA), "prefix_caching": False}, "plain causal attention"),
    "speculative": ({"drafts": 2}, "speculative decoding"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_engine_that_cannot_says_so_once_and_serves(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *rest: said.append(text % rest))
    options, why = REFUSED[kind]
    one = Engine(model, "one", **options)
    # A first turn, as P and as D; then, as both again, with what a D that can would send.
    one.run(H, FIRST_TURN)
    assert one.run(H, D_TURN, max_tokens=20, answer=OUT)[0] is None
    params, _ = finished_turn(Engine(model, "d"), H, OUT)
    found, _ = one.run(H + OUT, params, source=None)
    assert found is not None and "lease_id" not in found
    assert one.run([*H, *OUT, 1], D_TURN, max_tokens=3)[0] is None
    assert one.orders == []
    assert [(row[:4]) for row in one.decisions] == [["recompute", "unsupported", 0, 0]]
    (warning,) = said
    assert warning.startswith("No read-back on this engine:") and why in warning
    one.forget()


def test_a_model_with_one_latent_vector_for_all_heads_is_read_back(model: Path) -> None:
    """MLA, whose specification is a kind of full attention."""

    def make(decode_caching: bool) -> tuple[Engine, Engine]:
        p = Engine(model, "p", groups=groups(MLA), prefix_caching=False)
        return p, Engine(model, "d", 2000, groups=groups(MLA), prefix_caching=decode_caching)

    assert run(Engines(make), COUNT // 10, seed=7) > COUNT // 50


@pytest.mark.parametrize(
    ("other", "refused"),
    [(FULL, False), (MLA, False), (INNER, True), (WINDOW, True), (LOCAL, True)],
)
def test_workers_look_at_every_layer_of_a_group(other: KVCacheSpec, refused: bool) -> None:
    """The scheduler sees one of them only."""
    specs = {"a": FULL, "b": other}
    whole = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    config = kv_cache_config(10, KVCacheGroupSpec(list(specs), whole))
    assert (layer_obstacle(config) is not None) is refused
