# SPDX-License-Identifier: Apache-2.0
"""Tells each decode node which leases go on and which have ended, in few and large calls.

For each node there is one loop that renews, three times within the shortest lease, and one that
gives back. A node that is taken off the list is given everything back at once, and what its last
turns leave as they end. A node that does not answer is asked again next time; until it does its
leases run out by themselves, and it says so then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from vllm.bidir.router.clients.access import bearer
from vllm.bidir.router.clients.keys import Keys
from vllm.bidir.router.conversations.conversations import Conversations, Key
from vllm.bidir.router.conversations.leases import Leases, NodeLeases
from vllm.bidir.router.nodes.calls import Calls, Unreachable
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.process.end_tasks import end_tasks
from vllm.bidir.router.process.loops import Loops
from vllm.bidir.router.state.state import State
from vllm.bidir.router.telemetry.metrics import Metrics

logger = logging.getLogger("vllm_bidir_router")

One = TypeVar("One")

MOST_IDS = 10_000
# A tenth of a millisecond's work.
_AT_ONCE = 100
# How long ended leases are collected, so that many cost one call. Until then they count against
# D's budget: with a second, many short conversations would have leases of others refused.
COLLECT_S = 0.2
_PER_LEASE = 3
# So that routers of one cluster do not call in step.
_JITTER = 0.1
# A node may name any duration: neither a busy loop nor a node that is never asked.
_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.1, 60.0
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 1.0, 10.0
_GOODBYE_S = 1.0


class _Answer(msgspec.Struct):
    """What is read of a node's answer to both calls."""

    lost: list[str]
    renewed: dict[str, float] = {}


_ANSWER = msgspec.json.Decoder(_Answer)


class _CallError(Exception):
    """A lease call that brought no answer; its text is a word or a status."""


