# SPDX-License-Identifier: Apache-2.0
"""Which of a request's new blocks takes which position, before anything is read into them.

NIXL merges blocks that are neighbours on both sides. A pool gives out long runs of neighbours, but
falling or rising as they came back, so that runs of two pools seldom go the same way: of 1,520
blocks (24,576 tokens) 540 to 1,120 remain single in pools that have served for a while. New blocks
are all alike; given out in the order in which the peer's lie, 10 to 31 pieces remain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_MOST = 2**31


def place(table: list[KVCacheBlock], first: int, theirs: Any) -> None:
    """Reorder `table[first : first + len(theirs)]` as the peer's blocks `theirs` lie.

    `table` is the request's own block table, by position; what is reordered must have come from
    the pool for this request alone and hold nothing yet, else it is left as it is. `theirs` are
    block ids by position; they come with the request, and say no more here than an order.
    """
    if not isinstance(theirs, (list, tuple)) or len(theirs) < 2 or first + len(theirs) > len(table):
        return
    new = table[first : first + len(theirs)]
    # The null block is nobody's: it has no reference.
    if any(one.ref_cnt != 1 for one in new) or any(one.block_hash is not None for one in new):
        return
    try:
        said = np.asarray(theirs)
    except (ValueError, OverflowError):
        return  # lists in lists
    if said.ndim != 1 or said.dtype.kind != "i":
        return
    # The k-th of theirs by id is to be read into the k-th of ours by id.
    placed = np.empty(len(new), dtype=np.int64)
    placed[np.argsort(said, kind="stable")] = np.argsort([one.block_id for one in new])
    table[first : first + len(theirs)] = [new[at] for at in placed.tolist()]


def last_blocks(table: list[KVCacheBlock], theirs: Any) -> tuple[int, Any]:
    """Where a handover's blocks begin in `table`, and which of the peer's they are read from.

    What is not in the own prefix cache are the peer's last blocks. `theirs` are by KV cache group.
    """
    first = next((at for at, one in enumerate(table) if one.block_hash is None), len(table))
    blocks = only_group(theirs)
    count = len(table) - first
    return first, blocks[-count:] if blocks is not None and 0 < count <= len(blocks) else None


def only_group(theirs: Any) -> Any:
    """The block ids that params name, if they are of one KV cache group; else None."""
    if isinstance(theirs, (list, tuple)) and len(theirs) == 1:
        (blocks,) = theirs
        if isinstance(blocks, (list, tuple)):
            return blocks
    return None
