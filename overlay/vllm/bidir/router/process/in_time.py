# SPDX-License-Identifier: Apache-2.0
"""A time limit for what a turn waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_time(work: Awaitable[Result], seconds: float) -> Result:
    """The result of `work`, which is cancelled after so many seconds, and TimeoutError raised.

    Unlike wait_for's of Python 3.11 and older it never takes a cancellation for its own: a client
    that goes, or the end of the process, would be missed.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _drop(task)
        raise
    if not done:
        _drop(task)
        raise asyncio.TimeoutError
    return task.result()


def _drop(task: asyncio.Future[Any]) -> None:
    """End it; what it still has to say interests nobody."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
