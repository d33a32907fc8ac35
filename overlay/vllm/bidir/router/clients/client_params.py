# SPDX-License-Identifier: Apache-2.0
"""Refuse bodies in which a client sets what only the router may: where nodes read KV.

An engine takes kv_transfer_params from the body and from vllm_xargs, and other releases may take
them from elsewhere, so that the key is refused wherever it stands. Free-form JSON that only the
model reads (a tool's schema, the arguments of its calls) may speak of anything.

Nearly no body holds the key. Of one that may, only the parts that may are looked into, level by
level, and no further than a conversation goes.
"""

from __future__ import annotations

import re

import msgspec
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.parts import TooManyError, split_array, split_object

REFUSED = ("kv_transfer_params", "ec_transfer_params")
# A key ends in a plain quote, while inside a JSON string quotes are escaped; no encoder escapes
# letters and underscores, but a decoder takes them.
_KEY = b'_transfer_params"'
_SPELLED_OUT = re.compile(rb"\\u00(?:[67]|5[fF])")
# Of one body: parts, and bytes. Five levels lead to what a message says; of a body that is longer
# than any conversation, not all of them may be as long as it is.
_MOST_PARTS = 50_000
_MOST_BYTES = 64 << 20
_FREE_FORM = frozenset(
    (
        *("tools", "functions", "parameters", "input_schema", "arguments", "metadata"),
        *("response_format", "structured_outputs", "format", "json_schema", "schema"),
    )
)


def refuse_params(body: bytes) -> None:
    """ClientError 400 naming the key, wherever it stands in a JSON body and is not null.

    A body that may hold it is also refused if it cannot be looked into, such as one that is no JSON
    or goes too deep.
    """
    if not _may_hold(body):
        return
    try:
        key = _find(body)
    except TooManyError as error:
        raise ClientError(
            400,
            f"The body is too large and too deep to make sure that it sets no `{REFUSED[0]}`. "
            "Send less, or leave the word out.",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"The body is not valid JSON: {error}") from error
    if key is not None:
        raise ClientError(400, f"`{key}` cannot be set by a client; leave it out.", key)


def _may_hold(text: bytes) -> bool:
    return _KEY in text or _SPELLED_OUT.search(text) is not None


def _find(body: bytes) -> str | None:
    waiting, top = [body], True
    parts, size = _MOST_PARTS, min(6 * len(body), 2 * len(body) + _MOST_BYTES)
    while waiting:
        one = waiting.pop()
        kind = one.lstrip()[:1]
        below: list[msgspec.Raw] = []
        if kind == b"[":
            below = split_array(one)
        elif kind == b"{":
            fields = split_object(one)
            for key in REFUSED:
                if key in fields and bytes(fields[key]) != b"null":
                    return key
            # Of Responses it is the history; below, of a tool's call, it is the model's.
            free = _FREE_FORM if top else _FREE_FORM | {"input"}
            below = [value for key, value in fields.items() if key not in free]
        elif top:
            msgspec.json.decode(one, type=msgspec.Raw)
        top = False
        parts -= len(below)
        size -= len(one)
        if parts < 0 or size < 0:
            raise TooManyError
        waiting.extend(text for text in map(bytes, below) if _may_hold(text))
    return None
