# SPDX-License-Identifier: Apache-2.0
"""Wait for a node no longer than it is up: one that hangs accepts a turn and never answers it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.bidir.router.nodes import Node

T = TypeVar("T")


class NodeDownError(ConnectionError):
    """Checks have found the node down while a turn waited for it."""


async def while_up(node: Node, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and NodeDownError raised when the node goes down."""
    # Within the turn's own task: another one for each leg would cost more than the rest of this.
    task = asyncio.current_task()
    assert task is not None  # this is a coroutine
    gone = False

    def give_up() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    node.awaited.add(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or _is_cancelled_otherwise(task):
            raise  # it is the client that has gone
        raise NodeDownError from None
    finally:
        node.awaited.discard(give_up)


def give_up(node: Node) -> None:
    """The node is down: whatever waits for it goes on without it."""
    waiting, node.awaited = node.awaited, set()
    for one in waiting:
        one()


def _is_cancelled_otherwise(task: asyncio.Task[Any]) -> bool:
    """Whether somebody else has cancelled it, too. Before Python 3.11 nobody counts."""
    return sys.version_info >= (3, 11) and task.uncancel() > 0
