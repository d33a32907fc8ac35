# SPDX-License-Identifier: Apache-2.0
"""What a turn's trace is told while the turn runs. Without traces nothing comes of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.clients.reuse import Reuse
from vllm.bidir.router.nodes.node import Node


class Spans:
    """The spans of one turn, of which there are none. One leg is under way at a time."""

    def about(self, request: TurnRequest, reuse: Reuse) -> None:
        """What the turn asks for; `reuse` is read when it ends."""

    def waiting(self, role: str) -> AbstractContextManager[None]:
        """While the turn waits for a node of this role."""
        return nullcontext()

    def leg_begins(
        self, leg: str, node: Node, path: str, headers: dict[str, str]
    ) -> dict[str, str]:
        """A request is about to be sent to a node; with which headers."""
        return headers

    def first_byte(self) -> None:
        """The node's stream has begun."""

    def leg_ends(self, status: int) -> None:
        """The node has answered, whole."""

    def leg_failed(self, kind: str) -> None:
        """The node has not answered, or not to the end."""


_NONE = Spans()

# Of the turn that runs here, so that a queue finds them without being told of turns.
CURRENT: ContextVar[Spans] = ContextVar("spans", default=_NONE)
