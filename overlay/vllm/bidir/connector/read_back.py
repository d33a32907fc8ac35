# SPDX-License-Identifier: Apache-2.0
"""One read-back as the scheduler orders it from its workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.bidir.connector.decision import Source


@dataclass(frozen=True)
class ReadBack:
    """Read blocks `first_block` onwards of the source's turn into `local_block_ids`.

    One local block for each position: `first_block + k` of D's list goes to the k-th. Counts are
    in tokens: `prompt` of the request, `local` that P had itself, `total` when the read is done.
    `compute_s`: seconds that computing what is read would take, None if that is not known.
    `placing_s`: seconds that it took to choose positions for the blocks.
    """

    source: Source
    digest: bytes
    first_block: int
    local_block_ids: tuple[int, ...]
    prompt: int
    local: int
    verified: int
    total: int
    compute_s: float | None = None
    placing_s: float = 0.0

    @property
    def remote_positions(self) -> slice:
        """Which of D's blocks, by position, are read."""
        return slice(self.first_block, self.first_block + len(self.local_block_ids))
