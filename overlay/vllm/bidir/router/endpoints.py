# SPDX-License-Identifier: Apache-2.0
"""What the router answers, path by path; `app` says which."""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from vllm.bidir.router import openapi
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.conversations.conversations import conversation_key
from vllm.bidir.router.conversations.leases import Ended
from vllm.bidir.router.router import Router
from vllm.bidir.router.side_calls import SideCalls
from vllm.bidir.router.status import page as status_page
from vllm.bidir.router.status.status import version


class Endpoints:
    """The handlers of one router, to be called while its `lifespan` runs."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def generate(self, http: web.Request) -> web.StreamResponse:
        assert self._router.turns is not None  # set before the server listens
        return await self._router.turns.serve(http)

    async def side_call(self, http: web.Request) -> web.StreamResponse:
        assert self._router.calls is not None  # set before the server listens
        return await SideCalls(
            self._router.calls, self._router.access, self._router.decode.candidates
        ).serve(http)

    async def show_conversation(self, http: web.Request) -> web.StreamResponse:
        """What is kept of a conversation of this tenant: no ids, and nothing of what was said."""
        tenant = self._router.access.tenant(http.headers)
        root = conversation_key(tenant, http.match_info["id"])
        await self._router.state.bring_named(root)
        keys = self._router.identities.keys_of(root)
        lines = [told for key in keys if (told := self._router.conversations.tell(key)) is not None]
        if not lines:
            raise ClientError(404, "No such conversation is remembered.")
        return web.json_response({"object": "conversation", "lines": lines})

    async def show_version(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({"version": version()})

    async def show_openapi(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(openapi.describe(version()))

    async def end_conversation(self, http: web.Request) -> web.StreamResponse:
        """Forget a conversation of this tenant and give its lease back."""
        tenant = self._router.access.tenant(http.headers)
        root = conversation_key(tenant, http.match_info["id"])
        await self._router.state.bring_named(root)
        keys = self._router.identities.end_named(root)
        known = sum(self._router.conversations.forget(key, Ended.DELETED) for key in keys)
        await self._router.state.forget(keys)
        if not known:
            raise ClientError(404, "No such conversation is remembered.")
        return web.Response(status=204)

    async def health(self, http: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def ready(self, http: web.Request) -> web.StreamResponse:
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
        return web.Response(text=f"up: {up['prefill']} prefill, {up['decode']} decode\n")

    async def show_status(self, http: web.Request) -> web.StreamResponse:
        data = msgspec.json.encode(self._router.sources.status())
        return web.Response(body=data, content_type="application/json")

    async def show_page(self, http: web.Request) -> web.StreamResponse:
        return web.Response(
            body=status_page.page(self._router.sources.status()),
            content_type="text/html",
            charset="utf-8",
            headers=status_page.headers(),
        )

    async def count(self, http: web.Request, response: web.StreamResponse) -> None:
        """An answer is about to be sent."""
        resource = http.match_info.route.resource
        self._router.metrics.answered(
            resource.canonical if resource else "unknown", response.status
        )

    async def show_metrics(self, http: web.Request) -> web.StreamResponse:
        data = generate_latest(self._router.metrics.registry)
        return web.Response(body=data, headers={"Content-Type": CONTENT_TYPE_LATEST})
