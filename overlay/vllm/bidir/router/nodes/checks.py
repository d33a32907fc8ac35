# SPDX-License-Identifier: Apache-2.0
"""Asks every node's /health, again and again; one that does not answer delays nobody else's."""

from __future__ import annotations

import asyncio
import logging
import time

from vllm.bidir.router.nodes.calls import Calls, Unreachable
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.process.end_tasks import end_tasks
from vllm.bidir.router.process.in_time import in_time
from vllm.bidir.router.process.loops import Loops

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

    def __init__(self, calls: Calls, pools: tuple[Pool, ...], interval_s: float) -> None:
        self._calls = calls
        self._pools = {pool.role: pool for pool in pools}
        self._interval_s = interval_s
        self._loops = Loops(self._follow)
        self._asking: dict[Node, asyncio.Task[None]] = {}
        self._running = False
        self._looked = 0.0
        self._look: asyncio.Task[None] | None = None
        if interval_s:
            for pool in pools:
                pool.watch(self)
                pool.recheck = self._recheck

    def joined(self, node: Node) -> None:
        """A node that comes later is given turns once it has passed a check."""
        if self._running:
            if node.health.up is None:
                node.health.up = False
            self._loops.start(node)

    def left(self, node: Node) -> None:
        """It is asked no more."""
        self._loops.stop(node)

    def gone(self, node: Node) -> None:
        """It is asked no more."""

    async def run(self) -> None:
        """Check until cancelled. Says once which nodes are not there at the start."""
        if not self._interval_s:
            return
        self._running = True
        nodes = self._nodes()
        for node in nodes:
            self._loops.start(node)
        saying = asyncio.create_task(self._say_who_is_missing(nodes))
        try:
            await self._loops.run()
        finally:
            looking = [] if self._look is None else [self._look]
            await end_tasks([saying, *looking, *self._asking.values()])

    def _nodes(self) -> list[Node]:
        return [node for pool in self._pools.values() for node in pool.nodes]

    async def _say_who_is_missing(self, nodes: list[Node]) -> None:
        if nodes:
            await asyncio.wait([self._ask(node) for node in nodes])
        missing = [node for node in nodes if not node.health.up and not node.draining]
        if missing:
            names = ", ".join(f"{node.role} {node.name}" for node in missing)
            logger.warning("waiting for nodes that do not answer yet: %s", names)

    async def _follow(self, node: Node) -> None:
        while True:
            # One that is about to be stopped leaves its check to whoever else waits for it.
            await asyncio.shield(self._ask(node))
            await asyncio.sleep(
                self._interval_s if node.health.up else min(self._interval_s, _PROBE_S)
            )

    async def _recheck(self) -> None:
        """Look at all nodes now; turns that ask at the same time share one look."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._look_at_all())
        await asyncio.wait([self._look], timeout=_RECHECK_S)

    async def _look_at_all(self) -> None:
        await asyncio.sleep(self._looked + _APART_S - time.monotonic())
        asking = [self._ask(node) for node in self._nodes()]
        if asking:
            await asyncio.wait(asking, timeout=_RECHECK_S)
        self._looked = time.monotonic()

    def _ask(self, node: Node) -> asyncio.Task[None]:
        """The check of a node that is under way, or one that begins now."""
        asking = self._asking.get(node)
        if asking is None:
            asking = self._asking[node] = asyncio.create_task(self._check(node))
            asking.add_done_callback(lambda _: self._asking.pop(node))
        return asking

    async def _check(self, node: Node) -> None:
        pool = self._pools[node.role]
        was_up = node.health.up
        why = ""
        try:
            answer = await in_time(self._calls.get(node, "/health", {}), TIMEOUT_S)
            passed, why = answer.status == 200, str(answer.status)
        except Unreachable as error:
            passed, why = False, type(error).__name__
        pool.checked(node, passed, why)
        if was_up and not node.health.up:
            logger.warning("%s node %s is down: /health: %s", pool.role, node.name, why)
        # Also for what time alone has changed: ejections that are over, slow starts.
        pool.look_again()
