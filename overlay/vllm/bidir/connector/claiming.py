# SPDX-License-Identifier: Apache-2.0
"""Handovers that count only when P has said that its blocks stood until they were read (handed.py).

    READ posted --------------------> READ done --> counts, and P is told that it may free them
         \\--CLAIM--> "for 25 s" or "gone" --/  \\--> lost: as a load that has failed

P is asked while NIXL reads, so that nobody waits for its answer. It says for how long the blocks
stay at the least; a READ that ends later is asked about again, when it has ended. P hears that it
may free them only then: NIXL itself would tell it with the READ's last byte, and P cannot vouch for
what it has freed. Where D needs none of the blocks it tells P so, and claims them all the same:
they may be another's, to whom a router has turned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.bidir.connector.peer import Asked
from vllm.bidir.connector.questions import Questions, drain
from vllm.bidir.connector.reading import ReadingWorker
from vllm.bidir.connector.stats import BidirStats
from vllm.bidir.reasons import Reason
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        RemoteMeta,
        ReqMeta,
    )

logger = init_logger(__name__)


@dataclass
class _Claim:
    """A handover that is being read, or of which nothing is needed (not `reads`). `notices` are for
    the ranks of P that it is read from, by rank; `read_at` (monotonic seconds) is when all of it
    was found to be there."""

    remote: RemoteMeta
    reads: bool
    notices: list[tuple[int, bytes]] = field(default_factory=list)
    answer: Asked | None = None
    read_at: float | None = None

    def is_of(self, other: _Claim) -> bool:
        """Whether both read the same blocks of P, for two requests of one client's."""
        mine, theirs = self.remote, other.remote
        return (mine.engine_id, mine.request_id) == (theirs.engine_id, theirs.request_id)


class ClaimingWorker(ReadingWorker):
    """Reads handovers, and claims those of a P that answers.

    What the base pairs by rules of its own (reading.py) is read unclaimed, as from a stock P.
    """

    xfer_stats: BidirStats

    def _set_up(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._questions = Questions(timeout_s)
        # Ordered, and not yet posted.
        self._claimable: set[str] = set()
        self._claims: dict[str, _Claim] = {}

    def shutdown(self) -> None:
        if hasattr(self, "_questions"):
            self._questions.close()
        super().shutdown()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """`metadata.claims` are the requests whose P can be asked; other fields as the base."""
        claims: set[str] = getattr(metadata, "claims", set())
        self._claimable |= claims
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        claim = None
        if req_id in self._claimable:
            self._claimable.discard(req_id)
            assert meta.remote is not None  # as ordered
            claim = self._claims[req_id] = _Claim(meta.remote, any(map(len, meta.local_block_ids)))
            if not claim.reads:
                claim.read_at = time.monotonic()
        super()._read_blocks_for_req(req_id, meta)
        if claim is not None and not claim.notices:
            # It has failed, or is read as the base reads it.
            self._claims.pop(req_id, None)

    def _told_by_read(self, request_id: str, rank: int, notice: bytes) -> bytes | None:
        claim = self._claims.get(request_id)
        if claim is None:
            return notice
        if not claim.notices:
            self._ask(request_id, claim)
        claim.notices.append((rank, notice))
        return None

    def _ask(self, request_id: str, claim: _Claim) -> None:
        remote = claim.remote
        claim.answer = None
        # All ranks of an engine are one reader: P waits until each has said that it is done.
        address = (remote.host, remote.port)
        self._questions.claim(request_id, address, remote.request_id, self.engine_id)

    def _claimed(self, done: set[str]) -> set[str]:
        """Of the requests whose READs are done, and of those that were: which count now."""
        for request_id, asked in drain(self._questions.claims):
            self._questions.note(asked)
            claim = self._claims.get(request_id)
            if claim is not None:
                claim.answer = asked
        if not self._claims:
            return done
        now = time.monotonic()
        for request_id in done & self._claims.keys():
            self._claims[request_id].read_at = now
            done.discard(request_id)
        for request_id, claim in list(self._claims.items()):
            if claim.read_at is not None and self._counts(request_id, claim, claim.read_at, now):
                if claim.reads:
                    done.add(request_id)
                del self._claims[request_id]
                self._tell(request_id, claim)
        return done

    def _counts(self, request_id: str, claim: _Claim, read_at: float, now: float) -> bool:
        """Whether P's blocks stood until they had been read; if they did not, it is lost."""
        answer = claim.answer
        if answer is None:
            # Twice: another P that is silent may keep the threads for as long.
            if now > read_at + 2 * self._timeout_s:
                self._lose_handover(request_id, Reason.TIMEOUT)
            return False
        if answer.stands_s is None:
            self._lose_handover(request_id, answer.reason or Reason.EXPIRED)
            return False
        if read_at <= answer.asked + answer.stands_s:
            return True
        self._ask(request_id, claim)
        return False

    def _lose_handover(self, request_id: str, reason: Reason) -> None:
        if not self._claims[request_id].reads:
            del self._claims[request_id]  # P frees it without this one's word
            return
        logger.warning(
            "handover req=%s peer=%s: P does not say that its blocks stood until they were read; "
            "they count as not loaded, reason=%s",
            request_id,
            self._claims[request_id].remote.engine_id,
            reason,
        )
        self.xfer_stats.record_lost_handover(str(reason))
        self._handle_failed_transfer(request_id, None)

    def _tell(self, request_id: str, claim: _Claim) -> None:
        """P may free what has been read, unless another request of this engine still reads it."""
        if any(other.is_of(claim) for other in self._claims.values()):
            return
        for rank, notice in claim.notices:
            agent = self._remote_agents[claim.remote.engine_id][0, rank]
            try:
                self.nixl_wrapper.send_notif(agent, notif_msg=notice)
            except Exception as error:
                self._log_failure(
                    failure_type="notification_failed",
                    req_id=request_id,
                    msg="P frees the blocks when their time is over",
                    error=error,
                    dst_engine_id=claim.remote.engine_id,
                    remote_rank=rank,
                )
                self.xfer_stats.record_failed_notification()

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> None:
        self._claimable.discard(req_id)
        self._claims.pop(req_id, None)
        super()._handle_failed_transfer(req_id, handle)

    def busy_engines(self) -> set[str]:
        claimed = {claim.remote.engine_id for claim in list(self._claims.values())}
        return super().busy_engines() | claimed
