# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode nodes, and in which order to try them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.bidir.router.options import Address


@dataclass(frozen=True)
class Node:
    """One engine's HTTP server. `role` is "prefill" or "decode"."""

    role: str
    address: Address

    @property
    def name(self) -> str:
        return str(self.address)

    def url(self, path: str) -> str:
        return f"http://{self.address}{path}"


class Pool:
    """The nodes of one role, taken in turns."""

    def __init__(self, role: str, addresses: Sequence[Address]) -> None:
        self.nodes = tuple(Node(role, address) for address in addresses)
        self._next = 0

    def candidates(self, first: str | None = None) -> Iterator[Node]:
        """Each node once: the one called `first` if it is here, then the others in turns."""
        start, self._next = self._next, (self._next + 1) % len(self.nodes)
        turns = [*self.nodes[start:], *self.nodes[:start]]
        return iter(sorted(turns, key=lambda node: node.name != first))