class Heartbeat:
    """The lease calls of one router to its decode nodes. `keys` has the nodes'."""

    def __init__(
        self,
        calls: Calls,
        conversations: Conversations,
        leases: Leases,
        metrics: Metrics,
        keys: Keys,
        state: State,
    ) -> None:
        self._state = state
        self._calls = calls
        self._conversations = conversations
        self._leases = leases
        self._metrics = metrics
        self._keys = keys
        self._silent: set[str] = set()
        # Under one name there may be another node than before, such as with TLS now.
        self._nodes: dict[str, Node] = {}
        self._loops = Loops(self._follow)

    def joined(self, node: Node) -> None:
        """From now on this node is called."""
        self._nodes[node.name] = node
        self._leases.of(node.name).gone = False
        self._loops.start(node.name)

    def left(self, node: Node) -> None:
        """No turn will need what it keeps, unless another node goes on under its name."""
        if self._nodes.get(node.name) is node:
            self._conversations.leave_node(node.name)

    def gone(self, node: Node) -> None:
        """Once it has been given everything back it is called no more."""
        if self._nodes.get(node.name) is node:
            here = self._leases.of(node.name)
            here.gone = True
            here.any_ended.set()

    async def run(self) -> None:
        """Renew and give back until cancelled, on the nodes that there are."""
        await self._loops.run()

    async def _follow(self, name: str) -> None:
        here = self._leases.of(name)
        while not here.gone:
            both = [asyncio.create_task(run(name)) for run in (self._renewing, self._giving_back)]
            try:
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            finally:
                await end_tasks(both)
        del self._nodes[name]
        self._silent.discard(name)
        self._leases.drop(name)

    async def say_goodbye(self) -> None:
        """Give everything back, as well as it goes within a second.

        Where the conversations are in this process's memory they end with it, and nobody would come
        back for their leases. Where routers share them another may go on: they are renewed once
        more. A router that is killed says nothing, and its leases run out.
        """
        calls = (self._say_goodbye_to(node) for node in self._nodes.values())
        try:
            await asyncio.wait_for(asyncio.gather(*calls), _GOODBYE_S)
        except asyncio.TimeoutError:
            logger.warning("a decode node did not answer in time; its leases run out by themselves")

    async def _say_goodbye_to(self, node: Node) -> None:
        here = self._leases.of(node.name)
        ended, living = here.take_ended(), list(self._conversations.lease_ids(here.living))
        renewed: list[str] = []
        if self._state.shared:
            released, renewed = [one for one, key in ended.items() if key is None], living
        else:
            released = [*ended, *living]
        for word, many in (("release", released), ("renew", renewed)):
            for ids in _batches(many):
                try:
                    await self._call(node, word, ids, _MOST_TIMEOUT_S)
                except _CallError:
                    return

    async def _renewing(self, name: str) -> None:
        here = self._leases.of(name)
        last = time.monotonic()
        while True:
            if math.isinf(here.shortest_s):
                await here.sooner.wait()
                last = time.monotonic()
            interval = _interval(here)
            try:
                left = last + _jittered(interval) - time.monotonic()
                await asyncio.wait_for(here.sooner.wait(), left)
            except asyncio.TimeoutError:
                last = time.monotonic()
                await self._renew(self._nodes[name], interval)
            here.sooner.clear()

    async def _renew(self, node: Node, interval: float) -> None:
        """One heartbeat: all leases of a node that are still needed."""
        here = self._leases.of(node.name)
        self._conversations.end_idle(node.name)
        here.look_again()
        if not here.living:
            return
        timeout = min(max(interval, _LEAST_TIMEOUT_S), _MOST_TIMEOUT_S)
        begun = time.monotonic()
        for keys in _batches(list(here.living)):
            ids = await self._lease_ids(keys)
            try:
                answer = await self._call(node, "renew", list(ids), timeout)
            except _CallError as error:
                self._failed(node, "renew", error)
                return
            self._answers(node)
            self._metrics.renewals.inc(sum(lease_id in answer.renewed for lease_id in ids))
            await self._end_lost(ids, answer.lost)
        self._metrics.heartbeat_seconds.observe(time.monotonic() - begun)

    async def _lease_ids(self, keys: list[Key]) -> dict[str, Key]:
        """Those of many conversations, a few at a time: turns are served in between."""
        ids: dict[str, Key] = {}
        for start in range(0, len(keys), _AT_ONCE):
            ids |= self._conversations.lease_ids(keys[start : start + _AT_ONCE])
            await asyncio.sleep(0)
        return ids

    async def _end_lost(self, asked: dict[str, Key], lost: list[str]) -> None:
        # Any text may stand here, and what has been superseded meanwhile is nobody's loss.
        keys = [
            asked[lease_id]
            for lease_id in lost
            if lease_id in asked and self._conversations.lost(asked[lease_id], lease_id)
        ]
        if keys:
            # What another router has superseded is no loss either.
            self._metrics.lost.inc(len(await self._state.give_up(keys)))

    async def _giving_back(self, name: str) -> None:
        here = self._leases.of(name)
        while here.ended or not here.gone:
            await here.any_ended.wait()
            await asyncio.sleep(COLLECT_S)
            for ids in _batches(await self._to_release(here.take_ended())):
                node = self._nodes[name]
                try:
                    await self._call(node, "release", ids, _MOST_TIMEOUT_S)
                except _CallError as error:
                    # Not tried again: they are renewed no more, and run out.
                    self._failed(node, "release", error)
                    break

    async def _to_release(self, ended: dict[str, Key | None]) -> list[str]:
        """Without those whose conversations another router goes on with."""
        asked = {key for key in ended.values() if key is not None}
        ours = await self._state.give_up(asked) if asked else asked
        return [lease_id for lease_id, key in ended.items() if key is None or key in ours]

    async def _call(self, node: Node, word: str, ids: list[str], timeout: float) -> _Answer:
        body = msgspec.json.encode({"lease_ids": ids})
        path = f"/v1/kv_leases/{word}"
        headers = {"Content-Type": "application/json"}
        authorization = bearer(self._keys.engine)
        if authorization is not None:
            headers["Authorization"] = authorization
        try:
            answer = await self._calls.post(node, path, body, headers, timeout)
            if answer.status != 200:
                raise _CallError(str(answer.status))
            return _ANSWER.decode(answer.body)
        except (*Unreachable, ValueError, RecursionError) as error:
            raise _CallError(type(error).__name__) from error

    def _answers(self, node: Node) -> None:
        if node.name in self._silent:
            self._silent.remove(node.name)
            logger.info("decode node %s answers lease calls again", node.name)

    def _failed(self, node: Node, word: str, error: _CallError) -> None:
        self._metrics.lease_call_failure(word, node.name, str(error))
        if node.name in self._silent:
            return
        self._silent.add(node.name)
        hint = "; does --engine-api-key-file name its key?" if str(error) in ("401", "403") else ""
        logger.warning(
            "decode node %s does not %s leases: %s%s; it is tried again",
            node.name,
            word,
            error,
            hint,
        )


def _interval(here: NodeLeases) -> float:
    return min(max(here.shortest_s / _PER_LEASE, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)


def _jittered(interval: float) -> float:
    return interval * random.uniform(1 - _JITTER, 1 + _JITTER)


def _batches(many: list[One]) -> Iterator[list[One]]:
    return (many[start : start + MOST_IDS] for start in range(0, len(many), MOST_IDS))
