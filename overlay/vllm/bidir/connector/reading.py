# SPDX-License-Identifier: Apache-2.0
"""How a worker reads blocks: which descriptors, in which order, and who posts them.

Serves both directions. Handovers that the base pairs by rules of its own (several kinds of groups,
other block sizes, context parallelism) are read as the base reads them, but for what P is told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.bidir.connector.meeting import MeetingWorker
from vllm.bidir.connector.posting import Descriptors, Post, Poster
from vllm.bidir.connector.probes import Probes
from vllm.bidir.connector.ranks import SourceRank
from vllm.bidir.connector.rows import in_order
from vllm.bidir.connector.touch import release
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# A probe of a small model's blocks has so many at most: they are posted one by one.
_MOST_NULL_BLOCKS = 8192

Pairs = tuple[Sequence["NDArray[np.int32]"], Sequence["NDArray[np.int32]"]]


class ReadingWorker(MeetingWorker):
    """The base's pull worker; what it reads is merged where that is possible, and posted aside."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._poster = Poster(self.nixl_wrapper, self._choose_device, self.shares_agent)
        # Engines that are met in order to read back from them.
        self._to_be_measured: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._probes = Probes(
            self.nixl_wrapper, self._null_blocks, self._choose_device, self._nixl_entry
        )

    def _block_megabytes(self) -> float:
        """Of one block, as NIXL is told of it; MB are 10^6 bytes."""
        return sum(self.block_len_per_layer) / 1e6

    def _choose_device(self) -> None:
        """UCX gives up the GPU's own links in a thread that has not chosen a device."""
        if not self.use_host_buffer:
            current_platform.set_device(self.device_id)

    def shutdown(self) -> None:
        if hasattr(self, "_poster"):
            for post in self._poster.close():
                release(self.nixl_wrapper, post.handle)
        if hasattr(self, "_probes"):
            for handle in self._probes.close():
                release(self.nixl_wrapper, handle)
        super().shutdown()

    def busy_engines(self) -> set[str]:
        return super().busy_engines() | self._poster.engines() | self._probes.engines()

    def _evict_stale_engines(self) -> None:
        # The base counts from the start of an engine's last transfer, which may still run.
        for engine_id in self.busy_engines() & self._engine_last_active.keys():
            self._engine_last_active[engine_id] = time.perf_counter()
        super()._evict_stale_engines()

    ############################################################
    # Handshake
    ############################################################

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *more: Any
    ) -> Any:
        found = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *more)
        self._probes.met(expected_engine_id, expected_engine_id in self._to_be_measured)
        return found

    def _null_blocks(
        self, engine_id: str, megabytes: float
    ) -> tuple[list[Descriptors], float] | None:
        """Its null block into ours, from each rank that is read from, as often as so many MB take;
        None where blocks do not pair.

        Nobody reads the null block: attention masks what a block table has it for.
        """
        if not self.shares_agent or self._is_hma_required or self._has_mamba:
            return None
        # One that was met for notifications only has no mapping.
        if engine_id not in self.tp_mappings or not self.is_alike(engine_id):
            return None
        assert self.transfer_topo is not None  # set with the caches, before any handshake
        if self.transfer_topo.get_engine_info(engine_id).remote_dcp_size != 1:
            return None
        each = self._block_megabytes()
        count = min(max(1, round(megabytes / each)), _MOST_NULL_BLOCKS)
        null = [np.zeros(count, dtype=np.int32)]
        reads = self._from_each_rank(engine_id, (null, null))
        return None if reads is None else ([read for _, read in reads], count * each)

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._probes.forget(engine_id)
        self._to_be_measured.discard(engine_id)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    def get_finished(self) -> tuple[set[str], set[str]]:
        self._probes.sweep(self._still_runs)
        self._take_up_posts()
        found: tuple[set[str], set[str]] = super().get_finished()
        return found

    def _still_runs(self, handle: Any) -> bool:
        """Whether NIXL is still at a transfer; one that has ended is released.

        It may not even have been handed to NIXL yet.
        """
        if isinstance(handle, Post):
            if not handle.ended:
                return True
            handle = handle.handle
            if handle is None:
                return False
        try:
            if self.nixl_wrapper.check_xfer_state(handle) == "PROC":
                return True
        except Exception as error:
            # NIXL raises for a transfer that has failed: it has ended, too.
            logger.info("a READ that was given up has failed: %s", error)
        release(self.nixl_wrapper, handle)
        return False

    ############################################################
    # Handover
    ############################################################

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        assert meta.remote is not None  # as ordered
        theirs = meta.remote.block_ids
        # Where nothing is to be read, there are no groups of ours. A group of Mamba states may
        # have one that P has not, which D computes itself.
        missing = not self._has_mamba and any(
            len(ours) and not len(named)
            for ours, named in zip(meta.local_block_ids, theirs, strict=False)
        )
        if missing or len(theirs) != len(self.kv_cache_config.transfer_groups):
            self._refuse_handover(req_id)
            return
        try:
            super()._read_blocks_for_req(req_id, meta)
        except (AssertionError, IndexError) as error:
            # What the base pairs by rules of its own it also checks by them, and would end the
            # engine, though the params come with the request.
            self._refuse_handover(req_id, error)

    def _refuse_handover(self, request_id: str, error: Exception | None = None) -> None:
        logger.warning(
            "req=%s: its params do not fit its prompt or its peer", request_id, exc_info=error
        )
        self._handle_failed_transfer(request_id, None)

    def _read_blocks(
        self,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        remote_request_id: str,
        local_xfer_side_handle: int,
        remote_xfer_side_handle: int,
        expected_consumers: int,
    ) -> None:
        """Of a handover, from one rank."""
        if not self._fits(read_spec, dst_engine_id):
            self._refuse_handover(request_id)
            return
        # Tells P, when all have come, that it may free them.
        notice = f"{remote_request_id}:{expected_consumers}".encode()
        rank = read_spec.remote_rank
        reads = any(map(len, read_spec.local_block_ids))
        if not reads and self._told_by_read(request_id, rank, notice) is None:
            return
        pairs = self._pairs(read_spec, dst_engine_id)
        if pairs is None:
            super()._read_blocks(
                read_spec,
                dst_engine_id,
                request_id,
                remote_request_id,
                local_xfer_side_handle,
                remote_xfer_side_handle,
                expected_consumers,
            )
            return
        read = self._descriptors(
            dst_engine_id,
            rank,
            pairs,
            local_xfer_side_handle,
            remote_xfer_side_handle,
            self._told_by_read(request_id, rank, notice),
        )
        if read is None:
            self._handle_failed_transfer(request_id, None)
            return
        self._post(request_id, dst_engine_id, rank, read)

    def _told_by_read(self, request_id: str, rank: int, notice: bytes) -> bytes | None:
        """What P's rank is told as soon as it has been read from, or at once where there is nothing
        to read; None: it will be told later."""
        return notice

    def _fits(self, read_spec: ReadSpec, engine_id: str) -> bool:
        """Whether a handover's params name blocks that there are, and enough of them.

        They come with the request. Too few would be taken for all where block sizes differ.
        """
        assert self.transfer_topo is not None  # set with the caches, before any request
        blocks = self.dst_num_blocks[engine_id]
        pairs = list(zip(read_spec.local_block_ids, read_spec.remote_block_ids, strict=False))
        if len(pairs) != len(read_spec.local_block_ids):
            return False
        if any(not 0 <= k < blocks for _, remote in pairs for k in remote):
            return False
        if self._has_mamba:
            return True  # states and blocks pair by rules of the base's own
        # Theirs in one of ours; and so many of them may lie behind the prompt's end in our last.
        remote_size = self.transfer_topo.get_engine_info(engine_id).remote_block_size
        ratio, spare = self.transfer_topo.block_size_ratio(remote_size), 0
        if not self.is_alike(engine_id):
            spare = ratio * self._physical_blocks_per_logical_kv_block - 1
        return all(len(local) * ratio <= len(theirs) + spare for local, theirs in pairs)

    def _pairs(self, read_spec: ReadSpec, engine_id: str) -> Pairs | None:
        """A handover's pairs of blocks in an order that NIXL can merge; None where the base pairs
        by rules of its own, or where there is nothing to read and only something to be told."""
        assert self.transfer_topo is not None  # set with the caches, before any request
        theirs_dcp = self.transfer_topo.get_engine_info(engine_id).remote_dcp_size
        if (
            self._is_hma_required
            or not self.is_alike(engine_id)
            or (self.dcp_size, theirs_dcp) != (1, 1)
        ):
            return None
        ratio = self._physical_blocks_per_logical_kv_block
        local, remote = self._apply_prefix_caching(
            read_spec.local_block_ids, read_spec.remote_block_ids, ratio, ratio
        )
        return in_order(local, remote) if any(map(len, local)) else None

    ############################################################
    # Both directions
    ############################################################

    def _source_ranks(self, engine_id: str) -> list[SourceRank]:
        """The ranks of a peer that this one reads from, as the base maps them."""
        assert self.transfer_topo is not None  # set with the caches, before any handshake
        remote = self.transfer_topo.get_engine_info(engine_id)
        plan = self.tp_mappings[engine_id]
        ratio = self.transfer_topo.tp_ratio(remote.remote_tp_size)
        ranks = plan.all_source_ranks
        if self._needs_split_local_xfer_handles(ratio, plan):
            places = self.src_xfer_handles_by_tp_ratio[ratio, remote.remote_block_size]
        else:
            whole = self.src_xfer_handles_by_block_size[remote.remote_block_size]
            places = [whole] * len(ranks)
        theirs = self.dst_xfer_side_handles[engine_id]
        return [
            SourceRank(rank, place, theirs[rank]) for rank, place in zip(ranks, places, strict=True)
        ]

    def _from_each_rank(self, engine_id: str, pairs: Pairs) -> list[tuple[int, Descriptors]] | None:
        """What NIXL is to read for these pairs of blocks from which rank; None as for one."""
        found = []
        for source in self._source_ranks(engine_id):
            read = self._descriptors(
                engine_id, source.rank, pairs, source.local_handle, source.remote_handle
            )
            if read is None:
                return None
            found.append((source.rank, read))
        return found

    def _descriptors(
        self,
        engine_id: str,
        rank: int,
        pairs: Pairs,
        local_handle: Any,
        remote_handle: Any,
        notification: bytes | None = None,
    ) -> Descriptors | None:
        """What NIXL is to read for these pairs of blocks; None if they do not match layer by layer.

        The handles are of single layers; where both sides have rows, rows are read.
        """
        ours, theirs = pairs
        rows = self._rows.of(engine_id, rank)
        if rows is not None:
            return Descriptors(
                rows[0], np.concatenate(ours), rows[1], np.concatenate(theirs), notification
            )
        assert self.transfer_topo is not None  # set with the caches, before any request
        remote = self.transfer_topo.get_engine_info(engine_id)
        remote_ids = self._compute_desc_ids(
            block_ids=theirs,
            dst_num_blocks=self.dst_num_blocks[engine_id],
            block_size_ratio=None,
            physical_blocks_per_logical=remote.remote_physical_blocks_per_logical,
        )
        local_ids = self._compute_desc_ids(
            block_ids=ours,
            dst_num_blocks=self.dst_num_blocks[self.engine_id],
            block_size_ratio=1,
            physical_blocks_per_logical=self._physical_blocks_per_logical_kv_block,
        )
        if len(remote_ids) != len(local_ids):
            return None
        return Descriptors(local_handle, local_ids, remote_handle, remote_ids, notification)

    def _post(self, request_id: str, engine_id: str, rank: int, read: Descriptors) -> None:
        self._poster.post(Post(request_id, engine_id, rank), read)
        self._take_up_posts()

    def _take_up_posts(self) -> None:
        """READs that NIXL has taken over are from now on asked after; others have failed.

        Not while somebody goes through the transfers: until then they count as on their way.
        """
        for post in self._poster.ended():
            if post.error is None:
                self._recving_transfers[post.request_id].append(post.handle)
                continue
            self._log_failure(
                failure_type="transfer_setup_failed",
                req_id=post.request_id,
                msg="its blocks are not loaded",
                error=post.error,
                dst_engine_id=post.engine_id,
                remote_rank=post.rank,
            )
            self._handle_failed_transfer(post.request_id, post.handle)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        # An empty list says "all done", to the base; here another READ may be on its way.
        posted = [name for name in transfers if self._poster.waits_for(name)]
        waiting = {name: transfers.pop(name) for name in posted}
        done: set[str] = super()._pop_done_transfers(transfers)
        transfers.update(waiting)
        return done
