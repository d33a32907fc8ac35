# SPDX-License-Identifier: Apache-2.0
"""One prefill or decode node, as the router sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.health import Health


@dataclass(eq=False)
class Node:
    """One engine's HTTP server. `role` is "prefill" or "decode".

    `in_flight` turns with `tokens` prompt tokens to be computed, an estimate, are with it.
    `verifies`: it has said that it checks what it reads back. `draining`: it has been taken off the
    list; it is given no new turns, and keeps none. `awaited`: to be called when it goes down.
    """

    role: str
    address: Address
    health: Health
    in_flight: int = 0
    tokens: int = 0
    verifies: bool = False
    draining: bool = False
    awaited: set[Callable[[], object]] = field(default_factory=set)

    @cached_property
    def name(self) -> str:
        return str(self.address)

    def url(self, path: str) -> str:
        return f"{self.address.scheme}://{self.name}{path}"


class Watcher(Protocol):
    """Is told which nodes come and go."""

    def joined(self, node: Node) -> None:
        """It is on the list, or is again before it was gone."""

    def left(self, node: Node) -> None:
        """It is not on the list any more; turns may still run on it."""

    def gone(self, node: Node) -> None:
        """It had left, and the last of its turns has ended."""
