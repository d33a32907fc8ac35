# SPDX-License-Identifier: Apache-2.0
"""How far one turn has got, for the metrics. Nothing here is done for each piece of a stream."""

from __future__ import annotations

import time

from vllm.bidir.router.metrics import Metrics
from vllm.bidir.router.reuse import Reuse


class Progress:
    """Made when a turn's request arrives. One leg is under way at a time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = self._leg_begun = time.monotonic()

    def leg_begins(self) -> None:
        """The request is about to be sent to a node."""
        self._leg_begun = time.monotonic()

    def prefilled(self) -> float:
        """P has answered; after how many seconds."""
        seconds = time.monotonic() - self._leg_begun
        self._metrics.prefill_seconds.observe(seconds)
        return seconds

    def stream_begins(self, reuse: Reuse) -> None:
        """The first bytes of D's stream are here, and go to the client at once."""
        now = time.monotonic()
        self._metrics.decode_first_byte_seconds.observe(now - self._leg_begun)
        self._metrics.first_byte_seconds.labels(reuse.outcome).observe(now - self._arrived)

    def answered(self, reuse: Reuse) -> None:
        """D's answer has gone to the client, whole."""
        seconds = time.monotonic() - self._arrived
        self._metrics.turn_seconds.labels(reuse.outcome).observe(seconds)
