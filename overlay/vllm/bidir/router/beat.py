# SPDX-License-Identifier: Apache-2.0
"""Many streams' bytes are read together every few milliseconds, instead of each when it comes.

A token's event wakes the process for a hundred bytes, and what it runs for them has left the
processor's caches since the last one. One after another they take a third of that.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable


class Beat:
    """Calls the readers of all descriptors that can be read, every `every_s` seconds.

    `busy` says whether that is worth it: it is with `least` streams, each of which `begins` and
    `ends`. It rests while it has no readers. Made within a running event loop; 0 seconds: never.
    """

    def __init__(self, every_s: float, least: int = 16) -> None:
        self._every_s = every_s
        self._least = least
        self._loop = asyncio.get_running_loop()
        self._poll = select.epoll() if every_s and hasattr(select, "epoll") else None
        self._readers: dict[int, Callable[[], None]] = {}
        self._next: asyncio.TimerHandle | None = None
        self._streams = 0

    @property
    def busy(self) -> bool:
        return self._poll is not None and self._streams >= self._least

    def begins(self) -> None:
        self._streams += 1

    def ends(self) -> None:
        self._streams -= 1

    def join(self, descriptor: int, read: Callable[[], None]) -> None:
        """From the next beat on, until it leaves."""
        assert self._poll is not None  # else it is never busy
        self._poll.register(descriptor, select.EPOLLIN)
        self._readers[descriptor] = read
        if self._next is None:
            self._next = self._loop.call_later(self._every_s, self._strike)

    def leave(self, descriptor: int) -> None:
        """Before it is closed: its number may soon be another's."""
        if self._poll is not None and self._readers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._poll is not None:
            self._poll.close()

    def _strike(self) -> None:
        assert self._poll is not None  # somebody has joined
        self._next = None
        if not self._readers:
            return
        self._next = self._loop.call_later(self._every_s, self._strike)
        for descriptor, _ in self._poll.poll(0, len(self._readers)):
            read = self._readers.get(descriptor)
            if read is not None:  # a reader may have made another leave
                read()
