# SPDX-License-Identifier: Apache-2.0
"""How far one turn has got, for metrics and traces. Nothing is done for each piece of a stream."""

from __future__ import annotations

import time

from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.clients.reuse import Reuse
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.telemetry.spans import CURRENT


class Progress:
    """Made when a turn's request arrives. One leg is under way at a time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._spans = CURRENT.get()
        self._arrived = self._leg_begun = time.monotonic()

    def about(self, request: TurnRequest, reuse: Reuse) -> None:
        """What the turn asks for, and what it reuses, as that comes to be known."""
        self._spans.about(request, reuse)

    def leg_begins(
        self, leg: str, node: Node, path: str, headers: dict[str, str]
    ) -> dict[str, str]:
        """The request is about to be sent to a node; with which headers."""
        self._leg_begun = time.monotonic()
        return self._spans.leg_begins(leg, node, path, headers)

    def leg_ends(self, status: int) -> None:
        """The node has answered, whole."""
        self._spans.leg_ends(status)

    def leg_failed(self, leg: str, node: Node, kind: str) -> None:
        """The node has not answered, or not to the end, or with a fault of its own."""
        self._metrics.failure(leg, node.name, kind)
        self._spans.leg_failed(kind)

    def prefilled(self) -> float:
        """P has the prompt; after how many seconds."""
        seconds = time.monotonic() - self._leg_begun
        self._metrics.prefill_seconds.observe(seconds)
        return seconds

    def stream_begins(self, reuse: Reuse) -> None:
        """The first bytes of D's stream are here, and go to the client at once."""
        now = time.monotonic()
        self._spans.first_byte()
        self._metrics.decode_first_byte_seconds.observe(now - self._leg_begun)
        self._metrics.first_byte_seconds.observe(now - self._arrived, reuse.outcome)

    def answered(self, reuse: Reuse) -> None:
        """D's answer has gone to the client, whole."""
        seconds = time.monotonic() - self._arrived
        self._metrics.turn_seconds.observe(seconds, reuse.outcome)
