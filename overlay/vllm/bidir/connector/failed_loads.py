# SPDX-License-Identifier: Apache-2.0
"""Loads of models with several kinds of KV cache groups that have failed.

The base marks blocks as not loaded, and only those of a model's one group of full attention: else
it marks none, and the scheduler takes the load for done. D then answers from blocks that nobody has
written, with 200 (upstream issue #52234). Here the worker says which request it was, and all of its
load counts as failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.outcome import WorkerReport
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class FailingWorker(NixlPullConnectorWorker):
    """The base's pull worker, which remembers the requests whose failure no block tells of."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._failed: set[str] = set()

    @property
    def _fails_whole(self) -> bool:
        """Whether blocks cannot tell the scheduler what has failed: it takes them for those of the
        model's only group."""
        return self._is_hma_required or len(self.kv_cache_config.kv_cache_groups) > 1

    def get_block_ids_with_load_errors(self) -> set[int]:
        found: set[int] = super().get_block_ids_with_load_errors()
        return set() if self._fails_whole else found

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        """May be called by a handshake's thread."""
        # One that has nothing to receive is never reported as over.
        if self._fails_whole and req_id in self._recving_metadata:
            self._failed.add(req_id)  # before the base has it reported
        super()._handle_failed_transfer(req_id, handle)

    def _failed_of(self, received: set[str]) -> set[str]:
        """Of the requests whose loads are over: those that have failed. Each is told once."""
        if not self._failed:
            return set()
        failed = received & self._failed
        self._failed -= failed
        return failed


class FailedLoads:
    """The scheduler's side: requests of which a rank has said so, until all ranks are over."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def over(self, output: KVConnectorOutput) -> set[str]:
        """Of the requests that all ranks are done with in this step, those that have failed."""
        for report in _reports(output.kv_connector_worker_meta):
            self._failed |= report.failed
        if not self._failed:
            return set()
        failed = self._failed & set(output.finished_recving or ())
        self._failed -= failed
        return failed


def _reports(meta: Any) -> list[WorkerReport]:
    """Ours, also where the connector is one of several."""
    several = getattr(meta, "metadata", None)
    every = several if isinstance(several, tuple | list) else (meta,)
    return [one for one in every if isinstance(one, WorkerReport)]


def settle(scheduler: Any, failed: set[str], computes: Callable[[Request], bool]) -> set[str]:
    """What becomes of requests whose loads have failed; those that are to end with an error.

    As `kv_load_failure_policy` says: that, or all of it is computed, which is so in any case of
    what `computes` says. How much of a load is good can be told only in a model of one group.
    """
    ends: set[str] = set()
    computed = 0
    for request_id in failed:
        request = scheduler.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue  # it has been aborted meanwhile
        request.num_computed_tokens = 0
        if scheduler.recompute_kv_load_failures or computes(request):
            scheduler.failed_recving_kv_req_ids.add(request_id)
            computed += 1
        else:
            ends.add(request_id)
    if ends or computed:
        logger.error(
            "KV could not be loaded: %d request(s) end with an error, %d are computed "
            "(kv_load_failure_policy)",
            len(ends),
            computed,
        )
    return ends
