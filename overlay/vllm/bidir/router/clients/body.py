# SPDX-License-Identifier: Apache-2.0
"""A client's body, of the kind that engines take: JSON, and said to be.

Engines refuse other content types, so that no page of another site can make a browser ask them
without a preflight. The router sends them its own, so that the check is here.
"""

from __future__ import annotations

from aiohttp import web
from vllm.bidir.router.clients.errors import ClientError

_JSON = "application/json"
# Those that aiohttp undoes without another package.
_CODINGS = ("identity", "gzip", "deflate")


async def read_body(http: web.Request) -> bytes:
    """The whole body, decompressed; ClientError 415 for a type or a coding that is not taken."""
    if http.content_type.lower() != _JSON:
        raise ClientError(415, f"`Content-Type` must be {_JSON}.", "Content-Type")
    coding = http.headers.get("Content-Encoding", _CODINGS[0]).strip().lower()
    if coding not in _CODINGS:
        known = ", ".join(_CODINGS)
        raise ClientError(415, f"`Content-Encoding` must be one of {known}.", "Content-Encoding")
    return await http.read()
