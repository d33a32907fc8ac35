# SPDX-License-Identifier: Apache-2.0
"""Counters of read-back with reasons, carried by the connector's own statistics.

One class for scheduler and workers, since vLLM adds the two up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

_KEY = "read_backs"
READ = "read"
RECOMPUTE = "recompute"


@dataclass
class BidirStats(NixlKVConnectorStats):
    """NIXL's transfer statistics, and one row per decided read-back."""

    def reset(self) -> None:
        super().reset()
        # [outcome, reason, tokens verified, tokens read, tokens computed]
        self.data[_KEY] = []

    def record_refusal(self, reason: str, verified: int, prompt: int) -> None:
        """The scheduler chose to compute."""
        self._add(RECOMPUTE, reason, verified, 0, prompt)

    def record_read(self, verified: int, read: int, computed: int) -> None:
        """A read-back was confirmed."""
        self._add(READ, "", verified, read, computed)

    def record_lost(self, reason: str, verified: int, computed: int) -> None:
        """A read-back was given up; its prompt is computed."""
        self._add(RECOMPUTE, reason, verified, 0, computed)

    def _add(self, *row: Any) -> None:
        self.data[_KEY].append(list(row))

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data.get(_KEY)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data.setdefault(_KEY, [])
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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, reason, verified, read, computed in transfer_stats_data.get(_KEY, ()):
            self._decisions.labels(*labels, outcome, reason).inc()
            for kind, count in (("verified", verified), ("read", read), ("computed", computed)):
                self._tokens.labels(*labels, kind).inc(count)
