# SPDX-License-Identifier: Apache-2.0
"""The state of a router at one moment, as GET /status gives it and the page at / shows it.

No more than /metrics says: addresses of nodes, numbers and kinds of errors; nothing of a request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

import msgspec
from vllm.bidir.router.clients.draining import Draining
from vllm.bidir.router.conversations.conversations import Conversations
from vllm.bidir.router.conversations.leases import Leases
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.telemetry.last_errors import LastError
from vllm.bidir.router.telemetry.last_minutes import MINUTES
from vllm.bidir.router.telemetry.metrics import Metrics


class NodeStatus(msgspec.Struct):
    """`state`: up, down, ejected, draining or unknown. `share`: of its full load, 0.1 to 1.

    `in_flight_limit` is 0 for none. `verifies`: it has said that it verifies read-backs.
    """

    node: str
    state: str
    in_flight: int
    in_flight_limit: int
    share: float
    verifies: bool


class PoolStatus(msgspec.Struct):
    """The nodes of one role. `usable` of them may be given turns, `waiting` turns wait for room."""

    role: str
    usable: int
    waiting: int
    nodes: list[NodeStatus]


class Turns(msgspec.Struct):
    """Turns through P and D: hits, and misses by reason."""

    hits: int
    misses: dict[str, int]

    @property
    def hit_rate(self) -> float | None:
        """0 to 1, None without any turn."""
        total = self.hits + sum(self.misses.values())
        return self.hits / total if total else None


class Status(msgspec.Struct):
    """Times in seconds; `now` and the errors' `last` since 1970. `draining`: it is ending."""

    version: str
    draining: bool
    now: float
    uptime: float
    pools: list[PoolStatus]
    conversations: int
    leases: int
    last_minutes: int
    turns_last_minutes: Turns
    turns: Turns
    decode_alone: dict[str, int]
    errors: list[LastError]

    def pool(self, role: str) -> PoolStatus:
        return next(pool for pool in self.pools if pool.role == role)


@dataclass(frozen=True)
class Sources:
    """Where a status comes from. `started`: by time.monotonic()."""

    draining: Draining
    pools: tuple[Pool, ...]
    conversations: Conversations
    leases: Leases
    metrics: Metrics
    started: float

    def status(self) -> Status:
        now = time.monotonic()
        totals = self.metrics.turns()
        return Status(
            version=version(),
            draining=self.draining.begun,
            now=time.time(),
            uptime=now - self.started,
            pools=[_pool(pool, now) for pool in self.pools],
            conversations=len(self.conversations),
            leases=len(self.leases),
            last_minutes=MINUTES,
            turns_last_minutes=_turns(self.metrics.last_minutes.totals()),
            turns=_turns(totals),
            decode_alone=self.metrics.decode_alone_by_reason(),
            errors=self.metrics.last_errors.newest_first(),
        )


def version() -> str:
    """The release of the wheel that the router is a part of."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "unknown"


def _pool(pool: Pool, now: float) -> PoolStatus:
    nodes = [_node(node, pool, now) for node in (*pool.nodes, *pool.draining)]
    return PoolStatus(pool.role, len(pool.usable()), pool.waiting, nodes)


def _node(node: Node, pool: Pool, now: float) -> NodeStatus:
    state = "draining" if node.draining else node.health.state(now)
    share = round(node.health.share(now), 2)
    limit = pool.in_flight_limit
    return NodeStatus(node.name, state, node.in_flight, limit, share, node.verifies)


def _turns(counted: Mapping[str, int]) -> Turns:
    misses = {word: number for word, number in counted.items() if word != "hit"}
    return Turns(counted.get("hit", 0), misses)
