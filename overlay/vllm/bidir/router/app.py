# SPDX-License-Identifier: Apache-2.0
"""The router as an aiohttp application: its routes, and what its refusals look like."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from vllm.bidir.router import openapi
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.headers import LOGGED, NAMED, REQUEST_ID, request_id
from vllm.bidir.router.clients.request import APIS
from vllm.bidir.router.endpoints import Endpoints
from vllm.bidir.router.router import Router
from vllm.bidir.router.side_calls import GET, POST

logger = logging.getLogger("vllm_bidir_router")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal of the router itself has the error shape of its API, else OpenAI's.

    And the request's id, the one that its log lines begin with, also where it has been made here.
    """
    named = request_id(request.headers)
    NAMED.set(named)
    try:
        return await handler(request)
    except ClientError as refusal:
        error = refusal
    except web.HTTPRequestEntityTooLarge:
        limit = request.client_max_size
        error = ClientError(413, f"The body exceeds {limit} bytes (--max-body).")
    except web.HTTPNotFound:
        error = ClientError(404, f"Unknown path {request.path[:200]}.")
    except web.HTTPMethodNotAllowed as refusal:
        allowed = ", ".join(sorted(refusal.allowed_methods))
        error = ClientError(
            405, f"Use {allowed} for {request.path[:200]}.", headers={"Allow": allowed}
        )
    except web.RequestPayloadError:
        error = ClientError(400, "The body is not what its headers say.")
    except web.HTTPException:
        raise
    except Exception:
        if request.writer.output_size > 0:
            raise  # the server cuts the connection: nothing else can be said any more
        logger.exception("[%s] a fault of the router", named[:LOGGED])
        error = ClientError(500, "The router has failed; its log says why.")
    response = error.response(request.path)
    response.headers[REQUEST_ID] = named
    return response


def make_app(router: Router) -> web.Application:
    """The aiohttp application of a router."""
    traced: list[Middleware] = [] if router.tracing is None else [router.tracing.trace]
    app = web.Application(
        middlewares=[*traced, openai_errors, router.access.guard],
        client_max_size=router.options.max_body,
    )
    app.cleanup_ctx.append(router.lifespan)
    endpoints = Endpoints(router)
    app.on_response_prepare.append(endpoints.count)
    admit = router.draining.admit
    generate, side_call = admit(endpoints.generate), admit(endpoints.side_call)
    for path in APIS:
        app.router.add_post(path, generate)
    for path in GET:
        app.router.add_get(path, side_call)
    for path in POST:
        app.router.add_post(path, side_call)
    # An id may hold a slash.
    app.router.add_delete("/conversations/{id:.+}", endpoints.end_conversation)
    app.router.add_get("/conversations/{id:.+}", endpoints.show_conversation)
    app.router.add_get("/version", endpoints.show_version)
    app.router.add_get("/", endpoints.show_page)
    app.router.add_get("/status", endpoints.show_status)
    app.router.add_get(openapi.PATH, endpoints.show_openapi)
    app.router.add_get("/health", endpoints.health)
    app.router.add_get("/ready", endpoints.ready)
    app.router.add_get("/metrics", endpoints.show_metrics)
    return app
