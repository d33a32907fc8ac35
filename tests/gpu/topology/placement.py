"""What each topology is made of, and which GPUs its nodes get. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.cluster.options import Role


@dataclass(frozen=True)
class Node:
    """One engine; its ranks are the product of both sizes. `gpus` is empty on a CPU."""

    role: Role
    index: int
    tensor_parallel: int = 1
    data_parallel: int = 1
    gpus: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True)
class Topology:
    """`about`: in a few words."""

    name: str
    about: str
    nodes: tuple[Node, ...]


class TooFewGpusError(Exception):
    """This machine cannot run the topology; the message says why."""


def _pair(name: str, about: str, prefill: int, decode: int, decoders: int = 1) -> Topology:
    nodes = Node("prefill", 0, prefill), Node("decode", 0, decode, decoders)
    return Topology(name, about, nodes)


TOPOLOGIES = {
    one.name: one
    for one in (
        _pair("tp1-to-tp2", "P on one rank, D on two", 1, 2),
        _pair("tp2-to-tp1", "P on two ranks, D on one", 2, 1),
        _pair("tp2", "P and D on two ranks each", 2, 2),
        _pair("dp2", "P, and a D of two data-parallel ranks", 1, 1, decoders=2),
        Topology(
            "2p2d",
            "two P and two D behind the router, nodes killed under load",
            tuple(Node(role, index) for role in ("prefill", "decode") for index in (0, 1)),
        ),
        _pair("nvlink", "P and D on different GPUs", 1, 1),
    )
}
# One GPU for all would be another fixture: `python -m tests.gpu`.
_LEAST = 2


def place(topology: Topology, gpus: Sequence[int]) -> tuple[Node, ...]:
    """The nodes with their GPUs: each its own while there are enough, else they go round.

    Raises TooFewGpusError. What runs beside another topology must be given other `gpus`.
    """
    least = max(_LEAST, *(node.ranks for node in topology.nodes))
    if len(gpus) < least:
        raise TooFewGpusError(f"{topology.name} needs {least} GPUs, found {len(gpus)}")
    placed, start = [], 0
    for node in topology.nodes:
        mine = sorted(gpus[(start + rank) % len(gpus)] for rank in range(node.ranks))
        placed.append(replace(node, gpus=tuple(mine)))
        start += node.ranks
    return tuple(placed)


def shared(nodes: Sequence[Node]) -> bool:
    """Whether any GPU has more than one node."""
    used = [gpu for node in nodes for gpu in node.gpus]
    return len(used) > len(set(used))
