# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of verified read-back: D keeps and proves turns, P decides what to read.

Handovers, too: P notes which it keeps for a D, and D which it can ask P about (handed.py).

On D, `request_finished` makes proof and lease of a turn. On P, `get_num_new_matched_tokens`
answers from the proof, `update_state_after_alloc` takes the one attempt that a request has, and
`build_connector_meta` orders it from the workers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector import agents, greeting, handed, support
from vllm.bidir.connector.binding import binding, prompt_digest
from vllm.bidir.connector.claiming import ClaimOrder
from vllm.bidir.connector.decision import Match, gain, match
from vllm.bidir.connector.failed_loads import FailedLoads
from vllm.bidir.connector.fingerprint import fingerprint
from vllm.bidir.connector.given_up import WrittenBlocks
from vllm.bidir.connector.handed import HandedOver
from vllm.bidir.connector.kept import KeptTurn, KeptTurns, new_lease_id
from vllm.bidir.connector.leases import LeaseOptions, Leases
from vllm.bidir.connector.listener import start_listener
from vllm.bidir.connector.messages import SideChannel
from vllm.bidir.connector.options import read_options
from vllm.bidir.connector.outcome import LostHandover, Outcome, WorkerReport
from vllm.bidir.connector.placing import last_blocks, only_group, place
from vllm.bidir.connector.proof import make_proof
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.rest import Rest
from vllm.bidir.connector.speed import PrefillSpeed
from vllm.bidir.connector.stats import BidirStats
from vllm.bidir.connector.window import misses_last_tokens
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_ENDED_BY_ITSELF = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class BidirScheduler(NixlPullConnectorScheduler):
    """As the base's pull scheduler, but reads back by content instead of by count."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.kept = KeptTurns(_leases(vllm_config, kv_cache_config))
        self.stats = BidirStats()
        self._total_blocks = kv_cache_config.num_blocks
        self._rank = vllm_config.parallel_config.data_parallel_index
        self._fingerprint = ""
        self._weight_version = "default"  # the engine core's own first word
        self._listening = False
        self._matches: dict[str, Match] = {}
        # Tokens that P had itself when it was last asked; the blocks no longer tell, once those
        # that are still to be computed have been allocated.
        self._local: dict[str, int] = {}
        self._attempted: set[str] = set()
        # Ordered in this step; and all whose workers have not reported yet.
        self._read_backs: dict[str, ReadBack] = {}
        self._orders: dict[str, ReadBack] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._named_agents: dict[str, tuple[bytes, ...]] = {}
        # Those whose P can be asked whether it still has them; those that a rank has lost.
        self._claims: dict[str, ClaimOrder] = {}
        self._lost: dict[str, LostHandover] = {}
        self.failed_loads = FailedLoads()
        # Another process of the same engine id is another reader, and all ranks are one.
        self._reader = f"{engine_id[:64]}/{secrets.token_hex(8)}"
        self.handed = HandedOver()
        self._speed = PrefillSpeed()
        # Of the request that is asked about next: the scheduler goes through them one by one.
        self._placing_s = 0.0
        self._agents: list[bytes] = []
        # Turns that were ended here, whose workers have not let go yet.
        self._ended: set[str] = set()
        self._told: dict[str, dict[str, Any] | None] | None = None
        self.written = WrittenBlocks()
        self.rest = Rest(self.written, leases_left=self.kept.seconds_left)
        self._obstacle = support.engine_obstacle(vllm_config, kv_cache_config, self.use_host_buffer)
        if self._obstacle is not None:
            logger.warning(
                "No read-back on this engine: %s. Prompts are computed; all else works.",
                self._obstacle,
            )

    ############################################################
    # P: what to read back
    ############################################################

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            if self._misses_last_tokens(request):
                return 0, False  # D computes it; P is told that it may free it
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id in self._attempted:
            return 0, False
        self._local[request.request_id] = num_computed_tokens
        gained, _ = gain(self._match(request), num_computed_tokens, self.kv_recompute_threshold)
        return gained, gained > 0

    def _misses_last_tokens(self, request: Request) -> bool:
        """Whether D would load a handover, and answer wrong from it (window.py)."""
        params, tokens = request.kv_transfer_params, len(request.prompt_token_ids or ())
        return (
            bool(params and params.get("do_remote_prefill"))
            # Less than all is loaded of others: the rest is computed as after a prefix hit.
            and self._get_remote_prefill_token_count(tokens) == tokens
            and misses_last_tokens(self.kv_cache_config, tokens)
        )

    def _match(self, request: Request) -> Match:
        """What the request's source verifiably holds; reckoned once, without side effects."""
        found = self._matches.get(request.request_id)
        if found is None:
            found = self._matches[request.request_id] = self._find_match(request)
        return found

    def _find_match(self, request: Request) -> Match:
        params = request.kv_transfer_params
        assert params is not None  # callers have looked
        if self._obstacle is not None or support.request_obstacle(request) is not None:
            asked = params.get("lease_id") is not None
            return Match(None, 0, Reason.UNSUPPORTED if asked else Reason.NO_PROOF)
        token_ids = request.prompt_token_ids
        assert token_ids is not None  # else an obstacle
        if params.get("remote_engine_id") == self.engine_id:
            # One engine for both roles: its own prefix cache is all there is to gain.
            return Match(None, 0, Reason.UNSUPPORTED)
        return match(
            params,
            self._own_fingerprint(),
            self.block_size,
            request.block_hashes,
            token_ids,
            support.text_until(request),
        )

    def _own_fingerprint(self) -> str:
        # The hash seed is settled after the scheduler has been made, before any request comes.
        if not self._fingerprint:
            self._fingerprint = fingerprint(self.vllm_config, self._weight_version)
        return self._fingerprint

    def weights_changed(self, weight_version: str) -> None:
        """What peers keep may have been computed with other weights."""
        self._weight_version, self._fingerprint = weight_version, ""
        self._matches.clear()

    def end_kept_turns(self) -> list[str]:
        """End all turns that are kept, and leave their blocks to the caller: the requests' ids."""
        return self.ended(self.kept.end_all())

    def ended(self, request_ids: list[str]) -> list[str]:
        """Turns that are kept no longer, and whose blocks the caller frees.

        Without leases the workers watch their time: they are told, and what they say of these
        requests afterwards counts no more.
        """
        for request_id in request_ids:
            self.rest.end(request_id)
            if not self.kept.leased:
                self._reqs_need_send[request_id] = time.perf_counter()
                self._ended.add(request_id)
        if request_ids:
            self.stats.record_leases(self.totals())
        return request_ids

    def leases_over(self) -> list[str]:
        """Requests whose leases are over, and whose blocks the caller frees."""
        return self.ended(self.kept.over())

    def reclaim(self, blocks: int) -> list[str]:
        """The same, of leases that make room for so many blocks that running requests need."""
        return self.ended(self.kept.reclaim(blocks))

    def totals(self) -> dict[str, Any]:
        """What is kept and has happened to leases, for metrics and HTTP."""
        found = asdict(self.kept.totals())
        return {
            "mode": "lease" if self.kept.leased else "fixed",
            "budget_blocks": found.pop("budget"),
            "total_blocks": self._total_blocks,
            **found,
        }

    def place(self, request: Request, table: list[KVCacheBlock], num_external_tokens: int) -> None:
        """Order the request's new blocks in its block table, before anybody is told of them.

        By what the params say of the peer's. What is read in the end is the peer's own word.
        """
        began = time.perf_counter()
        params = request.kv_transfer_params or {}
        theirs = params.get("remote_block_ids")
        if params.get("do_remote_decode") and request.request_id not in self._attempted:
            blocks, total = only_group(theirs), self._match(request).tokens
            first = (total - num_external_tokens) // self.block_size
            end = -(-total // self.block_size)
            if blocks is not None and 0 <= first < end:
                place(table, first, blocks[first:end])
            self._placing_s = time.perf_counter() - began
        elif params.get("do_remote_prefill"):
            place(table, *last_blocks(table, theirs))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            if request.request_id not in self._attempted:
                self._attempt(request, blocks, num_external_tokens)
            elif num_external_tokens == 0:
                # Behind a read-back: what is computed is all if that was lost.
                self._begin_computing(request)
            # The base would read by count; this tells it that there is nothing to do. Both words
            # at once would have it read what the params name, past all verification.
            params["_remote_blocks_processed"] = True
            params["do_remote_prefill"] = False
        elif params and params.get("do_remote_prefill"):
            named = agents.parse_agents(params.get(agents.PARAM))
            if named is not None:
                self._named_agents[request.request_id] = named
            if self._claim(request) and num_external_tokens == 0:
                self.rest.look_again()
            if self._misses_last_tokens(request):
                self.stats.record_lost_handover(str(Reason.WINDOW))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _claim(self, request: Request) -> bool:
        """Have the workers claim its handover, if P can be asked."""
        token = handed.parse_token((request.kv_transfer_params or {}).get(handed.PARAM))
        if token is not None:
            # What D would load, were all of it there; P's own count of a prompt is the same.
            tokens = self._get_remote_prefill_token_count(len(request.prompt_token_ids or ()))
            prompt = prompt_digest(request, tokens)
            self._claims[request.request_id] = ClaimOrder(token, self._reader, prompt)
        return token is not None

    def _attempt(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Take the request's one attempt: order the read, or count why there is none."""
        self._attempted.add(request.request_id)
        matched = self._match(request)
        if num_external_tokens == 0:
            self._begin_computing(request)
            self._refuse(request, matched, self._local.pop(request.request_id, 0))
            return
        assert matched.source is not None  # else no tokens had been reported
        total = matched.tokens
        local = total - num_external_tokens
        assert local % self.block_size == 0, "the scheduler reports whole local blocks"
        first, end = local // self.block_size, -(-total // self.block_size)
        (block_ids,) = blocks.get_block_ids()
        order = ReadBack(
            source=matched.source,
            digest=matched.source.proof.digest(),
            first_block=first,
            local_block_ids=tuple(block_ids[first:end]),
            prompt=request.num_prompt_tokens,
            local=local,
            verified=matched.tokens,
            total=total,
            compute_s=self._speed.seconds(num_external_tokens),
            placing_s=self._placing_s,
        )
        self._read_backs[request.request_id] = self._orders[request.request_id] = order

    def _begin_computing(self, request: Request) -> None:
        """Time it, unless somebody loads a part of it: another connector, or a read-back."""
        stats = request.prefill_stats
        if request.num_preemptions:
            # Its statistics are of the first time; a part of it may be in the prefix cache now.
            self._speed.dropped(request.request_id)
        elif stats is not None and not stats.num_external_cached_tokens:
            self._speed.began(request.request_id, stats.num_computed_tokens, time.monotonic())

    def _refuse(self, request: Request, matched: Match, local: int) -> None:
        reason = matched.reason if matched.tokens == 0 else Reason.BELOW_THRESHOLD
        if matched.source is None and reason is Reason.NO_PROOF:
            params = request.kv_transfer_params or {}
            if not params.get("remote_block_ids"):
                return  # a first turn: nothing was offered, so nothing is refused
        reason = reason or Reason.BELOW_THRESHOLD
        computed = request.num_prompt_tokens - local
        self.stats.record_refusal(str(reason), matched.tokens, computed)
        logger.info(
            "read-back req=%s peer=%s prompt=%d local=%d verified=%d read=0 computed=%d "
            "outcome=recompute reason=%s",
            request.request_id,
            matched.source.engine_id if matched.source else "-",
            request.num_prompt_tokens,
            local,
            matched.tokens,
            computed,
            reason,
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        # Beside the base's own orders; its class travels unchanged.
        meta.read_backs, self._read_backs = self._read_backs, {}
        meta.agents, self._named_agents = self._named_agents, {}
        meta.claims, self._claims = self._claims, {}
        self.rest.stepped()
        return meta

    def _decided(self, request_id: str, order: ReadBack, outcome: Outcome) -> None:
        """All ranks have reported: count and log what has become of the read-back."""
        taken = 0 if outcome.lost else order.total - order.local
        computed = order.prompt - order.local - taken
        if outcome.lost:
            self.stats.record_lost(str(outcome.lost), order.verified, computed)
        else:
            self.stats.record_read(order.verified, taken, computed)
        logger.info(
            "read-back req=%s peer=%s prompt=%d local=%d verified=%d read=%d computed=%d "
            "blocks=%d mb=%.1f hold_ms=%.1f transfer_ms=%.1f confirm_ms=%.1f engine_ms=%.1f "
            "outcome=%s",
            request_id,
            order.source.engine_id,
            order.prompt,
            order.local,
            order.verified,
            taken,
            computed,
            len(order.local_block_ids),
            outcome.megabytes,
            outcome.hold_s * 1000,
            outcome.transfer_s * 1000,
            outcome.confirm_s * 1000,
            (outcome.engine_s + order.placing_s) * 1000,
            f"recompute reason={outcome.lost}" if outcome.lost else "read",
        )

    ############################################################
    # D: keep and prove finished turns
    ############################################################

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._matches.pop(request.request_id, None)
        self._local.pop(request.request_id, None)
        self._attempted.discard(request.request_id)
        self._note_speed(request)
        unread = (request.kv_transfer_params or {}).get("do_remote_prefill")
        if unread and self._claim(request):
            # It was aborted before it was scheduled: P is told that it may free its blocks.
            self.rest.look_again()
        keeps, params = super().request_finished(request, block_ids)
        if params is not None:
            if params["do_remote_prefill"]:
                # P's answer: a router gives D's state only to a P that verifies it.
                params = {**params, "readback": 1, agents.PARAM: agents.to_params(self._agents)}
                if keeps:
                    until = self._reqs_need_send[request.request_id]
                    # All of it: a Mamba model's has lost its last token on P.
                    prompt = prompt_digest(request, request.num_prompt_tokens)
                    named = binding(params["remote_request_id"], params["remote_block_ids"], prompt)
                    params[handed.PARAM] = self.handed.add(request.request_id, until, named)
                # Its reader may be done at any time.
                due, interval = 0.0, self._kv_lease_duration / 10
            else:
                if keeps:
                    keeps, params = self._finished_on_decode(request, params)
                # The workers' time starts a moment later, when they hear of it.
                due = self._reqs_need_send.get(request.request_id, 0.0) + 0.1
                interval = self.decoder_kv_blocks_ttl / 10
            if keeps and request.request_id in self._reqs_need_send:
                self.rest.begin(request.request_id, due, interval)
            elif keeps:
                self.rest.begin_lease(request.request_id)
        if self._told is not None:
            self._told[request.request_id] = params
        return keeps, params

    def _note_speed(self, request: Request) -> None:
        """How long computing its prompt has taken, if it has been computed.

        An aborted request's tokens count as computed as soon as they are scheduled.
        """
        if request.status in _ENDED_BY_ITSELF:
            self._speed.ended(request.request_id, time.monotonic())
        else:
            self._speed.dropped(request.request_id)

    @contextmanager
    def telling(self) -> Iterator[dict[str, dict[str, Any] | None]]:
        """The params of what finishes within the block, by request id."""
        told: dict[str, dict[str, Any] | None] = {}
        self._told = told
        try:
            yield told
        finally:
            self._told = None

    def _finished_on_decode(
        self, request: Request, params: dict[str, Any]
    ) -> tuple[bool, dict[str, Any] | None]:
        valid = valid_tokens(request)
        proof = None
        # The only group, unless there is an obstacle.
        kept_ids = params["remote_block_ids"][0]
        # Block 0 is the null block: a hole that no position can be read from.
        readable = self._obstacle is None and 0 not in kept_ids
        if readable and support.request_obstacle(request) is None:
            start = support.text_until(request)
            hashed = min(valid // self.block_size, len(request.block_hashes)) * self.block_size
            proof = make_proof(
                self._own_fingerprint(),
                self.block_size,
                request.block_hashes,
                request.all_token_ids,
                valid,
                request.num_prompt_tokens,
                None if start is None or start < hashed else start - hashed,
            )
        if proof is None:
            # Nobody could ever read these blocks: free them now instead of pinning them.
            self._workers_keep_no_time(request.request_id)
            return False, None
        lease_id = new_lease_id(self._rank)
        covered = -(-proof.valid_tokens // self.block_size)
        params = {
            **params,
            "remote_num_tokens": proof.valid_tokens,
            "lease_id": lease_id,
            "prefix_proof": proof.to_params(),
        }
        if self.kept.leased:
            params["lease_duration"] = self.kept.lease_s
            # A stock reader takes a time to come for a promise, and asks nobody: pressure may end
            # any lease before, so it is told not to read.
            params["remote_blocks_expiry_time"] = 0.0
        turn = KeptTurn(
            lease_id,
            request.request_id,
            tuple(kept_ids[:covered]),
            proof.valid_tokens,
            proof.digest(),
            params,
        )
        keeps = self.kept.keep(turn, kept_ids)
        if self.kept.leased:
            self._workers_keep_no_time(request.request_id)
            self.stats.record_leases(self.totals())
        else:
            # The workers end only what they have seen in a batch; a turn that D served alone has
            # not been handed over, and is announced here.
            self._reqs_in_batch.add(request.request_id)
        return (True, params) if keeps else (False, {"reason": str(Reason.BUDGET)})

    def _workers_keep_no_time(self, request_id: str) -> None:
        """When its blocks are freed is decided here alone."""
        del self._reqs_need_send[request_id]
        self._reqs_not_processed.add(request_id)

    ############################################################
    # What workers report
    ############################################################

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # The scheduler frees these blocks right after this call, in the same step.
        sent = connector_output.finished_sending
        if sent and self._ended:
            # Freed here already; the workers have only now let go.
            connector_output.finished_sending = sent - self._ended
            self._ended -= sent
        for request_id in connector_output.finished_sending or ():
            self.kept.end(request_id)
            self.handed.end(request_id)
            self.rest.end(request_id)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._heard(report)
        for request_id in connector_output.finished_recving or ():
            order = self._orders.pop(request_id, None)
            outcome = self._outcomes.pop(request_id, None)
            if order is not None and outcome is not None:
                self._decided(request_id, order, outcome)
            lost = self._lost.pop(request_id, None)
            if lost is not None:
                self._lose_handover(request_id, lost)
        super().update_connector_output(connector_output)

    def _lose_handover(self, request_id: str, lost: LostHandover) -> None:
        self.stats.record_lost_handover(str(lost.reason))
        why = "P does not say that it had the blocks until they were read"
        if lost.reason is Reason.NOT_HANDED_OVER:
            why = "P has not handed over what its params name"
        logger.warning(
            "handover req=%s peer=%s: %s; they count as not loaded, reason=%s",
            request_id,
            lost.engine_id,
            why,
            lost.reason,
        )

    def _heard(self, report: WorkerReport) -> None:
        self._lost |= report.lost
        for request_id, outcome in report.outcomes.items():
            others = self._outcomes.get(request_id)
            self._outcomes[request_id] = others.with_rank(outcome) if others else outcome
        for request_id, change in report.writers.items():
            order = self._orders.get(request_id)
            block_ids = order.local_block_ids if order is not None else ()
            self.written.change(request_id, change, block_ids)

    def recomputes_elsewhere(self, request_id: str) -> bool:
        """Whether a failed load's blocks are still being written, so that others must be used."""
        return request_id in self.written

    def has_pending_push_work(self) -> bool:
        """Asked by an engine that has nothing to run: whether to step all the same."""
        return self.rest.is_due()

    ############################################################
    # The side channel
    ############################################################

    def set_xfer_handshake_metadata(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve handshakes, HOLD, CONFIRM and CLAIM from one thread that no message can end."""
        for payload in metadata.values():
            if not isinstance(payload, NixlHandshakePayload):
                raise ValueError(f"expected a NixlHandshakePayload, found {type(payload)}")
        if self._listening:
            return
        self._listening = True
        self._agents = own_agents(metadata)
        channel = SideChannel(
            self.kept,
            self.engine_id,
            self.vllm_config.parallel_config.tensor_parallel_size,
            greeting.payloads(metadata),
            GET_META_MSG,
            time.perf_counter,
            self._agents,
            self.handed,
        )
        self._nixl_handshake_listener_t = start_listener(
            channel, self.side_channel_host, self.side_channel_port, self._stop_event
        )


def _leases(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Leases | None:
    """The leases that the options ask for; None to keep turns for a fixed time."""
    assert vllm_config.kv_transfer_config is not None  # else no connector
    options = read_options(vllm_config.kv_transfer_config)
    if options.lease_s is None:
        return None
    # Block 0 is the null block.
    budget = int(options.lease_budget * (kv_cache_config.num_blocks - 1))
    return Leases(
        LeaseOptions(options.lease_s, options.ttl_s, options.hold_s, budget), time.monotonic
    )


def valid_tokens(request: Request) -> int:
    """Tokens of a finished request whose KV is there.

    Tokens in flight are scheduled but not computed, and the last sampled one has never been fed;
    a rejected draft never counts.
    """
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, min(computed, request.num_tokens - 1))


def own_agents(metadata: dict[tuple[int, int], NixlHandshakePayload]) -> list[bytes]:
    """Digests of this engine's NIXL agents, by tensor-parallel rank."""
    return [greeting.agent_of(metadata[ranks].agent_metadata_bytes) for ranks in sorted(metadata)]
