# SPDX-License-Identifier: Apache-2.0
"""Errors that a client sees, in the shape that its API's clients parse."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from vllm.bidir.router.http.response import JSON, Response

_HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ClientError(Exception):
    """The router answers `status` with this message instead of serving the request."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or _HEADERS.get(status)

    def response(self, path: str = "") -> Response:
        """The answer to a request for `path`."""
        body = error_body(self.status, self.message, self.param, path)
        return Response(self.status, body, JSON, self.headers)


def error_body(status: int, message: str, param: str | None = None, path: str = "") -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, as OpenAI's API documents it.

    Below /v1/messages as Anthropic's does: `{"type": "error", "error": {"type", "message"}}`.
    """
    if _is_anthropic(path):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def error_event(status: int, message: str, path: str = "", after: bytes = b"") -> bytes:
    """The same as the last event of a stream whose 200 has been sent already.

    `after` are the lines that were sent last: an event that they have begun is ended first.
    """
    named, body = b"", error_body(status, message, None, path)
    if _is_anthropic(path):
        named = b"event: error\n"
    elif path == "/v1/responses":
        named = b"event: error\n"
        # As it is documented, and with `error`, which makes OpenAI's clients raise: to a loop that
        # looks for text only, the event would else be one that it does not know.
        told = {"code": "server_error", "message": message, "param": None}
        error = {"type": "error", **told, "error": {"type": "server_error", **told}}
        body = msgspec.json.encode(error)
    ended = not after or after.endswith((b"\n\n", b"\n\r\n"))
    return (b"" if ended else b"\n") + named + b"data: " + body + b"\n\n"


def _is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")
