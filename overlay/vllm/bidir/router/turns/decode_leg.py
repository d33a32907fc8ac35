# SPDX-License-Identifier: Apache-2.0
"""The decode leg of a turn: which D answers the client, and what is done when one fails."""

from __future__ import annotations

from typing import Any

from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.errors import ClientError, error_event
from vllm.bidir.router.clients.headers import to_client
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import Response
from vllm.bidir.router.http.stream import ClientGoneError, ClientStream
from vllm.bidir.router.nodes.calls import Answer, Unreachable
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.policies import Ask
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.nodes.seat import Seat
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.turns.beginning import Failed, read_beginning, whole_failure
from vllm.bidir.router.turns.keeping import Keeping
from vllm.bidir.router.turns.legs import Legs
from vllm.bidir.router.turns.pass_through import PassThrough
from vllm.bidir.router.turns.prefill_leg import PrefillLeg
from vllm.bidir.router.turns.responses import ResponsesFilter, said_in
from vllm.bidir.router.turns.stream import StreamFilter, take_params
from vllm.bidir.router.turns.turn import Turn

_EVENT_STREAM = "text/event-stream"


class DecodeLeg:
    """Runs it on the nodes of one pool. `prefill` is for a D whose predecessor has used up what P
    has handed over."""

    def __init__(
        self, legs: Legs, nodes: Pool, prefill: PrefillLeg, keeping: Keeping, metrics: Metrics
    ) -> None:
        self._legs = legs
        self._nodes = nodes
        self._prefill = prefill
        self._keeping = keeping
        self._metrics = metrics

    async def run(
        self,
        http: Request,
        turn: Turn,
        params: dict[str, Any] | None,
        seat: Seat,
        ask: Ask,
    ) -> Answered:
        """Try decode nodes until one has sent its first byte; what follows is that node's."""
        refusal: Answer | None = None
        async for node in seat:
            if turn.spent:
                # A D may have read it and have had P free it, before it failed: another would find
                # anything there. P has the prompt in its prefix cache, and hands it over anew.
                prefilled = await self._prefill.run(turn, ask)
                if isinstance(prefilled, Answer):
                    return whole_answer(prefilled, turn)
                params, turn.spent = prefilled.params, False
            done = await self._try_decode(http, turn, node, params)
            if isinstance(done, Answer) and params is not None:
                done = await self._try_alone(http, turn, node)
            if isinstance(done, Answered):
                return done
            # Once for both tries: a node that serves the turn alone is none that has failed.
            self._nodes.failed(node)
            refusal = done or refusal
        if refusal is None:
            raise no_decode_node()
        return whole_answer(refusal, turn)

    async def _try_decode(
        self, http: Request, turn: Turn, node: Node, params: dict[str, Any] | None
    ) -> Answered | Answer | None:
        """What the client has been given; an Answer that says that the node has failed before its
        first byte, or None when it could not be reached, and nothing has been given."""
        try:
            upstream, first, failed = await self._open(turn, node, params)
        except Unreachable as error:
            # Who has refused the connection has been sent nothing.
            turn.spent |= params is not None and not isinstance(error, ConnectionRefusedError)
            turn.leg_failed("decode", node, type(error).__name__)
            return None
        try:
            if failed is None:
                self._nodes.succeeded(node)
                if _is_stream(upstream):
                    return await self._stream(http, turn, node, upstream, first)
        finally:
            upstream.close()
        if failed is None:
            return await self._answer(turn, node, upstream, first)
        turn.spent |= params is not None
        turn.leg_failed("decode", node, failed.kind)
        headers = to_client(upstream.headers)
        return Answer(failed.status, failed.content_type, failed.body, headers)

    async def _try_alone(self, http: Request, turn: Turn, node: Node) -> Answered | Answer | None:
        """The fault may lie with what P was to hand over: this node computes it all instead."""
        reuse, tokens = turn.reuse.reason, turn.reuse.tokens
        turn.reuse.reason, turn.reuse.tokens = Reason.TRANSFER_FAILED, None
        done = await self._try_decode(http, turn, node, None)
        if isinstance(done, Answered):
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

    async def _answer(self, turn: Turn, node: Node, upstream: Reply, whole: bytes) -> Answered:
        body, found = take_params(whole)
        if upstream.status == 200:
            await self._keeping.keep(turn, node, found)
            await self._keeping.keep_response(turn, None if turn.asked is None else said_in(whole))
            turn.progress.answered(turn.reuse)
        return whole_answer(Answer.of(upstream, body), turn)

    async def _stream(
        self, http: Request, turn: Turn, node: Node, upstream: Reply, first: bytes
    ) -> Answered:
        turn.progress.stream_begins(turn.reuse)
        taken = StreamFilter() if turn.asked is None else ResponsesFilter()
        at_once, first = (first, b"") if taken.passes(first) else (b"", first)
        client = ClientStream.begin(http, turn.answer_headers, at_once)
        # A client may go as soon as it has its answer, a moment before this is cancelled.
        try:
            left = await self._pass_through(client, taken, turn, node, upstream, first)
            await client.end(left)
        except ClientGoneError:
            pass
        return client

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
                await self._keeping.keep(turn, node, params)
            if isinstance(taken, ResponsesFilter):
                answer, taken.said = taken.said, None
                await self._keeping.keep_response(turn, answer)

        try:
            left = await PassThrough(upstream, taken, client, note).run(first)
        except ClientGoneError:
            raise  # nobody has failed
        except (*Unreachable, ValueError) as error:
            turn.leg_failed("decode", node, type(error).__name__)
            message = "The decode node failed in the middle of its answer."
            return error_event(502, message, turn.request.path, client.sent)
        await note()
        if not kept:
            await self._keeping.keep(turn, node, None)
        turn.progress.answered(turn.reuse)
        return left


def _is_stream(upstream: Reply) -> bool:
    return upstream.status == 200 and upstream.content_type == _EVENT_STREAM


def _failure(upstream: Reply, whole: bytes, path: str) -> Failed | None:
    """Why a whole answer is the node's fault, if it is."""
    if upstream.status >= 500:
        return Failed(upstream.status, whole, str(upstream.status), upstream.content_type)
    return whole_failure(whole, path) if upstream.status == 200 else None


def no_decode_node() -> ClientError:
    """What a client is told when there is none to ask."""
    return ClientError(503, "No decode node can be reached. Try again later.")


def whole_answer(answer: Answer, turn: Turn) -> Response:
    """A node's answer that is no stream, for the client."""
    headers = {**answer.headers, **turn.answer_headers}
    return Response(answer.status, answer.body, answer.content_type, headers)
