# SPDX-License-Identifier: Apache-2.0
"""The nodes of one role: who is in, how they are, and which of them a turn is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.health import Health, HealthRules
from vllm.bidir.router.nodes.node import Node, Watcher
from vllm.bidir.router.nodes.policies import Ask, Policy, pick
from vllm.bidir.router.nodes.queue import FullError, Queue
from vllm.bidir.router.nodes.seat import Seat
from vllm.bidir.router.nodes.while_up import give_up
from vllm.bidir.router.telemetry.metrics import Metrics

logger = logging.getLogger("vllm_bidir_router")

Recheck = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """`in_flight` turns on one node, 0 for any number; `queue` turns wait, `timeout_s` at most."""

    in_flight: int = 0
    queue: int = 1000
    timeout_s: float = 30.0


class Pool:
    """Nodes that may come and go; `policy` says which of those with room a turn is given.

    `always`: rather try a node that has been ejected, or look once more at one that was down, than
    give up. `recheck` does the looking.
    """

    def __init__(
        self,
        role: str,
        policy: Policy,
        limits: Limits,
        rules: HealthRules,
        metrics: Metrics,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.recheck: Recheck | None = None
        self._policy = policy
        self._limits = limits
        self._rules = rules
        self._metrics = metrics
        self._always = always
        self._clock = clock
        self._nodes: tuple[Node, ...] = ()
        self._draining: dict[Address, Node] = {}
        self._watchers: list[Watcher] = []
        self._queue = Queue(
            role, limits.queue, limits.timeout_s, self._take, self.give_back, metrics
        )
        self._next = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those on the list; a node that drains is not."""
        return self._nodes

    @property
    def draining(self) -> tuple[Node, ...]:
        return tuple(self._draining.values())

    @property
    def waiting(self) -> int:
        """Turns in the queue."""
        return self._queue.waiting

    @property
    def in_flight_limit(self) -> int:
        """Turns on one node, 0 for any number."""
        return self._limits.in_flight

    def usable(self) -> list[Node]:
        """The nodes that may be given turns now."""
        now = self._clock()
        return [node for node in self._nodes if node.health.usable(now)]

    def is_down(self, name: str) -> bool:
        """Whether checks have found that node down; False for one that is not on the list."""
        node = self.named(name)
        return node is not None and node.health.up is False

    def candidates(self, first: str | None = None) -> Iterator[Node]:
        """Usable nodes for a call that is no turn: the one called `first`, the others in turns."""
        now = self._clock()
        usable = [node for node in self._in_turns() if node.health.usable(now)]
        return iter(sorted(usable, key=lambda node: node.name != first))

    def named(self, name: str) -> Node | None:
        """The node on the list that has this name (host:port)."""
        for node in self._nodes:
            if node.name == name:
                return node
        return None

    def watch(self, watcher: Watcher) -> None:
        """Tell it of the nodes that are here, and of all that come and go."""
        self._watchers.append(watcher)
        for node in self._nodes:
            watcher.joined(node)

    def set_addresses(self, addresses: Iterable[Address]) -> None:
        """Make this the list. Nodes that stay are not touched, those that are missing drain.

        Of two with the same name, host and port, the first one counts.
        """
        before = {node.address: node for node in self._nodes}
        by_name: dict[str, Address] = {}
        for address in addresses:
            by_name.setdefault(str(address), address)
        wanted = dict.fromkeys(by_name.values())
        if wanted.keys() == before.keys():
            return
        come = {address: self._come(address) for address in wanted if address not in before}
        self._nodes = tuple(before.get(address) or come[address] for address in wanted)
        for node in come.values():
            node.draining = False
            logger.info("%s node %s has joined", self.role, node.name)
            for watcher in self._watchers:
                watcher.joined(node)
        for address, node in before.items():
            if address not in wanted:
                self._drain(node)
        self.look_again()

    def seat(self, ask: Ask) -> Seat:
        """A place for one turn."""
        return Seat(self, ask)

    async def take(self, ask: Ask, tried: set[Node]) -> Node | None:
        """A node for one more turn, None if there is none left; `give_back` ends it.

        Waits in the queue while all are full; ClientError says when that has been too long.
        """
        node = await self._take_or_wait(ask, tried)
        if node is None and not tried and self._always and self.recheck is not None:
            await self.recheck()
            node = await self._take_or_wait(ask, tried)
        if node is not None and tried:
            self._metrics.retried(self.role)
        return node

    def give_back(self, node: Node, ask: Ask) -> None:
        """That turn on this node has ended."""
        node.in_flight -= 1
        node.tokens -= ask.tokens
        if node.draining and not node.in_flight:
            self._gone(node)
        self.look_again()

    def succeeded(self, node: Node) -> None:
        """A turn has had its first byte, or an answer that is not the node's fault."""
        node.health.turn_succeeded()

    def failed(self, node: Node) -> None:
        """A turn has failed on this node before its first byte."""
        if node.health.turn_failed():
            node.verifies = False
            self._metrics.ejected(self.role, node.name)
            logger.warning("%s node %s is ejected: turns fail there", self.role, node.name)
            self.look_again()

    def checked(self, node: Node, passed: bool, why: str = "") -> None:
        """A node has answered a check or has not, and `why`: the status, or the error's name."""
        if not node.health.checked(passed):
            return
        if passed:
            logger.info("%s node %s is up", self.role, node.name)
        else:
            # What comes back there may be another release.
            node.verifies = False
            self._metrics.last_errors.note(f"{self.role} node", node.name, f"down: {why}")
            give_up(node)
        self.look_again()

    def look_again(self) -> None:
        """There may be room, or none left to wait for."""
        if self._queue.waiters:
            self._queue.serve()

    async def _take_or_wait(self, ask: Ask, tried: set[Node]) -> Node | None:
        if not self._queue.waiters:
            try:
                return self._take(ask, tried)
            except FullError:
                pass
        return await self._queue.wait(ask, tried)

    def _take(self, ask: Ask, tried: set[Node]) -> Node | None:
        now = self._clock()
        # A retry is not a turn of its own: the next turn would begin at the node that has failed.
        left = self._in_turns(move_on=not tried)
        if tried:
            left = [node for node in left if node not in tried]
        usable = [node for node in left if node.health.usable(now)]
        if not usable and self._always:
            usable = [node for node in left if node.health.up is not False]
        if not usable:
            return None
        limit = self._limits.in_flight
        free = [node for node in usable if _has_room(node, limit, now)] if limit else usable
        if not free:
            raise FullError
        node = pick(self._policy, free, ask, now)
        node.in_flight += 1
        node.tokens += ask.tokens
        return node

    def _in_turns(self, move_on: bool = True) -> list[Node]:
        if not self._nodes:
            return []
        start = self._next % len(self._nodes)
        self._next = start + move_on
        return [*self._nodes[start:], *self._nodes[:start]]

    def _come(self, address: Address) -> Node:
        if address in self._draining:
            return self._draining.pop(address)
        return Node(self.role, address, Health(self._rules, self._clock))

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


def _has_room(node: Node, limit: int, now: float) -> bool:
    return node.in_flight < max(int(limit * node.health.share(now)), 1)
