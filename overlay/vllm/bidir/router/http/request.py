# SPDX-License-Identifier: Apache-2.0
"""One request of a client: its head, and its body as soon as that is there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from multidict import CIMultiDict
from vllm.bidir.router.clients.errors import ClientError

if TYPE_CHECKING:
    from vllm.bidir.router.http.stream import ClientStream

_CONTINUE = "100-continue"


class Client(Protocol):
    """The connection that a request has come over."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport | None
    secure: bool
    # It reads more slowly than it is written to.
    full: bool

    def count(self, request: Request, status: int) -> None:
        """An answer to it is about to be sent."""

    async def drained(self) -> None:
        """The client has read nearly all that it was sent, or has gone."""


class Request:
    """`path` is decoded, without the query, `raw_path` is it as it was sent. `headers`: of one that
    is repeated the first counts. `most`: bytes that its body may have.

    `named` is its id, `route` the pattern of the paths that it belongs to, and `rest` what stands
    for the id in that: those who serve it find them out. `stream`: what of an answer is under way.
    """

    def __init__(
        self, client: Client, method: str, target: bytes, http_11: bool, most: int
    ) -> None:
        self.client = client
        self.method = method
        self.raw_path = _raw_path(target)
        self.path = _decoded(self.raw_path)
        self.http_11 = http_11
        self.most = most
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.named = ""
        self.route = "unknown"
        self.rest = ""
        self.stream: ClientStream | None = None
        # All of it has come.
        self.whole = False
        # The connection can be used for another one after it.
        self.keeps_alive = True
        self._pieces: list[bytes] = []
        self._size = 0
        self._fault: ClientError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case; "" for none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The whole body as it was sent. ClientError 400 if it is none, 413 if it is too large,
        417 for an expectation that nobody meets."""
        expected = self.headers.get("Expect")
        if expected is not None and expected.strip().lower() != _CONTINUE:
            raise ClientError(417, "Expectation Failed.")
        if not self.whole and self._fault is None:
            if expected is not None:
                self._go_on()
            self._waiter = self.client.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._fault is not None:
            raise self._fault
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def expect(self, size: int) -> None:
        """So many bytes are said to come."""
        if size > self.most:
            self.fail(self.too_large())

    def receive(self, piece: bytes) -> None:
        """A piece of the body has come."""
        if self._fault is not None:
            return
        self._size += len(piece)
        if self._size > self.most:
            self.fail(self.too_large())
        else:
            self._pieces.append(piece)

    def too_large(self) -> ClientError:
        """What is said of a body that is."""
        return ClientError(413, f"The body exceeds {self.most} bytes (--max-body).")

    def complete(self) -> None:
        """All of the body has come."""
        self.whole = True
        self._wake()

    def fail(self, fault: ClientError) -> None:
        """What has come is no body, and no more of it will be read."""
        self._fault = fault
        self._pieces.clear()
        self._wake()

    def _go_on(self) -> None:
        """Tell a client that waits for it to send the body (RFC 9110, 10.1.1)."""
        transport = self.client.transport
        if self.http_11 and not self._pieces and transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _raw_path(target: bytes) -> str:
    """Of a request's target in any of its forms (RFC 9112, 3.2)."""
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):
        _, slashes, rest = path.partition(b"://")
        if slashes:
            path = b"/" + rest.partition(b"/")[2]
    return path.decode("ascii", "replace")


def _decoded(path: str) -> str:
    return unquote(path) if "%" in path else path
