# SPDX-License-Identifier: Apache-2.0
"""End tasks that run for ever, for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them until each has ended; what they raise is dropped.

    Once is not enough: before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes in
    the moment in which what it waits for is done, and a loop around it would go on for ever.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=_AGAIN_S)
        await asyncio.gather(*done, return_exceptions=True)
