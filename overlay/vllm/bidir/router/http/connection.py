# SPDX-License-Identifier: Apache-2.0
"""One connection of a client: its requests are served one after the other, in their order.

A client that goes cancels whatever is done for it. What is no HTTP is answered, once what came
before has been, and the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from typing import Protocol, cast

from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.http.reader import Limits, RequestReader
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import Response
from vllm.bidir.router.http.stream import ClientGoneError, ClientStream

# Requests that wait for the one before them.
_MOST_WAITING = 256
# What comes while a request is served, and belongs to those after it: more is not read. What is not
# read does not tell whether the client is still there.
_MOST_AHEAD = 256 << 10
# What a client may leave unread, beside what its system takes: asyncio's own limit, but for TLS.
_MOST_UNREAD = 64 << 10
# So long unread bytes are thrown away before a connection is closed: the system would tell the
# client that it has been reset, maybe before it has read its answer.
_LINGER_S = 10.0

logger = logging.getLogger("vllm_bidir_router")

Answered = Response | ClientStream


class Application(Protocol):
    """What serves requests."""

    async def answer(self, request: Request) -> Answered:
        """A whole answer, or one that has been sent. What it raises cuts the connection."""

    def count(self, request: Request, status: int) -> None:
        """A request is about to be answered with this status."""


class ClientConnection(asyncio.Protocol):
    """A server's side of HTTP/1.1. `open_` are all of a listener's, of which this is one."""

    def __init__(
        self, application: Application, limits: Limits, open_: set[ClientConnection]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.secure = False
        # When it was heard of last, by the loop's clock.
        self.heard = self.loop.time()
        self._application = application
        self._open = open_
        self._reader = RequestReader(self, limits, self._take)
        # What has come after all that is waiting, and is no request.
        self._fault: ClientError | None = None
        self._waiting: deque[Request] = deque()
        # Of the request that is being served.
        self._task: asyncio.Task[None] | None = None
        self._ahead = 0
        self._ends = False
        self._reading = True
        self.full = False
        self._waiter: asyncio.Future[None] | None = None
        self._lingers: asyncio.TimerHandle | None = None

    @property
    def _live_transport(self) -> asyncio.Transport | None:
        """What can still be written to and read from."""
        transport = self.transport
        return None if transport is None or transport.is_closing() else transport

    def count(self, request: Request, status: int) -> None:
        self._application.count(request, status)

    async def drained(self) -> None:
        """The client has read nearly all that it was sent, or has gone."""
        if self.full:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def end_if_silent(self, since: float) -> None:
        """Wait no longer for a request, or for the rest of one, if none has come since then.

        Nor for a client to read what it was told last.
        """
        if self.heard > since:
            return
        if self.transport is not None and self.transport.is_closing():
            self.abort()  # it does not read what it has been told
        elif not self._reading:
            return  # it is we who do not listen
        elif self._reader.coming is not None:
            self._reader.coming.fail(ClientError(408, "The body has not come."))
        elif self._task is None:
            self._close()

    def end_soon(self) -> None:
        """Serve what is being served, and nothing after it."""
        self._ends = True
        if self._task is None:
            self._close()

    def cut(self) -> asyncio.Task[None] | None:
        """Give up whatever is being served: that task ends."""
        if self._task is not None:
            self._task.cancel()
        return self._task

    def abort(self) -> None:
        """Close at once, whatever has not been sent yet."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.secure = transport.get_extra_info("sslcontext") is not None
        self.transport.set_write_buffer_limits(high=_MOST_UNREAD)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            # A client whose host vanishes while nothing is sent to it is noticed all the same.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._reader.close()
        self._open.discard(self)
        self._waiting.clear()
        if self._lingers is not None:
            self._lingers.cancel()
        self.resume_writing()
        self.cut()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        if self._waiting:
            self._ahead += len(data)
            if self._ahead > _MOST_AHEAD:
                self._pause()
        fault = self._reader.feed(data)
        if fault is not None:
            self._refuse(fault)

    def _refuse(self, fault: ClientError) -> None:
        """Nothing comes any more. What is said of it in the log is none of what has been sent."""
        peer = self.transport.get_extra_info("peername") if self.transport else None
        named = peer[0] if isinstance(peer, tuple) else "a client"
        logger.info("a request from %s cannot be read: %s", named, fault.message)
        if self._reader.coming is not None:
            return  # it has been told, and is answered
        self._fault = fault
        if self._task is None:
            self._say_fault()

    def _take(self, request: Request) -> ClientError | None:
        if self._task is None:
            self._serve_next(request)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(request)
        else:
            return ClientError(400, f"More than {_MOST_WAITING} requests have come at once.")
        return None

    def _serve_next(self, request: Request) -> None:
        self._task = self.loop.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            answered = await self._application.answer(request)
            if isinstance(answered, Response):
                self._send(request, answered)
            await self.drained()
        except asyncio.CancelledError:
            self._task = None
            self._close()
            raise
        except ClientGoneError:
            self._task = None
            self.abort()
        except Exception:
            logger.exception("[%s] an answer is cut: a fault of the router", request.named)
            self._task = None
            self.abort()
        else:
            self._task = None
            self._served(request)

    def _send(self, request: Request, response: Response) -> None:
        transport = self._live_transport
        if transport is None:
            return
        request.keeps_alive &= request.whole and not response.close and not self._ends
        self.count(request, response.status)
        said = response.head(not request.keeps_alive, request.http_11)
        transport.write(said if request.method == "HEAD" else said + response.body)

    def _served(self, request: Request) -> None:
        self.heard = self.loop.time()
        if not request.keeps_alive or self._ends:
            self._close(unread=not request.whole)
        elif self._waiting:
            self._serve_next(self._waiting.popleft())
            if not self._waiting:
                self._ahead = 0
                self._resume()
        elif self._fault is not None:
            self._say_fault()

    def _say_fault(self) -> None:
        """The answer to what was no request."""
        assert self._fault is not None
        transport = self._live_transport
        if transport is not None:
            response = self._fault.response()
            transport.write(response.head(True, True) + response.body)
            self._close(unread=True)

    def _close(self, unread: bool = False) -> None:
        """No more is served. `unread`: more may have come than has been read."""
        self._reader.close()
        self._waiting.clear()
        transport = self._live_transport
        if transport is None or self._lingers is not None:
            return
        if not unread:
            transport.close()
            return
        if transport.can_write_eof():
            transport.write_eof()
        self._resume()
        self._lingers = self.loop.call_later(_LINGER_S, self.abort)

    def _pause(self) -> None:
        transport = self._live_transport
        if self._reading and transport is not None:
            self._reading = False
            transport.pause_reading()

    def _resume(self) -> None:
        transport = self._live_transport
        if not self._reading and transport is not None:
            self._reading = True
            self.heard = self.loop.time()
            transport.resume_reading()
