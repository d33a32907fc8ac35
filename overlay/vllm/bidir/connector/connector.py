# SPDX-License-Identifier: Apache-2.0
"""The connector class that stands in for NixlConnector when `bidirectional_kv_xfer` is true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.options import read_options
from vllm.bidir.connector.scheduler import BidirScheduler
from vllm.bidir.connector.stats import BidirPromMetrics, BidirStats
from vllm.bidir.connector.support import refuse_wrong_answers
from vllm.bidir.connector.worker import BidirWorker
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig


class BidirConnector(NixlPullConnector):
    """NixlConnector with verified read-back."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not the pull connector's own: it would make the base's scheduler and worker first.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        refuse_wrong_answers(vllm_config)
        assert vllm_config.kv_transfer_config is not None  # else no connector
        read_options(vllm_config.kv_transfer_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = BidirScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = BidirWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if isinstance(self.connector_scheduler, BidirScheduler):
            self.connector_scheduler.written.bind(gpu_block_pool)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert isinstance(self.connector_worker, BidirWorker)  # asked of workers only
        return self.connector_worker.take_report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if isinstance(self.connector_scheduler, BidirScheduler):
            stats = self.connector_scheduler.stats
            return None if stats.is_empty() else stats.clone_and_reset()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return BidirStats() if data is None else BidirStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return BidirPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
