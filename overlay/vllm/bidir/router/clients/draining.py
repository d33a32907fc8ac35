# SPDX-License-Identifier: Apache-2.0
"""How a router ends: it says so, lets what is under way go on, and then cuts what is left.

At the first SIGTERM or SIGINT `/ready` turns 503. For `delay_s` requests are taken as before, until
no load balancer sends any; then they get 503. What is under way has `timeout_s` more; what is left
then gets an error as its last event and its legs are cancelled. A second signal is the end of all
that waiting.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress

from vllm.bidir.router.clients.errors import ClientError, error_event
from vllm.bidir.router.http.connection import Answered
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import Response
from vllm.bidir.router.http.routes import Handler
from vllm.bidir.router.telemetry.metrics import Metrics

logger = logging.getLogger("vllm_bidir_router")

# For the last event to clients that read slowly.
_LAST_WORDS_S = 1.0
_SAID = "The router is shutting down. Try again."


class ShuttingDownError(ClientError):
    """503; the connection ends, so that the next request goes elsewhere."""

    def __init__(self) -> None:
        super().__init__(503, _SAID)

    def response(self, path: str = "") -> Response:
        made = super().response(path)
        made.close = True
        return made


class Draining:
    """The end of one router. Times in seconds."""

    def __init__(self, delay_s: float, timeout_s: float, metrics: Metrics) -> None:
        self._delay_s = delay_s
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._told = asyncio.Event()
        self._told_again = asyncio.Event()
        self._refuses = False
        self._under_way: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()
        self._none_left = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the router has been told to end."""
        return self._told.is_set()

    def tell(self) -> None:
        """End; told again, at once."""
        if self.begun:
            self._told_again.set()
        self._told.set()

    def admit(self, handler: Handler) -> Handler:
        """The same handler, for requests that are refused, waited for and cut as told above."""

        async def admitted(request: Request) -> Answered:
            if self._refuses:
                self._metrics.refused("router", "draining")
                raise ShuttingDownError
            task = asyncio.current_task()
            assert task is not None
            self._under_way.add(task)
            try:
                return await handler(request)
            except asyncio.CancelledError:
                if task not in self._cut:
                    raise  # it is the client that has gone
                if request.stream is None:
                    if sys.version_info >= (3, 11):
                        task.uncancel()
                    raise ShuttingDownError from None
                if not request.stream.ended:
                    # Whole lines have been sent, perhaps in the middle of an event: a blank line
                    # ends that. A client may have gone at the same moment.
                    with suppress(ConnectionError):
                        last = error_event(503, _SAID, request.path, after=b"\n")
                        await request.stream.end(last)
                raise
            finally:
                self._under_way.discard(task)
                self._cut.discard(task)
                if not self._under_way:
                    self._none_left.set()

        return admitted

    async def run(self) -> None:
        """Return when the router has been told to end, and nothing is under way any more."""
        await self._told.wait()
        if self._delay_s:
            logger.info("ending: not ready any more, requests are taken for %gs", self._delay_s)
            await self._wait(self._told_again, self._delay_s)
        self._refuses = True
        if not self._under_way:
            return
        if not self._told_again.is_set():
            logger.info(
                "ending: %d requests under way, they have %gs",
                len(self._under_way),
                self._timeout_s,
            )
            await self._wait_for_none(self._timeout_s)
        if self._under_way:
            logger.warning("ending: %d requests are cut", len(self._under_way))
            self._cut.update(self._under_way)
            for task in self._cut:
                task.cancel()
            self._none_left.clear()
            await self._wait(self._none_left, _LAST_WORDS_S)

    async def _wait_for_none(self, seconds: float) -> None:
        self._none_left.clear()
        waits = [asyncio.create_task(one.wait()) for one in (self._none_left, self._told_again)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)
