# SPDX-License-Identifier: Apache-2.0
"""An answer that is sent whole, and how any answer's head is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import cache
from http import HTTPStatus

from vllm.bidir.router.http.fields import encoded

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
# They have no body, and say nothing of its length (RFC 9110, 8.6).
_WITHOUT_BODY = frozenset((*range(100, 200), 204, 304))


class Response:
    """`close`: the connection ends after it. `headers` beside type and length, which are made."""

    __slots__ = ("body", "close", "content_type", "headers", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        content_type: str = TEXT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body = b"" if status in _WITHOUT_BODY else body
        self.content_type = content_type
        self.headers = dict(headers or ())
        self.close = False

    def head(self, close: bool, http_11: bool) -> bytes:
        """Status line and header fields; ValueError for a field that cannot be sent."""
        fields = self.headers
        if self.status not in _WITHOUT_BODY:
            length = str(len(self.body))
            fields = {**fields, "Content-Type": self.content_type, "Content-Length": length}
        return head(self.status, fields, close, http_11)


def head(status: int, fields: Mapping[str, str], close: bool, http_11: bool) -> bytes:
    """What goes before a body, its blank line too; ValueError for a field that cannot be sent."""
    lines = [_status_line(status), *[f"{name}: {value}" for name, value in fields.items()]]
    lines.append(f"Date: {_date(int(time.time()))}")
    if close:
        lines.append("Connection: close")
    elif not http_11:
        lines.append("Connection: keep-alive")
    return encoded(lines)


@cache
def _status_line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""  # such as a node's own
    return f"HTTP/1.1 {status} {phrase}"


_dated = (0, "")


def _date(second: int) -> str:
    """The time in words, which are looked for once a second."""
    global _dated
    if _dated[0] != second:
        _dated = (second, formatdate(second, usegmt=True))
    return _dated[1]
