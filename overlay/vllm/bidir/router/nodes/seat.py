# SPDX-License-Identifier: Apache-2.0
"""One turn's place in a pool: on one node at a time, and on none twice."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.policies import Ask


class Places(Protocol):
    """What gives nodes to turns: a pool."""

    async def take(self, ask: Ask, tried: set[Node]) -> Node | None:
        """A node that has room for one more turn, not among `tried`."""

    def give_back(self, node: Node, ask: Ask) -> None:
        """That turn on this node has ended."""


class Seat:
    """Iterating moves it on: each node is held until the next is asked for, or the `with` ends."""

    def __init__(self, places: Places, ask: Ask) -> None:
        self._places = places
        self._ask = ask
        self._node: Node | None = None
        self._reserved = False
        self._tried: set[Node] = set()

    def __enter__(self) -> Seat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    async def reserve(self) -> bool:
        """Take the first node before it is needed; False if there is none."""
        self._reserved = await self._move_on() is not None
        return self._reserved

    def __aiter__(self) -> Seat:
        return self

    async def __anext__(self) -> Node:
        if self._reserved:
            self._reserved = False
            node = self._node
        else:
            node = await self._move_on()
        if node is None:
            raise StopAsyncIteration
        return node

    async def _move_on(self) -> Node | None:
        self._release()
        node = await self._places.take(self._ask, self._tried)
        if node is not None:
            self._tried.add(node)
            self._node = node
        return node

    def _release(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            self._places.give_back(node, self._ask)
