# SPDX-License-Identifier: Apache-2.0
"""What the router answers, path by path; `app` says which."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from vllm.bidir.router import openapi
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.conversations.conversations import conversation_key
from vllm.bidir.router.conversations.leases import Ended
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import JSON, Response
from vllm.bidir.router.router import Router
from vllm.bidir.router.side_calls import SideCalls
from vllm.bidir.router.status import page as status_page
from vllm.bidir.router.status.status import version


class Endpoints:
    """The handlers of one router, to be called while its `lifespan` runs."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def generate(self, request: Request) -> Awaitable[Answered]:
        assert self._router.turns is not None  # set before the server listens
        return self._router.turns.serve(request)

    async def side_call(self, request: Request) -> Answered:
        assert self._router.calls is not None  # set before the server listens
        return await SideCalls(
            self._router.calls, self._router.access, self._router.decode.candidates
        ).serve(request)

    async def show_conversation(self, request: Request) -> Answered:
        """What is kept of a conversation of this tenant: no ids, and nothing of what was said."""
        tenant = self._router.access.tenant(request.headers)
        root = conversation_key(tenant, request.rest)
        await self._router.state.bring_named(root)
        keys = self._router.identities.keys_of(root)
        lines = [told for key in keys if (told := self._router.conversations.tell(key)) is not None]
        if not lines:
            raise ClientError(404, "No such conversation is remembered.")
        return _json({"object": "conversation", "lines": lines})

    async def show_version(self, request: Request) -> Answered:
        return _json({"version": version()})

    async def show_openapi(self, request: Request) -> Answered:
        return _json(openapi.describe(version()))

    async def end_conversation(self, request: Request) -> Answered:
        """Forget a conversation of this tenant and give its lease back."""
        tenant = self._router.access.tenant(request.headers)
        root = conversation_key(tenant, request.rest)
        await self._router.state.bring_named(root)
        keys = self._router.identities.end_named(root)
        known = sum(self._router.conversations.forget(key, Ended.DELETED) for key in keys)
        await self._router.state.forget(keys)
        if not known:
            raise ClientError(404, "No such conversation is remembered.")
        return Response(204)

    async def health(self, request: Request) -> Answered:
        return Response(body=b"ok\n")

    async def ready(self, request: Request) -> Answered:
        """Whether a turn can be served: D serve alone, P do not."""
        if self._router.draining.begun:
            raise ClientError(503, "The router is shutting down.")
        known = bool(self._router.options.nodes.health_interval)
        up = {
            pool.role: sum(bool(node.health.up) or not known for node in pool.usable())
            for pool in (self._router.prefill, self._router.decode)
        }
        if not up["decode"]:
            raise ClientError(503, "No decode node is up. Try again later.")
        said = f"up: {up['prefill']} prefill, {up['decode']} decode\n"
        return Response(body=said.encode())

    async def show_status(self, request: Request) -> Answered:
        return _json(self._router.sources.status())

    async def show_page(self, request: Request) -> Answered:
        page = status_page.page(self._router.sources.status())
        return Response(200, page, "text/html; charset=utf-8", status_page.headers())

    async def show_metrics(self, request: Request) -> Answered:
        data = generate_latest(self._router.metrics.registry)
        return Response(200, data, CONTENT_TYPE_LATEST)


def _json(value: object) -> Response:
    return Response(200, msgspec.json.encode(value), JSON)
