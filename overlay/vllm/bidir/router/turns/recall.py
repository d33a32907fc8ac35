# SPDX-License-Identifier: Apache-2.0
"""The params of a kept turn that are not at hand: D, who made them, is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.access import bearer
from vllm.bidir.router.clients.keys import Keys
from vllm.bidir.router.conversations.record import KeptTurn
from vllm.bidir.router.nodes.calls import Calls, Unreachable
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.params import decode_params, holds_blocks
from vllm.bidir.router.nodes.side_channels import SideChannels
from vllm.bidir.router.process.in_time import in_time
from vllm.bidir.router.telemetry.metrics import Metrics

# D answers between two steps. Longer than this, and computing may well be sooner.
_LIMIT_S = 1.0


class Recall:
    """Asks decode nodes. `node` finds one by its name; `keys` has the nodes'."""

    def __init__(
        self,
        calls: Calls,
        node: Callable[[str], Node | None],
        side_channels: SideChannels,
        metrics: Metrics,
        keys: Keys,
    ) -> None:
        self._calls = calls
        self._node = node
        self._side_channels = side_channels
        self._metrics = metrics
        self._keys = keys

    async def params(self, turn: KeptTurn) -> KeptTurn | Reason:
        """The turn with its params; why not: D has let it go, or does not say."""
        found = await self._ask(turn)
        self._metrics.recalled("found" if isinstance(found, KeptTurn) else found.value)
        return found

    async def _ask(self, turn: KeptTurn) -> KeptTurn | Reason:
        node = self._node(turn.node)
        if node is None:
            return Reason.PEER_GONE
        authorization = bearer(self._keys.engine)
        headers = {} if authorization is None else {"Authorization": authorization}
        path = f"/v1/kv_leases/{turn.lease_id}"
        try:
            answer = await in_time(self._calls.get(node, path, headers), _LIMIT_S)
            if answer.status == 404:
                return Reason.EXPIRED
            if answer.status != 200:
                return Reason.PEER_GONE
        except asyncio.TimeoutError:
            return Reason.TIMEOUT
        except Unreachable:
            return Reason.PEER_GONE
        params = decode_params(answer.body)
        if params is None:
            return Reason.PEER_GONE
        # What is said here is as untrusted as what a turn's answer says.
        admitted = self._side_channels.admit(params, node.name, node.address.host)
        if admitted is None:
            self._metrics.params_dropped("decode", node.name)
            return Reason.UNSUPPORTED
        if not holds_blocks(admitted) or admitted.get("lease_id") != turn.lease_id:
            return Reason.NO_PARAMS
        return turn.with_params(admitted)
