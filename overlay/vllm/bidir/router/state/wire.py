# SPDX-License-Identifier: Apache-2.0
"""What routers write into Redis for each other. What is read there is not trusted."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from vllm.bidir.reasons import Reason
from vllm.bidir.router.conversations.conversations import DIGEST_BYTES, Key
from vllm.bidir.router.conversations.record import KeptTurn, is_lease_id
from vllm.bidir.router.nodes.params import decode_params

# A change of what is written changes this, so that routers of two releases do not meet.
VERSION = "1"
MOST_ANCESTORS = 256
_DAY_S = 86_400.0

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Seconds = Annotated[float, Meta(gt=0, le=_DAY_S)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]


class WireTurn(msgspec.Struct, frozen=True, array_like=True):
    """A turn of `node`, or the `reason` why nothing is kept; `until` by the clock on the wall.

    `tip`: the digest of the line's last messages. `root`: the named conversation it belongs to.
    """

    stamp: _Count
    tip: Digest
    root: Digest | None
    reason: Reason | None
    node: Annotated[str, Meta(max_length=300)] = ""
    lease_id: str | None = None
    renewed_s: _Seconds | None = None
    until: float = 0.0
    tokens: _Count = 0

    def __post_init__(self) -> None:
        if self.lease_id is not None and not is_lease_id(self.lease_id):
            raise ValueError("no lease id")
        if self.renewed_s is not None and self.lease_id is None:
            raise ValueError("a lease without its id")


class WireResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response's own items, as JSON without brackets, and those before it, the last first."""

    ancestors: Annotated[list[Digest], Meta(max_length=MOST_ANCESTORS)]
    items: bytes


_TURN = msgspec.msgpack.Decoder(WireTurn)
_RESPONSE = msgspec.msgpack.Decoder(WireResponse)
_WHOLE = msgspec.json.Decoder(msgspec.Raw)
_ENCODE = msgspec.msgpack.Encoder().encode

Wire = TypeVar("Wire", WireTurn, WireResponse)


class NotOursError(ValueError):
    """What was read is nothing that a router has written."""


def encode(what: WireTurn | WireResponse) -> bytes:
    """As it is written."""
    return _ENCODE(what)


def read_turn(data: Any) -> WireTurn | None:
    """A turn; None where nothing was written. NotOursError."""
    return None if data is None else _decoded(_TURN, data)


def read_response(data: Any) -> WireResponse | None:
    """A response; None where nothing was written. NotOursError."""
    if data is None:
        return None
    found = _decoded(_RESPONSE, data)
    try:
        _WHOLE.decode(b"[" + found.items + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotOursError from error
    return found


def read_params(data: Any, lease_id: str | None) -> dict[str, Any] | None:
    """D's params of the turn with this lease; None if there are none, or of another turn."""
    if not isinstance(data, bytes):
        return None
    params = decode_params(data)
    if params is None:
        raise NotOursError
    return params if params.get("lease_id") == lease_id else None


def read_key(data: Any) -> Key | None:
    """The key of a line; None where nothing was written. NotOursError."""
    if data is None:
        return None
    if not isinstance(data, bytes) or len(data) != DIGEST_BYTES:
        raise NotOursError
    return data


def wire_turn(
    kept: KeptTurn | Reason, stamp: int, tip: Key, root: Key | None, until: float
) -> WireTurn:
    """A kept turn as it is written. `until`: when it ends, by the clock on the wall."""
    if isinstance(kept, Reason):
        return WireTurn(stamp, tip, root, kept)
    return WireTurn(
        stamp, tip, root, None, kept.node, kept.lease_id, kept.renewed_s, until, kept.tokens
    )


def _decoded(decoder: msgspec.msgpack.Decoder[Wire], data: Any) -> Wire:
    try:
        if isinstance(data, bytes):
            return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotOursError from error
    raise NotOursError
