# SPDX-License-Identifier: Apache-2.0
"""One kept connection to a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
from vllm.bidir.router.http.fields import TEXT
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.reply import AnswerError, Reply
from vllm.bidir.router.nodes.size_lines import SizeLines
from vllm.bidir.router.nodes.while_up import NodeDownError, is_down

# Of an answer's head, and of anything else that is no body.
_MAX_HEAD = 64 << 10
_SIZE_LINES = SizeLines()


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
        # Whether the parser stands behind a chunk, and has seen nothing of the next.
        self._between = False
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

    async def ask(self, head: bytes, body: bytes, node: Node | None = None) -> Reply:
        """Send a request and wait for the head of its answer; AnswerError, OSError.

        NodeDownError when `node` goes down meanwhile, or has gone down.
        """
        if self._transport is None or self._transport.is_closing():
            # asyncio's own transport may even raise what is no OSError, or watch a closed socket.
            raise AnswerError("the connection has been closed")
        if node is not None and is_down(node):
            self.abort()
            raise NodeDownError
        reply = self._reply = Reply(self, node)
        self._complete = False
        # In one system call, and the node wakes once: each costs more than all that is said here.
        self._transport.writelines((head, body) if body else (head,))
        try:
            while not reply.status and reply.more_to_come():
                await reply.more()
        except BaseException:
            reply.close()
            raise
        return reply

    def abort(self) -> None:
        """Close at once; the node sees its client go."""
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, fault: Exception) -> None:
        """End the answer with an error, and close."""
        self._parser = None
        self._end(fault)
        self.abort()

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
        # Each event of each stream comes here: no call that can be saved.
        reply = self._reply
        if (
            self._between
            and reply is not None
            and (take := reply.take_chunk) is not None
            and data.startswith(_SIZE_LINES[len(data)])
            and data.endswith(b"\n\r\n")
        ):
            # The parser misses nothing: it stands between two chunks.
            try:
                taken = take(data)
            except Exception as error:
                reply.refused(error)
                return
            if taken is not None:
                reply.heard += 1
                if not taken:
                    reply.refused(False)
                return
        self._read(data)

    def _read(self, data: bytes) -> None:
        parser, pieces = self._parser, self._pieces
        if parser is None:
            return
        fault: Exception | None = None
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            fault = AnswerError(f"what a node answers is no HTTP: {type(error).__name__}")
        # Else it has seen some of the next chunk's size.
        self._between &= data.endswith(b"\r\n")
        if pieces:
            self._without_body = 0
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._reply is not None:
                self._reply.receive(body, self._complete)
            if not self._complete and fault is None:
                return
        else:
            self._without_body += len(data)
            if self._without_body > _MAX_HEAD:
                fault = AnswerError(f"a node's header fields exceed {_MAX_HEAD} bytes")
        if self._complete:
            self._finish(fault)
        elif fault is not None:
            self.break_off(fault)

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
            reply.headers.add(name.decode(*TEXT), value.decode(*TEXT))

    def on_headers_complete(self) -> None:
        reply, parser = self._reply, self._parser
        if reply is None or parser is None:
            return
        status = parser.get_status_code()
        if status < 200:
            reply.headers.clear()  # such as 100 Continue: the answer itself is still to come
            return
        self._until_closed = not (
            "Content-Length" in reply.headers or "Transfer-Encoding" in reply.headers
        )
        reply.begin(status)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        self._between = False
        self._complete = self._reply is not None and self._reply.status > 0
        # The parser does not remember it any longer.
        self._kept = self._parser is not None and self._parser.should_keep_alive()

    def _finish(self, fault: Exception | None) -> None:
        """The answer is whole; whatever else has come spoils the connection only.

        So does an answer that the node cannot serve: a server that is ending may wait until nobody
        has a connection to it, and would be asked over this one whether it is back.
        """
        transport = self._transport
        failed = self._reply is not None and self._reply.status >= 500
        self._until_closed = False
        self._without_body = 0
        self._end(None)
        if (
            fault is None
            and not failed
            and self._kept
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        ):
            self.resume()
            self._idle(self)
        else:
            self.abort()

    def _end(self, fault: Exception | None) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.end(fault)
