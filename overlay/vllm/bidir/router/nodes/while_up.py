# SPDX-License-Identifier: Apache-2.0
"""Wait for a node no longer than it is up: one that hangs accepts a turn and never answers it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from vllm.bidir.router.nodes.node import Node

# A stopped process says nothing for ever; one that is only too busy for its checks says something.
SILENT_S = 10.0


class NodeDownError(ConnectionError):
    """Checks have found the node down while a turn waited for it."""


class Waiting(Protocol):
    """An answer under way. `heard`: a number that grows when some of it comes, or is asked for."""

    heard: int

    @property
    def waits(self) -> bool:
        """Whether somebody waits for the node now, and not the node for a slow client."""

    def fail(self, fault: Exception) -> None:
        """End it with an error for whoever waits, and on the node."""


class WhileUp:
    """Fails an answer, with NodeDownError, whose node goes down.

    At once; one that has been made `patient` only after SILENT_S of silence: an engine that is
    about to end may well finish its streams. Whoever waits is not cancelled for it: a client that
    goes in the same moment would be missed.
    """

    def __init__(self, node: Node, answer: Waiting) -> None:
        self.patient = False
        self._node = node
        self._answer = answer
        self._timer: asyncio.TimerHandle | None = None
        node.awaited.add(self._down)

    def end(self) -> None:
        """The answer has ended."""
        self._node.awaited.discard(self._down)
        if self._timer is not None:
            self._timer.cancel()

    def _down(self) -> None:
        if not self.patient:
            self._answer.fail(NodeDownError())
        elif self._timer is None:
            self._listen()

    def _listen(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            SILENT_S, self._listened, self._answer.heard
        )

    def _listened(self, heard_before: int) -> None:
        self._timer = None
        if not is_down(self._node):
            return
        if self._answer.waits and self._answer.heard == heard_before:
            self._answer.fail(NodeDownError())
        else:
            self._listen()


def is_down(node: Node) -> bool:
    """Whether checks have found it down; not before the first one."""
    return node.health.up is False


def give_up(node: Node) -> None:
    """The node is down: whatever waits for it goes on without it."""
    for one in tuple(node.awaited):
        one()
