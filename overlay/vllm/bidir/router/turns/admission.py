# SPDX-License-Identifier: Apache-2.0
"""What nodes answer as kv_transfer_params is untrusted: only what a node may say goes on."""

from __future__ import annotations

from typing import Any

from vllm.bidir.reasons import Reason
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.side_channels import SideChannels
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.turns.turn import Turn, logger


class Admission:
    """The params of nodes' answers, as others may be given them."""

    def __init__(self, side_channels: SideChannels, metrics: Metrics) -> None:
        self._side_channels = side_channels
        self._metrics = metrics

    def admit(
        self, turn: Turn, leg: str, node: Node, params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """A node's params, unless they name a side channel or an engine that is not its own."""
        if params is None:
            return None
        admitted = self._side_channels.admit(params, node.name, node.address.host)
        if admitted is None:
            self._metrics.params_dropped(leg, node.name)
            if leg == "prefill":
                turn.reuse.reason = Reason.UNSUPPORTED  # D computes it all
            # Not what they name: it may be anything.
            logger.warning(
                "%s: %s %s names another side channel than its own, or another node's engine; "
                "dropped",
                turn.name,
                leg,
                node.name,
            )
        elif admitted.get("remote_host") != params.get("remote_host"):
            self._metrics.host_replaced(leg)
        return admitted
