# SPDX-License-Identifier: Apache-2.0
"""One turn, in order: identify, prefill leg, decode leg, keep D's params."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from vllm.bidir.reasons import Reason
from vllm.bidir.router.access import Access
from vllm.bidir.router.ask import ask_of
from vllm.bidir.router.beginning import Failed, read_beginning, whole_failure
from vllm.bidir.router.body import read_body
from vllm.bidir.router.client_stream import ClientGoneError, ClientStream
from vllm.bidir.router.conversations import Conversations, Key
from vllm.bidir.router.draining import ANSWER_BEGUN, ANSWER_ENDED
from vllm.bidir.router.errors import ClientError, error_event
from vllm.bidir.router.headers import LOGGED, NAMED, REQUEST_ID, to_client, to_engine
from vllm.bidir.router.identity import Identities, Place, trace
from vllm.bidir.router.leases import Ended
from vllm.bidir.router.legs import (
    FIRST_TURN,
    Answer,
    Legs,
    PrefillDone,
    Unreachable,
    holds_blocks,
    read_back,
    why_nothing,
)
from vllm.bidir.router.log_lines import TurnLog
from vllm.bidir.router.metrics import Metrics
from vllm.bidir.router.nodes import Node
from vllm.bidir.router.pass_through import PassThrough
from vllm.bidir.router.policies import Ask
from vllm.bidir.router.pool import Pool
from vllm.bidir.router.progress import Progress
from vllm.bidir.router.recall import Recall
from vllm.bidir.router.record import KeptTurn
from vllm.bidir.router.reply import Reply
from vllm.bidir.router.request import (
    END_HEADER,
    TurnRequest,
    ends_conversation,
    parse_request,
)
from vllm.bidir.router.responses import Asked, Responses, ResponsesFilter, Said, said_in
from vllm.bidir.router.reuse import HEADER, Reuse
from vllm.bidir.router.seat import Seat
from vllm.bidir.router.side_channels import SideChannels
from vllm.bidir.router.state import State
from vllm.bidir.router.stream import StreamFilter, take_params

logger = logging.getLogger("vllm_bidir_router")
said = TurnLog(logger)

_EVENT_STREAM = "text/event-stream"


@dataclass(eq=False)
class Turn:
    """One turn under way. `place` is None for a request without a conversation.

    `kept`: the turn before, with its params. `last`: the client has said that no turn follows.
    `asked`: what to keep of it as a response. `name`: what its log lines begin with.
    """

    request: TurnRequest
    headers: dict[str, str]
    request_id: str
    place: Place | None
    last: bool
    asked: Asked | None
    progress: Progress
    kept: KeptTurn | None = None
    reuse: Reuse = field(default_factory=Reuse)
    # Whether a D may have read what P has handed over last.
    spent: bool = False
    name: str = field(init=False)

    @property
    def key(self) -> Key | None:
        """Where the turn before is kept."""
        return None if self.place is None else self.place.key

    def __post_init__(self) -> None:
        # The request's id is meant to be found; of a conversation's a digest is enough.
        conversation = "-" if self.key is None else self.key.hex()[:8]
        self.name = f"[{self.request_id[:LOGGED]}] conv={conversation}"


class Turns:
    """Serve generation requests over a pool of prefill and a pool of decode nodes."""

    def __init__(
        self,
        legs: Legs,
        prefill: Pool,
        decode: Pool,
        conversations: Conversations,
        metrics: Metrics,
        access: Access,
        identities: Identities,
        responses: Responses,
        side_channels: SideChannels,
        recall: Recall,
        state: State,
    ) -> None:
        self._legs = legs
        self._prefill = prefill
        self._decode = decode
        self._conversations = conversations
        self._metrics = metrics
        self._access = access
        self._identities = identities
        self._responses = responses
        self._side_channels = side_channels
        self._recall = recall
        self._state = state
        self._keeping: set[asyncio.Future[None]] = set()

    async def serve(self, http: web.Request) -> web.StreamResponse:
        """Answer one client; ClientError is the caller's to turn into a response."""
        progress = Progress(self._metrics)
        body = await read_body(http)
        request = parse_request(http.path, body)
        turn = await self._identify(http, request, progress)
        with self._conversations.under_way(turn.key, turn):
            await self._recall_kept(turn)
            return await self._both_legs(http, turn)

    async def _both_legs(self, http: web.Request, turn: Turn) -> web.StreamResponse:
        bypass = turn.request.bypass
        ask = ask_of(turn.request, turn.key, turn.kept)
        with self._decode.seat(ask) as seat:
            # Before any work is done for a turn that nobody could finish.
            if not await seat.reserve():
                raise _no_decode_node()
            if bypass is not None:
                self._metrics.decode_alone(bypass)
                turn.reuse.reason = bypass
                said.info("%s: decode node alone (%s)", turn.name, str(bypass))
                return await self._decode_leg(http, turn, None, seat, ask)
            prefilled = await self._prefill_leg(turn, ask)
            if isinstance(prefilled, Answer):
                return _whole(prefilled, turn)
            return await self._decode_leg(http, turn, prefilled.params, seat, ask)

    async def _identify(self, http: web.Request, request: TurnRequest, progress: Progress) -> Turn:
        last = ends_conversation(http.headers.get(END_HEADER))
        named = NAMED.get()
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
                if self._decode.is_down(found.node):
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

    async def _prefill_leg(self, turn: Turn, ask: Ask) -> PrefillDone | Answer:
        """P's params, or a refusal that the client must see; without any P, no params."""
        with self._prefill.seat(ask) as seat:
            async for node in seat:
                offered = self._offer(turn, node)
                done = await self._try_prefill(
                    turn, node, FIRST_TURN if offered is None else offered
                )
                if isinstance(done, Answer) and done.status >= 500 and offered is not None:
                    # The fault may lie with what was to be read back: compute it all instead.
                    turn.reuse.reason = Reason.TRANSFER_FAILED
                    done = await self._try_prefill(turn, node, FIRST_TURN)
                if isinstance(done, PrefillDone) or (done is not None and done.status < 500):
                    return done
        turn.reuse.reason = Reason.PEER_GONE
        self._metrics.decode_alone(Reason.PEER_GONE)
        logger.warning("%s: no prefill node answers; decode node alone", turn.name)
        return PrefillDone(None)

    def _offer(self, turn: Turn, node: Node) -> msgspec.Raw | None:
        """What D kept of the last turn, if this P is known to verify what it reads.

        A stock P would match it by count, and answer wrong when the history has changed.
        """
        if turn.kept is None:
            return None
        if not node.verifies:
            turn.reuse.reason = Reason.UNSUPPORTED
            self._metrics.withheld()
            said.info("%s: %s does not verify read-backs; it computes", turn.name, node.name)
            return None
        turn.reuse.reason = None
        assert turn.kept.encoded is not None  # or D has been asked
        return read_back(turn.kept.encoded)

    async def _try_prefill(
        self, turn: Turn, node: Node, params: msgspec.Raw
    ) -> PrefillDone | Answer | None:
        """What a node answered, or None when it could not be reached."""
        headers = turn.progress.leg_begins("prefill", node, turn.request.path, turn.headers)
        try:
            done = await self._legs.prefill(node, turn.request, params, headers)
        except Unreachable as error:
            self._failed(turn, "prefill", node, type(error).__name__)
            self._prefill.failed(node)
            return None
        turn.progress.leg_ends(done.status if isinstance(done, Answer) else 200)
        if isinstance(done, PrefillDone):
            self._note_whether_it_verifies(node, done.params)
            seconds = turn.progress.prefilled()
            turn.reuse.tokens, turn.reuse.prompt_tokens = done.cached_tokens, done.prompt_tokens
            self._metrics.prompt_tokens(done.prompt_tokens, done.cached_tokens)
            done = PrefillDone(self._admit(turn, "prefill", node, done.params))
            took = f"{seconds * 1000:.0f}"
            said.info("%s: Prefill done in %sms (%s)", turn.name, took, node.name)
        if isinstance(done, Answer) and done.status >= 500:
            self._failed(turn, "prefill", node, str(done.status))
            self._prefill.failed(node)
        else:
            self._prefill.succeeded(node)
        return done

    def _note_whether_it_verifies(self, node: Node, params: dict[str, Any] | None) -> None:
        """P says so in its own params; a node may be another release after a restart."""
        node.verifies = params is not None and params.get("readback") == 1

    async def _decode_leg(
        self,
        http: web.Request,
        turn: Turn,
        params: dict[str, Any] | None,
        seat: Seat,
        ask: Ask,
    ) -> web.StreamResponse:
        """Try decode nodes until one has sent its first byte; what follows is that node's."""
        refusal: Answer | None = None
        async for node in seat:
            if turn.spent:
                # A D may have read it and have had P free it, before it failed: another would find
                # anything there. P has the prompt in its prefix cache, and hands it over anew.
                prefilled = await self._prefill_leg(turn, ask)
                if isinstance(prefilled, Answer):
                    return _whole(prefilled, turn)
                params, turn.spent = prefilled.params, False
            done = await self._try_decode(http, turn, node, params)
            if isinstance(done, Answer) and params is not None:
                done = await self._try_alone(http, turn, node)
            if isinstance(done, web.StreamResponse):
                return done
            # Once for both tries: a node that serves the turn alone is none that has failed.
            self._decode.failed(node)
            refusal = done or refusal
        if refusal is None:
            raise _no_decode_node()
        return _whole(refusal, turn)

    async def _try_decode(
        self, http: web.Request, turn: Turn, node: Node, params: dict[str, Any] | None
    ) -> web.StreamResponse | Answer | None:
        """What the client has been given; an Answer that says that the node has failed before its
        first byte, or None when it could not be reached, and nothing has been given."""
        try:
            upstream, first, failed = await self._open(turn, node, params)
        except Unreachable as error:
            # Who has refused the connection has been sent nothing.
            turn.spent |= params is not None and not isinstance(error, ConnectionRefusedError)
            self._failed(turn, "decode", node, type(error).__name__)
            return None
        with closing(upstream):
            if failed is None:
                self._decode.succeeded(node)
                if _is_stream(upstream):
                    return await self._stream(http, turn, node, upstream, first)
        if failed is None:
            return await self._answer(turn, node, upstream, first)
        turn.spent |= params is not None
        self._failed(turn, "decode", node, failed.kind)
        headers = to_client(upstream.headers)
        return Answer(failed.status, failed.content_type, failed.body, headers)

    async def _try_alone(
        self, http: web.Request, turn: Turn, node: Node
    ) -> web.StreamResponse | Answer | None:
        """The fault may lie with what P was to hand over: this node computes it all instead."""
        reuse, tokens = turn.reuse.reason, turn.reuse.tokens
        turn.reuse.reason, turn.reuse.tokens = Reason.TRANSFER_FAILED, None
        done = await self._try_decode(http, turn, node, None)
        if isinstance(done, web.StreamResponse):
            self._metrics.decode_alone(Reason.TRANSFER_FAILED)
        else:
            turn.reuse.reason, turn.reuse.tokens = reuse, tokens
        return done

    async def _open(
        self, turn: Turn, node: Node, params: dict[str, Any] | None
    ) -> tuple[Reply, bytes, Failed | None]:
        """D's reply with its first bytes, or with all of them where it is no stream, and whether
        they say that it has failed: 5xx, or a 200 that is none.

        Raises Unreachable for a failure before the first byte.
        """
        headers = turn.progress.leg_begins("decode", node, turn.request.path, turn.headers)
        upstream = await self._legs.decode(node, turn.request, params, headers)
        try:
            if not _is_stream(upstream):
                whole = await upstream.read()
                turn.progress.leg_ends(upstream.status)
                return upstream, whole, _failure(upstream, whole, turn.request.path)
            beginning = await read_beginning(upstream, turn.request.path)
            upstream.be_patient()
            return upstream, beginning.data, beginning.failed
        except BaseException:
            # Whatever it is, such as a client that has gone: closing ends the request on D.
            upstream.close()
            raise

    async def _answer(
        self, turn: Turn, node: Node, upstream: Reply, whole: bytes
    ) -> web.StreamResponse:
        body, found = take_params(whole)
        if upstream.status == 200:
            await self._keep(turn, node, found)
            await self._keep_response(turn, None if turn.asked is None else said_in(whole))
            turn.progress.answered(turn.reuse)
        return _whole(Answer.of(upstream, body), turn)

    async def _stream(
        self, http: web.Request, turn: Turn, node: Node, upstream: Reply, first: bytes
    ) -> web.StreamResponse:
        turn.progress.stream_begins(turn.reuse)
        ANSWER_BEGUN.set(True)
        taken = StreamFilter() if turn.asked is None else ResponsesFilter()
        at_once, first = (first, b"") if taken.passes(first) else (b"", first)
        client = await ClientStream.begin(http, _headers(turn), at_once)
        # A client may go as soon as it has its answer, a moment before this is cancelled.
        with suppress(ConnectionResetError):
            left = await self._pass_through(client, taken, turn, node, upstream, first)
            # Whoever cuts it from here on has nothing to add.
            ANSWER_ENDED.set(True)
            await client.end(left)
        return client.response

    async def _pass_through(
        self,
        client: ClientStream,
        taken: StreamFilter,
        turn: Turn,
        node: Node,
        upstream: Reply,
        first: bytes,
    ) -> bytes:
        """D's stream for the client, from `first` on, up to the last of it, which is returned.

        Its params are kept before the client sees its end.
        """
        kept = False

        async def note() -> None:
            nonlocal kept
            if taken.params is not None:
                params, taken.params, kept = taken.params, None, True
                await self._keep(turn, node, params)
            if isinstance(taken, ResponsesFilter):
                answer, taken.said = taken.said, None
                await self._keep_response(turn, answer)

        try:
            left = await PassThrough(upstream, taken, client, note).run(first)
        except ClientGoneError:
            raise  # nobody has failed
        except (*Unreachable, ValueError) as error:
            self._failed(turn, "decode", node, type(error).__name__)
            message = "The decode node failed in the middle of its answer."
            return error_event(502, message, turn.request.path, client.sent)
        await note()
        if not kept:
            await self._keep(turn, node, None)
        turn.progress.answered(turn.reuse)
        return left

    async def _keep(self, turn: Turn, node: Node, params: dict[str, Any] | None) -> None:
        """Remember what D has kept of a turn that it has answered, or that it has kept nothing."""
        keeping = self._keep_now(turn, node, params)
        if not self._state.shared:
            await keeping
            return
        # Others have to be asked, and a client that goes meanwhile leaves its lease all the same.
        task = asyncio.ensure_future(keeping)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)
        await asyncio.shield(task)

    async def _keep_now(self, turn: Turn, node: Node, params: dict[str, Any] | None) -> None:
        kept = self._admit(turn, "decode", node, params)
        place = turn.place
        if place is not None:
            # Whatever another router knows of it.
            if not turn.last:
                await self._state.look_again(place)
            elif place.root is not None:
                await self._state.bring_named(place.root)
        if place is not None and not self._conversations.goes_on(place.key, turn):
            place = None  # forgotten while this turn ran
        if place is None or turn.last:
            self._conversations.put_last(turn.key if place else None, kept or {}, node.name)
            if place is not None:
                await self._forget(self._identities.end(place), Ended.ENDED)
            return
        settled = self._identities.settle(place)
        if node.draining:
            self._conversations.put_left(settled.key, kept or {}, node.name)
        elif kept is not None and holds_blocks(kept):
            self._conversations.put(settled.key, kept, node.name)
        else:
            self._conversations.put_nothing(settled.key, why_nothing(params))
        await self._state.tell(place, settled.key)
        await self._forget(settled.over, Ended.SUPERSEDED)

    async def _forget(self, keys: list[Key], why: Ended) -> None:
        for key in keys:
            self._conversations.forget(key, why)
        if keys:
            await self._state.forget(keys)

    async def _keep_response(self, turn: Turn, answer: Said | None) -> None:
        """Keep what a later request may name as its previous response."""
        if turn.asked is not None and answer is not None:
            key = self._responses.keep(turn.asked, answer)
            if key is not None:
                await self._state.tell_response(key)

    def _admit(
        self, turn: Turn, leg: str, node: Node, params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """A node's params, unless they name a side channel or an engine that is not its own."""
        if params is None:
            return None
        admitted = self._side_channels.admit(params, node.name, node.address.host)
        if admitted is None:
            self._metrics.params_dropped(leg, node.name)
            if leg == "prefill":
                turn.reuse.reason = Reason.UNSUPPORTED  # D computes it all
            # Not what they name: it may be anything.
            logger.warning(
                "%s: %s %s names another side channel than its own, or another node's engine; "
                "dropped",
                turn.name,
                leg,
                node.name,
            )
        elif admitted.get("remote_host") != params.get("remote_host"):
            self._metrics.host_replaced(leg)
        return admitted

    def _failed(self, turn: Turn, leg: str, node: Node, kind: str) -> None:
        self._metrics.failure(leg, node.name, kind)
        turn.progress.leg_failed(kind)
        logger.warning("%s: %s leg failed on %s: %s", turn.name, leg, node.name, kind)


def _is_stream(upstream: Reply) -> bool:
    return upstream.status == 200 and upstream.content_type == _EVENT_STREAM


def _failure(upstream: Reply, whole: bytes, path: str) -> Failed | None:
    """Why a whole answer is the node's fault, if it is."""
    if upstream.status >= 500:
        return Failed(upstream.status, whole, str(upstream.status), upstream.content_type)
    return whole_failure(whole, path) if upstream.status == 200 else None


def _no_decode_node() -> ClientError:
    return ClientError(503, "No decode node can be reached. Try again later.")


def _headers(turn: Turn) -> dict[str, str]:
    return {REQUEST_ID: turn.request_id, HEADER: str(turn.reuse)}


def _whole(answer: Answer, turn: Turn) -> web.Response:
    return web.Response(
        status=answer.status,
        body=answer.body,
        content_type=answer.content_type,
        headers={**answer.headers, **_headers(turn)},
    )
