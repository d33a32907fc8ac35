# SPDX-License-Identifier: Apache-2.0
"""One endless loop for each of many things that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from vllm.bidir.router.process.end_tasks import end_tasks

Key = TypeVar("Key", bound=Hashable)


class Loops(Generic[Key]):
    """`follow` makes the loop of one key. It may return when nothing is left."""

    def __init__(self, follow: Callable[[Key], Coroutine[Any, Any, None]]) -> None:
        self._follow = follow
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._stopped: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue()

    def start(self, key: Key) -> None:
        """Follow it, unless it is being followed."""
        task = self._tasks.get(key)
        if task is None or task.done():
            task = self._tasks[key] = asyncio.create_task(self._follow(key))
            task.add_done_callback(lambda ended: self._ended(key, ended))

    def stop(self, key: Key) -> None:
        """Follow it no more."""
        task = self._tasks.pop(key, None)
        if task is not None:
            self._stopped.add(task)
            stopping = asyncio.create_task(end_tasks([task]))
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    async def run(self) -> None:
        """Until cancelled, and then end them all; what one of them fails with is raised."""
        try:
            raise await self._failed.get()
        finally:
            await asyncio.gather(end_tasks(self._tasks.values()), *self._stopping)

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if task in self._stopped:
            self._stopped.remove(task)
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._failed.put_nowait(error)
