# SPDX-License-Identifier: Apache-2.0
"""READs that were given up: NIXL may still write into their blocks, so nobody else may have them.

The worker goes on asking NIXL about them, and tells the scheduler how many writers a request's
blocks have; the scheduler keeps them out of the pool until there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)


class GivenUpReads:
    """The worker's side: transfers that nobody waits for any more, by request id."""

    def __init__(self, still_runs: Callable[[Any], bool]) -> None:
        """`still_runs` asks NIXL about a transfer, and releases it when it has ended."""
        self._still_runs = still_runs
        self._handles: dict[str, tuple[str, list[Any]]] = {}

    def add(self, request_id: str, engine_id: str, handles: Iterable[Any]) -> None:
        self._handles[request_id] = (engine_id, list(handles))

    def engines(self) -> set[str]:
        """Engines that something is still being read from."""
        return {engine_id for engine_id, _ in self._handles.values()}

    def ended(self) -> list[str]:
        """Requests whose transfers have all ended since the last call."""
        over: list[str] = []
        for request_id, (engine_id, handles) in list(self._handles.items()):
            running = [handle for handle in handles if self._still_runs(handle)]
            self._handles[request_id] = (engine_id, running)
            if not running:
                del self._handles[request_id]
                over.append(request_id)
        return over


class WrittenBlocks:
    """The scheduler's side: blocks that a READ that was given up may still write into."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._writers: dict[str, int] = {}
        self._blocks: dict[str, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        return len(self._writers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._writers

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def change(self, request_id: str, writers: int, block_ids: Iterable[int]) -> None:
        """`writers` ranks more (or fewer) still read into the request's blocks.

        With the first writer they get a reference of ours, so that the request may give up its
        own; with the last one they go back to the pool.
        """
        assert self._pool is not None  # bound before any request
        count = self._writers.get(request_id, 0) + writers
        if count > 0 and request_id not in self._writers:
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            self._pool.touch(blocks)
            self._blocks[request_id] = blocks
        if count > 0:
            self._writers[request_id] = count
        elif request_id in self._writers:
            del self._writers[request_id]
            self._pool.free_blocks(reversed(self._blocks.pop(request_id)))
            logger.info("read-back req=%s: a READ that was given up has ended", request_id)
