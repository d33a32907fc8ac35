# SPDX-License-Identifier: Apache-2.0
"""Asks every node's /health, again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from vllm.bidir.router.legs import Legs, Unreachable
from vllm.bidir.router.nodes import Node
from vllm.bidir.router.pool import Pool

logger = logging.getLogger("vllm_bidir_router")

# Nodes that are not up yet are asked this often, if that is more.
_PROBE_S = 1.0
# A server that is busy with a long prompt may take its time; one that is gone refuses at once.
TIMEOUT_S = 5.0
# A turn that finds no node waits for one more look no longer than this.
_RECHECK_S = 1.0
_APART_S = 0.1


class HealthChecks:
    """Checks the nodes of some pools every `interval_s`; 0: never, only turns tell."""

    def __init__(self, legs: Legs, pools: tuple[Pool, ...], interval_s: float) -> None:
        self._legs = legs
        self._pools = pools
        self._interval_s = interval_s
        self._joined = asyncio.Event()
        self._running = False
        self._ended = 0.0
        self._round: asyncio.Task[None] | None = None
        if interval_s:
            for pool in pools:
                pool.watch(self)
                pool.recheck = self._recheck

    def joined(self, node: Node) -> None:
        """A node that comes later is given turns once it has passed a check."""
        if self._running and node.health.up is None:
            node.health.up = False
        self._joined.set()

    def left(self, node: Node) -> None:
        """It is asked no more."""

    def gone(self, node: Node) -> None:
        """It is asked no more."""

    async def run(self) -> None:
        """Check until cancelled. Says once which nodes are not there at the start."""
        if not self._interval_s:
            return
        self._running = True
        await self._one_round()
        waiting = [node for pool in self._pools for node in pool.nodes if not node.health.up]
        if waiting:
            names = ", ".join(f"{node.role} {node.name}" for node in waiting)
            logger.warning("waiting for nodes that do not answer yet: %s", names)
        try:
            while True:
                await self._pause()
                await self._one_round()
        finally:
            if self._round is not None:
                self._round.cancel()

    async def _pause(self) -> None:
        nodes = [node for pool in self._pools for node in pool.nodes]
        all_up = all(node.health.up for node in nodes)
        pause = self._interval_s if all_up else min(self._interval_s, _PROBE_S)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._joined.wait(), pause)

    async def _recheck(self) -> None:
        """Look at all nodes now; turns that ask at the same time share one round."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._one_more_round())
        await asyncio.wait([self._round], timeout=_RECHECK_S)

    async def _one_more_round(self) -> None:
        await asyncio.sleep(self._ended + _APART_S - time.monotonic())
        await self._one_round()

    async def _one_round(self) -> None:
        self._joined.clear()
        await asyncio.gather(
            *(self._check(pool, node) for pool in self._pools for node in pool.nodes)
        )
        self._ended = time.monotonic()
        for pool in self._pools:
            # Also for what time alone has changed: ejections that are over, slow starts.
            pool.look_again()

    async def _check(self, pool: Pool, node: Node) -> None:
        was_up = node.health.up
        why = ""
        try:
            answer = await asyncio.wait_for(self._legs.get(node, "/health", {}), TIMEOUT_S)
            passed, why = answer.status == 200, str(answer.status)
        except Unreachable as error:
            passed, why = False, type(error).__name__
        pool.checked(node, passed, why)
        if was_up and not node.health.up:
            logger.warning("%s node %s is down: /health: %s", pool.role, node.name, why)
