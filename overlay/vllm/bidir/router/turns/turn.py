# SPDX-License-Identifier: Apache-2.0
"""One turn under way: what its parts know of it, and its line in the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from vllm.bidir.router.clients.headers import LOGGED, REQUEST_ID
from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.clients.reuse import HEADER, Reuse
from vllm.bidir.router.conversations.conversations import Key
from vllm.bidir.router.conversations.identity import Place
from vllm.bidir.router.conversations.record import KeptTurn
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.telemetry.log_lines import TurnLog
from vllm.bidir.router.turns.progress import Progress
from vllm.bidir.router.turns.responses import Asked

logger = logging.getLogger("vllm_bidir_router")
said = TurnLog(logger)


@dataclass(eq=False)
class Turn:
    """`place` is None for a request without a conversation.

    `kept`: the turn before, with its params. `last`: the client has said that no turn follows.
    `asked`: what to keep of it as a response. `name`: what its log lines begin with.
    """

    request: TurnRequest
    headers: dict[str, str]
    request_id: str
    place: Place | None
    last: bool
    asked: Asked | None
    progress: Progress
    kept: KeptTurn | None = None
    reuse: Reuse = field(default_factory=Reuse)
    # Whether a D may have read what P has handed over last.
    spent: bool = False
    # Where the turn before is kept.
    key: Key | None = field(init=False)
    name: str = field(init=False)

    @property
    def answer_headers(self) -> dict[str, str]:
        """What the router itself says with every answer: whose it is, and what was reused."""
        return {REQUEST_ID: self.request_id, HEADER: str(self.reuse)}

    def leg_failed(self, leg: str, node: Node, kind: str) -> None:
        """A node has not answered, or not to the end, or with a fault of its own."""
        self.progress.leg_failed(leg, node, kind)
        logger.warning("%s: %s leg failed on %s: %s", self.name, leg, node.name, kind)

    def __post_init__(self) -> None:
        self.key = None if self.place is None else self.place.key
        # The request's id is meant to be found; of a conversation's a digest is enough.
        conversation = "-" if self.key is None else self.key.hex()[:8]
        self.name = f"[{self.request_id[:LOGGED]}] conv={conversation}"
