# SPDX-License-Identifier: Apache-2.0
"""A node's answer under way, and whoever waits for it.

An answer's bytes go from the socket to whoever takes them in one call, without a task or a queue in
between: a token's event is a hundred bytes, and everything else costs more than moving it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Literal, Protocol

from multidict import CIMultiDict
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.while_up import WhileUp

# What waits for a taker before the node is not read any more.
_MAX_HELD = 64 << 10

Take = Callable[[bytes], bool]
# Of a chunk in its frame that ends in a line's end; None: it is to be taken without its frame.
TakeChunk = Callable[[bytes], bool | None]


class AnswerError(ConnectionError):
    """A node's answer has broken off, or is no HTTP."""


class Source(Protocol):
    """The connection that an answer comes over."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None:
        """Read again."""

    def abort(self) -> None:
        """Close at once; the node sees its client go."""

    def break_off(self, fault: Exception) -> None:
        """End the answer with an error, and close."""


class Reply:
    """A node's answer under way. Whoever has asked closes it; at its end it is closed already.

    `headers` are those of its head, `content_type` without parameters. It fails with NodeDownError
    when `node` goes down, if that is said.
    """

    def __init__(self, connection: Source, node: Node | None) -> None:
        self.status = 0
        self.content_type = ""
        self.heard = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._connection: Source | None = connection
        self._fault: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._most = _MAX_HELD
        self._take: Take | None = None
        # While it is relayed to somebody who takes whole chunks as they are framed.
        self.take_chunk: TakeChunk | None = None
        # What `_take` or `take_chunk` said last when it was not True.
        self._refusal: Exception | Literal[False] | None = None
        self._while_up = None if node is None else WhileUp(node, self)

    async def read(self) -> bytes:
        """The whole body; AnswerError if it breaks off."""
        self._most = sys.maxsize
        while self.more_to_come():
            await self.more()
        return self._pop()

    async def read_some(self) -> bytes:
        """What has come of the body, at least one byte; b"" at its end."""
        while not self._held and self.more_to_come():
            await self.more()
        return self._pop()

    async def relay(self, take: Take, take_chunk: TakeChunk | None = None) -> bytes | None:
        """Hand the body over as it comes; `take` is called from within the event loop.

        `take_chunk` is asked before, with what comes as exactly one chunk that ends a line, in its
        frame (RFC 9112, 7.1): to take it out of one and put it into another costs more than to hand
        it on.
        At its end what has come together with that, b"" for nothing: whoever asks for it can send
        it on together with an end. None once `take` has returned False, which means not now.
        Errors are AnswerError, if the answer breaks off, and those of `take`.
        """
        while not self._is_whole():
            if self._held:
                if not take(self._pop()):
                    return None
            elif self.more_to_come():
                self._take, self.take_chunk = take, take_chunk
                try:
                    await self.more()
                finally:
                    self._take = self.take_chunk = None
                refusal, self._refusal = self._refusal, None
                if refusal is False:
                    return None
                if refusal is not None:
                    raise refusal
        return self._pop()

    def close(self) -> None:
        """Before its end this ends the request on the node as well."""
        self._watch_no_more()
        if self._connection is not None:
            self._connection.abort()

    def be_patient(self) -> None:
        """Let it go on after its node has gone down, for as long as some of it comes."""
        if self._while_up is not None:
            self._while_up.patient = True

    @property
    def waits(self) -> bool:
        """Whether somebody waits for more of it."""
        return self._waiter is not None and not self._waiter.done()

    def fail(self, fault: Exception) -> None:
        """End it with an error for whoever waits, and on the node."""
        if self._connection is not None:
            self._connection.break_off(fault)

    def begin(self, status: int) -> None:
        """Its head is there, and these are its `headers`."""
        self.status = status
        self.content_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.wake()

    def receive(self, body: bytes, last: bool = False) -> None:
        """The connection has read a piece of the body; `last`: `end` is called next."""
        self.heard += 1
        if self._take is None or last:
            self._held.append(body)
            self._size += len(body)
            if self._size > self._most and self._connection is not None:
                self._connection.pause()
            self.wake()
            return
        try:
            if self._take(body):
                return
            self.refused(False)
        except Exception as error:
            self.refused(error)

    def refused(self, refusal: Exception | Literal[False]) -> None:
        """Whoever takes it has said that it cannot take more now, or has failed."""
        self._refusal = refusal
        self._take = self.take_chunk = None
        self.wake()

    def end(self, fault: Exception | None = None) -> None:
        """Nothing more will come."""
        self._connection = None
        self._fault = fault
        self._watch_no_more()
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _watch_no_more(self) -> None:
        watch, self._while_up = self._while_up, None
        if watch is not None:
            watch.end()

    def _is_whole(self) -> bool:
        """Whether all of it has come."""
        return self._connection is None and self._fault is None

    def more_to_come(self) -> bool:
        """Whether it is under way still; AnswerError, NodeDownError if it has failed."""
        if self._fault is not None:
            raise self._fault
        return self._connection is not None

    def more(self) -> asyncio.Future[None]:
        """Done when something has come, or when nothing will any more."""
        assert self._connection is not None  # more is to come
        self._connection.resume()
        self.heard += 1
        waiter = self._waiter = self._connection.loop.create_future()
        return waiter

    def _pop(self) -> bytes:
        held = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._size = 0
        return held
