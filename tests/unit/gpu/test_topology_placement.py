"""Which GPUs the nodes of a topology get, and how they are started there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.shapes import SHAPES
from tests.gpu.topology.engines import Settings, options
from tests.gpu.topology.placement import TOPOLOGIES, Node, TooFewGpusError, place, shared


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_gpus_are_enough_and_one_is_not(name: str) -> None:
    nodes = place(TOPOLOGIES[name], (0, 1))
    assert {gpu for node in nodes for gpu in node.gpus} == {0, 1}
    with pytest.raises(TooFewGpusError, match=rf"{name} needs 2 GPUs, found 1"):
        place(TOPOLOGIES[name], (0,))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_rank_has_a_gpu_and_no_node_has_one_twice(name: str) -> None:
    for gpus in ((4, 7), (0, 1, 2), (0, 1, 2, 3)):
        for node in place(TOPOLOGIES[name], gpus):
            assert len(set(node.gpus)) == node.ranks and set(node.gpus) <= set(gpus)


def test_nodes_share_only_where_gpus_are_missing() -> None:
    apart = {"tp2": 4, "tp1-to-tp2": 3, "tp2-to-tp1": 3, "dp2": 3, "2p2d": 4, "nvlink": 2}
    for name, enough in apart.items():
        assert not shared(place(TOPOLOGIES[name], range(enough)))
        if enough > 2:
            assert shared(place(TOPOLOGIES[name], range(enough - 1)))


def test_p_and_d_of_one_index_never_share_a_gpu_with_the_other_role_alone() -> None:
    """On two GPUs a killed P leaves a D on its GPU, and the other pair whole."""
    nodes = {node.name: node.gpus for node in place(TOPOLOGIES["2p2d"], (0, 1))}
    assert nodes == {"prefill-0": (0,), "prefill-1": (1,), "decode-0": (0,), "decode-1": (1,)}


def test_a_node_is_started_where_it_was_placed() -> None:
    settings = Settings(SHAPES["small"], Path("m"), "cuda", engine_args=("--block-size", "64"))
    node = Node("decode", 0, data_parallel=2, gpus=(1, 3))
    decode = options(settings, node).decode
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert decode.data_parallel == 2
    assert decode.args[-2:] == ("--block-size", "64")


def test_on_a_cpu_nothing_is_said_of_gpus() -> None:
    settings = Settings(SHAPES["tiny"], Path("m"), "cpu")
    chosen = options(settings, Node("prefill", 0, 2))
    assert "CUDA_VISIBLE_DEVICES" not in chosen.prefill.env
    assert "--gpu-memory-utilization" not in chosen.prefill.args
    assert chosen.prefill.data_parallel == 1
