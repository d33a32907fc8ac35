# SPDX-License-Identifier: Apache-2.0
"""The two legs of a turn as HTTP calls: the prefill on P, the decode on D."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from vllm.bidir.reasons import Reason
from vllm.bidir.router.headers import to_client
from vllm.bidir.router.nodes import Node
from vllm.bidir.router.request import TurnRequest
from vllm.bidir.router.reuse import prompt_tokens
from vllm.bidir.router.stream import take_params

# What P is told when there is nothing to read back: keep your blocks for a decode node.
FIRST_TURN: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Unreachable = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


@dataclass(frozen=True)
class Answer:
    """A whole answer of a node, for the client as it is."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillDone:
    """P has the prompt's KV. `params` tell D where, as P says it; None if P is no NIXL node.

    `prompt_tokens` long was the prompt, `cached_tokens` of them it had not to compute; None if it
    does not say.
    """

    params: dict[str, Any] | None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


class Legs:
    """HTTP calls to nodes over one shared client session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def prefill(
        self, node: Node, request: TurnRequest, params: Mapping[str, Any], headers: dict[str, str]
    ) -> PrefillDone | Answer:
        """Run the prefill leg on one node. An Answer is its refusal; Unreachable may be raised."""
        body = request.prefill_body(dict(params))
        async with self._session.post(
            node.url(request.path), data=body, headers=headers
        ) as upstream:
            whole = await upstream.read()
            if upstream.status != 200:
                sent = to_client(upstream.headers)
                return Answer(upstream.status, upstream.content_type, whole, sent)
        _, found = take_params(whole)
        prompt, cached = prompt_tokens(whole)
        return PrefillDone(found, cached, prompt)

    async def decode(
        self,
        node: Node,
        request: TurnRequest,
        params: dict[str, Any] | None,
        headers: dict[str, str],
    ) -> aiohttp.ClientResponse:
        """D's response to the client's own request; closing it ends the request on D as well."""
        raw = None if params is None else msgspec.Raw(msgspec.json.encode(params))
        body = request.decode_body(raw)
        return await self._session.post(node.url(request.path), data=body, headers=headers)

    async def get(self, node: Node, path: str, headers: dict[str, str]) -> Answer:
        """A plain GET, such as /v1/models or /health."""
        async with self._session.get(
            node.url(path),
            headers=headers,
            # The nodes' key is for the nodes.
            allow_redirects=False,
        ) as upstream:
            return Answer(upstream.status, upstream.content_type, await upstream.read())

    async def post(
        self, node: Node, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> Answer:
        """A call beside the legs, answered whole within `timeout_s`."""
        async with self._session.post(
            node.url(path),
            data=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            # The nodes' key is for the nodes.
            allow_redirects=False,
        ) as upstream:
            sent = to_client(upstream.headers)
            return Answer(upstream.status, upstream.content_type, await upstream.read(), sent)


def read_back(params: dict[str, Any]) -> dict[str, Any]:
    """D's params of the last turn as P takes them: read there, then keep yours for D."""
    return {**params, "do_remote_decode": True, "do_remote_prefill": False}


def holds_blocks(params: dict[str, Any] | None) -> bool:
    """Whether D's params name any blocks; D may have freed them at once."""
    blocks = None if params is None else params.get("remote_block_ids")
    return isinstance(blocks, list) and any(blocks)


def why_nothing(params: dict[str, Any] | None) -> Reason:
    """Why D kept nothing of a turn, in its own word if it gives one."""
    word = None if params is None else params.get("reason")
    try:
        return Reason(word)
    except ValueError:
        return Reason.NO_PARAMS
