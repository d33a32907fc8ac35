# SPDX-License-Identifier: Apache-2.0
"""Whole blocks as one descriptor each, where all layers of a block lie side by side in memory.

NIXL's cost goes by descriptors, not by bytes, and the base makes one per block and layer. In a
block-outermost layout (`VLLM_KV_CACHE_LAYOUT=BLHNC`) a block is one run of bytes, a row: 24,880
tokens of 36 layers in blocks of 16 are 1,555 descriptors instead of 55,980. Neighbouring rows that
are asked for in order are merged by NIXL itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

# NIXL's name for descriptors of the caller's own memory.
_OWN = "NIXL_INIT_AGENT"


@dataclass(frozen=True)
class Row:
    """Block k's bytes, in all layers: `length` of them, at `address` + k * `stride`."""

    address: int
    length: int
    stride: int

    def descriptors(self, blocks: int, device: int) -> NDArray[np.uint64]:
        """[blocks, 3]: address, bytes, device."""
        found = np.empty((blocks, 3), dtype=np.uint64)
        found[:, 0] = self.address + np.arange(blocks, dtype=np.uint64) * np.uint64(self.stride)
        found[:, 1] = self.length
        found[:, 2] = device
        return found


def row_of(bases: Sequence[int], lengths: Sequence[int], strides: Sequence[int]) -> Row | None:
    """The row that regions form, given the address of block 0, the bytes of a block and the
    distance of two blocks for each; None when a block is not one run of bytes."""
    if not bases or len({len(bases), len(lengths), len(strides)}) != 1:
        return None
    if len(set(strides)) != 1 or strides[0] < sum(lengths):
        return None
    end = bases[0]
    for base, length in zip(bases, lengths, strict=True):
        if base != end:
            return None
        end = base + length
    return Row(bases[0], sum(lengths), strides[0])


def parts_of(
    address: int, length: int, stride: int, blocks: int, parts: int, device: int
) -> NDArray[np.uint64]:
    """[blocks * parts, 3] address, bytes, device: each block of `length` bytes, one every `stride`,
    in so many equal parts."""
    size = length // parts
    starts = address + np.arange(blocks, dtype=np.uint64)[:, None] * np.uint64(stride)
    found = np.empty((blocks * parts, 3), dtype=np.uint64)
    found[:, 0] = (starts + np.arange(parts, dtype=np.uint64) * np.uint64(size)).flatten()
    found[:, 1] = size
    found[:, 2] = device
    return found


def join_blocks(cache: torch.Tensor, block_ids: Sequence[int], parts: int, covered: int) -> None:
    """What smaller blocks left in blocks of ours becomes what ours would hold.

    `cache` is [block, head, token, content]. Each block of `block_ids` has been read into part by
    part, one behind the other, `parts` of them, `covered` in all: the rest is zeroed.
    """
    _, heads, tokens, content = cache.shape
    indices = torch.as_tensor(block_ids, dtype=torch.long, device=cache.device)
    if cache.stride(2) == content and cache.stride(1) == tokens * content:
        # Heads are outside tokens: each part has brought its own heads.
        read = cache.index_select(0, indices)
        read = read.reshape(-1, parts, heads, tokens // parts, content)
        cache.index_copy_(0, indices, read.transpose(1, 2).reshape(-1, heads, tokens, content))
    full, more = divmod(covered, parts)
    if more:
        cache[block_ids[full], :, more * (tokens // parts) :].zero_()
        full += 1
    if full < len(block_ids):
        cache.index_fill_(0, indices[full:], 0)


class RowHandles:
    """NIXL's handles for rows: this worker's own, and those of the ranks it has met."""

    def __init__(self, nixl: Any, memory_type: str) -> None:
        """`nixl`: the agent; `memory_type`: its word for where the KV cache is."""
        self._nixl = nixl
        self._memory_type = memory_type
        self._lengths: tuple[int, ...] = ()
        self._own: Any = None
        self._met: dict[str, dict[int, Any]] = {}

    def own(self, row: Row | None, lengths: Sequence[int], blocks: int, device: int) -> None:
        """This worker's KV cache has been registered; without a row there will be no handles."""
        if row is not None:
            self._lengths = tuple(lengths)
            self._own = self._prepare(_OWN, row.descriptors(blocks, device))

    def meet(
        self,
        engine_id: str,
        rank: int,
        agent: str,
        row: Row | None,
        lengths: Sequence[int],
        blocks: int,
        device: int,
    ) -> None:
        """A rank has been met. Its rows are used if its layers are as long as ours, one by one."""
        if self._own is None or row is None or tuple(lengths) != self._lengths:
            return
        self._met.setdefault(engine_id, {})[rank] = self._prepare(
            agent, row.descriptors(blocks, device)
        )

    def of(self, engine_id: str, rank: int) -> tuple[Any, Any] | None:
        """Own and remote handle; None where blocks must be read layer by layer."""
        theirs = self._met.get(engine_id, {}).get(rank)
        return None if theirs is None else (self._own, theirs)

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        for handle in self._met.pop(engine_id, {}).values():
            self._nixl.release_dlist_handle(handle)

    def close(self) -> None:
        for engine_id in list(self._met):
            self.forget(engine_id)
        if self._own is not None:
            self._nixl.release_dlist_handle(self._own)
            self._own = None

    def _prepare(self, agent: str, descriptors: NDArray[np.uint64]) -> Any:
        described = self._nixl.get_xfer_descs(descriptors, self._memory_type)
        return self._nixl.prep_xfer_dlist(agent, described)


def in_order(
    local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]]
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]:
    """The same pairs of blocks, group by group, by rising local id.

    NIXL merges neighbours only where both sides rise together; a pool gives out falling ids.
    ValueError for groups of unequal length: pairing by position is all that gives bytes a meaning.
    """
    ours: list[NDArray[np.int32]] = []
    theirs: list[NDArray[np.int32]] = []
    for mine, their in zip(local, remote, strict=True):
        if len(mine) != len(their):
            raise ValueError(f"{len(mine)} blocks cannot be paired with {len(their)}")
        ids = np.asarray(mine, dtype=np.int32)
        order = np.argsort(ids, kind="stable")
        ours.append(ids[order])
        theirs.append(np.asarray(their, dtype=np.int32)[order])
    return ours, theirs
