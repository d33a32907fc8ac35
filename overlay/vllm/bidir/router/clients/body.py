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
from vllm.bidir.router.http.response import JSON

_IDENTITY = "identity"
# As zlib's wbits has them. What is called deflate is zlib's format (RFC 9110, 8.4.1.2), and of
# some clients the bare one.
_CODINGS = {"gzip": 31, "deflate": 15}
_BARE = -15
# Of gzip there may be several, one after the other; an empty one has 20 bytes and takes its time.
_MOST_MEMBERS = 100
_WINDOW = 1024


async def read_body(request: Request) -> bytes:
    """The whole body, decompressed.

    ClientError 415 for a type or a coding that is not taken, 413 if it is too large,
    400 if it is not what its headers say.
    """
    if request.content_type != JSON:
        raise ClientError(415, f"`Content-Type` must be {JSON}.", "Content-Type")
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
    size = at = 0
    undo, members = zlib.decompressobj(coding), 1
    while at < len(body):
        piece = body[at : at + _WINDOW]
        try:
            whole.append(undo.decompress(piece, request.most - size + 1))
        except zlib.error as error:
            raise _not_as_said() from error
        size += len(whole[-1])
        if size > request.most:
            raise request.too_large()
        # What is left is copied each time, so that no more is given than is likely to be taken.
        at += len(piece) - len(undo.unused_data) - len(undo.unconsumed_tail)
        if undo.eof and at < len(body):
            undo, members = zlib.decompressobj(coding), members + 1
            if members > _MOST_MEMBERS:
                raise _not_as_said()
    if not undo.eof:
        raise _not_as_said()
    return b"".join(whole)


def _not_as_said() -> ClientError:
    return ClientError(400, "The body is not what its headers say.")


def _is_zlib(body: bytes) -> bool:
    """Whether it begins as zlib's format does (RFC 1950, 2.2)."""
    return len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
