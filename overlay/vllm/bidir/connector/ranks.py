# SPDX-License-Identifier: Apache-2.0
"""Engines of different tensor-parallel size: which sizes pair, and which cannot.

Which ranks a rank reads from, and which heads of theirs, is the base's own mapping (tp_mapping.py):

    P 2 ranks, D 1    each of P's ranks reads its heads out of D's blocks
    P 1 rank,  D 2    P reads from both ranks of D, each into the place of that rank's heads
    MLA               every rank has all of it: one is read from
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology

_MOST_RANKS = 1024


@dataclass(frozen=True)
class SourceRank:
    """A rank of a peer that is read from: NIXL's handles of its blocks, or of the part of them
    that is ours, and of the places in our blocks where they belong."""

    rank: int
    local_handle: Any
    remote_handle: Any


class UnlikePeerError(ValueError):
    """A peer whose blocks cannot be read into ours, as long as either process lives."""


def size_obstacle(topology: TransferTopology, theirs: int) -> str | None:
    """Why nothing can be read from an engine of so many ranks, or None.

    The base asserts it, in its handshake or before.
    """
    ours = topology.tp_size
    if not 1 <= theirs <= _MOST_RANKS:
        return f"{theirs} is no number of ranks"
    if ours % theirs and theirs % ours:
        return f"neither of {ours} and {theirs} ranks is a multiple of the other"
    if theirs > ours and not topology.is_mla and theirs > topology.total_num_kv_heads:
        return f"its {theirs} ranks share {topology.total_num_kv_heads} KV heads"
    return None
