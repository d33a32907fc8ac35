# SPDX-License-Identifier: Apache-2.0
"""Gauges of the nodes and the queues, read when somebody asks.

Nodes come and go, and their labels with them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.bidir.router.nodes.pool import Pool


class NodeGauges(Collector):
    """Of the nodes of some pools, those that drain included."""

    def __init__(
        self, pools: tuple[Pool, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = pools
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "bidir_router_node_up",
            "1 while a node may be given turns; 0: down, ejected or draining.",
            labels=("role", "node"),
        )
        in_flight = GaugeMetricFamily(
            "bidir_router_node_in_flight",
            "Turns that a node has been given and that have not ended.",
            labels=("role", "node"),
        )
        waiting = GaugeMetricFamily(
            "bidir_router_queue_length",
            "Turns that wait for a node with room.",
            labels=("role",),
        )
        now = self._clock()
        for pool in self._pools:
            waiting.add_metric((pool.role,), pool.waiting)
            # A node may drain while another has joined under its name.
            turns: Counter[str] = Counter()
            usable: dict[str, bool] = {}
            for node in (*pool.nodes, *pool.draining):
                turns[node.name] += node.in_flight
                usable.setdefault(node.name, node.health.usable(now) and not node.draining)
            for name, may_be_given in usable.items():
                up.add_metric((pool.role, name), float(may_be_given))
                in_flight.add_metric((pool.role, name), turns[name])
        return (up, in_flight, waiting)
