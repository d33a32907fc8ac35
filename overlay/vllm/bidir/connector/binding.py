# SPDX-License-Identifier: Apache-2.0
"""Names what P has handed over: one request of its own, that request's blocks, and its prompt.

A token says which handover D claims, and comes with a request, as do the block ids that D reads.
Whoever puts them together himself could claim a prompt of his own and have D read another's, or
have D take his blocks, and what lies in them behind their end, for another prompt's. So D claims
them together with the prompt that it is to answer, under this name, and P compares it with that of
what it has handed over.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.v1.request import Request

_BYTES = 16
_pack = msgspec.msgpack.Encoder().encode


def prompt_digest(request: Request, tokens: int) -> bytes:
    """Of the first so many tokens of its prompt, its LoRA adapter and its cache salt: KV of others
    is another's. Of images only the places."""
    adapter = "" if request.lora_request is None else request.lora_request.lora_name
    texts = [text.encode("utf-8", "surrogatepass") for text in (adapter, request.cache_salt or "")]
    # Packed it is a third of what an array of all ids takes to be made and hashed.
    return hashlib.sha256(_pack(((request.prompt_token_ids or [])[:tokens], *texts))).digest()


def binding(request_id: str, block_ids: Sequence[Sequence[int]], prompt: bytes) -> bytes:
    """Of P's request, its logical block ids by KV cache group and position, as params have them,
    and its prompt's digest; b"", which names nothing, where they are ids that no block can have."""
    name = request_id.encode()
    # Each part behind its length, so that nothing can pass for something else cut differently.
    hashed = hashlib.sha256(struct.pack("<Q", len(name)) + name)
    hashed.update(struct.pack("<Q", len(prompt)) + prompt)
    try:
        for group in block_ids:
            count = len(group)
            hashed.update(struct.pack(f"<{count + 1}Q", count, *group))
    except struct.error:
        return b""
    return hashed.digest()[:_BYTES]
