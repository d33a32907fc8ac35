# SPDX-License-Identifier: Apache-2.0
"""What a policy is: filter the nodes that have room, give each a cost; the cheapest is picked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from vllm.bidir.router.nodes.node import Node


class Ask(msgspec.Struct, frozen=True):
    """What policies know of a turn.

    `tokens`: prompt tokens to be computed, an estimate. `kept_on`: the decode node that keeps the
    conversation's KV. `affinity`: equal for turns that begin alike, empty if that is not known.
    """

    tokens: int = 0
    kept_on: str | None = None
    affinity: bytes = b""


class Policy:
    """The cheapest of the nodes that pass the filter. As it stands here: each in its turn."""

    def filter(self, nodes: Sequence[Node], ask: Ask) -> Sequence[Node]:
        """Those among `nodes` that should serve the turn; none means that any may."""
        return nodes

    def cost(self, node: Node, ask: Ask, now: float) -> float:
        """What giving the turn to this node costs, in any unit."""
        return 0.0


def pick(policy: Policy, nodes: Sequence[Node], ask: Ask, now: float) -> Node:
    """One of `nodes`, which has one at least. Of equals the first: the caller rotates them."""
    if len(nodes) == 1:
        return nodes[0]
    passed = policy.filter(nodes, ask) or nodes
    return min(passed, key=lambda node: policy.cost(node, ask, now))
