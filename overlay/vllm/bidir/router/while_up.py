# SPDX-License-Identifier: Apache-2.0
"""Wait for a node no longer than it is up: one that hangs accepts a turn and never answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm.bidir.router.nodes import Node

T = TypeVar("T")


class NodeDownError(ConnectionError):
    """Checks have found the node down while a turn waited for it."""


async def while_up(node: Node, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and NodeDownError raised when the node goes down."""
    task = asyncio.create_task(work)
    node.awaited.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        if task in node.awaited or not task.cancelled():
            raise  # it is the client that has gone
        raise NodeDownError from None
    finally:
        node.awaited.discard(task)


def give_up(node: Node) -> None:
    """The node is down: whatever waits for it goes on without it."""
    tasks, node.awaited = node.awaited, set()
    for task in tasks:
        task.cancel()
