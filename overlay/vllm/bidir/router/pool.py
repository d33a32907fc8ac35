# SPDX-License-Identifier: Apache-2.0
"""The nodes of one role: who is in, and which of them a turn is given."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from types import TracebackType

from vllm.bidir.router.address import Address
from vllm.bidir.router.nodes import Node, Watcher

logger = logging.getLogger("vllm_bidir_router")


class Pool:
    """Nodes that may come and go, taken in turns."""

    def __init__(self, role: str, addresses: Iterable[Address] = ()) -> None:
        self.role = role
        self._nodes = tuple(Node(role, address) for address in dict.fromkeys(addresses))
        self._draining: dict[Address, Node] = {}
        self._watchers: list[Watcher] = []
        self._next = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those on the list; a node that drains is not."""
        return self._nodes

    @property
    def draining(self) -> tuple[Node, ...]:
        return tuple(self._draining.values())

    def watch(self, watcher: Watcher) -> None:
        """Tell it of the nodes that are here, and of all that come and go."""
        self._watchers.append(watcher)
        for node in self._nodes:
            watcher.joined(node)

    def set_addresses(self, addresses: Iterable[Address]) -> None:
        """Make this the list. Nodes that stay are not touched, those that are missing drain."""
        before = {node.address: node for node in self._nodes}
        wanted = dict.fromkeys(addresses)
        if wanted.keys() == before.keys():
            return
        come = {
            address: (
                self._draining.pop(address)
                if address in self._draining
                else Node(self.role, address)
            )
            for address in wanted
            if address not in before
        }
        self._nodes = tuple(before.get(address) or come[address] for address in wanted)
        for node in come.values():
            node.draining = False
            logger.info("%s node %s has joined", self.role, node.name)
            for watcher in self._watchers:
                watcher.joined(node)
        for address, node in before.items():
            if address not in wanted:
                self._drain(node)

    def candidates(self, first: str | None = None) -> Iterator[Node]:
        """Each node once: the one called `first` if it is here, then the others in turns."""
        turns = self._in_turns()
        return iter(sorted(turns, key=lambda node: node.name != first))

    def seat(self, kept_on: str | None = None) -> Seat:
        """A place for one turn, on the node called `kept_on` if that is possible."""
        return Seat(self, kept_on)

    def take(self, kept_on: str | None, tried: set[Node]) -> Node | None:
        """A node for one more turn, None if all have been tried; `give_back` ends it."""
        for node in self.candidates(kept_on):
            if node not in tried:
                node.in_flight += 1
                return node
        return None

    def give_back(self, node: Node) -> None:
        """One turn on this node has ended."""
        node.in_flight -= 1
        if node.draining and not node.in_flight:
            self._gone(node)

    def _in_turns(self) -> list[Node]:
        if not self._nodes:
            return []
        start, self._next = self._next % len(self._nodes), self._next + 1
        return [*self._nodes[start:], *self._nodes[:start]]

    def _drain(self, node: Node) -> None:
        node.draining = True
        self._draining[node.address] = node
        logger.info(
            "%s node %s has left; turns that go on there: %d",
            self.role,
            node.name,
            node.in_flight,
        )
        for watcher in self._watchers:
            watcher.left(node)
        if not node.in_flight:
            self._gone(node)

    def _gone(self, node: Node) -> None:
        del self._draining[node.address]
        for watcher in self._watchers:
            watcher.gone(node)


class Seat:
    """One turn's place in a pool: on one node at a time, and on none twice.

    Iterating moves it on: each node is held until the next is asked for or the `with` block ends.
    """

    def __init__(self, pool: Pool, kept_on: str | None) -> None:
        self._pool = pool
        self._kept_on = kept_on
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
        node = self._pool.take(self._kept_on, self._tried)
        if node is not None:
            self._tried.add(node)
            self._node = node
        return node

    def _release(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            self._pool.give_back(node)
