from __future__ import annotations

import pytest

from tools.cluster.errors import ClusterError
from tools.cluster.placement import Slot, cpu_slots, gpu_slots, visible_gpus


def test_engines_get_cores_of_their_own() -> None:
    """While there are enough cores, no two engines share one and all start together."""
    assert cpu_slots(2, 1, [0, 1]) == [Slot(cores=(0,)), Slot(cores=(1,))]
    assert [slot.cores for slot in cpu_slots(2, 1, range(4, 10))] == [(4, 5, 6), (7, 8, 9)]


def test_engines_without_cores_of_their_own_go_round() -> None:
    """More engines than cores share them, and wait for the ones before them to be up."""
    slots = cpu_slots(3, 1, [0, 1])
    assert [slot.cores for slot in slots] == [(0,), (1,), (0,)]
    assert [slot.sharers for slot in slots] == [2, 1, 2]
    assert [slot.wave for slot in slots] == [0, 0, 1]


def test_every_rank_gets_a_core_while_there_are_enough() -> None:
    """An engine of two ranks takes two cores, though another engine then has to share them."""
    assert [slot.cores for slot in cpu_slots(2, 2, [0, 1, 2])] == [(0, 1), (0, 1)]
    assert [slot.cores for slot in cpu_slots(1, 4, [0, 1])] == [(0, 1)]


def test_gpus_are_placed_by_index() -> None:
    """Each rank has a GPU of its own, in order; engines go round when there are too few."""
    assert [slot.gpus for slot in gpu_slots(2, 2, [0, 1, 2, 3])] == [(0, 1), (2, 3)]
    assert [(s.gpus, s.sharers, s.wave) for s in gpu_slots(2, 1, [5])] == [
        ((5,), 2, 0),
        ((5,), 2, 1),
    ]


def test_too_few_gpus_for_one_engine() -> None:
    """An engine with more ranks than GPUs is refused with both numbers."""
    with pytest.raises(ClusterError, match=r"needs 4 GPUs, found 2 \[0, 1\]"):
        gpu_slots(1, 4, [0, 1])


def test_visible_gpus_follow_the_environment() -> None:
    """CUDA_VISIBLE_DEVICES limits the choice; anything but indexes is refused."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == [3, 1]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    with pytest.raises(ClusterError, match="expected indexes"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1234"})
