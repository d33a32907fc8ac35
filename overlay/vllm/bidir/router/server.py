# SPDX-License-Identifier: Apache-2.0
"""The HTTP server under the application: its limits, and its refusals in the shape of the API.

What is no HTTP never reaches the application. aiohttp would answer it in plain text, and say in its
log, and in the answer, what the client has sent.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from vllm.bidir.router.app import make_app
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.http_log import HttpLog
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.router import Router

# Above the idle timeouts of load balancers (60 s), so that none sends on a connection that is
# being closed here.
_KEEP_ALIVE_S = 75.0
# Clients that connect at the same moment; the system may allow fewer.
_BACKLOG = 4096
# At the end, for what is no turn, and for clients that do not read what they are told last.
_LEFT_OVER_S = 1.0

logger = logging.getLogger("vllm_bidir_router")


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what cannot be served, in JSON; the connection ends after it.

        ConnectionError if an answer has begun: nothing else can be said then.
        """
        super().handle_error(request, status, exc, message)  # it logs, and says whether one has
        if isinstance(exc, LineTooLong):
            said = f"The URL or a header field exceeds {self.max_field_size} bytes (--max-header)."
        elif isinstance(exc, HttpProcessingError):
            said = "This is not valid HTTP."
        else:
            said = "The router has failed; its log says why."
        response = ClientError(status, said).response(request.path)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; one that aiohttp has raised by itself, such as 417, in our shape."""
        if isinstance(resp, web.HTTPException):
            resp = ClientError(resp.status, f"{resp.reason}.").response(request.path)
        return await super().finish_response(request, resp, start_time)


class _Server(web.Server):
    """Makes connections of our kind for what `served` serves."""

    def __init__(self, served: web.Server, **limits: Any) -> None:
        super().__init__(
            served.request_handler,
            request_factory=served.request_factory,
            handler_cancellation=True,
        )
        self._limits = limits

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._limits)


class Runner(web.AppRunner):
    """Runs a router's application; a client that goes away cancels its handler, and so both legs.

    It ends what has not been drained.
    """

    def __init__(self, app: web.Application, security: Security) -> None:
        super().__init__(app, shutdown_timeout=_LEFT_OVER_S)
        self._security = security

    async def _make_server(self) -> web.Server:
        return _Server(
            await super()._make_server(),
            logger=HttpLog(logger),
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_S,
            max_field_size=self._security.max_header,
            max_line_size=self._security.max_header,
        )


async def serve(router: Router) -> None:
    """Listen until SIGTERM or SIGINT, then drain. OSError if the port cannot be had."""
    options = router.options
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, router.draining.tell)
    runner = Runner(make_app(router), options.security)
    try:
        await runner.setup()
        site = web.TCPSite(
            runner,
            options.host,
            options.port,
            ssl_context=None if router.certificate is None else router.certificate.context,
            backlog=_BACKLOG,
        )
        await site.start()
        await router.draining.run()
    finally:
        await runner.cleanup()
