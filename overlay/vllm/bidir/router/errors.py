# SPDX-License-Identifier: Apache-2.0
"""Errors that a client sees, in the shape that OpenAI's clients parse."""

from __future__ import annotations

import msgspec
from aiohttp import web

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class ClientError(Exception):
    """The router answers `status` with this message instead of serving the request."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def response(self) -> web.Response:
        headers = _HEADERS.get(self.status)
        return web.Response(
            status=self.status,
            body=error_body(self.status, self.message, self.param),
            content_type="application/json",
            headers=headers,
        )


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, as OpenAI's API documents it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def error_event(status: int, message: str) -> bytes:
    """The same as the last event of a stream whose 200 has been sent already."""
    return b"data: " + error_body(status, message) + b"\n\n"
