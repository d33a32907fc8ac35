# SPDX-License-Identifier: Apache-2.0
"""The worker's side of verified read-back: HOLD, read, CONFIRM, and only then report the blocks.

    asking --HOLD--> meeting --handshake--> reading --READ--> confirming --CONFIRM--> done
       |                |                      |                  |
       +----------------+-------- lost --------+------------------+     (P recomputes)

Each state has its time; a read-back that outlives it is lost. Questions and handshakes wait in
threads of their own. Everything else runs in the engine's step, on answers that have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.claiming import ClaimingWorker
from vllm.bidir.connector.given_up import GivenUpReads
from vllm.bidir.connector.outcome import Outcome, WorkerReport
from vllm.bidir.connector.pace import Pace
from vllm.bidir.connector.peer import Asked
from vllm.bidir.connector.questions import drain
from vllm.bidir.connector.ranks import size_obstacle
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.rows import in_order
from vllm.bidir.connector.stats import HANDOVER, READ_BACK, BidirStats
from vllm.bidir.connector.support import layer_obstacle
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# Seconds for the handshake and the READs that open and time a link, where it is emulated: 0.2 of
# reading at 0.4 GB/s, and the rest.
MEETING_S = 0.3
# And no longer than this, however long computing may take.
_LONGEST_MEETING_S = 10.0
# Of so many engines it is remembered that they could not be met.
_UNMET = 1024


class _State(Enum):
    ASKING = auto()
    MEETING = auto()
    READING = auto()
    CONFIRMING = auto()
    LOST = auto()


@dataclass
class _Read:
    """A read-back under way on this worker; `deadline` (monotonic seconds) is its state's."""

    order: ReadBack
    deadline: float
    state: _State = _State.ASKING
    epoch: int = 0
    agents: tuple[bytes, ...] = ()
    tp_size: int = 0
    hold_s: float = 0.0
    posted: float = 0.0
    megabytes: float = 0.0
    transfer_s: float = 0.0
    confirm_s: float = 0.0
    engine_s: float = 0.0
    lost: Reason | None = None


