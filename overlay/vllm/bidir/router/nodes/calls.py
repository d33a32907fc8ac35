# SPDX-License-Identifier: Apache-2.0
"""HTTP calls to nodes that are answered whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

import msgspec
from vllm.bidir.router.clients.headers import to_client
from vllm.bidir.router.nodes.client import NodeClient
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.process.in_time import in_time

Unreachable = (asyncio.TimeoutError, OSError)


class Answer(msgspec.Struct, frozen=True):
    """A whole answer of a node, for the client as it is."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}

    @classmethod
    def of(cls, reply: Reply, body: bytes) -> Answer:
        """A reply whose body has been read."""
        return cls(reply.status, reply.content_type, body, to_client(reply.headers))


class Calls:
    """What is asked of nodes beside the legs of turns, over the client that those have as well."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client

    async def ask(
        self, node: Node, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> Answer:
        """For as long as the node is up; Unreachable."""
        return await whole(
            self._client.request(node.address, method, path, headers, body, node=node)
        )

    async def get(self, node: Node, path: str, headers: dict[str, str]) -> Answer:
        """A plain GET, such as /v1/models or /health, however long it takes."""
        return await whole(self._client.request(node.address, "GET", path, headers))

    async def post(
        self, node: Node, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> Answer:
        """Answered within `timeout_s`; Unreachable."""
        asking = self._client.request(node.address, "POST", path, headers, body)
        return await in_time(whole(asking), timeout_s)


async def whole(asking: Awaitable[Reply]) -> Answer:
    """A call's answer with its body; Unreachable."""
    reply = await asking
    try:
        return Answer.of(reply, await reply.read())
    finally:
        reply.close()
