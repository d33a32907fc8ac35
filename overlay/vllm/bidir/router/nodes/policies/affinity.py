# SPDX-License-Identifier: Apache-2.0
"""By prefix: the node that has computed a prompt's beginning before."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.policies.base import Ask
from vllm.bidir.router.nodes.policies.load import LeastTokens


class PrefixAffine(LeastTokens):
    """The same node for the same beginning, unless waiting there costs more than it can save.

    Which node is a matter of hashes alone (the highest of node and beginning), so that all routers
    agree and a node that comes or goes moves only its own share. What stays in the prefix cache can
    save no more than this prompt's tokens: with more than that ahead of it, compared with the least
    loaded node, the turn goes there.
    """

    def filter(self, nodes: Sequence[Node], ask: Ask) -> Sequence[Node]:
        if not ask.affinity:
            return nodes
        home = max(nodes, key=lambda node: _weight(node, ask.affinity))
        least = min(node.tokens for node in nodes)
        return [home] if home.tokens - least <= ask.tokens else nodes


def _weight(node: Node, affinity: bytes) -> bytes:
    return blake2b(affinity + node.name.encode(), digest_size=8).digest()
