# SPDX-License-Identifier: Apache-2.0
"""A client's body, of the kind that engines take: JSON, and said to be.

Engines refuse other content types, so that no page of another site can make a browser ask them
without a preflight. The router sends them its own, so that the check is here.
"""

from __future__ import annotations

import asyncio
import zlib

from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.http.request import Request

_JSON = "application/json"
_IDENTITY = "identity"
# As zlib's wbits has them. What is called deflate is zlib's format (RFC 9110, 8.4.1.2), and of
# some clients the bare one.
_CODINGS = {"gzip": 31, "deflate": 15}
_BARE = -15


async def read_body(request: Request) -> bytes:
    """The whole body, decompressed.

    ClientError 415 for a type or a coding that is not taken, 413 if it is too large,
    400 if it is not what its headers say.
    """
    if request.content_type != _JSON:
        raise ClientError(415, f"`Content-Type` must be {_JSON}.", "Content-Type")
    coding = request.headers.get("Content-Encoding", _IDENTITY).strip().lower()
    if coding == _IDENTITY:
        return await request.read()
    if coding not in _CODINGS:
        known = ", ".join((_IDENTITY, *_CODINGS))
        raise ClientError(415, f"`Content-Encoding` must be one of {known}.", "Content-Encoding")
    body = await request.read()
    # A kilobyte may be as much work as a megabyte.
    return await asyncio.to_thread(_decompressed, body, _CODINGS[coding], request)


def _decompressed(body: bytes, coding: int, request: Request) -> bytes:
    if coding == _CODINGS["deflate"] and not _is_zlib(body):
        coding = _BARE
    whole: list[bytes] = []
    size = 0
    try:
        while body or not whole:
            undo = zlib.decompressobj(coding)
            whole.append(undo.decompress(body, request.most - size + 1))
            size += len(whole[-1])
            if size > request.most:
                raise request.too_large()
            if not undo.eof:
                raise ClientError(400, "The body is not what its headers say.")
            # Of gzip there may be several, one after the other.
            body = undo.unused_data
    except zlib.error as error:
        raise ClientError(400, "The body is not what its headers say.") from error
    return b"".join(whole)


def _is_zlib(body: bytes) -> bool:
    """Whether it begins as zlib's format does (RFC 1950, 2.2)."""
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
