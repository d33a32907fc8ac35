# SPDX-License-Identifier: Apache-2.0
"""Refuse bodies in which a client sets what only the router may: where nodes read KV.

An engine takes kv_transfer_params from the body and from vllm_xargs, and other releases may take
them from elsewhere, so that the key is refused wherever it stands. Free-form JSON that only the
model reads (a tool's schema, the arguments of its calls) may speak of anything.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.bidir.router.errors import ClientError

REFUSED = ("kv_transfer_params", "ec_transfer_params")
# A key ends in a plain quote, while inside a JSON string quotes are escaped; no encoder escapes
# letters and underscores, but a decoder takes them.
_HINTS = (b'_transfer_params"', b"\\u006", b"\\u007", b"\\u005f", b"\\u005F")
_FREE_FORM = frozenset(
    (
        *("tools", "functions", "parameters", "input_schema", "arguments", "metadata"),
        *("response_format", "structured_outputs", "format", "json_schema", "schema"),
    )
)


def refuse_params(body: bytes) -> None:
    """ClientError 400 naming the key, wherever it stands in a JSON body and is not null.

    A body that may hold it is also refused if it cannot be looked into: engines read JSON that is
    no JSON to others, such as numbers beyond all numbers.
    """
    if not any(hint in body for hint in _HINTS):
        return
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"The body is not valid JSON: {error}") from error
    key = _find(decoded)
    if key is not None:
        raise ClientError(400, f"`{key}` cannot be set by a client; leave it out.", key)


def _find(body: Any) -> str | None:
    waiting = [body]
    if isinstance(body, dict):
        # Of Responses it is the history; below, of a tool's call, it is the model's.
        waiting.append(body.get("input"))
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, dict):
            for key, value in one.items():
                if key in REFUSED and value is not None:
                    return str(key)
                if key not in _FREE_FORM and key != "input":
                    waiting.append(value)
    return None
