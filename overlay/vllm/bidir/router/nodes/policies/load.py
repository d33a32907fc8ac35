# SPDX-License-Identifier: Apache-2.0
"""By load: the fewest turns, or where the KV is; the fewest prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.policies.base import Ask, Policy


class LeastLoaded(Policy):
    """The node with the fewest turns in flight, counted more while it starts slowly."""

    def cost(self, node: Node, ask: Ask, now: float) -> float:
        return (node.in_flight + 1) / node.health.share(now)


class Sticky(LeastLoaded):
    """The node that keeps the conversation's KV; without one, or when it is full, least loaded."""

    def filter(self, nodes: Sequence[Node], ask: Ask) -> Sequence[Node]:
        if ask.kept_on is None:
            return nodes
        return [node for node in nodes if node.name == ask.kept_on]


class LeastTokens(Policy):
    """The node with the fewest prompt tokens outstanding: a prefill takes its time by tokens."""

    def cost(self, node: Node, ask: Ask, now: float) -> float:
        return (node.tokens + ask.tokens + 1) / node.health.share(now)
