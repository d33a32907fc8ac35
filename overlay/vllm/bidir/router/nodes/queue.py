# SPDX-License-Identifier: Apache-2.0
"""Turns that wait until a node of a pool has room, first come first served."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.policies import Ask
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.telemetry.spans import CURRENT


class FullError(Exception):
    """There are nodes for a turn, and none of them has room."""


# A node with one more turn, None if there is none to be had; raises FullError.
Take = Callable[[Ask, set[Node]], Node | None]


@dataclass(eq=False)
class _Waiter:
    ask: Ask
    tried: set[Node]
    place: asyncio.Future[Node | None]


class Queue:
    """At most `limit` turns wait, each at most `timeout_s`; `take` is tried when there may be room.

    A turn that is on its way already, and whose node has failed, goes first.
    """

    def __init__(
        self,
        role: str,
        limit: int,
        timeout_s: float,
        take: Take,
        give_back: Callable[[Node, Ask], None],
        metrics: Metrics,
    ) -> None:
        self._role = role
        self._limit = limit
        self._timeout_s = timeout_s
        self._take = take
        self._give_back = give_back
        self._metrics = metrics
        # For whoever asks, each turn, whether there are any.
        self.waiters: OrderedDict[_Waiter, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many turns wait."""
        return len(self.waiters)

    async def wait(self, ask: Ask, tried: set[Node]) -> Node | None:
        """A node with room, None when there is none left; ClientError 429 or 503 says "later"."""
        if len(self.waiters) >= self._limit:
            self._metrics.refused(self._role, "queue_full")
            raise ClientError(
                429, f"All {self._role} nodes and the queue are full. Try again later."
            )
        loop = asyncio.get_running_loop()
        waiter = _Waiter(ask, tried, loop.create_future())
        self.waiters[waiter] = None
        if tried:
            self.waiters.move_to_end(waiter, last=False)
        begun = time.monotonic()
        timer = loop.call_later(self._timeout_s, self._time_out, waiter)
        self.serve()
        try:
            with CURRENT.get().waiting(self._role):
                return await waiter.place
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            timer.cancel()
            del self.waiters[waiter]
            self._metrics.queue_seconds.labels(self._role).observe(time.monotonic() - begun)

    def serve(self) -> None:
        """There may be room: give it to those who have waited longest."""
        for waiter in self.waiters:
            if waiter.place.done():
                continue
            try:
                waiter.place.set_result(self._take(waiter.ask, waiter.tried))
            except FullError:
                if not waiter.tried:
                    break  # there is no room for anybody else either

    def _time_out(self, waiter: _Waiter) -> None:
        if not waiter.place.done():
            self._metrics.refused(self._role, "queue_timeout")
            message = (
                f"No {self._role} node had room within {self._timeout_s:g} s. Try again later."
            )
            waiter.place.set_exception(ClientError(503, message))

    def _abandon(self, waiter: _Waiter) -> None:
        """The client has gone, perhaps just when there was room."""
        place = waiter.place
        if place.done() and not place.cancelled() and place.exception() is None:
            node = place.result()
            if node is not None:
                self._give_back(node, waiter.ask)
