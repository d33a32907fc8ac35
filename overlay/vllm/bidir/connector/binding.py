# SPDX-License-Identifier: Apache-2.0
"""Names what P has handed over: one request of its own, and that request's blocks.

A token says which handover D claims, and comes with a request, as do the block ids that D reads.
Whoever puts them together himself could claim a prompt of his own and have D read another's. So D
claims them together, under this name, and P compares it with that of what it has handed over.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_BYTES = 16


def binding(request_id: str, block_ids: Sequence[Sequence[int]]) -> bytes:
    """Of P's request, and its logical block ids by KV cache group and position, as params have
    them; b"", which names nothing, where they are ids that no block can have."""
    name = request_id.encode()
    # Each part behind its length, so that nothing can pass for something else cut differently.
    hashed = hashlib.sha256(struct.pack("<Q", len(name)) + name)
    try:
        for group in block_ids:
            count = len(group)
            hashed.update(struct.pack(f"<{count + 1}Q", count, *group))
    except struct.error:
        return b""
    return hashed.digest()[:_BYTES]
