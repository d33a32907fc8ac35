# SPDX-License-Identifier: Apache-2.0
"""One turn, in order: identify, recall what D keeps, prefill leg, decode leg."""

from __future__ import annotations

from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.access import Access
from vllm.bidir.router.clients.body import read_body
from vllm.bidir.router.clients.headers import REQUEST_ID, to_engine
from vllm.bidir.router.clients.request import (
    END_HEADER,
    TurnRequest,
    ends_conversation,
    parse_request,
)
from vllm.bidir.router.conversations.conversations import Conversations, Key
from vllm.bidir.router.conversations.identity import Identities, trace
from vllm.bidir.router.conversations.record import KeptTurn
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.nodes.calls import Answer
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.state.state import State
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.turns.ask import ask_of
from vllm.bidir.router.turns.decode_leg import DecodeLeg, no_decode_node, whole_answer
from vllm.bidir.router.turns.prefill_leg import PrefillLeg
from vllm.bidir.router.turns.progress import Progress
from vllm.bidir.router.turns.recall import Recall
from vllm.bidir.router.turns.responses import Responses
from vllm.bidir.router.turns.turn import Turn, said


class Turns:
    """Serve generation requests. `nodes`: those of the decode leg."""

    def __init__(
        self,
        prefill_leg: PrefillLeg,
        decode_leg: DecodeLeg,
        nodes: Pool,
        conversations: Conversations,
        metrics: Metrics,
        access: Access,
        identities: Identities,
        responses: Responses,
        recall: Recall,
        state: State,
    ) -> None:
        self._prefill_leg = prefill_leg
        self._decode_leg = decode_leg
        self._nodes = nodes
        self._conversations = conversations
        self._metrics = metrics
        self._access = access
        self._identities = identities
        self._responses = responses
        self._recall = recall
        self._state = state

    async def serve(self, http: Request) -> Answered:
        """Answer one client; ClientError is the caller's to turn into a response."""
        progress = Progress(self._metrics)
        body = await read_body(http)
        request = parse_request(http.path, body)
        turn = await self._identify(http, request, progress)
        self._conversations.begins(turn.key, turn)
        try:
            await self._recall_kept(turn)
            return await self._both_legs(http, turn)
        finally:
            self._conversations.ends(turn.key, turn)

    async def _both_legs(self, http: Request, turn: Turn) -> Answered:
        bypass = turn.request.bypass
        ask = ask_of(turn.request, turn.key, turn.kept)
        with self._nodes.seat(ask) as seat:
            # Before any work is done for a turn that nobody could finish.
            if not await seat.reserve():
                raise no_decode_node()
            if bypass is not None:
                self._metrics.decode_alone(bypass)
                turn.reuse.reason = bypass
                said.info("%s: decode node alone (%s)", turn.name, str(bypass))
                return await self._decode_leg.run(http, turn, None, seat, ask)
            prefilled = await self._prefill_leg.run(turn, ask)
            if isinstance(prefilled, Answer):
                return whole_answer(prefilled, turn)
            return await self._decode_leg.run(http, turn, prefilled.params, seat, ask)

    async def _identify(self, http: Request, request: TurnRequest, progress: Progress) -> Turn:
        last = ends_conversation(http.headers.get(END_HEADER))
        named = http.named
        headers = to_engine(http.headers, self._access.authorization(http.headers))
        headers |= {REQUEST_ID: named, "Content-Type": "application/json"}
        tenant = self._access.tenant(http.headers)
        await self._state.bring_responses(tenant, request)
        request, asked = self._responses.expand(tenant, request)
        traced = trace(tenant, request, http.headers)
        await self._state.bring(traced)
        place = self._identities.place(traced)
        self._metrics.identified("none" if place is None else place.by)
        turn = Turn(request, headers, named, place, last, asked, progress)
        progress.about(request, turn.reuse)
        return turn

    async def _recall_kept(self, turn: Turn) -> None:
        """Find what is kept of the turn before, or why nothing is."""
        found: KeptTurn | Reason = Reason.NO_CONVERSATION
        if turn.key is not None:
            found = self._conversations.get(turn.key)
            if isinstance(found, KeptTurn):
                if self._nodes.is_down(found.node):
                    # P would wait for it in vain. What it keeps is remembered: it may come back.
                    found = Reason.PEER_GONE
                elif found.encoded is None:
                    found = await self._ask_for_params(turn.key, found)
        if isinstance(found, KeptTurn):
            turn.kept = found
        turn.reuse.reason = found if isinstance(found, Reason) else None
        if turn.request.bypass is not None:
            return
        if isinstance(found, KeptTurn):
            self._metrics.hit()
            said.info("%s: cache HIT (%s)", turn.name, found.node)
        else:
            self._metrics.miss(found)
            said.info("%s: cache MISS (%s)", turn.name, str(found))

    async def _ask_for_params(self, key: Key, kept: KeptTurn) -> KeptTurn | Reason:
        """The same turn with its params, or why D does not tell them."""
        told = await self._recall.params(kept)
        if isinstance(told, KeptTurn):
            self._conversations.put_params(key, told)
        elif told is Reason.EXPIRED and kept.lease_id is not None:
            self._conversations.lost(key, kept.lease_id)
        return told
