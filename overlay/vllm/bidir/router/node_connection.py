# SPDX-License-Identifier: Apache-2.0
"""One kept connection to a node, and the answer that comes over it.

An answer's bytes go from the socket to whoever takes them in one call, without a task or a queue in
between: a token's event is a hundred bytes, and everything else costs more than moving it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Literal, cast

import httptools
from multidict import CIMultiDict

# Of an answer's head, and of anything else that is no body.
_MAX_HEAD = 64 << 10
# What waits for a taker before the node is not read any more.
_MAX_HELD = 64 << 10

Take = Callable[[bytes], bool]


class AnswerError(ConnectionError):
    """A node's answer has broken off, or is no HTTP."""


class Reply:
    """A node's answer under way. Whoever has asked closes it; at its end it is closed already.

    `headers` are those of its head, `content_type` without parameters.
    """

    def __init__(self, connection: NodeConnection) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection: NodeConnection | None = connection
        self._fault: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._most = _MAX_HELD
        self._take: Take | None = None
        # What `_take` said last when it was not True.
        self._refusal: Exception | Literal[False] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body; AnswerError if it breaks off."""
        self._most = sys.maxsize
        while self._more_to_come():
            await self._wait()
        return self._pop()

    async def read_some(self) -> bytes:
        """What has come of the body, at least one byte; b"" at its end."""
        while not self._held and self._more_to_come():
            await self._wait()
        return self._pop()

    async def relay(self, take: Take) -> bool:
        """Hand the body over as it comes; `take` is called from within the event loop.

        True at its end; False once `take` has returned False, which means not now. Errors are
        AnswerError, if the answer breaks off, and those of `take`.
        """
        while self._held:
            if not take(self._pop()):
                return False
        while self._more_to_come():
            self._take = take
            try:
                await self._wait()
            finally:
                self._take = None
            refusal, self._refusal = self._refusal, None
            if refusal is False:
                return False
            if refusal is not None:
                raise refusal
        return True

    def close(self) -> None:
        """Before its end this ends the request on the node as well."""
        if self._connection is not None:
            self._connection.abort()

    async def begun(self) -> None:
        """Its head is there."""
        while not self.status and self._more_to_come():
            await self._wait()

    def receive(self, body: bytes) -> None:
        """The connection has read a piece of the body."""
        if self._take is None:
            self._held.append(body)
            self._size += len(body)
            if self._size > self._most and self._connection is not None:
                self._connection.pause()
            self.wake()
            return
        try:
            if self._take(body):
                return
            self._refusal = False
        except Exception as error:
            self._refusal = error
        self._take = None
        self.wake()

    def end(self, fault: Exception | None = None) -> None:
        """Nothing more will come."""
        self._connection = None
        self._fault = fault
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _more_to_come(self) -> bool:
        if self._fault is not None:
            raise self._fault
        return self._connection is not None

    async def _wait(self) -> None:
        assert self._connection is not None  # more is to come
        self._connection.resume()
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _pop(self) -> bytes:
        held = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._size = 0
        return held


class NodeConnection(asyncio.Protocol):
    """A client's side of HTTP/1.1, one request at a time.

    `idle` is called when it can be used for another request, `gone` when it never will be.
    """

    def __init__(
        self, idle: Callable[[NodeConnection], None], gone: Callable[[NodeConnection], None]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._idle = idle
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._pieces: list[bytes] = []
        self._complete = False
        self._kept = False
        self._until_closed = False
        self._reading = True
        self._without_body = 0
        # What the parser calls for each piece of a body.
        self.on_body = self._pieces.append
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes) -> Reply:
        """Send a request and wait for the head of its answer; AnswerError, OSError."""
        if self._transport is None:
            raise AnswerError("the connection has been closed")
        reply = self._reply = Reply(self)
        self._complete = False
        self._transport.write(head)
        if body:
            self._transport.write(body)
        try:
            await reply.begun()
        except BaseException:
            reply.close()
            raise
        return reply

    def abort(self) -> None:
        """Close at once; the node sees its client go."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._reading and self.usable:
            self._reading = False
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume(self) -> None:
        if not self._reading and self.usable:
            self._reading = True
            cast(asyncio.Transport, self._transport).resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        parser, pieces = self._parser, self._pieces
        if parser is None:
            return
        fault: Exception | None = None
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            fault = AnswerError(f"what a node answers is no HTTP: {type(error).__name__}")
        if pieces:
            self._without_body = 0
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._reply is not None:
                self._reply.receive(body)
            if not self._complete and fault is None:
                return
        else:
            self._without_body += len(data)
            if self._without_body > _MAX_HEAD:
                fault = AnswerError(f"a node's header fields exceed {_MAX_HEAD} bytes")
        if self._complete:
            self._finish(fault)
        elif fault is not None:
            self._break(fault)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._parser = None  # it and this hold each other
        if self._until_closed and error is None:
            fault = None
        else:
            fault = AnswerError("a node has closed the connection before the end of its answer")
            fault.__cause__ = error
        self._end(fault)
        self._gone(self)

    def on_message_begin(self) -> None:
        if self._reply is None or self._complete:
            raise AnswerError("an answer that nobody has asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self._reply
        if reply is not None and not reply.status:
            reply.headers.add(_text(name), _text(value))

    def on_headers_complete(self) -> None:
        reply, parser = self._reply, self._parser
        if reply is None or parser is None:
            return
        status = parser.get_status_code()
        if status < 200:
            reply.headers.clear()  # such as 100 Continue: the answer itself is still to come
            return
        reply.status = status
        self._until_closed = not (
            "Content-Length" in reply.headers or "Transfer-Encoding" in reply.headers
        )
        reply.wake()

    def on_message_complete(self) -> None:
        self._complete = self._reply is not None and self._reply.status > 0
        # The parser does not remember it any longer.
        self._kept = self._parser is not None and self._parser.should_keep_alive()

    def _finish(self, fault: Exception | None) -> None:
        """The answer is whole; whatever else has come spoils the connection only."""
        transport = self._transport
        self._until_closed = False
        self._without_body = 0
        self._end(None)
        if (
            fault is None
            and self._kept
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        ):
            self.resume()
            self._idle(self)
        else:
            self.abort()

    def _break(self, fault: Exception) -> None:
        self._parser = None
        self._end(fault)
        self.abort()

    def _end(self, fault: Exception | None) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.end(fault)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
