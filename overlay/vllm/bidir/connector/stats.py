# SPDX-License-Identifier: Apache-2.0
"""Counters of read-back with reasons and of transfers, carried by the connector's own statistics.

One class for scheduler and workers, since vLLM adds the two up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.lease_gauges import LeaseGauges
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

if TYPE_CHECKING:
    from vllm.distributed.nixl_utils import nixlXferTelemetry

_KEY = "read_backs"
READ = "read"
RECOMPUTE = "recompute"

_LOST = "lost_handovers"
_LEASES = "leases"
_TRANSFERS = "transfers"
READ_BACK = "read_back"
HANDOVER = "handover"
# Engine ids come and go with restarts; so many keep a gauge of their own.
PEERS = 64
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass
class BidirStats(NixlKVConnectorStats):
    """NIXL's transfer statistics, and one row per decided read-back and per transfer."""

    def reset(self) -> None:
        super().reset()
        # [outcome, reason, tokens verified, tokens read, tokens computed]
        self.data[_KEY] = []
        # [direction, engine id, descriptors, seconds to post, seconds to its end, bytes]
        self.data[_TRANSFERS] = []
        # Of each handover that was lost: why.
        self.data[_LOST] = []
        # At most one: what is kept after the last change.
        self.data[_LEASES] = []

    def about(self, direction: str, engine_id: str) -> None:
        """The transfers recorded next are of this kind, from this engine."""
        self._about = (direction, engine_id)

    def record_transfer(self, res: nixlXferTelemetry) -> None:
        super().record_transfer(res)
        self.data[_TRANSFERS].append(
            [*self._about, res.descCount, res.postDuration / 1e6, res.xferDuration / 1e6]
            + [res.totalBytes]
        )

    def record_refusal(self, reason: str, verified: int, prompt: int) -> None:
        """The scheduler chose to compute."""
        self._add(RECOMPUTE, reason, verified, 0, prompt)

    def record_read(self, verified: int, read: int, computed: int) -> None:
        """A read-back was confirmed."""
        self._add(READ, "", verified, read, computed)

    def record_lost(self, reason: str, verified: int, computed: int) -> None:
        """A read-back was given up; its prompt is computed."""
        self._add(RECOMPUTE, reason, verified, 0, computed)

    def record_lost_handover(self, reason: str) -> None:
        """D does not use what it was to read of a prompt: P does not say that it still had it, or
        has not handed it over, or not all of it would be loaded."""
        self.data[_LOST].append(reason)

    def record_leases(self, totals: dict[str, Any]) -> None:
        """Something has changed about what is kept."""
        self.data[_LEASES] = [totals]

    def _add(self, *row: Any) -> None:
        self.data[_KEY].append(list(row))

    def is_empty(self) -> bool:
        ours = (_KEY, _LOST, _LEASES)
        return super().is_empty() and not any(self.data.get(key) for key in ours)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data.setdefault(_KEY, [])
        self.data.setdefault(_TRANSFERS, [])
        self.data.setdefault(_LOST, [])
        self.data.setdefault(_LEASES, [])
        return super().aggregate(other)


class BidirPromMetrics(NixlPromMetrics):
    """NIXL's metrics and ours, all starting with `vllm:bidir_`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._decisions = self._counter_cls(
            name="vllm:bidir_read_back",
            documentation="Read-backs by outcome (read, recompute) and reason.",
            labelnames=[*labelnames, "outcome", "reason"],
        )
        self._tokens = self._counter_cls(
            name="vllm:bidir_tokens",
            documentation="Prompt tokens of turns that were offered a read-back: verified by "
            "content, read from the decode node, computed here.",
            labelnames=[*labelnames, "kind"],
        )
        self._lost = self._counter_cls(
            name="vllm:bidir_lost_handovers",
            documentation="Handovers that a decode node does not use, by reason: the prefill node "
            "did not say that it still had the blocks, or has not handed over what was named.",
            labelnames=[*labelnames, "reason"],
        )
        by_direction = [*labelnames, "direction"]
        self._bytes = self._counter_cls(
            name="vllm:bidir_transfer_bytes",
            documentation="Bytes of KV read from peers: read_back by P, handover by D.",
            labelnames=by_direction,
        )
        self._descriptors = self._counter_cls(
            name="vllm:bidir_transfer_descriptors",
            documentation="NIXL descriptors of these reads, after merging.",
            labelnames=by_direction,
        )
        self._posting = self._histogram_cls(
            name="vllm:bidir_transfer_post_seconds",
            documentation="Time until NIXL had taken a read over.",
            buckets=_SECONDS,
            labelnames=by_direction,
        )
        self._moving = self._histogram_cls(
            name="vllm:bidir_transfer_seconds",
            documentation="Time until a read was found to be done.",
            buckets=_SECONDS,
            labelnames=by_direction,
        )
        self._rate = self._gauge_cls(
            name="vllm:bidir_peer_gigabytes_per_second",
            documentation="Rate of the last read from a peer.",
            labelnames=[*labelnames, "direction", "peer"],
        )
        self._peers: dict[tuple[Any, ...], None] = {}
        self.leases = LeaseGauges(self._gauge_cls, labelnames, per_engine_labelvalues)
        _shown.append(self)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, reason, verified, read, computed in transfer_stats_data.get(_KEY, ()):
            self._decisions.labels(*labels, outcome, reason).inc()
            for kind, count in (("verified", verified), ("read", read), ("computed", computed)):
                self._tokens.labels(*labels, kind).inc(count)
        for transfer in transfer_stats_data.get(_TRANSFERS, ()):
            self._observe_transfer(labels, *transfer)
        for reason in transfer_stats_data.get(_LOST, ()):
            self._lost.labels(*labels, reason).inc()
        for totals in transfer_stats_data.get(_LEASES, ())[-1:]:
            self.leases.show(engine_idx, totals)

    def _observe_transfer(
        self,
        labels: list[object],
        direction: str,
        peer: str,
        descriptors: int,
        post_s: float,
        transfer_s: float,
        size: int,
    ) -> None:
        self._bytes.labels(*labels, direction).inc(size)
        self._descriptors.labels(*labels, direction).inc(descriptors)
        self._posting.labels(*labels, direction).observe(post_s)
        self._moving.labels(*labels, direction).observe(transfer_s)
        shown = (*labels, direction, peer)
        # The one that was heard of longest ago makes room.
        self._peers.pop(shown, None)
        self._peers[shown] = None
        if len(self._peers) > PEERS:
            oldest = next(iter(self._peers))
            del self._peers[oldest]
            # Gauges that are exported in another way than by a scrape cannot forget a label.
            if hasattr(self._rate, "remove"):
                self._rate.remove(*oldest)
        self._rate.labels(*shown).set(size / max(transfer_s, 1e-6) / 1e9)


# Those of this process: a server has one set.
_shown: list[BidirPromMetrics] = []


def show_leases(engine_index: int, totals: dict[str, Any]) -> None:
    """What an engine has answered about its leases, in the metrics of this process."""
    for metrics in _shown[-1:]:
        metrics.leases.show(engine_index, totals)
