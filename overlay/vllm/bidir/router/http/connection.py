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
from dataclasses import dataclass
from typing import Protocol, cast

import httptools
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.http.request import Request
from vllm.bidir.router.http.response import Response
from vllm.bidir.router.http.stream import ClientGoneError, ClientStream

# Of a head, and of what is in a body besides it, so many times the longest field.
_FIELDS_SIZE = 16
_MOST_FIELDS = 128
# What is no UTF-8 goes on as it came.
_TEXT = ("utf-8", "surrogateescape")
# Requests that wait for the one before them.
_MOST_WAITING = 256
# What comes while a request is served, and belongs to those after it: more is not read. What is not
# read does not tell whether the client is still there.
_MOST_AHEAD = 256 << 10
# So long unread bytes are thrown away before a connection is closed: the system would tell the
# client that it has been reset, maybe before it has read its answer.
_LINGER_S = 10.0

logger = logging.getLogger("vllm_bidir_router")

Answered = Response | ClientStream


@dataclass(frozen=True)
class Limits:
    """Bytes. `max_header`: of a header field, and of a URL."""

    max_body: int
    max_header: int


class Application(Protocol):
    """What serves requests."""

    async def answer(self, request: Request) -> Answered:
        """A whole answer, or one that has been sent. What it raises cuts the connection."""

    def count(self, request: Request, status: int) -> None:
        """A request is about to be answered with this status."""


