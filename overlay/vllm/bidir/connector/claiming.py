# SPDX-License-Identifier: Apache-2.0
"""Handovers that count only when P has said that its blocks stood until they were read (handed.py).

    READ posted --------------------> READ done --> counts, and P is told that it may free them
         \\--CLAIM--> "for 25 s" or "gone" --/  \\--> lost: as a load that has failed

What is claimed are these blocks of this request of P's, for this prompt (binding.py): P knows what
it has handed over, and D knows only what came with its own request. So nothing is read unclaimed of
a P that binds claims, and P is told nothing in the name of a request that was not claimed.

P is asked while NIXL reads: its answer is waited for only where that takes longer. It says for how
long the blocks stay at the least; a READ that ends later is asked about again, when it has ended.

That time ends with this engine's own word that P may free them. So P hears it only when the load
counts, where NIXL itself would tell it with the READ's last byte; and once it has been said,
whatever this rank reads of the same handover has no promise, and is asked about afterwards. Where D
needs none of the blocks it tells P so, and claims them all the same: they may be another D's, to
whom a router has turned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.bidir.connector.binding import binding
from vllm.bidir.connector.outcome import LostHandover, WorkerReport
from vllm.bidir.connector.peer import Asked
from vllm.bidir.connector.questions import Questions, drain
from vllm.bidir.connector.reading import ReadingWorker
from vllm.bidir.reasons import Reason
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.bidir.connector.meeting import Address
    from vllm.bidir.connector.stats import BidirStats
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        RemoteMeta,
        ReqMeta,
    )

logger = init_logger(__name__)

# Of so many handovers it is remembered that P has been told.
_TOLD = 4096
# Answers that asking once more would not change.
_FINAL = (Reason.EXPIRED, Reason.NOT_HANDED_OVER)


@dataclass(frozen=True)
class ClaimOrder:
    """What the scheduler tells its workers: P's token, this engine's name as a reader, and a digest
    of the prompt that it is to answer."""

    token: str
    reader: str
    prompt: bytes


@dataclass
class _Claim:
    """A handover that is being read, or of which nothing is needed (not `reads`).

    `address` is where its engine was met, which the params need not say; `binding` names what they
    do say, and for which prompt. `notices` are for the ranks of P that it is read from, by
    rank. `asked_at` and `read_at` (monotonic seconds): when P was asked last, and when all of it
    was found to be there. `insists`: P has been asked once more, since it had not answered.
    """

    order: ClaimOrder
    remote: RemoteMeta
    reads: bool
    address: Address
    binding: bytes
    notices: list[tuple[int, bytes]] = field(default_factory=list)
    answer: Asked | None = None
    asked_at: float = 0.0
    read_at: float | None = None
    insists: bool = False


class ClaimingWorker(ReadingWorker):
    """Reads handovers, and claims those of a P that answers."""

    xfer_stats: BidirStats

    def _set_up(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._questions = Questions(timeout_s)
        self._report = WorkerReport()
        # Ordered, and not yet posted.
        self._claimable: dict[str, ClaimOrder] = {}
        self._claims: dict[str, _Claim] = {}
        # The request whose READs are being posted, if it claims.
        self._posting: str | None = None
        # By token: handovers that P has been told of; and those that are done but for a sibling.
        self._told: dict[str, None] = {}
        self._owed: dict[str, _Claim] = {}

    def shutdown(self) -> None:
        if hasattr(self, "_questions"):
            self._questions.close()
        super().shutdown()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """`metadata.claims`: of the requests whose P can be asked; other fields as the base."""
        claims: dict[str, ClaimOrder] = getattr(metadata, "claims", {})
        self._claimable.update(claims)
        if self._claims:
            self._take_answers()
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        order = self._claimable.pop(req_id, None)
        remote, reads = meta.remote, any(map(len, meta.local_block_ids))
        assert remote is not None  # as ordered
        # Read once, before it is asked whether it binds claims: it may be met at this moment.
        address = self._addresses.get(remote.engine_id)
        if address is None:
            self._handle_failed_transfer(req_id, None)  # forgotten since
            return
        if not self.binds_claims(remote.engine_id):
            super()._read_blocks_for_req(req_id, meta)  # stock: as the base reads it
            return
        if order is None:
            self._refuse_unclaimed(req_id, remote.engine_id, reads)
            return
        claim = _Claim(
            order,
            remote,
            reads,
            address,
            # Before the base puts kernels' blocks in their place.
            binding(remote.request_id, remote.block_ids, order.prompt),
        )
        if not claim.reads:
            claim.read_at = time.monotonic()
        self._claims[req_id], self._posting = claim, req_id
        super()._read_blocks_for_req(req_id, meta)
        self._posting = None
        if not claim.notices:
            # It has failed.
            self._claims.pop(req_id, None)

    def _told_by_read(self, request_id: str, rank: int, notice: bytes) -> bytes | None:
        claim = self._claims.get(request_id)
        if claim is None:
            # Not even by what is still posted of one that has failed on another rank.
            return None if request_id == self._posting else notice
        if not claim.notices:
            self._ask(request_id, claim)
        claim.notices.append((rank, notice))
        return None

    def _ask(self, request_id: str, claim: _Claim) -> None:
        claim.answer, claim.asked_at = None, time.monotonic()
        order = claim.order
        self._questions.claim(
            request_id, claim.address, order.token, order.reader, claim.binding, claim.insists
        )

    def _take_answers(self) -> None:
        for request_id, asked in drain(self._questions.claims):
            claim = self._claims.get(request_id)
            if claim is not None and asked.asked >= claim.asked_at:
                claim.answer = asked

    def _claimed(self, done: set[str]) -> set[str]:
        """Of the requests whose READs are done, and of those that were: which count now."""
        if not self._claims:
            return done
        self._take_answers()
        now = time.monotonic()
        for request_id in done & self._claims.keys():
            self._claims[request_id].read_at = now
            done.discard(request_id)
        for request_id, claim in list(self._claims.items()):
            if claim.read_at is not None and self._counts(request_id, claim, claim.read_at, now):
                if claim.reads:
                    done.add(request_id)
                del self._claims[request_id]
                self._owed[claim.order.token] = claim
                self._tell(claim.order.token)
        return done

    def _counts(self, request_id: str, claim: _Claim, read_at: float, now: float) -> bool:
        """Whether P's blocks stood until they had been read; if they did not, it is lost."""
        answer = claim.answer
        if answer is None:
            # Twice: it may have had to wait for a thread.
            if now > max(read_at, claim.asked_at) + 2 * self._timeout_s:
                self._lose_handover(request_id, claim, Reason.TIMEOUT)
            return False
        if answer.stands_s is None:
            if answer.reason in _FINAL or claim.insists:
                self._lose_handover(request_id, claim, answer.reason or Reason.EXPIRED)
            else:
                # It was busy, or another that was has had it taken for silent.
                claim.insists = True
                self._ask(request_id, claim)
            return False
        stands_s = 0.0 if claim.order.token in self._told else answer.stands_s
        if read_at <= answer.asked + stands_s:
            return True
        self._ask(request_id, claim)
        return False

    def _lose_handover(self, request_id: str, claim: _Claim, reason: Reason) -> None:
        if claim.reads:
            self._report.lost[request_id] = LostHandover(claim.remote.engine_id, reason)
            self._handle_failed_transfer(request_id, None)
            return
        if reason is Reason.NOT_HANDED_OVER:
            _log_untold(request_id)
        self._drop_claim(request_id)  # P frees it without this one's word

    def _refuse_unclaimed(self, request_id: str, engine_id: str, reads: bool) -> None:
        """Its params came without the token that this P gives with all that it hands over."""
        if reads:
            self._report.lost[request_id] = LostHandover(engine_id, Reason.NOT_HANDED_OVER)
        else:
            _log_untold(request_id)
        self._handle_failed_transfer(request_id, None)

    def _tell(self, token: str) -> None:
        """P may free what has been read, unless another request of this rank still reads it."""
        if any(other.order.token == token for other in self._claims.values()):
            return
        claim = self._owed.pop(token, None)
        if claim is None or token in self._told:
            return
        if len(self._told) >= _TOLD:
            del self._told[next(iter(self._told))]
        self._told[token] = None
        engine_id = claim.remote.engine_id
        for rank, notice in claim.notices:
            try:
                agent = self._remote_agents[engine_id][0, rank]
                self.nixl_wrapper.send_notif(agent, notif_msg=notice)
            except Exception as error:
                # Of the base's kind, with its counter: P frees the blocks when their time is over.
                logger.warning("engine %s is not told that it may free: %r", engine_id, error)
                self.xfer_stats.record_failed_notification()

    def _drop_claim(self, request_id: str) -> None:
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            self._tell(claim.order.token)

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        """May be called by a handshake's thread, of a request that has no claim yet."""
        self._claimable.pop(req_id, None)
        self._drop_claim(req_id)
        super()._handle_failed_transfer(req_id, handle)

    def busy_engines(self) -> set[str]:
        reading = {one.remote.engine_id for one in list(self._claims.values()) if one.reads}
        return super().busy_engines() | reading


def _log_untold(request_id: str) -> None:
    """Of a handover of which nothing is needed; the scheduler logs the others."""
    logger.warning(
        "handover req=%s: P has not handed over what its params name, and is not told that it "
        "may free it",
        request_id,
    )
