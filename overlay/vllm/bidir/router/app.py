# SPDX-License-Identifier: Apache-2.0
"""The router as an application: its paths, and what its refusals look like."""

from __future__ import annotations

import logging

from vllm.bidir.router import openapi
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.headers import LOGGED, REQUEST_ID, request_id
from vllm.bidir.router.clients.request import APIS
from vllm.bidir.router.endpoints import Endpoints
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.routes import Routes
from vllm.bidir.router.http.stream import ClientGoneError
from vllm.bidir.router.router import Router
from vllm.bidir.router.side_calls import GET, POST

logger = logging.getLogger("vllm_bidir_router")


class App:
    """Answers requests while its router's `lifespan` runs."""

    def __init__(self, router: Router) -> None:
        self.routes = _routes(router)
        self.answer = self._answer if router.tracing is None else self._traced
        self._router = router

    async def _traced(self, request: Request) -> Answered:
        tracing = self._router.tracing
        if tracing is None or request.path not in APIS:
            return await self._answer(request)
        return await tracing.trace(request, self._answer)

    def count(self, request: Request, status: int) -> None:
        """An answer is about to be sent."""
        self._router.metrics.answered(request.route, status)

    async def _answer(self, request: Request) -> Answered:
        """A whole answer, or the stream that has been sent.

        Every refusal of the router itself has the error shape of its API, else OpenAI's, and the
        request's id, the one that its log lines begin with, also where it has been made here. A
        fault of the router is raised where a stream has begun: nothing else can be said then.
        """
        request.named = request_id(request.headers)
        try:
            handler = self.routes.find(request)
            self._router.access.check(request)
            return await handler(request)
        except ClientError as refusal:
            if request.stream is not None:
                raise
            error = refusal
        except ClientGoneError:
            raise  # nobody is there to be told anything
        except Exception:
            if request.stream is not None:
                raise
            logger.exception("[%s] a fault of the router", request.named[:LOGGED])
            error = ClientError(500, "The router has failed; its log says why.")
        response = error.response(request.path)
        response.headers[REQUEST_ID] = request.named
        return response


def _routes(router: Router) -> Routes:
    endpoints = Endpoints(router)
    admit = router.draining.admit
    generate, side_call = admit(endpoints.generate), admit(endpoints.side_call)
    routes = Routes()
    for path in APIS:
        routes.add("POST", path, generate)
    for path in GET:
        routes.add("GET", path, side_call)
    for path in POST:
        routes.add("POST", path, side_call)
    # An id may hold a slash.
    routes.add("DELETE", "/conversations/{id}", endpoints.end_conversation)
    routes.add("GET", "/conversations/{id}", endpoints.show_conversation)
    routes.add("GET", "/version", endpoints.show_version)
    routes.add("GET", "/", endpoints.show_page)
    routes.add("GET", "/status", endpoints.show_status)
    routes.add("GET", openapi.PATH, endpoints.show_openapi)
    routes.add("GET", "/health", endpoints.health)
    routes.add("GET", "/ready", endpoints.ready)
    routes.add("GET", "/metrics", endpoints.show_metrics)
    return routes
