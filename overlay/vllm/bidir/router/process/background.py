# SPDX-License-Identifier: Apache-2.0
"""What runs beside the requests for as long as the router does.

A loop that has ended with an error would be missed by nobody: nodes that go down would be given
turns for ever. So the router ends with it, and whatever has started it starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from vllm.bidir.router.process.end_tasks import end_tasks

logger = logging.getLogger("vllm_bidir_router")

Run = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """Tasks of one router; `fail` is called when one has failed. One may return: it has no work."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    def start(self, runs: Iterable[Run]) -> None:
        """Run these from now on."""
        for run in runs:
            task = asyncio.create_task(run(), name=run.__qualname__)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def end(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        self._ending = True
        await end_tasks(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._ending:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        logger.critical(
            "%s has failed, and the router ends: this is a fault of it",
            task.get_name(),
            exc_info=error,
        )
        self._fail()
