# SPDX-License-Identifier: Apache-2.0
"""kv_transfer_params: what nodes say in them, read no further than the router needs, and what P is
told.

They are untrusted: `side_channels` says whether others may be given them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.parts import SHORT, TooManyError, split_object

# Block ids of 128,000 tokens take 50 kB, in a list for each group of layers.
_MOST_PARAMS = 1 << 20
_MOST_LISTS = 10_000
# These grow with the history, and are for nodes: above so many bytes they are not decoded.
_BLOCKS, _PROOF = "remote_block_ids", "prefix_proof"
_DECODED = 64
# No node counts its blocks so far, and Python reads no number that is as long as it likes.
_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)
_TOO_MANY_ZEROS = b"0" * 20

_VALUE = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()
# What P is to do: read where it is told, if it is, and keep what it has for D.
_ORDERS = {"do_remote_decode": True, "do_remote_prefill": False}
# What P is told when there is nothing to read back: keep your blocks for a decode node.
FIRST_TURN = msgspec.Raw(
    _ENCODER.encode(
        {
            **_ORDERS,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)


def decode_params(text: bytes | msgspec.Raw) -> dict[str, Any] | None:
    """A node's kv_transfer_params; None for what is none, or no such could be that long or have so
    many fields.

    A proof of the history, and block ids if there are any, stay bytes (`msgspec.Raw`) unless they
    are short. Of the proof's numbers nobody knows whether they can be read.
    """
    size = len(memoryview(text))
    if size > _MOST_PARAMS:
        return None
    whole = bytes(text)
    if size > SHORT and whole.count(b"[") + whole.count(b"{") > _MOST_LISTS:
        return None
    try:
        if not whole.isascii():
            whole.decode()  # what is not looked into has to be text all the same
        params: dict[str, Any] = split_object(text)
        for name, value in params.items():
            data = bytes(value)
            if len(data) > _DECODED and (name == _PROOF or (name == _BLOCKS and _some(data))):
                # Of its own: what it was taken from may be long.
                params[name] = msgspec.Raw(data)
            else:
                params[name] = _VALUE.decode(value)
    except (TooManyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return params


def as_offered(params: Mapping[str, Any]) -> bytes:
    """D's params of a turn as P takes them with the next one; they are kept like that.

    D's own say the same already, unless it is of a release that does not.
    """
    return _ENCODER.encode({**params, **_ORDERS})


def holds_blocks(params: dict[str, Any] | None) -> bool:
    """Whether D's params name any blocks; D may have freed them at once."""
    blocks = None if params is None else params.get(_BLOCKS)
    # Many stay as they came.
    return isinstance(blocks, msgspec.Raw) or (isinstance(blocks, list) and any(blocks))


def why_nothing(params: dict[str, Any] | None) -> Reason:
    """Why D kept nothing of a turn, in its own word if it gives one."""
    word = None if params is None else params.get("reason")
    try:
        return Reason(word)
    except ValueError:
        return Reason.NO_PARAMS


def _some(blocks: bytes) -> bool:
    """Whether they are lists of nothing but block ids, and of one at least."""
    digits = blocks.translate(None, b"[], \t\r\n").isdigit()
    return digits and _TOO_MANY_ZEROS not in blocks.translate(_ZEROS)
