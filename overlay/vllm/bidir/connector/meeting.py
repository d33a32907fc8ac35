# SPDX-License-Identifier: Apache-2.0
"""Which engines a worker has met by NIXL's handshake: where, and which process.

An engine id alone says neither. An engine that has restarted or moved is met anew before anything
is read from it, for read-backs and for handovers; and a peer that is silent delays nobody else's
handshake.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm.bidir.connector import agents, layout, peer
from vllm.bidir.connector.failed_loads import FailingWorker
from vllm.bidir.connector.nixl_config import configured, delay_us
from vllm.bidir.connector.options import read_options
from vllm.bidir.connector.ranks import UnlikePeerError
from vllm.bidir.connector.rows import RowHandles, join_blocks, parts_of, row_of
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

Address = tuple[str, int]

# So many peers may be silent at once before a handshake waits for another peer's.
_HANDSHAKES = 64
# Seconds that an engine has for an answer, in the base's handshake too.
_GREETING_S = 5.0
# Of so many ranks it is remembered that their blocks cannot be read.
_UNLIKE = 4096


class MeetingWorker(FailingWorker):
    """The base's pull worker, which remembers whom it has met."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        assert vllm_config.kv_transfer_config is not None  # else no connector
        self.options = read_options(vllm_config.kv_transfer_config)
        delay = delay_us(self.options.progress_delay_us)
        with configured(NixlWrapper, delay) as made:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # Whether NIXL's agent may be used in several threads.
        self.shares_agent = made.shared
        detected: str = self.kv_cache_layout  # type: ignore[has-type]
        self.kv_cache_layout = layout.announced(detected)
        self._rows = RowHandles(self.nixl_wrapper, self.nixl_memory_type)
        # The base has one thread, in which a silent peer delays the handshakes with all others.
        self._handshake_initiation_executor.shutdown(wait=False)
        pool = ThreadPoolExecutor(_HANDSHAKES, thread_name_prefix="bidir_handshake")
        self._handshake_initiation_executor: ThreadPoolExecutor = pool
        self._remember_nobody()

    def _remember_nobody(self) -> None:
        # NIXL itself is entered by one handshake at a time, as in the base.
        self._nixl_entry = threading.Lock()
        self._addresses: dict[str, Address] = {}
        self._agents: dict[str, dict[int, bytes]] = {}
        # Engines that compare what is claimed with what they have handed over.
        self._binding_engines: set[str] = set()
        # NIXL's names of ranks that are being met.
        self._half_met: dict[str, list[str]] = {}
        # Ranks, and the size of the engine that each was taken for.
        self._unlike: set[tuple[bytes, int]] = set()
        # The agents that a handover names, until it is read.
        self._named: dict[str, tuple[bytes, ...]] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self.use_host_buffer or self._has_mamba or self._is_hma_required or self.dcp_size > 1:
            return  # a block is more, or less, than the sum of its layers
        lengths = self.block_len_per_layer
        bases = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        row = row_of(bases, lengths, self.block_stride_per_layer)
        self._rows.own(row, lengths, self.num_blocks, self.device_id)

    def shutdown(self) -> None:
        if hasattr(self, "_rows"):
            # In the base's order: what is under way, what it was made from, the memory itself.
            for handles in self._recving_transfers.values():
                for handle in handles:
                    self.nixl_wrapper.release_xfer_handle(handle)
            self._recving_transfers.clear()
            self._rows.close()
        super().shutdown()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """`metadata.agents` are those that handovers name, by request; other fields as the base."""
        named: dict[str, tuple[bytes, ...]] = getattr(metadata, "agents", {})
        for request_id, theirs in named.items():
            meta = metadata.reqs_to_recv.get(request_id)
            if meta is None or meta.remote is None:
                continue
            self._named[request_id] = theirs
            met = self._agents.get(meta.remote.engine_id)
            if met and not agents.are_met(met, theirs):
                self.forget(meta.remote.engine_id)
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        """Of every read, when its engine has been met: whether it is the one that was named.

        It may have been met as another process, or have been forgotten since.
        """
        assert meta.remote is not None  # as ordered
        remote, named = meta.remote, self._named.pop(req_id, None)
        # A process is known by its agents: routers may know its host by several names.
        met = self._agents.get(remote.engine_id, {})
        if remote.engine_id not in self._remote_agents or (
            named is not None and not agents.are_met(met, named)
        ):
            logger.warning("req=%s: its blocks are of a process that is gone", req_id)
            self._handle_failed_transfer(req_id, None)
            return
        super()._read_blocks_for_req(req_id, meta)

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        self._named.pop(req_id, None)
        super()._handle_failed_transfer(req_id, handle)

    def is_met(self, engine_id: str, address: Address, theirs: Sequence[bytes]) -> bool:
        """Whether the engine was met at this address, and as the process with these agents."""
        return self._addresses.get(engine_id) == address and agents.are_met(
            self._agents.get(engine_id, {}), theirs
        )

    def is_unlike(self, theirs: Sequence[bytes], tp_size: int) -> bool:
        """Whether a handshake with one of these agents, of an engine of so many ranks, has shown
        that its blocks cannot be read."""
        return any((agent, tp_size) in self._unlike for agent in theirs)

    def forget(self, engine_id: str) -> bool:
        """Let it be met anew; False while something is still being read from it."""
        with self._handshake_lock:
            if engine_id not in self._remote_agents:
                return True
        if engine_id in self.busy_engines():
            return False
        self._cleanup_remote_engine(engine_id)
        return True

    def is_alike(self, engine_id: str) -> bool:
        """Whether a peer's blocks are as long as ours, so that they pair one to one."""
        assert self.transfer_topo is not None  # set with the caches, before any request
        remote = self.transfer_topo.get_engine_info(engine_id)
        alike: bool = (
            self.transfer_topo.block_size_ratio(remote.remote_block_size) == 1
            and remote.remote_physical_blocks_per_logical
            == self._physical_blocks_per_logical_kv_block
        )
        return alike

    def busy_engines(self) -> set[str]:
        """Engines that something is being read from."""
        under_way = map(self._recving_metadata.get, self._recving_transfers)
        return {meta.remote.engine_id for meta in under_way if meta is not None and meta.remote}

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *more: Any
    ) -> Any:
        """Runs in a thread of its own for each peer."""
        try:
            found = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *more)
            self._hear_greeting((host, port), expected_engine_id, found[0])
        except Exception:
            self._forget_half_met(expected_engine_id)
            raise
        self._half_met.pop(expected_engine_id, None)
        self._addresses[expected_engine_id] = (host, port)
        return found

    def _hear_greeting(
        self, address: Address, engine_id: str, met: Iterable[tuple[int, int]]
    ) -> None:
        """What the engine says of itself to which these ranks belong, the last one met last.

        RuntimeError if another process answers there by now.
        """
        *_, (pp_rank, tp_rank) = met
        ask = msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank))
        said = peer.greeting(*address, ask, _GREETING_S)
        # None are remembered of an engine that is only told something.
        if self._agents.get(engine_id, {}).get(tp_rank, said.agent) != said.agent:
            raise RuntimeError(f"engine {engine_id} has been started anew while it was being met")
        if said.binds:
            self._binding_engines.add(engine_id)
        else:
            self._binding_engines.discard(engine_id)

    def binds_claims(self, engine_id: str) -> bool:
        """Whether an engine that was met compares what is claimed with what it has handed over."""
        return engine_id in self._binding_engines

    def _forget_half_met(self, engine_id: str) -> None:
        """What a handshake leaves that failed on its way.

        The base keeps it, the size that it was tried with included, which may have come with a
        request: each handshake with the right size would fail on it.
        """
        with self._nixl_entry:
            for handle in self.dst_xfer_side_handles.pop(engine_id, {}).values():
                self.nixl_wrapper.release_dlist_handle(handle)
            self._rows.forget(engine_id)
            for name in self._half_met.pop(engine_id, []):
                self.nixl_wrapper.remove_remote_agent(name)
            known: tuple[dict[str, Any], ...] = (
                self.kv_caches_base_addr,
                self.dst_num_blocks,
                self.tp_mappings,
                self._agents,
            )
            for by_engine in known:
                by_engine.pop(engine_id, None)
            assert self.transfer_topo is not None  # set with the caches, before any handshake
            self.transfer_topo.unregister_remote_engine(engine_id)

    def add_remote_agent(
        self,
        nixl_agent_meta: NixlAgentMetadata,
        remote_tp_rank: int = 0,
        remote_tp_size: int = 1,
        remote_dcp_size: int = 1,
    ) -> str:
        """UnlikePeerError for a peer whose blocks would be read into the wrong places."""
        agent = agents.digest(nixl_agent_meta.agent_metadata)
        theirs = layout.as_ours(nixl_agent_meta, self.kv_cache_layout)
        try:
            self._refuse_other_blocks(theirs)
            with self._nixl_entry:
                name: str = super().add_remote_agent(
                    theirs, remote_tp_rank, remote_tp_size, remote_dcp_size
                )
                self._half_met.setdefault(theirs.engine_id, []).append(name)
                if remote_dcp_size == 1:
                    self._meet_rows(theirs, remote_tp_rank, name)
        except (AssertionError, UnlikePeerError) as error:
            if len(self._unlike) >= _UNLIKE:
                self._unlike.clear()
            self._unlike.add((agent, remote_tp_size))
            raise UnlikePeerError(f"engine {theirs.engine_id}: {error}") from error
        self._agents.setdefault(theirs.engine_id, {})[remote_tp_rank] = agent
        return name

    def _validate_remote_agent_handshake(self, *arguments: Any) -> None:
        """Layouts that do not pair are a RuntimeError in the base, as what NIXL may say is."""
        try:
            super()._validate_remote_agent_handshake(*arguments)
        except RuntimeError as error:
            raise UnlikePeerError(str(error)) from error

    def _refuse_other_blocks(self, theirs: NixlAgentMetadata) -> None:
        if theirs.block_size != self.block_size and current_platform.is_cpu():
            # Its kernels keep the keys of a block in an order of their own. The base reads all the
            # same, and answers wrong.
            raise UnlikePeerError(
                f"its blocks are of {theirs.block_size} tokens, those here of {self.block_size}: "
                "on a CPU both need the same --block-size"
            )

    def _meet_rows(self, theirs: NixlAgentMetadata, rank: int, agent: str) -> None:
        """Where a whole block of theirs is a whole block of ours: as many heads, and the same."""
        plan = self.tp_mappings[theirs.engine_id]
        if (
            not self.is_alike(theirs.engine_id)
            or rank not in plan.all_source_ranks
            or plan.rank_offset_factor
        ):
            return
        lengths = theirs.block_lens
        row = row_of(theirs.kv_caches_base_addr, lengths, theirs.block_strides)
        self._rows.meet(
            theirs.engine_id, rank, agent, row, lengths, theirs.num_blocks, theirs.device_id
        )

    def _build_fa_local(self, base_addresses: list[int], block_size_ratio: int) -> Any:
        """[layers * parts, 3] address, bytes, device: own blocks, in parts as long as a peer's.

        The base takes a part of a block for a part of the distance to the next one, which is more
        where other layers lie between.
        """
        if block_size_ratio == 1 or self.block_stride_per_layer == self.block_len_per_layer:
            return super()._build_fa_local(base_addresses, block_size_ratio)
        layers = zip(
            base_addresses, self.block_len_per_layer, self.block_stride_per_layer, strict=True
        )
        return np.concatenate(
            [
                parts_of(base, length, stride, self.num_blocks, block_size_ratio, self.device_id)
                for base, length, stride in layers
            ]
        )

    def post_process_device_kv_on_receive(
        self,
        block_size_ratio: int,
        block_ids_list: list[tuple[list[int], int]],
        convert: bool = True,
    ) -> None:
        """Make one block of each few that a peer's smaller blocks were read into, and zero what
        was not read. See the base for the arguments.

        The base takes a cache's axes for [block, token, head, content] and puts heads where tokens
        belong; they are [block, head, token, content] (vllm.v1.kv_cache_layout).
        """
        if not convert or self.enable_permute_local_kv or block_size_ratio == 1:
            super().post_process_device_kv_on_receive(block_size_ratio, block_ids_list, convert)
            return
        for block_ids, covered in block_ids_list:
            for cache in self._attention_kv_caches:
                join_blocks(cache, block_ids, block_size_ratio, covered)

    def _add_notif_only_remote_agent(self, *args: Any) -> str:
        with self._nixl_entry:
            name: str = super()._add_notif_only_remote_agent(*args)
        return name

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._binding_engines.discard(engine_id)
        self._addresses.pop(engine_id, None)
        self._agents.pop(engine_id, None)
        self._rows.forget(engine_id)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
