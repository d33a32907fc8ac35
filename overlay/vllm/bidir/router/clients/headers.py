# SPDX-License-Identifier: Apache-2.0
"""Which headers cross the router; all others, hop-by-hop ones among them, end here.

To engines go the credentials, the trace context, the request id and the priority. Not the
data-parallel rank that a client may name: ranks of P and D have nothing in common.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

REQUEST_ID = "X-Request-Id"
_TO_ENGINES = ("traceparent", "tracestate", "baggage", "X-Vllm-Priority")
_TO_CLIENTS = ("Retry-After", "WWW-Authenticate")
_MAX_REQUEST_ID = 128
# So much of it is in log lines.
LOGGED = 36


def request_id(headers: Mapping[str, str]) -> str:
    """The client's request id if it is usable as one, else a new one."""
    given = headers.get(REQUEST_ID, "")
    usable = 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else os.urandom(16).hex()


def to_engine(headers: Mapping[str, str], authorization: str | None) -> dict[str, str]:
    """Of a client's request, what a node gets. `authorization` is None for none."""
    sent = {name: headers[name] for name in _TO_ENGINES if name in headers}
    if authorization is not None:
        sent["Authorization"] = authorization
    return sent


def to_client(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a node's answer, what the client gets beside the content type and the request id."""
    return {name: headers[name] for name in _TO_CLIENTS if name in headers}
