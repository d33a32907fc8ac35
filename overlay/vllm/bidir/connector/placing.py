# SPDX-License-Identifier: Apache-2.0
"""Which of a request's new blocks takes which position, before anything is read into them.

NIXL merges blocks that are neighbours on both sides. A pool gives out long runs of neighbours, but
falling or rising as they came back, so that runs of two pools seldom go the same way: of 1,520
blocks (24,576 tokens) 540 to 1,120 remain single in pools that have served for a while. New blocks
are all alike; given out in the order in which the peer's lie, 10 to 31 pieces remain.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    if not isinstance(theirs, (list, tuple)) or len(theirs) < 2:
        return
    end = first + len(theirs)
    if end > len(table) or not all(type(k) is int and 0 <= k < _MOST for k in theirs):
        return
    new = table[first:end]
    if any(one.block_hash is not None or one.is_null or one.ref_cnt != 1 for one in new):
        return
    rising = sorted(new, key=lambda one: one.block_id)
    # The k-th of theirs by id is to be read into the k-th of ours by id.
    ranks = np.empty(len(new), dtype=np.int64)
    ranks[np.argsort(np.asarray(theirs), kind="stable")] = np.arange(len(new))
    table[first:end] = [rising[rank] for rank in ranks.tolist()]


def place_last(tables: Sequence[Any], theirs: Any) -> None:
    """The same for a handover: what is not in the own prefix cache are the peer's last blocks.

    `tables` and `theirs` are by KV cache group; several are left as they are.
    """
    if len(tables) != 1 or not isinstance(theirs, (list, tuple)) or len(theirs) != 1:
        return
    (table,), (blocks,) = tables, theirs
    if not isinstance(table, list) or not isinstance(blocks, (list, tuple)):
        return
    first = next((at for at, one in enumerate(table) if one.block_hash is None), len(table))
    count = len(table) - first
    if 0 < count <= len(blocks):
        place(table, first, blocks[-count:])
