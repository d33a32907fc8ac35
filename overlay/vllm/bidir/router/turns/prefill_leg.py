# SPDX-License-Identifier: Apache-2.0
"""The prefill leg of a turn: which P is offered what, and what is done when one fails."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.bidir.reasons import Reason
from vllm.bidir.router.nodes.calls import Answer, Unreachable
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.params import FIRST_TURN
from vllm.bidir.router.nodes.policies import Ask
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.telemetry.metrics import Metrics
from vllm.bidir.router.turns.admission import Admission
from vllm.bidir.router.turns.legs import Legs, PrefillDone
from vllm.bidir.router.turns.turn import Turn, logger, said


class PrefillLeg:
    """Runs it on the nodes of one pool."""

    def __init__(self, legs: Legs, nodes: Pool, admission: Admission, metrics: Metrics) -> None:
        self._legs = legs
        self._nodes = nodes
        self._admission = admission
        self._metrics = metrics

    async def run(self, turn: Turn, ask: Ask) -> PrefillDone | Answer:
        """P's params, or a refusal that the client must see; without any P, no params."""
        with self._nodes.seat(ask) as seat:
            async for node in seat:
                offered = self._offer(turn, node)
                done = await self._try_prefill(
                    turn, node, FIRST_TURN if offered is None else offered
                )
                if isinstance(done, Answer) and offered is not None and _may_be_the_offer(done):
                    # The fault may lie with what was to be read back: compute it all instead.
                    turn.reuse.reason = Reason.TRANSFER_FAILED
                    done = await self._try_prefill(turn, node, FIRST_TURN)
                    if isinstance(done, Answer) and done.status < 500:
                        turn.reuse.reason = None  # it lay with the request
                if isinstance(done, PrefillDone) or (done is not None and done.status < 500):
                    return done
        self._decode_alone(turn, Reason.PEER_GONE, "no prefill node answers")
        return PrefillDone(None)

    def _offer(self, turn: Turn, node: Node) -> msgspec.Raw | None:
        """What D kept of the last turn, if this P is known to verify what it reads.

        A stock P would match it by count, and answer wrong when the history has changed.
        """
        if turn.kept is None:
            return None
        if not node.verifies:
            turn.reuse.reason = Reason.UNSUPPORTED
            self._metrics.withheld()
            said.info("%s: %s does not verify read-backs; it computes", turn.name, node.name)
            return None
        turn.reuse.reason = None
        assert turn.kept.encoded is not None  # or D has been asked
        return msgspec.Raw(turn.kept.encoded)

    async def _try_prefill(
        self, turn: Turn, node: Node, params: msgspec.Raw
    ) -> PrefillDone | Answer | None:
        """What a node answered, or None when it could not be reached."""
        headers = turn.progress.leg_begins("prefill", node, turn.request.path, turn.headers)
        try:
            done = await self._legs.prefill(node, turn.request, params, headers)
        except Unreachable as error:
            turn.leg_failed("prefill", node, type(error).__name__)
            self._nodes.failed(node)
            return None
        turn.progress.leg_ends(done.status if isinstance(done, Answer) else 200)
        if isinstance(done, PrefillDone):
            self._note_whether_it_verifies(node, done.params)
            seconds = turn.progress.prefilled()
            turn.reuse.tokens, turn.reuse.prompt_tokens = done.cached_tokens, done.prompt_tokens
            self._metrics.prompt_tokens(done.prompt_tokens, done.cached_tokens)
            if done.params is None:
                why = f"{node.name} answers without kv_transfer_params (no --kv-transfer-config?)"
                self._decode_alone(turn, Reason.NO_PARAMS, why)
            done = PrefillDone(self._admission.admit(turn, "prefill", node, done.params))
            took = f"{seconds * 1000:.0f}"
            said.info("%s: Prefill done in %sms (%s)", turn.name, took, node.name)
        if isinstance(done, Answer) and done.status >= 500:
            turn.leg_failed("prefill", node, str(done.status))
            self._nodes.failed(node)
        else:
            self._nodes.succeeded(node)
        return done

    def _decode_alone(self, turn: Turn, reason: Reason, why: str) -> None:
        """D computes all of it, and answers right: without this nobody would notice."""
        turn.reuse.reason = reason
        self._metrics.decode_alone(reason)
        logger.warning("%s: %s; decode node alone", turn.name, why)

    def _note_whether_it_verifies(self, node: Node, params: dict[str, Any] | None) -> None:
        """P says so in its own params; a node may be another release after a restart."""
        node.verifies = params is not None and params.get("readback") == 1


def _may_be_the_offer(refusal: Answer) -> bool:
    """Whether what a node was offered may have made it refuse: it may be no params at all to it.

    A request that is bad by itself is refused twice.
    """
    return refusal.status >= 500 or refusal.status in (400, 422)
