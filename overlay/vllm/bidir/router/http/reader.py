# SPDX-License-Identifier: Apache-2.0
"""Makes requests of what comes over a connection, within limits, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httptools
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.http.fields import TEXT
from vllm.bidir.router.http.request import Client, Request

# Of a head, and of what is in a body besides it, so many times the longest field.
_FIELDS_SIZE = 16
_MOST_FIELDS = 128


@dataclass(frozen=True)
class Limits:
    """Bytes. `max_header`: of a header field, and of a URL."""

    max_body: int
    max_header: int


# Is given each request as soon as its head is there; says why it cannot take any more.
Take = Callable[[Request], ClientError | None]


class _StopError(Exception):
    """Ends the parser's work: `RequestReader._fault` says why."""


class RequestReader:
    """`coming` is the request whose body is still coming. One `client`, one reader."""

    def __init__(self, client: Client, limits: Limits, take: Take) -> None:
        self.coming: Request | None = None
        self._client = client
        self._limits = limits
        self._take = take
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._fault: ClientError | None = None
        self._last: Request | None = None
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        # Bytes since the last of a head, or of a body, that were neither's end.
        self._besides = 0
        self._moved = False
        # `coming` has asked for another protocol, and only its body is still to be read.
        self._stays = False

    def feed(self, data: bytes) -> ClientError | None:
        """Read on. What is wrong: nothing can be read after that. A request whose body is at fault
        has been told.
        """
        self._moved = False
        left: bytes | None = data
        while left is not None and self._parser is not None:
            left = self._read(self._parser, left)
        self._besides = 0 if self._moved else self._besides + len(data)
        if self._parser is not None and self._besides > _FIELDS_SIZE * self._limits.max_header:
            self._end(ClientError(400, "The header fields are too many."))
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """Read no more."""
        self._parser = None  # it and this hold each other

    def on_message_begin(self) -> None:
        if not self._stays:
            self._target = b""
            self._fields.clear()

    def on_url(self, url: bytes) -> None:
        if self._stays:
            return
        # It may come in pieces.
        self._target += url
        if len(self._target) > self._limits.max_header:
            self._too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.coming is not None:
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
        request = Request(self._client, method, self._target, http_11, self._limits.max_body)
        for name, value in self._fields:
            request.headers.add(name.decode(*TEXT), value.decode(*TEXT))
        coding = request.headers.get("Transfer-Encoding", "chunked")
        if "Transfer-Encoding" in request.headers:
            # Whoever stands before us may read it otherwise (RFC 9112, 6.1).
            request.keeps_alive = http_11
        if coding.strip().lower() != "chunked":
            request.keeps_alive = False
            request.fail(ClientError(400, "`Transfer-Encoding` may be chunked only."))
        # The parser has seen that it is a number, of 64 bits.
        request.expect(int(request.headers.get("Content-Length", "0")))
        refusal = self._take(request)
        if refusal is not None:
            self._stop(refusal)
        self.coming = self._last = request

    def on_body(self, piece: bytes) -> None:
        self._moved = True
        if self.coming is not None:
            self.coming.receive(piece)

    def on_message_complete(self) -> None:
        parser, request = self._parser, self.coming
        if parser is None or request is None or (parser.should_upgrade() and not self._stays):
            return
        self._moved, self._stays, self.coming = True, False, None
        request.keeps_alive &= parser.should_keep_alive()
        request.complete()

    def _read(self, parser: httptools.HttpRequestParser, data: bytes) -> bytes | None:
        """What is left of it for another parser, None for nothing."""
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._stay(parser, data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            if self._fault is None:
                raise  # a fault of ours: the loop logs it, and closes
            self._end(self._fault)
        except httptools.HttpParserError:
            if self._says_no_more():
                self.close()
            else:
                self._end(ClientError(400, "This is not valid HTTP."))
        return None

    def _stay(self, parser: httptools.HttpRequestParser, rest: bytes) -> bytes | None:
        """Nobody has to change the protocol (RFC 9110, 7.8): the request is served as it is.

        The parser takes what comes next for the other protocol. Another one reads it as the body
        that it is, once it has been told which.
        """
        assert self.coming is not None  # its head is what asks
        self.coming.keeps_alive &= parser.should_keep_alive()
        another = self._parser = httptools.HttpRequestParser(self)
        self._stays = True
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self._fields
            if name.lower() in (b"content-length", b"transfer-encoding")
        ]
        try:
            another.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        except httptools.HttpParserError:
            self._end(ClientError(400, "This is not valid HTTP."))
            return None
        return rest or None

    def _says_no_more(self) -> bool:
        """Whether the request before was to be the last one, whatever comes after it."""
        return self.coming is None and self._last is not None and not self._last.keeps_alive

    def _too_long(self) -> None:
        limit = self._limits.max_header
        said = f"The URL or a header field exceeds {limit} bytes (--max-header)."
        self._stop(ClientError(400, said))

    def _stop(self, fault: ClientError) -> None:
        self._fault = fault
        raise _StopError

    def _end(self, fault: ClientError) -> None:
        """Nothing that comes from here on can be understood."""
        self.close()
        self._fault = fault
        if self.coming is not None:
            self.coming.fail(fault)