class _FaultError(Exception):
    """Ends the parser's work: `ClientConnection._fault` says why."""


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
        self._limits = limits
        self._most_besides = _FIELDS_SIZE * limits.max_header
        self._open = open_
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._besides = 0
        self._moved = False
        self._fault: ClientError | None = None
        # A request whose head, or whose body, is coming.
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._coming: Request | None = None
        # It has asked for another protocol, and only its body is still to be read.
        self._stays = False
        self._waiting: deque[Request] = deque()
        # What is being served.
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._ahead = 0
        self._ends = False
        self._reading = True
        self._full = False
        self._waiter: asyncio.Future[None] | None = None
        self._lingers: asyncio.TimerHandle | None = None

    def count(self, request: Request, status: int) -> None:
        self._application.count(request, status)

    async def drained(self) -> None:
        """The client has read nearly all that it was sent, or has gone."""
        if self._full:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def end_if_silent(self, since: float) -> None:
        """Wait no longer for a request, or for the rest of one, if none has come since then.

        Nor for a client to read what it was told last.
        """
        if self.heard > since or not self._reading:
            return
        if self.transport is not None and self.transport.is_closing():
            self.abort()  # it does not read what it has been told
        elif self._coming is not None:
            self._coming.fail(ClientError(408, "The body has not come."))
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
        connected = transport.get_extra_info("socket")
        if connected is not None:
            # A client whose host vanishes while nothing is sent to it is noticed all the same.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._parser = None  # it and this hold each other
        self._open.discard(self)
        self._waiting.clear()
        if self._lingers is not None:
            self._lingers.cancel()
        self.resume_writing()
        self.cut()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        if self._waiting:
            self._ahead += len(data)
            if self._ahead > _MOST_AHEAD:
                self._pause()
        self._moved = False
        left: bytes | None = data
        while left is not None and self._parser is not None:
            left = self._feed(self._parser, left)
        if self._moved:
            self._besides = 0
            return
        self._besides += len(data)
        if self._besides > self._most_besides and self._parser is not None:
            self._refuse(ClientError(400, "The header fields are too many."))

    def _feed(self, parser: httptools.HttpRequestParser, data: bytes) -> bytes | None:
        """What is left of it for another parser, None for nothing."""
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._fault is None and isinstance(error, httptools.HttpParserCallbackError):
                raise  # a fault of ours: the loop logs it, and closes
            if self._fault is None and self._says_no_more():
                return None
            self._log(error)
            self._refuse(self._fault or ClientError(400, "This is not valid HTTP."))
        return None

    def _stay(self, rest: bytes) -> bytes | None:
        """Nobody has to change the protocol (RFC 9110, 7.8): the request is served as it is.

        The parser takes what comes next for the other protocol. Another one reads it as the body
        that it is, once it has been told which.
        """
        request = self._coming
        assert request is not None  # its head is what asks
        assert self._parser is not None  # it has just said so
        request.keeps_alive = self._parser.should_keep_alive()
        parser = self._parser = httptools.HttpRequestParser(self)
        self._stays = True
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self._fields
            if name.lower() in (b"content-length", b"transfer-encoding")
        ]
        try:
            parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        except httptools.HttpParserError as error:
            self._log(error)
            self._refuse(ClientError(400, "This is not valid HTTP."))
            return None
        return rest or None

    def on_message_begin(self) -> None:
        if self._stays:
            return
        self._target = b""
        self._fields.clear()

    def on_url(self, url: bytes) -> None:
        # It may come in pieces.
        self._target += url if not self._stays else b""
        if len(self._target) > self._limits.max_header:
            self._too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._coming is not None:
            return  # of a trailer
        if len(name) + len(value) > self._limits.max_header:
            self._too_long()
        if len(self._fields) == _MOST_FIELDS:
            self._stop(ClientError(400, f"There are more than {_MOST_FIELDS} header fields."))
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # it is what calls this
        self._moved = True
        if self._stays:
            return
        http_11 = self._parser.get_http_version() == "1.1"
        method = self._parser.get_method().decode()
        request = self._coming = Request(self, method, self._target, http_11, self._limits.max_body)
        for name, value in self._fields:
            request.headers.add(name.decode(*_TEXT), value.decode(*_TEXT))
        coding = request.headers.get("Transfer-Encoding", "chunked")
        if "Transfer-Encoding" in request.headers:
            # Whoever stands before us may read it otherwise (RFC 9112, 6.1).
            request.keeps_alive = http_11
        if coding.strip().lower() != "chunked":
            request.keeps_alive = False
            request.fail(ClientError(400, "`Transfer-Encoding` may be chunked only."))
        # The parser has seen that it is a number, of 64 bits.
        request.expect(int(request.headers.get("Content-Length", "0")))
        self._take(request)

    def on_body(self, piece: bytes) -> None:
        self._moved = True
        if self._coming is not None:
            self._coming.receive(piece)

    def on_message_complete(self) -> None:
        parser, request = self._parser, self._coming
        if parser is None or request is None or (parser.should_upgrade() and not self._stays):
            return
        self._moved, self._stays, self._coming = True, False, None
        request.keeps_alive &= parser.should_keep_alive()
        request.complete()

    def _too_long(self) -> None:
        limit = self._limits.max_header
        said = f"The URL or a header field exceeds {limit} bytes (--max-header)."
        self._stop(ClientError(400, said))

    def _stop(self, fault: ClientError) -> None:
        self._fault = fault
        raise _FaultError

    def _says_no_more(self) -> bool:
        """Whether the request before was to be the last one, whatever comes after it."""
        last = self._waiting[-1] if self._waiting else self._request
        return self._coming is None and last is not None and not last.keeps_alive

    def _log(self, error: Exception) -> None:
        """What kind of fault it is, and from where; nothing of what has been sent."""
        peer = self.transport.get_extra_info("peername") if self.transport else None
        logger.info(
            "a request from %s is no HTTP: %s",
            peer[0] if isinstance(peer, tuple) else "a client",
            type(error).__name__,
        )

    def _refuse(self, fault: ClientError) -> None:
        """Nothing that comes from here on can be understood."""
        self._parser = None
        self._fault = fault
        if self._coming is not None:  # its body is at fault
            self._coming.fail(fault)
        elif self._task is None:
            self._say_fault()

    def _take(self, request: Request) -> None:
        if self._task is None:
            self._serve_next(request)
            return
        if len(self._waiting) == _MOST_WAITING:
            self._coming = None
            self._stop(ClientError(400, f"More than {_MOST_WAITING} requests have come at once."))
        self._waiting.append(request)

    def _serve_next(self, request: Request) -> None:
        self._request = request
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
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        request.keeps_alive &= request.whole and not response.close and not self._ends
        self.count(request, response.status)
        said = response.head(not request.keeps_alive, request.http_11)
        transport.write(said if request.method == "HEAD" else said + response.body)

    def _served(self, request: Request) -> None:
        self._request = None
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
        transport = self.transport
        if transport is not None and not transport.is_closing():
            response = self._fault.response()
            transport.write(response.head(True, True) + response.body)
            self._close(unread=True)

    def _close(self, unread: bool = False) -> None:
        """No more is served. `unread`: more may have come than has been read."""
        self._parser = None
        self._waiting.clear()
        transport = self.transport
        if transport is None or transport.is_closing() or self._lingers is not None:
            return
        if not unread:
            transport.close()
            return
        if transport.can_write_eof():
            transport.write_eof()
        self._resume()
        self._lingers = self.loop.call_later(_LINGER_S, self.abort)

    def _pause(self) -> None:
        if self._reading and self.transport is not None and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def _resume(self) -> None:
        if not self._reading and self.transport is not None and not self.transport.is_closing():
            self._reading = True
            self.heard = self.loop.time()
            self.transport.resume_reading()
