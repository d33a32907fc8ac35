# SPDX-License-Identifier: Apache-2.0
"""The worker's side of verified read-back: HOLD, read, CONFIRM, and only then report the blocks.

    ordered --HOLD--> held --handshake, READ--> transferred --CONFIRM--> done
       |               |                           |             |
       +---------------+------------ lost ---------+-------------+   (P recomputes)

Questions to the peer wait in threads of their own. Everything else runs in the engine's step, on
answers that have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from vllm.bidir.connector import peer
from vllm.bidir.connector.messages import HoldAnswer
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.stats import BidirStats
from vllm.bidir.connector.support import layer_obstacle
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

DEFAULT_TIMEOUT_S = 2.0
# A peer that did not answer is not asked again for so long: its silence must not take the
# threads that the answers of others wait for.
SILENCE_S = 5.0
_THREADS = 8


@dataclass
class _Read:
    """A read-back under way on this worker."""

    order: ReadBack
    epoch: int = 0
    hold_s: float = 0.0
    posted: float = 0.0
    megabytes: float = 0.0
    transfer_s: float = 0.0
    confirm_s: float = 0.0
    lost: Reason | None = None


class BidirWorker(NixlPullConnectorWorker):
    """As the base's pull worker; read-backs are held and confirmed, and end nothing on D."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None  # else no connector
        self.xfer_stats = BidirStats()
        self._reads: dict[str, _Read] = {}
        self._holds: SimpleQueue[tuple[str, peer.Asked]] = SimpleQueue()
        self._confirms: SimpleQueue[tuple[str, peer.Asked]] = SimpleQueue()
        self._timeout_s = float(
            vllm_config.kv_transfer_config.get_from_extra_config(
                "read_back_timeout", DEFAULT_TIMEOUT_S
            )
        )
        self._askers = ThreadPoolExecutor(_THREADS, thread_name_prefix="bidir_ask")
        self._confirmers = ThreadPoolExecutor(_THREADS, thread_name_prefix="bidir_confirm")
        self._silent_until: dict[tuple[str, int], float] = {}
        # Where, and with which process, NIXL's handshake with an engine was made. HOLD must be
        # answered by that very process, or what it answers is not about the memory that is read.
        self._addresses: dict[str, tuple[str, int]] = {}
        self._processes: dict[str, bytes] = {}
        self._obstacle = layer_obstacle(kv_cache_config)

    def shutdown(self) -> None:
        if hasattr(self, "_askers"):
            self._askers.shutdown(wait=False, cancel_futures=True)
            self._confirmers.shutdown(wait=False, cancel_futures=True)
        super().shutdown()

    ############################################################
    # HOLD
    ############################################################

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        orders: dict[str, ReadBack] = getattr(metadata, "read_backs", {})
        for request_id, order in orders.items():
            # One request is read for by one rule only.
            metadata.reqs_to_recv.pop(request_id, None)
            self._order(request_id, order)
        for request_id, asked in _drain(self._holds):
            self._held(request_id, asked)
        super().start_load_kv(metadata)

    def _order(self, request_id: str, order: ReadBack) -> None:
        source = order.source
        local = (list(order.local_block_ids),)
        self._recving_metadata[request_id] = ReqMeta(
            local_block_ids=local,
            local_physical_block_ids=self._logical_to_kernel_block_ids(
                local, self._physical_blocks_per_logical_kv_block
            ),
            tp_size=source.tp_size,
            dcp_size=source.dcp_size,
            pp_size=source.pp_size,
            # Which blocks is D's to say, in its answer to HOLD.
            remote=RemoteMeta(
                block_ids=([],),
                host=source.host,
                port=source.port,
                engine_id=source.engine_id,
                request_id=source.lease_id,
            ),
        )
        self._reads[request_id] = _Read(order)

        if self._obstacle is not None:
            self._lose(request_id, Reason.UNSUPPORTED)
        elif self._silent_until.get((source.host, source.port), 0.0) > time.monotonic():
            self._lose(request_id, Reason.PEER_GONE)
        else:
            timeout = self._timeout_s
            self._askers.submit(
                self._ask,
                self._holds,
                request_id,
                lambda: peer.hold(source.host, source.port, source.lease_id, timeout),
            )

    @staticmethod
    def _ask(
        answers: SimpleQueue[tuple[str, peer.Asked]],
        request_id: str,
        question: Callable[[], peer.Asked],
    ) -> None:
        """Runs in a thread. An answer is queued whatever happens: the request waits for it."""
        try:
            asked = question()
        except Exception:
            logger.exception("read-back req=%s: the peer could not be asked", request_id)
            asked = peer.Asked(reason=Reason.PEER_GONE)
        answers.put((request_id, asked))

    def _held(self, request_id: str, asked: peer.Asked) -> None:
        read = self._reads[request_id]
        read.hold_s = asked.seconds
        order, answer = read.order, asked.hold
        address = (order.source.host, order.source.port)
        if answer is None:
            reason = asked.reason or Reason.HOLD_LOST
            if reason in (Reason.TIMEOUT, Reason.PEER_GONE):
                self._silent_until[address] = time.monotonic() + SILENCE_S
            else:
                # The words that operators of this flow know from the base.
                logger.warning(
                    "Declining expired remote read for %s from engine %s.",
                    request_id,
                    order.source.engine_id,
                )
            self._lose(request_id, reason)
            return
        self._silent_until.pop(address, None)
        blocks = answer.block_ids[order.remote_positions]
        if (
            answer.digest != order.digest
            or answer.engine_id != order.source.engine_id
            or answer.valid_tokens < order.total
            or len(blocks) != len(order.local_block_ids)
        ):
            # Another turn's lease, or params that were put together from several.
            self._lose(request_id, Reason.HOLD_LOST)
            return
        if answer.tp_size != self.world_size:
            # Params may lie about the size, and several reads for one request are not ours yet.
            self._lose(request_id, Reason.UNSUPPORTED)
            return
        if not self._same_process(answer, address):
            self._lose(request_id, Reason.PEER_GONE)
            return
        read.epoch = answer.epoch
        meta = self._recving_metadata[request_id]
        assert meta.remote is not None  # as ordered
        meta.remote.block_ids = (blocks,)
        meta.tp_size = answer.tp_size
        if answer.engine_id in self._remote_agents:
            self._read_blocks_for_req(request_id, meta)
        else:
            self._background_nixl_handshake(request_id, answer.engine_id, meta)

    def _same_process(self, answer: HoldAnswer, address: tuple[str, int]) -> bool:
        """Whether HOLD was answered by the process whose memory NIXL would read.

        A handshake that is under way counts as made: whoever waits for it reads where it leads. A
        restarted engine keeps its id and address: its old agent is dropped, unless something is
        still being read with it, and a new handshake follows.
        """
        engine = answer.engine_id
        with self._handshake_lock:
            pending = engine in self._handshake_futures
            met = engine in self._remote_agents
        if (pending or met) and self._addresses.get(engine) != address:
            return False
        if (pending or met) and self._processes.get(engine, answer.process) != answer.process:
            if pending or any(self._recving_transfers.values()):
                return False
            self._cleanup_remote_engine(engine)
        self._addresses[engine] = address
        self._processes[engine] = answer.process
        return True

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._addresses.pop(engine_id, None)
        self._processes.pop(engine_id, None)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    ############################################################
    # READ
    ############################################################

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
        read = self._reads.get(request_id)
        if read is None:
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
        assert self.transfer_topo is not None  # set with the caches, before any request
        remote = self.transfer_topo.get_engine_info(dst_engine_id)
        remote_blocks = self.dst_num_blocks[dst_engine_id]
        if self.transfer_topo.block_size_ratio(remote.remote_block_size) != 1:
            self._lose(request_id, Reason.BLOCK_SIZE)
            return
        if any(not 0 <= k < remote_blocks for group in read_spec.remote_block_ids for k in group):
            self._lose(request_id, Reason.HOLD_LOST)
            return
        remote_ids = self._compute_desc_ids(
            block_ids=read_spec.remote_block_ids,
            dst_num_blocks=remote_blocks,
            block_size_ratio=None,
            physical_blocks_per_logical=remote.remote_physical_blocks_per_logical,
        )
        local_ids = self._compute_desc_ids(
            block_ids=read_spec.local_block_ids,
            dst_num_blocks=self.dst_num_blocks[self.engine_id],
            block_size_ratio=1,
            physical_blocks_per_logical=self._physical_blocks_per_logical_kv_block,
        )
        if len(remote_ids) != len(local_ids):
            # Pairing by position is all that makes the bytes mean what they say.
            self._lose(request_id, Reason.UNSUPPORTED)
            return
        read.posted = time.monotonic()
        physical = sum(map(len, read_spec.local_block_ids))
        read.megabytes = physical * sum(self.block_len_per_layer) / 1e6
        handle = None
        try:
            # No notification: a finished read ends nothing on D, where siblings may read too.
            handle = self.nixl_wrapper.make_prepped_xfer(
                "READ", local_xfer_side_handle, local_ids, remote_xfer_side_handle, remote_ids
            )
            self.nixl_wrapper.transfer(handle)
        except Exception as error:
            self._log_failure(
                failure_type="transfer_setup_failed",
                req_id=request_id,
                msg="the prompt is recomputed",
                error=error,
                dst_engine_id=dst_engine_id,
                remote_rank=read_spec.remote_rank,
            )
            read.lost = Reason.TRANSFER_FAILED
            self._handle_failed_transfer(request_id, handle)
        else:
            self._recving_transfers[request_id].append(handle)

    ############################################################
    # CONFIRM
    ############################################################

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        done = super()._pop_done_transfers(transfers)
        for request_id in list(done):
            read = self._reads.get(request_id)
            if read is not None and read.lost is None:
                done.discard(request_id)
                self._transferred(request_id, read)
        for request_id, asked in _drain(self._confirms):
            self._reads[request_id].confirm_s = asked.seconds
            if asked.stood:
                done.add(request_id)
            else:
                self._lose(request_id, asked.reason or Reason.HOLD_LOST)
        return done

    def _transferred(self, request_id: str, read: _Read) -> None:
        read.transfer_s = time.monotonic() - read.posted
        source, epoch, timeout = read.order.source, read.epoch, self._timeout_s
        self._confirmers.submit(
            self._ask,
            self._confirms,
            request_id,
            lambda: peer.confirm(source.host, source.port, source.lease_id, epoch, timeout),
        )

    def get_finished(self) -> tuple[set[str], set[str]]:
        sent, received = super().get_finished()
        for request_id in received:
            read = self._reads.pop(request_id, None)
            if read is not None and self.tp_rank == 0:
                self._report(request_id, read)
        return sent, received

    ############################################################
    # Loss and report
    ############################################################

    def _lose(self, request_id: str, reason: Reason) -> None:
        """Give a read-back up; its blocks count as not loaded, and P computes them."""
        self._reads[request_id].lost = reason
        self._handle_failed_transfer(request_id, None)

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        read = self._reads.get(req_id)
        if read is not None and read.lost is None:
            # The base found it: a handshake or a transfer that failed.
            read.lost = Reason.TRANSFER_FAILED if read.posted else Reason.PEER_GONE
        super()._handle_failed_transfer(req_id, handle)

    def _report(self, request_id: str, read: _Read) -> None:
        order = read.order
        stats = self.xfer_stats
        assert isinstance(stats, BidirStats)  # as made above
        taken = 0 if read.lost else order.total - order.local
        computed = order.prompt - order.local - taken
        if read.lost:
            stats.record_lost(str(read.lost), order.verified, computed)
        else:
            stats.record_read(order.verified, taken, computed)
        logger.info(
            "read-back req=%s peer=%s prompt=%d local=%d verified=%d read=%d computed=%d "
            "blocks=%d mb=%.1f hold_ms=%.1f transfer_ms=%.1f confirm_ms=%.1f outcome=%s",
            request_id,
            order.source.engine_id,
            order.prompt,
            order.local,
            order.verified,
            taken,
            computed,
            len(order.local_block_ids),
            0.0 if read.lost else read.megabytes,
            read.hold_s * 1000,
            read.transfer_s * 1000,
            read.confirm_s * 1000,
            f"recompute reason={read.lost}" if read.lost else "read",
        )


def _drain(
    waiting: SimpleQueue[tuple[str, peer.Asked]],
) -> list[tuple[str, peer.Asked]]:
    """All that has arrived, without waiting."""
    arrived: list[tuple[str, peer.Asked]] = []
    while True:
        try:
            arrived.append(waiting.get_nowait())
        except Empty:
            return arrived
