# SPDX-License-Identifier: Apache-2.0
"""The two legs of a turn as HTTP calls: the prefill on P, the decode on D."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.clients.reuse import prompt_tokens
from vllm.bidir.router.nodes.calls import Answer
from vllm.bidir.router.nodes.client import NodeClient
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.turns.beginning import AbortedError, whole_failure
from vllm.bidir.router.turns.stream import find_params


class PrefillDone(msgspec.Struct, frozen=True):
    """P has the prompt's KV. `params` tell D where, as P says it; None if P is no NIXL node.

    `prompt_tokens` long was the prompt, `cached_tokens` of them it had not to compute; None if it
    does not say.
    """

    params: dict[str, Any] | None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


class Legs:
    """Over one client that all turns share."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    async def prefill(
        self, node: Node, request: TurnRequest, params: msgspec.Raw, headers: dict[str, str]
    ) -> PrefillDone | Answer:
        """Run the prefill leg on one node. An Answer is its refusal; Unreachable may be
        raised, for one that P has aborted, too."""
        body = request.prefill_body(params)
        reply = await self._client.request(
            node.address, "POST", request.path, headers, body, node=node
        )
        try:
            answer = await reply.read()
        finally:
            reply.close()
        if reply.status != 200:
            return Answer.of(reply, answer)
        if whole_failure(answer, request.path) is not None:
            raise AbortedError
        prompt, cached = prompt_tokens(answer)
        return PrefillDone(find_params(answer), cached, prompt)

    def decode(
        self,
        node: Node,
        request: TurnRequest,
        params: dict[str, Any] | None,
        headers: dict[str, str],
    ) -> Awaitable[Reply]:
        """D's answer to the client's own request; closing it ends the request on D as well."""
        raw = None if params is None else msgspec.Raw(msgspec.json.encode(params))
        body = request.decode_body(raw)
        return self._client.request(node.address, "POST", request.path, headers, body, node=node)