class BidirWorker(ClaimingWorker):
    """As the base's pull worker; read-backs are held and confirmed, and end nothing on D."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = BidirStats()
        self._obstacle = layer_obstacle(kv_cache_config)
        self._set_up(self.options.timeout_s)

    def _set_up(self, timeout_s: float) -> None:
        super()._set_up(timeout_s)
        self._reads: dict[str, _Read] = {}
        self._pace = Pace(timeout_s)
        self._met: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        # Engines whose last handshake, that nobody waited for, has failed.
        self._unmet: set[str] = set()
        self._given_up = GivenUpReads(self._still_runs)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        orders: dict[str, ReadBack] = getattr(metadata, "read_backs", {})
        for request_id, order in orders.items():
            # One request is read for by one rule only.
            metadata.reqs_to_recv.pop(request_id, None)
            self._order(request_id, order)
        self._advance()
        super().start_load_kv(metadata)

    def _advance(self) -> None:
        """Take up what has arrived, and give up what has not arrived in time."""
        for request_id, asked in drain(self._questions.holds):
            # Also one that comes too late for its request says whether the peer is there.
            self._questions.note(asked)
            if self._is(request_id, _State.ASKING):
                with self._busy_with(request_id):
                    self._held(request_id, asked)
            elif asked.hold is not None and asked.source is not None:
                self._questions.let_go(asked.source, asked.hold.epoch)
        for request_id, succeeded in drain(self._met):
            if self._is(request_id, _State.MEETING):
                with self._busy_with(request_id):
                    self._handshake_ended(request_id, succeeded)
        now = time.monotonic()
        for request_id, read in self._reads.items():
            if read.state is not _State.LOST and now > read.deadline:
                self._overdue(request_id, read)

    @contextmanager
    def _busy_with(self, request_id: str) -> Iterator[None]:
        """What the engine's thread does in this block, it does for this read-back."""
        began = time.perf_counter()
        yield
        self._reads[request_id].engine_s += time.perf_counter() - began

    def _is(self, request_id: str, state: _State) -> bool:
        """Whether the read-back still waits for this: an answer may come too late."""
        read = self._reads.get(request_id)
        return read is not None and read.state is state

    ############################################################
    # HOLD
    ############################################################

    def _order(self, request_id: str, order: ReadBack) -> None:
        began = time.perf_counter()
        source = order.source
        local = (list(order.local_block_ids),)
        self._recving_metadata[request_id] = ReqMeta(
            local_block_ids=local,
            local_physical_block_ids=self._logical_to_kernel_block_ids(
                local, self._physical_blocks_per_logical_kv_block
            ),
            # Which blocks, of how many ranks, is D's to say in its answer to HOLD. One that answers
            # has neither context nor pipeline parallelism, whatever the params claim.
            tp_size=0,
            dcp_size=1,
            pp_size=1,
            remote=RemoteMeta(
                block_ids=([],),
                host=source.host,
                port=source.port,
                engine_id=source.engine_id,
                request_id=source.lease_id,
            ),
        )
        read = self._reads[request_id] = _Read(order, time.monotonic() + self._timeout_s)

        if self._obstacle is not None:
            self._lose(request_id, Reason.UNSUPPORTED)
        elif self._questions.is_silent(source):
            self._lose(request_id, Reason.PEER_GONE)
        elif self._is_too_slow(read):
            self._lose(request_id, Reason.SLOW_LINK)
        else:
            self._questions.hold(request_id, source)
        read.engine_s += time.perf_counter() - began

    def _held(self, request_id: str, asked: Asked) -> None:
        read = self._reads[request_id]
        read.hold_s = asked.seconds
        order, answer = read.order, asked.hold
        if answer is None:
            reason = asked.reason or Reason.HOLD_LOST
            if reason is Reason.HOLD_LOST:
                # The words that operators of this flow know from the base.
                logger.warning(
                    "Declining expired remote read for %s from engine %s.",
                    request_id,
                    order.source.engine_id,
                )
            self._lose(request_id, reason)
            return
        read.epoch, read.agents, read.tp_size = answer.epoch, tuple(answer.agents), answer.tp_size
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
        assert self.transfer_topo is not None  # set with the caches, before any request
        obstacle = size_obstacle(self.transfer_topo, answer.tp_size)
        if obstacle is not None or self.is_unlike(answer.agents, answer.tp_size):
            if obstacle is not None:
                logger.info("read-back req=%s: %s", request_id, obstacle)
            self._lose(request_id, Reason.UNSUPPORTED)
            return
        meta = self._recving_metadata[request_id]
        assert meta.remote is not None  # as ordered
        meta.remote.block_ids, meta.tp_size = (blocks,), answer.tp_size
        self._meet(request_id, read, meta)

    ############################################################
    # Handshake
    ############################################################

    def _meet(self, request_id: str, read: _Read, meta: ReqMeta) -> None:
        source = read.order.source
        if not self._is_same(source.engine_id, read) and not self.forget(source.engine_id):
            # Something is still being read with the agents of an engine that is gone.
            self._lose(request_id, Reason.PEER_GONE)
            return
        read.state = _State.MEETING
        self._to_be_measured.add(source.engine_id)
        handshake = self._ensure_handshake(
            source.engine_id, source.host, source.port, meta.tp_size, meta.dcp_size, meta.pp_size
        )
        if handshake is None:
            self._handshake_ended(request_id, True)
        elif self._meets_aside(read.order):
            failed = source.engine_id in self._unmet
            handshake.add_done_callback(partial(self._met_aside, source.engine_id))
            self._lose(request_id, Reason.PEER_GONE if failed else Reason.MEETING)
        else:
            read.deadline += min(_LONGEST_MEETING_S, (read.order.compute_s or 0.0) / 4)
            handshake.add_done_callback(partial(self._handshake_done, request_id))

    def _handshake_done(self, request_id: str, handshake: Future[Any]) -> None:
        """Runs in the handshake's thread."""
        self._met.put((request_id, not handshake.cancelled() and handshake.exception() is None))

    def _met_aside(self, engine_id: str, handshake: Future[Any]) -> None:
        """Runs in the handshake's thread."""
        if handshake.cancelled() or handshake.exception() is not None:
            if len(self._unmet) >= _UNMET:
                self._unmet.clear()
            self._unmet.add(engine_id)
        else:
            self._unmet.discard(engine_id)

    def _handshake_ended(self, request_id: str, succeeded: bool) -> None:
        read = self._reads[request_id]
        engine_id = read.order.source.engine_id
        if not succeeded and self.is_unlike(read.agents, read.tp_size):
            self._lose(request_id, Reason.UNSUPPORTED)
        elif not succeeded or not self._is_same(engine_id, read):
            # A handshake that was under way may have been with another process of that id.
            self._lose(request_id, Reason.PEER_GONE)
        elif self._is_too_slow(read):
            self._lose(request_id, Reason.SLOW_LINK)
        elif self._probes.links.is_off(engine_id):
            # Still the process whose link was slow.
            self._look_again(engine_id)
            self._lose(request_id, Reason.SLOW_LINK)
        else:
            self._unmet.discard(engine_id)
            if self._probes.links.rate(engine_id) is None:
                # It was met by a handover, which does not ask how fast it is.
                self._suspect(engine_id)
            self._read(request_id)

    def _meets_aside(self, order: ReadBack) -> bool:
        """Whether a prompt is computed rather than waiting until its peer has been met.

        Opening the way to a peer's GPU memory and timing it takes up to MEETING_S where it is
        slow, once for each peer; a prompt that takes long to compute waits, and loses little.
        """
        return self.nixl_memory_type == "VRAM" and (
            order.compute_s is None or order.compute_s < 20 * MEETING_S
        )

    ############################################################
    # How fast the link is
    ############################################################

    def _is_too_slow(self, read: _Read) -> bool:
        """Whether computing takes less than reading over what the link was last seen to achieve.

        From time to time the link is looked at again.
        """
        order, links = read.order, self._probes.links
        engine_id = order.source.engine_id
        if not links.is_slow(engine_id, self._megabytes(order), order.compute_s):
            return False
        self._look_again(engine_id)
        return True

    def _look_again(self, engine_id: str) -> None:
        if self._probes.links.should_probe(engine_id, time.monotonic()):
            self._probes.start(engine_id)

    def _suspect(self, engine_id: str) -> None:
        if self._probes.links.suspect(engine_id, time.monotonic()):
            self._probes.start(engine_id)

    def _megabytes(self, order: ReadBack) -> float:
        blocks = len(order.local_block_ids) * self._physical_blocks_per_logical_kv_block
        return blocks * self._block_megabytes()

    def _is_same(self, engine_id: str, read: _Read) -> bool:
        """Whether HOLD was answered by the process whose memory NIXL would read."""
        source = read.order.source
        if not self.is_met(engine_id, (source.host, source.port), read.agents):
            return False
        # It may have been met by a handover whose params lied about its size.
        assert self.transfer_topo is not None  # set with the caches, before any request
        met_as: int = self.transfer_topo.get_engine_info(engine_id).remote_tp_size
        return met_as == read.tp_size

    def busy_engines(self) -> set[str]:
        reading = (_State.READING, _State.CONFIRMING)
        read_from = {
            read.order.source.engine_id for read in self._reads.values() if read.state in reading
        }
        return super().busy_engines() | self._given_up.engines() | read_from

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._pace.forget(engine_id)
        self._unmet.discard(engine_id)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    ############################################################
    # READ
    ############################################################

    def _read(self, request_id: str) -> None:
        """Post what D holds, from each of its ranks that has a part of it, or lose it."""
        read, meta = self._reads[request_id], self._recving_metadata[request_id]
        assert self.transfer_topo is not None  # set with the caches, before any request
        assert meta.remote is not None  # as ordered
        engine_id = meta.remote.engine_id
        self._engine_last_active[engine_id] = time.perf_counter()
        remote = self.transfer_topo.get_engine_info(engine_id)
        if self.transfer_topo.block_size_ratio(remote.remote_block_size) != 1:
            self._lose(request_id, Reason.BLOCK_SIZE)
            return
        theirs = self._logical_to_kernel_block_ids(
            meta.remote.block_ids, remote.remote_physical_blocks_per_logical
        )
        blocks = self.dst_num_blocks[engine_id]
        if any(not 0 <= k < blocks for group in theirs for k in group):
            self._lose(request_id, Reason.HOLD_LOST)
            return
        try:
            pairs = in_order(meta.local_physical_block_ids, theirs)
        except ValueError:
            self._lose(request_id, Reason.UNSUPPORTED)
            return
        # No notification: a finished read ends nothing on D, where siblings may read too.
        parts = self._from_each_rank(engine_id, pairs)
        if parts is None:
            self._lose(request_id, Reason.UNSUPPORTED)
            return
        read.megabytes = self._megabytes(read.order)
        read.posted = time.monotonic()
        read.deadline = read.posted + self._pace.bound(engine_id, read.megabytes)
        read.state = _State.READING
        self._recving_transfers.setdefault(request_id, [])
        for rank, part in parts:
            if read.state is _State.READING:
                self._post(request_id, engine_id, rank, part)

    ############################################################
    # CONFIRM
    ############################################################

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> set[str]:
        done: set[str] = set()
        for request_id in list(transfers):
            # One by one, so that what is recorded can be told apart.
            began = time.perf_counter()
            self.xfer_stats.about(
                READ_BACK if request_id in self._reads else HANDOVER, self._read_from(request_id)
            )
            one = {request_id: transfers.pop(request_id)}
            done |= super()._pop_done_transfers(one)
            transfers.update(one)
            if request_id in self._reads and request_id in done:
                self._reads[request_id].engine_s += time.perf_counter() - began
        for request_id in [name for name in transfers if self._is(name, _State.LOST)]:
            # A part of it has failed: nobody waits for the rest.
            self._give_up(request_id, transfers.pop(request_id))
        for request_id in list(done):
            if self._is(request_id, _State.READING):
                done.discard(request_id)
                self._transferred(self._reads[request_id], request_id)
        for request_id, asked in drain(self._questions.confirms):
            if not self._is(request_id, _State.CONFIRMING):
                continue
            self._reads[request_id].confirm_s = asked.seconds
            if asked.stood:
                done.add(request_id)
            else:
                self._lose(request_id, asked.reason or Reason.HOLD_LOST)
        return self._claimed(done)

    def _read_from(self, request_id: str) -> str:
        meta = self._recving_metadata.get(request_id)
        return meta.remote.engine_id if meta is not None and meta.remote is not None else ""

    def _transferred(self, read: _Read, request_id: str) -> None:
        now = time.monotonic()
        read.transfer_s = now - read.posted
        engine_id, compute_s = read.order.source.engine_id, read.order.compute_s
        self._pace.measured(engine_id, read.megabytes, read.transfer_s)
        self._probes.links.achieved(engine_id, read.megabytes, read.transfer_s)
        if compute_s is not None and read.transfer_s > compute_s:
            self._suspect(engine_id)
        read.state, read.deadline = _State.CONFIRMING, now + self._timeout_s
        self._questions.confirm(request_id, read.order.source, read.epoch)

    def get_finished(self) -> tuple[set[str], set[str]]:
        sent, received = super().get_finished()
        self._note(received)
        return sent, received

    def _note(self, received: set[str]) -> None:
        """News for the scheduler at a step's end, of requests whose loads are over and others."""
        for request_id in received:
            self._note_outcome(request_id)
        self._report.failed |= self._failed_of(received)
        self._note_ended_writers()

    def _note_outcome(self, request_id: str) -> None:
        read = self._reads.pop(request_id, None)
        if read is None:
            return
        self._report.outcomes[request_id] = Outcome(
            read.lost,
            0.0 if read.lost else read.megabytes,
            read.hold_s,
            read.transfer_s,
            read.confirm_s,
            read.engine_s,
        )

    def _note_ended_writers(self) -> None:
        for request_id in self._given_up.ended():
            self._count_writer(request_id, -1)

    def take_report(self) -> WorkerReport | None:
        """News since the last call, for the scheduler; None if there are none."""
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    ############################################################
    # Loss
    ############################################################

    def _lose(self, request_id: str, reason: Reason) -> None:
        """Give a read-back up; its blocks count as not loaded, and P computes them."""
        self._mark_lost(self._reads[request_id], reason)
        self._handle_failed_transfer(request_id, None)

    def _mark_lost(self, read: _Read, reason: Reason) -> None:
        """Also tell D, whose lease a hold pins, unless that is under way."""
        if read.epoch and read.state in (_State.ASKING, _State.MEETING, _State.READING):
            self._questions.let_go(read.order.source, read.epoch)
        read.lost, read.state = reason, _State.LOST

    def _overdue(self, request_id: str, read: _Read) -> None:
        if read.state is not _State.ASKING:
            # While it was being asked the peer may not even have been reached yet.
            self._questions.not_heard((read.order.source.host, read.order.source.port))
        if read.state is _State.READING:
            self._give_up(request_id, self._recving_transfers.pop(request_id))
            self._suspect(read.order.source.engine_id)
            logger.warning(
                "read-back req=%s: %.1f MB have not arrived within %.1f s; the READ is given up",
                request_id,
                read.megabytes,
                time.monotonic() - read.posted,
            )
        self._lose(request_id, Reason.TIMEOUT)

    def _give_up(self, request_id: str, handles: list[Any]) -> None:
        """What NIXL has begun cannot be stopped; the blocks stay its own until it has ended."""
        engine_id = self._reads[request_id].order.source.engine_id
        posts = self._poster.give_up(request_id)
        self._given_up.add(request_id, engine_id, [*handles, *posts])
        self._count_writer(request_id, 1)

    def _count_writer(self, request_id: str, change: int) -> None:
        writers = self._report.writers
        writers[request_id] = writers.get(request_id, 0) + change

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        read = self._reads.get(req_id)
        if read is not None and read.state is not _State.LOST:
            # The base found it: a transfer that failed.
            self._mark_lost(read, Reason.TRANSFER_FAILED)
        super()._handle_failed_transfer(req_id, handle)
